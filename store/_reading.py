"""A whole log, read slice by slice: between two slices others have their turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Final, Protocol

from pensieve.errors import DataLoss
from pensieve.store.contract import LoggedRecord, LogSlice

ATTEMPTS: Final = 3
"""A session that is replaced by another one while its log is read is read again from the beginning."""


class FetchSlice(Protocol):
    """The first slice after a revision, which has this chain hash ("": not known)."""

    def __call__(self, after_revision: int, head_hash: str) -> Awaitable[LogSlice]: ...


async def read_whole(fetch: FetchSlice, after_revision: int, head_hash: str) -> list[LoggedRecord]:
    """Every record after ``after_revision``. Raises what ``fetch`` raises.

    Each slice continues the chain of the one before it, and the last one ends in the row's head: so the result is
    proven as if it had been read at once.
    """
    for attempt in range(ATTEMPTS):
        logged: list[LoggedRecord] = []
        created: int | None = None
        while True:
            at, chain = (
                (logged[-1].record.revision, logged[-1].head_hash) if logged else (after_revision, head_hash)
            )
            try:
                piece = await fetch(at, chain)
            except DataLoss as error:
                if not logged or error.reason != "HISTORY_REGRESSED" or attempt + 1 == ATTEMPTS:
                    raise
                break
            if created not in (None, piece.row.create_ms):
                break
            created = piece.row.create_ms
            logged += piece.records
            if not piece.records or piece.records[-1].record.revision >= piece.row.revision:
                return logged
            await asyncio.sleep(0)
    raise DataLoss("the session was replaced again and again while it was read", reason="HISTORY_REGRESSED")
