"""The way into a server process: one set of keys in front of all of its ports, watched while it runs."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Final, Protocol

from grpc import aio

from pensieve.errors import Unauthenticated
from pensieve.server.rpc.auth import RELOAD_S, Authenticator, LoginThrottle
from pensieve.server.rpc.calls import CallObserver
from pensieve.server.rpc.grpc_server import make_server
from pensieve.server.rpc.interceptor import DEFAULT_IN_FLIGHT, Interceptor
from pensieve.server.tenants import TenantTable

log = logging.getLogger(__name__)

STREAMS_OF_THE_DOOR: Final = 8192
_OPERATORS: Final = "/pensieve.v1.AdminService/GetStats"


class AccessObserver(Protocol):
    """Counts events at the door."""

    def auth_failure(self) -> None: ...

    def auth_held_back(self) -> None: ...

    @property
    def calls(self) -> CallObserver:
        """Hears of every call."""
        ...


class AccessControl:
    """One per process. Used on one event loop."""

    def __init__(self, key_file: Path | None, observer: AccessObserver) -> None:
        """Reads the key file. Raises ValueError or OSError when it cannot be used."""
        self._authenticator = Authenticator(key_file, on_failure=observer.auth_failure)
        self._held_back: Callable[[], None] = observer.auth_held_back
        self._observer = observer.calls
        self._logins = LoginThrottle(self._held_back)
        """Operators' logins over HTTP."""
        self._interceptors: list[Interceptor] = []

    @property
    def tenants(self) -> TenantTable:
        """The limits of each tenant, as the key file says at the time."""
        return self._authenticator.tenants

    def make_server(self, max_in_flight: int = DEFAULT_IN_FLIGHT, connections: int = 0) -> aio.Server:
        """A gRPC server, not yet bound, whose calls all come through here. ``connections``: see ``make_server``."""
        interceptor = Interceptor(
            self._authenticator,
            max_in_flight=max_in_flight,
            tenants=self.tenants,
            logins=LoginThrottle(self._held_back),
            observer=self._observer,
        )
        self._interceptors.append(interceptor)
        return make_server([interceptor], connections=connections)

    def make_private_server(self) -> aio.Server:
        """One for the HTTP door, on a socket that nobody else reaches. Its calls have places among those of the first.

        Each of the door's connections carries many callers, or all of those without a key.
        """
        interceptor = self._interceptors[0].for_http_door()
        self._interceptors.append(interceptor)
        return make_server([interceptor], most_streams=STREAMS_OF_THE_DOOR)

    async def admit_operator(self, authorization: str, address: str) -> None:
        """Let in who may call the admin service. Raises PermissionDenied or, late for who guesses, Unauthenticated."""
        try:
            self._authenticator.check(_OPERATORS, [("authorization", authorization)] if authorization else [])
        except Unauthenticated:
            held_back = self._logins.record_failure(address)
            if held_back:
                await self._logins.hold_back(held_back)
            raise

    def reload_keys(self, *, always: bool = False) -> None:
        """Read the key file if it changed (or ``always``), and end the calls that it no longer lets in."""
        self._authenticator.reload(always=always)
        ended = sum(one.recheck(self._authenticator.revocation_error) for one in self._interceptors)
        if ended:
            log.warning("calls ended because their credential is no longer valid: %d", ended)

    async def watch(self, interval_s: float = RELOAD_S) -> None:
        """``look`` every ``interval_s``, until cancelled."""
        while True:
            await asyncio.sleep(interval_s)
            self.reload_keys()
