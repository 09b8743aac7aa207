"""Work that a server does in the background, unasked: it erases sessions whose time to live is over, and looks how late
its event loop is.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import Final

from pensieve.errors import PensieveError
from pensieve.store import HistoryStore

log = logging.getLogger(__name__)

PURGE_INTERVAL_S: Final = 60.0
"""An expired session is unreachable at once; this is how long its content may still lie on the disk."""

LAG_INTERVAL_S: Final = 0.25


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


async def watch_lag(observe: Callable[[float], None], interval_s: float = LAG_INTERVAL_S) -> None:
    """Tell ``observe`` every ``interval_s`` how many seconds late the event loop woke this task, until cancelled."""
    loop = asyncio.get_running_loop()
    while True:
        due = loop.time() + interval_s
        await asyncio.sleep(interval_s)
        observe(max(0.0, loop.time() - due))
