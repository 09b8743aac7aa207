"""A store that went back, as a fail-over to a stale copy or a restored backup makes it: the SDK notices by default."""

from __future__ import annotations

import copy

import pytest

from pensieve.client import AsyncClient
from pensieve.errors import DataLoss
from pensieve.store._redis import clients
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import serving, spec
from support.store.redis_groups import replace_primary, sentinel_group
from support.store.store_bench import opened_redis


async def test_a_turn_on_lost_history_is_refused_and_nothing_is_written() -> None:
    """The server is a new one: only the client can know."""
    store = MemoryStore()
    async with serving(store=store) as rig, AsyncClient(rig.target) as client:
        chat = await client.create_session()
        await chat.send("one")
        earlier = copy.deepcopy(store._sessions)
        await chat.send("two")
        assert chat.revision == 3
    store._sessions = earlier
    async with serving(store=store) as rig, AsyncClient(rig.target) as client:
        same = client.session(chat.name)
        same._core.last_turn = chat.last_turn  # the handle outlives the server, and here its connection too
        for _ in range(2):
            with pytest.raises(DataLoss) as caught:
                await same.send("three")
            assert caught.value.reason == "HISTORY_REGRESSED"
            assert caught.value.metadata["current_revision"] == "2"
        info = await client.session(chat.name).refresh()
        assert (info.revision, info.active_request_id) == (2, "")
        assert (await client.session(chat.name).send("three")).revision == 3, (
            "a new handle takes what is there"
        )


async def test_handles_that_are_behind_go_on() -> None:
    async with serving() as rig, AsyncClient(rig.target) as client, AsyncClient(rig.target) as other:
        chat = await client.create_session()
        twin = other.session(chat.name)
        for revision in range(2, 8, 2):
            assert (await chat.send("mine")).revision == revision
            assert (await twin.send("yours")).revision == revision + 1


async def test_what_is_known_is_not_part_of_the_turn() -> None:
    """A retry by somebody who has seen more, or less, is the same turn."""
    async with serving() as rig:
        name, turn = await rig.create(), spec("hi", known_revision=1)
        done = await rig.run(name, turn)
        for known in (2, 1, 0):
            turn.known_revision = known
            assert await rig.run(name, turn) == done
        turn.ClearField("known_revision")
        again = await rig.stream(name, turn)
        assert again.completed.revision == done.revision and again.accepted.replayed
        assert (await rig.session(name)).state == pb.Session.STATE_ACTIVE


@pytest.mark.redis
@pytest.mark.fault(48)
async def test_a_client_has_seen_more_than_a_server_that_missed_a_fail_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The old primary is alive and has not heard of it; the server's connections to it are open."""
    monkeypatch.setattr(clients, "ASK_AGAIN_S", 60.0)
    with sentinel_group() as group:
        url = group.url(replicas=1)
        async with (
            opened_redis(url) as store,
            opened_redis(url) as late,
            serving(store=store) as rig,
            serving(store=late) as other,
            AsyncClient(rig.target) as client,
        ):
            chat = await client.create_session()
            assert (await other.session(chat.name)).revision == 1
            old = await replace_primary(group)
            for words in ("one", "two"):  # the first try of the first reached the old one, too
                await chat.send(words)
            assert late._link.primary == ("127.0.0.1", old.port)
            assert (await other.run(chat.name, spec("again", known_revision=chat.revision))).revision == 4
