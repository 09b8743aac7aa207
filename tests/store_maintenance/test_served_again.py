"""A conversation on SQLite, its backup restored to Redis, a server there: it goes on as if nothing had happened."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from pensieve.store import open_store
from pensieve.store.maintenance import Mode, backup, open_backup, open_raw, restore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import serving, spec, uid
from support.store.redis_server import RedisServer

pytestmark = pytest.mark.redis


async def test_a_conversation_goes_on_after_a_restore(
    tmp_path: Path, shared_redis: RedisServer, client: redis.Redis
) -> None:
    assert client.ping()
    sqlite = f"sqlite:///{tmp_path}/h.db"
    created = uid()
    first, second = spec("my cat is called Mimi"), spec("what is she called?")
    store = open_store(sqlite)
    await store.open()
    async with serving(store=store) as before:
        name = await before.create("Be brief.", labels={"who": "ada"}, request_id=created, session_id="talk")
        turn = (await before.stream(name, first)).completed
        await before.stream(name, second)
        session, items = await before.session(name), await before.items(name, tokens=True)
        raw = open_raw(sqlite)
        await raw.open(Mode.SNAPSHOT)  # beside the server
        await backup(raw, tmp_path / "b.jsonl.gz")
        await raw.close()
    await store.close()

    target = open_raw(shared_redis.url)
    await target.open(Mode.WRITE)
    assert (await restore(open_backup(tmp_path / "b.jsonl.gz"), target)).written == 1
    await target.close()

    store = open_store(shared_redis.url)
    await store.open()
    async with serving(store=store) as after:
        assert await after.session(name) == session
        assert await after.items(name, tokens=True) == items
        again = await after.stream(name, first)
        assert again.accepted.replayed and again.completed == turn
        assert (
            await after.create("Be brief.", labels={"who": "ada"}, request_id=created, session_id="talk")
            == name
        )
        assert len(await after.items(name)) == len(items), "a retry appended something"
        third = (await after.stream(name, spec("and where does she live?"))).completed
        assert third.base_revision == session.revision
        assert third.usage.context_tokens > session.context_tokens
        listed = await after.api.ListSessions(pb.ListSessionsRequest(label_selector="who=ada"))
        assert [one.name for one in listed.sessions] == [name]
    await store.close()
