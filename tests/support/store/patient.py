"""A store with two sessions in it, to be damaged behind its back, checked and repaired."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

from pensieve.store import HistoryStore, open_store
from pensieve.store.maintenance import Mode, Problem, RepairResult, Survey, check, open_raw, repair
from support.store.population import Made
from support.store.store_bench import Bench, SqliteBench, key

KEY = key()
MADE = Made(KEY, ("turn", "rewind", "turn", "update", "turn"))
OTHER = Made(key("s2"), ("turn",))


class Patient:
    """A store that holds two sessions, and hands that reach behind it."""

    def __init__(self, url: str, bench: Bench) -> None:
        self.url = url
        self.bench = bench

    async def check(self) -> Survey:
        store = open_raw(self.url)
        await store.open(Mode.READ)
        try:
            return await check(store)
        finally:
            await store.close()

    async def problems(self) -> set[Problem]:
        found = (await self.check()).findings
        assert all(one.session in ("", KEY.session_id) for one in found), found
        return {one.problem for one in found}

    async def repair(self, *, apply: bool = True, cut_to: Path | None = None) -> RepairResult:
        store = open_raw(self.url)
        await store.open(Mode.EXCLUSIVE if apply else Mode.READ)
        try:
            return await repair(store, apply=apply, cut_to=cut_to)
        finally:
            await store.close()

    @contextlib.asynccontextmanager
    async def served(self) -> AsyncIterator[HistoryStore]:
        store = open_store(self.url)
        await store.open()
        try:
            yield store
        finally:
            await store.close()


def execute(patient: Patient, statement: str, *values: object) -> None:
    assert isinstance(patient.bench, SqliteBench)
    with contextlib.closing(sqlite3.connect(patient.bench.path)) as connection, connection:
        connection.execute(statement, values)
