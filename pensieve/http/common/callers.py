"""SDK clients for each credential: the service sees every caller as itself."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Final, NamedTuple

from starlette.requests import Request

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.errors import Cancelled
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.settings import DoorSettings

CERTIFICATE_NAMES: Final = "certificate_names"
"""Where a connection's state has the names in its verified client certificate."""
CERTIFICATE_KEY: Final = "pensieve-certificate-name-bin"
ADDRESS_KEY: Final = "pensieve-caller-address"
"""Metadata that tell the service a name and the caller's address; it listens to them on its private socket only."""
REQUESTS_EACH: Final = 100
"""At once on one connection. A server takes 256 calls on each, and a request may make several at a time; what goes
beyond would wait in silence until another call ends."""
MAX_KEY_CHARS: Final = 4096
"""What is longer, or holds other characters than a header of the service's can, is nobody's key."""
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)
"""Else all clients of one process share one connection."""


class _Who(NamedTuple):
    """Whom the service is to see: each has connections of its own, since all that is told goes with a connection."""

    key: str
    names: tuple[str, ...] = ()
    address: str = ""


@dataclass(slots=True)
class Caller:
    """A credential, where it is used, and one of its connections."""

    client: AsyncClient
    scope: bytes
    """Names the credential without showing it: what is remembered for one is not found by another."""
    busy: int = 0


class Callers:
    """Connections, least recently used closed first when there are too many and nobody uses them. One event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._callers: OrderedDict[tuple[_Who, int], Caller] = OrderedDict()
        """By who calls, and the number of the connection among theirs: a full one is followed by the next."""
        self._closed = False

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[Caller]:
        """The caller of a request, by its bearer token, for as long as the request lasts.

        Raises HttpFailure (401) for what can be no key, Cancelled (CLIENT_CLOSED) after ``close``.
        """
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        if len(key) > MAX_KEY_CHARS or not (key.isascii() and key.isprintable()):
            raise HttpFailure(
                401,
                "the key is not a key of this server",
                kind="authentication_error",
                code="invalid_api_key",
            )
        who = _Who(key)
        if self._settings.vouches:
            state = request.scope.get("state", {})
            who = _Who(key, state.get(CERTIFICATE_NAMES, ()), _address(request))
        place = next(
            (who, number)
            for number in itertools.count()
            if (found := self._callers.get((who, number))) is None or found.busy < REQUESTS_EACH
        )
        caller = self._callers.get(place)
        if caller is None:
            if self._closed:
                raise Cancelled("the door is closed", reason="CLIENT_CLOSED")
            caller = self._callers[place] = self._connected(who)
        self._callers.move_to_end(place)
        caller.busy += 1
        try:
            yield caller
        finally:
            caller.busy -= 1
            await self._shrink()

    async def close(self) -> None:
        """End all connections, and make no more."""
        self._closed = True
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.client.close()

    def _connected(self, who: _Who) -> Caller:
        told: list[tuple[str, str | bytes]] = [(CERTIFICATE_KEY, name.encode()) for name in who.names]
        if who.address:
            told.append((ADDRESS_KEY, who.address))
        client = AsyncClient(
            self._settings.target,
            api_key=who.key or None,
            tls=self._settings.tls,
            retry=RetryPolicy(max_wait_s=self._settings.patience_s),
            options=_OPTIONS,
            metadata=told,
        )
        scope = hashlib.blake2b(who.key.encode())
        for name in who.names:  # none: as it always was, so that what is remembered for a key stays found
            scope.update(b"\0" + name.encode())
        return Caller(client, scope.digest())

    async def _shrink(self) -> None:
        surplus = len(self._callers) - self._settings.max_callers
        if surplus <= 0:
            return
        idle = [place for place, caller in self._callers.items() if not caller.busy]
        for place in idle[:surplus]:
            await self._callers.pop(place).client.close()


def _address(request: Request) -> str:
    """Where the request comes from; "" for what a proxy named and is no address."""
    try:
        return str(ip_address(request.client.host)) if request.client is not None else ""
    except ValueError:
        return ""
