"""Bugs on purpose, one at a time, in a server under test: each breaks another promise, and the checker must find it.

They are put around the store that the server opens, or over one method of it, in the server's own process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import os
import random
import sqlite3
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec

import pensieve.server.app as app
from pensieve.server.history.rendering import ContextRoom, ItemStamp, PreparedTurn, Renderer
from pensieve.server.values import InputEntry
from pensieve.store import BeginOutcome, BeginRequest, Counts, Key, Replay, head_hash_after
from pensieve.store.records import History, Record, SessionRow

LATE_S = 0.25


class _Around:
    """A store with another one inside that does everything."""

    def __init__(self, store: Any) -> None:
        self._store = store

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


class AcknowledgesEarly(_Around):
    """Answers a commit before it is made."""

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        row: SessionRow = await self._store.load(key)
        before = row.head_hash

        async def later() -> None:
            await asyncio.sleep(LATE_S)
            await self._store.commit(key, token, fingerprint, record, counts)

        self._late = asyncio.create_task(later())
        return msgspec.structs.replace(
            row, revision=record.revision, head_hash=head_hash_after(record, before), running=None
        )


class Forgets(_Around):
    """Forgets each request id once: the first retry of a committed turn is another turn."""

    def __init__(self, store: Any) -> None:
        super().__init__(store)
        self._aliases: dict[str, str] = {}
        self._forgotten: set[str] = set()

    async def begin(self, key: Key, request: BeginRequest) -> BeginOutcome:
        outcome: BeginOutcome = await self._store.begin(key, request)
        if not isinstance(outcome, Replay) or request.request_id in self._forgotten:
            return outcome
        self._forgotten.add(request.request_id)
        alias = f"{request.request_id}#{outcome.row.revision}"
        self._aliases[request.token] = alias
        again: BeginOutcome = await self._store.begin(key, dataclasses.replace(request, request_id=alias))
        return again

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        alias = self._aliases.pop(token, record.request_id)
        record = msgspec.structs.replace(record, request_id=alias)
        row: SessionRow = await self._store.commit(key, token, fingerprint, record, counts)
        return row


class DropsInput(_Around):
    """Appends the answer without the question."""

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        assert record.turn is not None
        torn = msgspec.structs.replace(
            record, items=record.items[-1:], turn=msgspec.structs.replace(record.turn, input_items=0)
        )
        row: SessionRow = await self._store.commit(key, token, fingerprint, torn, counts)
        return row


class FallsBack(_Around):
    """After a restart, a SQLite file is as it was some commits before."""

    def __init__(self, store: Any, path: Path) -> None:
        super().__init__(store)
        self._path, self._copy = path, path.with_suffix(".earlier")
        self._commits = 0

    async def open(self) -> None:
        if self._copy.exists():
            for suffix in ("-wal", "-shm"):
                Path(f"{self._path}{suffix}").unlink(missing_ok=True)
            os.replace(self._copy, self._path)
        await self._store.open()

    async def commit(
        self, key: Key, token: str, fingerprint: str, record: Record, counts: Counts
    ) -> SessionRow:
        row: SessionRow = await self._store.commit(key, token, fingerprint, record, counts)
        self._commits += 1
        if self._commits == 2:
            await asyncio.to_thread(self._save)
        return row

    def _save(self) -> None:
        source, target = sqlite3.connect(self._path), sqlite3.connect(self._copy)
        try:
            source.backup(target)
        finally:
            source.close()
            target.close()


def _early(store: Any, url: str) -> Any:
    return AcknowledgesEarly(store)


def _forgets(store: Any, url: str) -> Any:
    return Forgets(store)


def _drops(store: Any, url: str) -> Any:
    return DropsInput(store)


def _falls(store: Any, url: str) -> Any:
    return FallsBack(store, Path(url.removeprefix("sqlite:///")))


def _stale_context() -> None:
    """Now and then a turn is answered on a history that lacks the turn before it, as if two had overlapped."""
    prepare = Renderer.prepare

    async def stale(
        self: Renderer, history: History, entries: Sequence[InputEntry], stamp: ItemStamp, room: ContextRoom
    ) -> PreparedTurn:
        prepared = await prepare(self, history, entries, stamp, room)
        if len(history.items) < 3 or random.random() < 0.5:
            return prepared
        before = dataclasses.replace(history, items=history.items[:-2])
        older = await prepare(self, before, entries, stamp, room)
        return dataclasses.replace(prepared, context=older.context, num_new=older.num_new)

    Renderer.prepare = stale  # type: ignore[method-assign]


_STORES: Final[dict[str, Callable[[Any, str], Any]]] = {
    "ack before commit": _early,
    "retry appended twice": _forgets,
    "commit drops input": _drops,
    "older state at restart": _falls,
}
BUGS: Final = (*_STORES, "stale context")
"""What ``plant`` knows."""


def plant(bug: str) -> None:
    """Have this process's server, which is yet to be run, behave so."""
    if bug == "stale context":
        _stale_context()
        return
    around, open_store = _STORES[bug], app.open_store

    def opened(url: str, *options: Any, **more: Any) -> Any:
        return around(open_store(url, *options, **more), url)

    app.open_store = opened
