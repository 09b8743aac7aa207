"""Two versions of the server on one store: each reads what the other wrote, goes on from it, and drops nothing of it.

``previous/session.json`` is a session as the version before wrote it into Redis: candidates, a choice among them, a
rewind, an update. The version that comes next is played by adding what this one does not know.
"""

from __future__ import annotations

import contextlib
import json
import zlib
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from pensieve.store import Key
from pensieve.store._codec import FORMAT, FORMAT_ERASED, chain_hash
from pensieve.store._redis.rows import index_key, session_keys
from pensieve.store.redis_store import RedisStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, uid
from support.store.redis_server import redis_server

pytestmark = pytest.mark.redis
PREVIOUS: dict[str, Any] = json.loads((Path(__file__).parent / "previous" / "session.json").read_text())
KEY = Key("acme", PREVIOUS["session"])
NAME = f"sessions/{KEY.session_id}"
META, REQUESTS, LOG = session_keys(KEY)


@pytest.fixture
def plain() -> Iterator[redis.Redis]:
    """A look behind the store's back."""
    with redis_server() as server, contextlib.closing(server.client()) as client:
        yield client


@asynccontextmanager
async def served(plain: redis.Redis, log: list[dict[str, str]], **extra: str) -> AsyncIterator[Rig]:
    """A server of this version on a store that holds the previous one's session."""
    port = plain.connection_pool.connection_kwargs["port"]
    store = RedisStore.from_url(f"redis://127.0.0.1:{port}/0")
    await store.open()
    plain.hset(META, mapping={**PREVIOUS["meta"], "revision": len(log), "head_hash": log[-1]["h"], **extra})
    plain.hset(REQUESTS, mapping=PREVIOUS["requests"])
    for entry in log:
        fields: Any = {"d": bytes.fromhex(entry["d"]), "c": entry["c"], "h": entry["h"]}
        plain.xadd(LOG, fields, id=entry["id"])
    plain.zadd(index_key(KEY.tenant), {KEY.session_id: int(PREVIOUS["meta"]["update_ms"])})
    try:
        async with serving(store=store) as rig:
            yield rig
    finally:
        await store.close()


def rewritten(change: Any, data_format: int = FORMAT) -> list[dict[str, str]]:
    """The log as another version would have written it: ``change`` gets each record as plain values."""
    log, head = [], ""
    for entry in PREVIOUS["log"]:
        record = msgspec.msgpack.decode(bytes.fromhex(entry["d"])[1:])
        data = bytes((data_format,)) + msgspec.msgpack.encode(change(record))
        head = chain_hash(head, data)
        log.append({"id": entry["id"], "d": data.hex(), "c": str(zlib.crc32(data)), "h": head})
    return log


def _from_the_future(value: Any) -> Any:
    """With a field that nobody knows yet in every object."""
    if isinstance(value, dict):
        known = {name: _from_the_future(inner) for name, inner in value.items()}
        return known if all(isinstance(inner, str) for inner in value.values()) else {**known, "novelty": [1]}
    return [_from_the_future(inner) for inner in value] if isinstance(value, list) else value


async def _check_read(rig: Rig) -> None:
    """All of the previous version's session is there."""
    items = await rig.items(NAME, tokens=True)
    assert [
        {"item": item.item, "role": int(item.role), "text": item.text, "tokens": list(item.tokens.ids)}
        for item in items
    ] == PREVIOUS["items"]
    chosen = await rig.get_turn(NAME, PREVIOUS["chosen"]["request_id"])
    assert chosen.chosen_candidate == PREVIOUS["chosen"]["candidate"]
    assert [one.text for one in chosen.candidates] == PREVIOUS["chosen"]["texts"]
    session = await rig.session(NAME)
    assert session.state == pb.Session.STATE_ACTIVE and dict(session.labels) == {"team": "b"}
    assert session.config.default_sampling.temperature == 0.5
    listed = await rig.api.ListSessions(pb.ListSessionsRequest(label_selector="team=b"))
    assert [one.name for one in listed.sessions] == [NAME]


async def _use(rig: Rig) -> None:
    """Every kind of change."""
    assert (await rig.run(NAME, "five")).revision == 9
    await rig.api.RewindSession(pb.RewindSessionRequest(name=NAME, request_id=uid(), item=5))
    update = pb.UpdateSessionRequest(name=NAME, session=pb.Session(labels={"team": "c"}))
    update.update_mask.paths.append("labels")
    await rig.api.UpdateSession(update)
    fork = await rig.api.ForkSession(pb.ForkSessionRequest(name=NAME, request_id=uid()))
    assert (await rig.run(fork.session.name, "six")).output.text
    assert (await rig.run(NAME, "six")).revision == 12


@pytest.mark.fault(53)
@pytest.mark.parametrize("version", ["previous", "next"])
async def test_a_session_of_another_version_goes_on_and_keeps_what_it_had(
    plain: redis.Redis, version: str
) -> None:
    log = PREVIOUS["log"] if version == "previous" else rewritten(_from_the_future)
    extra = {} if version == "previous" else {"novelty": "kept"}
    async with served(plain, log, **extra) as rig:
        await _check_read(rig)
        await _use(rig)
    after: Any = plain.xrange(LOG)
    assert [entry[b"d"].hex() for _, entry in after[: len(log)]] == [entry["d"] for entry in log]
    assert plain.hget(META, "novelty") == (b"kept" if extra else None)


@pytest.mark.fault(53)
async def test_what_only_a_newer_version_understands_is_refused_and_left_alone(plain: redis.Redis) -> None:
    """The format of a record grows when ignoring a field of it would be wrong."""
    log = rewritten(lambda record: record, FORMAT_ERASED + 1)
    async with served(plain, log) as rig:
        request = pb.TurnSpec(request_id=uid(), input=[pb.InputItem(role=pb.ROLE_USER, text="hi")])
        calls = [
            rig.call(NAME, request),
            rig.api.ListItems(pb.ListItemsRequest(name=NAME)),
            rig.api.RewindSession(pb.RewindSessionRequest(name=NAME, request_id=uid(), item=5)),
            rig.api.ForkSession(pb.ForkSessionRequest(name=NAME, request_id=uid())),
        ]
        for call in calls:
            error = await refusal(call)
            assert (error.code, error.reason) == ("FAILED_PRECONDITION", "STORE_VERSION")
        session = await rig.session(NAME)
        assert session.state == pb.Session.STATE_ACTIVE and not session.HasField("active_turn")
        other = await rig.create()
        assert (await rig.run(other, "hi")).revision == 2, "others go on"
    assert len(plain.xrange(LOG)) == len(log) and plain.hget(META, "revision") == b"8"
