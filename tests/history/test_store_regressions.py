"""A store that went back in time is refused by default, by the server alone: no caller has to say what it expects."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from pensieve.server.history.transcript import KnownRevisions
from pensieve.store import Key
from pensieve.store.memory_store import MemoryStore
from pensieve.store.records import SessionRow
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, spec
from support.store.redis_server import redis_server
from support.store.store_bench import opened_redis

REGRESSED = ("DATA_LOSS", "HISTORY_REGRESSED")


class Counted:
    """Counts what the server found, as its metric does."""

    def __init__(self, rig: Rig) -> None:
        self.seen_by: list[str] = []
        rig.conversations._transcript.known._on_regression = self.seen_by.append


def forgetful(rig: Rig) -> None:
    """The folded histories are gone from the cache, as under pressure; what was acknowledged is still known."""
    histories = rig.conversations._transcript
    for key in list(histories._cached):
        histories._drop(key)


def warm(rig: Rig) -> None:
    """Everything stays cached."""


@pytest.mark.parametrize("cache", [warm, forgetful])
async def test_turns_and_readers_are_refused(
    cache: Callable[[Rig], None], caplog: pytest.LogCaptureFixture
) -> None:
    store = MemoryStore()
    async with serving(store=store) as rig:
        name, other = await rig.create(), await rig.create()
        await rig.run(name, "first")
        backup = copy.deepcopy(store._sessions)
        await rig.run(name, "second")
        counted = Counted(rig)
        cache(rig)
        store._sessions = backup
        for call in (
            rig.call(name, spec("third")),
            rig.api.ListItems(pb.ListItemsRequest(name=name)),
            rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=1)),
            rig.api.DeleteSession(pb.DeleteSessionRequest(name=name, unused_only=True)),
        ):
            error = await refusal(call)
            assert (error.code, error.reason) == REGRESSED
            assert error.metadata["current_revision"] == "2"
        assert counted.seen_by == ["server"] * 4
        assert sum("went back in time" in record.message for record in caplog.records) == 4
        assert (await rig.session(name)).revision == 2, "nothing was added"
        assert (await rig.run(other, "hi")).revision == 2, "other sessions go on"


@pytest.mark.parametrize("cache", [warm, forgetful])
@pytest.mark.parametrize("more", [0, 1], ids=["as far", "further"])
async def test_another_history_of_the_same_length_is_found(cache: Callable[[Rig], None], more: int) -> None:
    store = MemoryStore()
    async with serving(store=store) as rig:
        name = await rig.create()
        backup = copy.deepcopy(store._sessions)
        await rig.run(name, "first")
        async with serving(store=store) as elsewhere:  # a replica that goes on after the fail-over
            store._sessions = backup
            for number in range(1 + more):
                await elsewhere.run(name, f"another {number}")
        cache(rig)
        counted = Counted(rig)
        error = await refusal(rig.call(name, spec("second")))
        assert (error.code, error.reason) == REGRESSED and counted.seen_by == ["server"]


async def test_a_client_that_says_it_has_seen_more_is_counted_apart() -> None:
    """It may be mistaken: nobody can raise the operator's alarm with a wrong number."""
    async with serving() as rig:
        name = await rig.create()
        await rig.run(name, "first")
        counted = Counted(rig)
        error = await refusal(rig.call(name, spec("second", expected_revision=9)))
        assert (error.code, error.reason) == REGRESSED and counted.seen_by == ["client"]


@pytest.mark.fault(42, 47)
@pytest.mark.redis
async def test_redis_restarted_on_an_earlier_prefix_of_its_log(tmp_path: Path) -> None:
    with redis_server(appendfsync="always") as redis:
        async with opened_redis(redis.url) as store, serving(store=store) as rig:
            name = await rig.create()
            await rig.run(name, "first")
            redis.kill()
            shutil.copytree(redis.append_only_folder, tmp_path / "earlier")
            redis.start()
            await rig.run(name, "second")
            redis.kill()
            shutil.rmtree(redis.append_only_folder)
            shutil.copytree(tmp_path / "earlier", redis.append_only_folder)
            redis.start()
            counted = Counted(rig)
            error = await refusal(rig.call(name, spec("third")))
            assert (error.code, error.reason) == REGRESSED
            assert counted.seen_by == ["server"] and (await rig.session(name)).revision == 2


async def test_a_row_that_was_just_overtaken_is_no_regression() -> None:
    """A reader holds an old row while a turn is committed: the store is asked again before it is blamed."""
    async with serving() as rig:
        name = await rig.create()
        key = Key("acme", name.removeprefix("sessions/"))
        old = await rig.store.load(key)
        await rig.run(name, "first")
        counted = Counted(rig)
        history = await rig.conversations._transcript.history_at(key, old)
        assert history.revision == 2 and not counted.seen_by


async def test_a_session_made_anew_under_an_old_id_is_another_one() -> None:
    now = 1_000_000
    store = MemoryStore(clock=lambda: now)
    async with serving(store=store) as rig:
        config = pb.SessionConfig()
        config.ttl.seconds = 3600
        name = await rig.create(session_id="again", config=config)
        await rig.run(name, "first")
        now += 3601 * 1000
        await rig.create(session_id="again", config=config)
        assert (await rig.run(name, "first of the new one")).revision == 2


def test_what_is_known_is_bounded_and_never_goes_back() -> None:
    known = KnownRevisions(max_sessions=2)
    rows = [SessionRow(tenant="t", session_id=str(n), revision=5, head_hash="aa") for n in range(3)]
    keys = [Key("t", row.session_id) for row in rows]
    for key, row in zip(keys, rows, strict=True):
        known.record(key, row)
    assert known.get(keys[0]).revision == 0 and known.get(keys[2]).revision == 5
    known.record(keys[2], SessionRow(tenant="t", session_id="2", revision=4, head_hash="bb"))
    assert known.get(keys[2]).revision == 5
