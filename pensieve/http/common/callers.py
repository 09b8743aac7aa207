"""One SDK client for each credential: the service sees every caller as itself."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from starlette.requests import Request

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.http.common.settings import DoorSettings


@dataclass(slots=True)
class Caller:
    """A credential and its connection."""

    client: AsyncClient
    scope: bytes
    """Names the credential without showing it: what is remembered for one is not found by another."""
    busy: int = 0


class Callers:
    """Connections, least recently used closed first when there are too many and nobody uses them. One event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._callers: OrderedDict[str, Caller] = OrderedDict()

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[Caller]:
        """The caller of a request, by its bearer token, for as long as the request lasts."""
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        caller = self._callers.get(key)
        if caller is None:
            client = AsyncClient(
                self._settings.target,
                api_key=key or None,
                tls=self._settings.tls,
                retry=RetryPolicy(max_wait_s=self._settings.patience_s),
            )
            caller = self._callers[key] = Caller(client, hashlib.blake2b(key.encode()).digest())
        self._callers.move_to_end(key)
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
        idle = [key for key, caller in self._callers.items() if not caller.busy]
        for key in idle[: max(0, surplus)]:
            await self._callers.pop(key).client.close()
