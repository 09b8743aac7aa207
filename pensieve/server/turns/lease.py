"""A running turn's lease in the store is kept alive, its loss is told, and it is given back when the turn is over."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Callable
from typing import Final

from pensieve.debug import async_failpoint
from pensieve.errors import NotFound, PensieveError, TurnFenced, Unavailable
from pensieve.store import HistoryStore, Key, Renewed

log = logging.getLogger(__name__)

HEARS_WITHIN_S: Final = 1.0
"""What another server left in the store waits no longer than this."""
SHORTEST_PAUSE_S: Final = 0.05
LONGEST_PAUSE_S: Final = 0.5
"""Between two tries to give a lease back to a store that is away."""


class LeaseKeeper:
    """Renews a lease three times in its length, and at least once in ``HEARS_WITHIN_S``.

    ``on_news`` is called with each renewal, which may bring what another server left in the store.
    ``on_lost`` is called once, from the event loop, when the lease was taken over, the session is gone, or no renewal
    succeeded for two thirds of the lease by the monotonic clock.

    Safety does not rest on this (the store refuses the commit of a turn without its lease): it only keeps two replicas
    from talking to users about one turn.
    """

    def __init__(
        self,
        store: HistoryStore,
        key: Key,
        token: str,
        lease_s: float,
        *,
        on_lost: Callable[[], None],
        on_news: Callable[[Renewed], None],
    ) -> None:
        self._store, self._key, self._token = store, key, token
        self._lease_s = lease_s
        self._on_lost = on_lost
        self._on_news = on_news
        self._task = asyncio.create_task(self._run(), name="lease")

    async def stop(self) -> None:
        """No renewal happens after this returns."""
        self._task.cancel()
        await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop = asyncio.get_running_loop()
        renewed, pause = loop.time(), min(self._lease_s / 3, HEARS_WITHIN_S)
        while True:
            await asyncio.sleep(pause)
            lost_at = renewed + self._lease_s * 2 / 3
            try:
                async with asyncio.timeout_at(max(lost_at, loop.time() + self._lease_s / 12)):
                    await async_failpoint("in_renew")
                    asked = loop.time()
                    news = await self._store.renew(self._key, self._token, round(self._lease_s * 1000))
            except (TurnFenced, NotFound):
                self._on_lost()
                return
            except Exception as error:  # whatever it was, the lease was not renewed
                log.warning("lease renewal failed: %s", type(error).__name__)
                if loop.time() >= lost_at:
                    self._on_lost()
                    return
                pause = self._lease_s / 12
            else:
                renewed, pause = asked, min(self._lease_s / 3, HEARS_WITHIN_S)
                self._on_news(news)


class LeaseReleaser:
    """Gives leases back, also to a store that is away when their turns end: as soon as it is there again.

    Without it a turn whose begin reached the store, and whose answer did not come back, would keep its session from
    everybody, its own repetition included, until the lease has lapsed. However many wait, one try is made at a time.
    """

    def __init__(self, store: HistoryStore, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._waiting: deque[tuple[float, Key, str, bool]] = deque()
        """When it has lapsed, whose, its token, and whether its turn was called off."""
        self._task: asyncio.Task[None] | None = None

    async def release(self, key: Key, token: str, *, called_off: bool) -> None:
        """Give one back now, or later if the store is away."""
        try:
            await self._store.abort(key, token, called_off=called_off)
        except Unavailable as error:
            log.warning("lease not released (%s): it is when the store is back", error.reason)
            lapses = asyncio.get_running_loop().time() + self._lease_s
            self._waiting.append((lapses, key, token, called_off))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run(), name="releases")
        except PensieveError as error:
            log.warning("lease not released (%s): it lapses by itself", error.reason)

    async def close(self) -> None:
        """What is left lapses by itself."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop, pause = asyncio.get_running_loop(), SHORTEST_PAUSE_S
        while self._waiting:
            lapses, key, token, called_off = self._waiting[0]
            if loop.time() < lapses:
                await asyncio.sleep(pause)
                try:
                    await self._store.abort(key, token, called_off=called_off)
                except Unavailable:
                    pause = min(2 * pause, LONGEST_PAUSE_S)
                    continue
                except PensieveError as error:
                    log.warning("lease not released (%s): it lapses by itself", error.reason)
                pause = 0.0
            self._waiting.popleft()
