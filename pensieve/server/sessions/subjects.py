"""Erases and exports all sessions about a person.

Each session is erased as ``Sessions.delete`` does, atomically; the whole is not. A call that ends early has erased the
sessions that it reported, and perhaps one more. A repeated call erases the rest.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Final

from pensieve.core import packed_length
from pensieve.engine.messages import ResidentTokens
from pensieve.errors import DataLoss, NotFound, RevisionMismatch
from pensieve.server.sessions.exports import EndLine, encode_line, session_lines
from pensieve.server.sessions.sessions import Sessions
from pensieve.store import HistoryStore, Key
from pensieve.store.records import RecordKind, SessionRow

_MAX_TRIES: Final = 8
"""Tries of one session that changes meanwhile; and searches that find new sessions."""


@dataclass(frozen=True, slots=True)
class SessionReceipt:
    """A session that is gone, and what it had held."""

    session_id: str
    forked_from: str
    revision: int
    turns: int = 0
    items: int = 0
    """Superseded ones included."""
    tokens: int = 0
    """Stored token ids, those of all candidates included."""
    damaged: bool = False
    """It could not be read whole."""
    device_tokens: int = 0
    host_tokens: int = 0
    dropped_tokens: int = 0


@dataclass(frozen=True, slots=True)
class SubjectReceipt:
    """No session about the subject is left."""

    sessions: tuple[SessionReceipt, ...]
    undecided: tuple[str, ...]
    """Ids of damaged sessions whose subject cannot be read."""
    remnants: str
    """See ``HistoryStore.remnants``."""


class Subjects:
    """Stateless between calls."""

    def __init__(
        self,
        store: HistoryStore,
        sessions: Sessions,
        residency: Callable[[Key], Awaitable[ResidentTokens | None]],
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._residency = residency

    async def erase(self, tenant: str, subject: str) -> AsyncGenerator[SessionReceipt | SubjectReceipt, None]:
        """Erase the tenant's sessions about ``subject``; yield each once it is gone, and at the end ``SubjectReceipt``.

        Raises RevisionMismatch if others create sessions as fast as they are erased, and the store's errors.
        """
        erased = list[SessionReceipt]()
        for _ in range(_MAX_TRIES):
            rows = await self._store.find_subject(tenant, subject)
            found = [row for row in rows if row.config.subject == subject]
            if not found:
                # Sessions whose time to live is over are hidden from the search, and may still be stored.
                await self._store.purge_expired()
                undecided = tuple(row.session_id for row in rows)
                yield SubjectReceipt(tuple(erased), undecided, self._store.remnants)
                return
            for row in found:
                # Shielded: a caller that goes away must not keep the last steps of an erasure from being done.
                one = await asyncio.shield(self._erase_session(Key(tenant, row.session_id), subject))
                if one is not None:
                    erased.append(one)
                    yield one
        raise RevisionMismatch("sessions about the subject are created while it is erased: repeat the call")

    async def export(self, tenant: str, subject: str) -> AsyncGenerator[bytes, None]:
        """Yield the lines of the tenant's sessions about ``subject``, without sessions that are deleted meanwhile."""
        rows = await self._store.find_subject(tenant, subject)
        count = 0
        for row in rows:
            if row.config.subject != subject:
                continue
            try:
                present = await self._store.load(Key(tenant, row.session_id))
            except NotFound:
                continue
            count += 1
            async for line in session_lines(self._store, present):
                yield line
        undecided = tuple(row.session_id for row in rows if row.config.subject != subject)
        yield encode_line(EndLine(count, undecided))

    async def export_session(self, row: SessionRow) -> AsyncGenerator[bytes, None]:
        """Yield the lines of one session."""
        async for line in session_lines(self._store, row):
            yield line
        yield encode_line(EndLine(1))

    async def _erase_session(self, key: Key, subject: str) -> SessionReceipt | None:
        """Erase a session; None if it is gone or no longer about the subject."""
        for _ in range(_MAX_TRIES):
            try:
                row = await self._store.load(key)
                if row.config.subject != subject:
                    return None
                holding = await self._read(row)
                resident = await self._residency(key)
                dropped = await self._sessions.delete(
                    key, expected_revision=holding.revision, allow_missing=False
                )
            except NotFound:
                return None
            except RevisionMismatch:
                continue  # a turn was committed meanwhile: count it, too
            if resident is None:
                return replace(holding, dropped_tokens=dropped)
            return replace(
                holding,
                device_tokens=resident.device_tokens,
                host_tokens=resident.host_tokens,
                dropped_tokens=dropped,
            )
        raise RevisionMismatch("the session changes too often to be erased: repeat the call")

    async def _read(self, row: SessionRow) -> SessionReceipt:
        """Count what the session holds, to the revision of ``row`` or a later one."""
        key = Key(row.tenant, row.session_id)
        revision, chain, turns, items, tokens = 0, "", 0, 0, 0
        damaged = False
        while revision < row.revision:
            try:
                piece = await self._store.read_slice(key, after_revision=revision, head_hash=chain)
            except DataLoss:
                damaged, revision = True, row.revision
                break
            for record in (one.record for one in piece.records):
                turns += record.kind is RecordKind.TURN
                items += len(record.items)
                tokens += sum(packed_length(item.tokens) for item in record.items)
                drawn = record.turn.candidates if record.turn is not None else ()
                tokens += sum(packed_length(answer.tokens) for answer in drawn)
            revision, chain = piece.records[-1].record.revision, piece.records[-1].head_hash
        return SessionReceipt(
            row.session_id, row.forked_from, revision, turns, items, tokens, damaged=damaged
        )
