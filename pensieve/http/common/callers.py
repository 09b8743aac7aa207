"""One SDK client for each credential: the service sees every caller as itself."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Final

from starlette.requests import Request

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.errors import Cancelled
from pensieve.http.common.settings import DoorSettings

CERTIFICATE_NAMES: Final = "certificate_names"
"""Where a connection's state has the names in its verified client certificate."""
CERTIFICATE_KEY: Final = "pensieve-certificate-name-bin"
"""Metadata that tells the service a name; it listens to that on its private socket only."""


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
        self._callers: OrderedDict[tuple[str, tuple[str, ...]], Caller] = OrderedDict()
        self._closed = False

    @asynccontextmanager
    async def of(self, request: Request) -> AsyncIterator[Caller]:
        """The caller of a request, by its bearer token, for as long as the request lasts.

        Raises Cancelled (CLIENT_CLOSED) after ``close``.
        """
        kind, _, key = request.headers.get("authorization", "").partition(" ")
        key = key.strip() if kind.lower() == "bearer" else ""
        names: tuple[str, ...] = request.scope.get("state", {}).get(CERTIFICATE_NAMES, ())
        shown = key, names if self._settings.vouches else ()
        caller = self._callers.get(shown)
        if caller is None:
            if self._closed:
                raise Cancelled("the door is closed", reason="CLIENT_CLOSED")
            caller = self._callers[shown] = self._connected(*shown)
        self._callers.move_to_end(shown)
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

    def _connected(self, key: str, names: tuple[str, ...]) -> Caller:
        client = AsyncClient(
            self._settings.target,
            api_key=key or None,
            tls=self._settings.tls,
            retry=RetryPolicy(max_wait_s=self._settings.patience_s),
            metadata=[(CERTIFICATE_KEY, name.encode()) for name in names],
        )
        scope = hashlib.blake2b(key.encode())
        for name in names:  # none: as it always was, so that what is remembered for a key stays found
            scope.update(b"\0" + name.encode())
        return Caller(client, scope.digest())

    async def _shrink(self) -> None:
        surplus = len(self._callers) - self._settings.max_callers
        idle = [shown for shown, caller in self._callers.items() if not caller.busy]
        for key in idle[: max(0, surplus)]:
            await self._callers.pop(key).client.close()
