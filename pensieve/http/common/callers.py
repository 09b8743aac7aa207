"""SDK clients for each credential: the service sees every caller as itself."""

from __future__ import annotations

import hashlib
import itertools
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.http.common.settings import DoorSettings

REQUESTS_EACH: Final = 100
"""At once on one connection. A server takes 256 calls on each, and a request may make several at a time; what goes
beyond would wait in silence until another call ends."""
_OPTIONS: Final = (("grpc.use_local_subchannel_pool", 1),)
"""Else all clients of one process share one connection."""


@dataclass(slots=True)
class Caller:
    """A credential and one of its connections."""

    client: AsyncClient
    scope: bytes
    """Names the credential without showing it: what is remembered for one is not found by another."""
    busy: int = 0


class Callers:
    """Connections, least recently used closed first when there are too many and nobody uses them. One event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._callers: OrderedDict[tuple[str, int], Caller] = OrderedDict()
        """By key, and the number of the connection among those of the key: a full one is followed by the next."""

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[Caller]:
        """The caller of a request, by its bearer token, for as long as the request lasts."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        place = next(
            (key, number)
            for number in itertools.count()
            if (found := self._callers.get((key, number))) is None or found.busy < REQUESTS_EACH
        )
        caller = self._callers.get(place)
        if caller is None:
            client = AsyncClient(
                self._settings.target,
                api_key=key or None,
                tls=self._settings.tls,
                retry=RetryPolicy(max_wait_s=self._settings.patience_s),
                options=_OPTIONS,
            )
            caller = self._callers[place] = Caller(client, hashlib.blake2b(key.encode()).digest())
        self._callers.move_to_end(place)
        caller.busy += 1
        try:
            yield caller
        finally:
            caller.busy -= 1
            await self._shrink()

    async def close(self) -> None:
        """End all connections."""
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.client.close()

    async def _shrink(self) -> None:
        surplus = len(self._callers) - self._settings.max_callers
        if surplus <= 0:
            return
        idle = [place for place, caller in self._callers.items() if not caller.busy]
        for place in idle[:surplus]:
            await self._callers.pop(place).client.close()
