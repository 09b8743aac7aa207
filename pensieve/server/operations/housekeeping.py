"""Work that a server does in the background, unasked: it erases sessions whose time to live is over."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from typing import Final

from pensieve.errors import PensieveError
from pensieve.store import HistoryStore

log = logging.getLogger(__name__)

PURGE_INTERVAL_S: Final = 60.0
"""An expired session is unreachable at once; this is how long its content may still lie on the disk."""


async def purge_forever(store: HistoryStore, interval_s: float = PURGE_INTERVAL_S) -> None:
    """Erase expired sessions every ``interval_s``, until cancelled. A store that is down is tried at the next round."""
    while True:
        await asyncio.sleep(interval_s)
        try:
            purged = await store.purge_expired()
        except PensieveError as error:
            log.warning("expired sessions not erased: %s", error.reason)
            continue
        if purged:
            log.info("expired sessions erased: %d", purged)


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a background task and wait for its end."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
