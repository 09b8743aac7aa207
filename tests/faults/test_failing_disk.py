"""A disk that fails every flush, under a server with its history in SQLite."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pensieve.server.rpc.auth import DEFAULT_TENANT
from pensieve.store import Key
from pensieve.store.sqlite_store import SqliteStore
from support.faults.fault_client import NOT_SERVING, audit, calling
from support.faults.fault_server import fault_server
from support.faults.io_errors import IoErrors


@pytest.mark.fault(39)
async def test_no_turn_is_acknowledged_that_a_power_cut_would_undo(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "files" / "history.sqlite3"
    disk = IoErrors(tmp_path, path)
    for name, value in disk.environment.items():
        monkeypatch.setenv(name, value)
    with fault_server(tmp_path / "server", f"sqlite:///{path}") as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            talks = [await caller.talk() for _ in range(3)]
            for talk in talks:
                await caller.say(talk, "before", 4)
            disk.fail("sync")
            turns = [asyncio.create_task(caller.turn(talk, talk.spec("is this kept?", 4))) for talk in talks]
            await caller.becomes(NOT_SERVING)
            refused = [turn for turn in turns if turn.done() and turn.exception() is not None]
            assert refused == [turn for turn in turns if turn.done()], "a turn was acknowledged"
            assert await asyncio.to_thread(server.metric, "pensieve_store_errors_total") > 0
            assert "the history file is closed until its content is proven" in server.log
            disk.heal()
            await asyncio.gather(*turns, return_exceptions=True)
            for talk in talks:
                for spec in list(talk.open.values()):
                    await caller.until_done(talk, spec)
            await audit(caller, talks)
            revisions = {talk.name: (await caller.session(talk)).revision for talk in talks}
            server.kill()
    disk.power_cut(tmp_path / "cut")
    store = SqliteStore(tmp_path / "cut" / path.name)
    await store.open()
    for name, revision in revisions.items():
        log = await store.read(Key(DEFAULT_TENANT, name.removeprefix("sessions/")))
        assert len(log) == revision
    await store.close()
