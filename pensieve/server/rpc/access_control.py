"""Access control of a server process: one key file for all its ports, reloaded while it runs."""

from __future__ import annotations

import asyncio
import logging
from pathlib import Path
from typing import Final

from grpc import aio

from pensieve.errors import Unauthenticated
from pensieve.server.keys import TenantTable
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.auth import RELOAD_S, Authenticator, LoginThrottle
from pensieve.server.rpc.grpc_server import make_server
from pensieve.server.rpc.interceptor import DEFAULT_IN_FLIGHT, Interceptor

log = logging.getLogger(__name__)

HTTP_DOOR_STREAMS: Final = 8192
_OPERATOR_METHOD: Final = "/pensieve.v1.AdminService/GetStats"


class AccessControl:
    """Authentication and limits for all gRPC servers of a process. Used on one event loop."""

    def __init__(self, key_file: Path | None, metrics: Metrics) -> None:
        """Read the key file. Raises ValueError or OSError when it cannot be used."""
        self._authenticator = Authenticator(key_file, on_failure=metrics.auth_failure)
        self._metrics = metrics
        self._logins = LoginThrottle(metrics.auth_held_back)
        self._interceptors: list[Interceptor] = []

    @property
    def tenants(self) -> TenantTable:
        return self._authenticator.tenants

    def make_server(self, max_in_flight: int = DEFAULT_IN_FLIGHT, connections: int = 0) -> aio.Server:
        """Return an unbound gRPC server behind an interceptor. ``connections``: see ``make_server``."""
        interceptor = Interceptor(
            self._authenticator,
            max_in_flight=max_in_flight,
            tenants=self.tenants,
            logins=LoginThrottle(self._metrics.auth_held_back),
            metrics=self._metrics.calls,
        )
        self._interceptors.append(interceptor)
        return make_server([interceptor], connections=connections)

    def make_private_server(self) -> aio.Server:
        """Return an unbound server for the HTTP door's private socket. It shares the limits of the first server. Each
        connection of the door carries many callers, with or without keys."""
        interceptor = self._interceptors[0].for_http_door()
        self._interceptors.append(interceptor)
        return make_server([interceptor], max_streams=HTTP_DOOR_STREAMS)

    async def admit_operator(self, authorization: str, address: str) -> None:
        """Check that the caller may use the admin service. Raises PermissionDenied or, delayed after repeated
        failures, Unauthenticated."""
        try:
            self._authenticator.check(
                _OPERATOR_METHOD, [("authorization", authorization)] if authorization else []
            )
        except Unauthenticated:
            held_back = self._logins.record_failure(address)
            if held_back:
                await self._logins.hold_back(held_back)
            raise

    def reload_keys(self, *, always: bool = False) -> None:
        """Reload the key file if it changed (or ``always``). End the calls whose credential it no longer accepts."""
        self._authenticator.reload(always=always)
        ended = sum(
            interceptor.end_revoked(self._authenticator.revocation_error)
            for interceptor in self._interceptors
        )
        if ended:
            log.warning("calls ended because their credential is no longer valid: %d", ended)

    async def watch(self, interval_s: float = RELOAD_S) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.reload_keys()
