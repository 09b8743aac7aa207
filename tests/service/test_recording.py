"""``--record``: what stands in a trace and what never does, and that it replays to the same counts."""

from __future__ import annotations

import asyncio
import gzip
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from typing import Any

import pytest
from grpc import aio

from pensieve.client import AsyncClient
from pensieve.config import EngineOptions
from pensieve.core import Usage
from pensieve.errors import PensieveError
from pensieve.replay.load.schedule import Arrivals, Script, scripts
from pensieve.replay.load.workload import load
from pensieve.replay.play.runner import replay
from pensieve.replay.records import RunOptions, TurnRecord
from pensieve.replay.targets.base import OnTokens, TurnRequest
from pensieve.replay.targets.grpc_target import PensieveTarget
from pensieve.server.conversations import Conversations, ServiceListeners
from pensieve.server.operations.recording import SCHEMA, header, open_recorder
from pensieve.server.rpc.grpc_server import make_server
from pensieve.server.rpc.interceptor import Interceptor
from pensieve.server.rpc.service import ConversationService
from pensieve.server.settings import TurnSettings
from pensieve.store.memory_store import MemoryStore
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2_grpc
from support.engine.hash_engine import build
from support.service.inprocess_link import InProcessLink
from support.service.server_process import model_folder
from support.service.service_rig import TenantHeader

OPTIONS = EngineOptions(
    model="",
    device_cache="256tokens",
    host_cache="256tokens",
    chunk_tokens=8,
    max_running=8,
    policy="lru",
    swap_watermark=0.0,
)
"""Tiers that hold a part of the load below, so that every source of context tokens occurs. With LRU and swap-out on
demand the cache knows the order of turns only, not how long they took."""
COUNTS = ("context_tokens", "input_tokens", "output_tokens")
SETTLED_S = 0.05
"""Between turns that run one after the other: when an answer is out the engine may still be at the step that gives up
its chunks, and on a busy machine the next turn would find them taken."""
SOURCES = ("gpu_cached_tokens", "swapped_in_tokens", "recomputed_tokens")


@asynccontextmanager
async def serving(folder: Path, trace: Path) -> AsyncIterator[str]:
    """A fresh server on the hashed engine that records into ``trace``; HOST:PORT."""
    async with AsyncExitStack() as stack:
        store = MemoryStore()
        await store.open()
        stack.push_async_callback(store.close)
        recorder = open_recorder(trace)
        stack.push_async_callback(recorder.close)
        link = InProcessLink(lambda: build(OPTIONS))
        await link.start()
        stack.push_async_callback(link.stop)
        recorder.start(header(link.info, OPTIONS))
        tokenizer = ChatTokenizer.from_folder(model_folder(folder / "model"))
        conversations = Conversations(
            store,
            link,
            tokenizer,
            TurnSettings(replica="r", prefix_sharing=False),
            ServiceListeners(turn_ended=recorder.turn_ended),
        )
        stack.push_async_callback(conversations.close)
        server: aio.Server = make_server([Interceptor(TenantHeader())])
        pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(
            ConversationService(conversations), server
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, None)
        yield address


def rows(trace: Path) -> list[dict[str, Any]]:
    """The turns, without the headers."""
    data = trace.read_bytes()
    text = (gzip.decompress(data) if trace.suffix == ".gz" else data).decode()
    return [row for row in map(json.loads, text.splitlines()) if "schema" not in row]


async def converse(address: str, *, seed: int, lanes: int) -> None:
    """Six sessions of random turns, ``lanes`` of them at a time."""
    random = Random(seed)
    async with AsyncClient(address) as client:
        chats = [await client.create_session() for _ in range(6)]
        lane = asyncio.Semaphore(lanes)

        async def send(chat: Any, text: str, output: int) -> None:
            async with lane:
                await chat.send(text, max_output_tokens=output)
                await asyncio.sleep(SETTLED_S if lanes == 1 else 0)

        for _ in range(5):
            random.shuffle(chats)
            await asyncio.gather(
                *(send(chat, "word " * random.randint(1, 6), random.randint(1, 12)) for chat in chats)
            )


class InOrder(PensieveTarget):
    """Lets one turn run after the other, in the order of the recording, however late each comes."""

    def __init__(self, address: str, script: Sequence[Script]) -> None:
        super().__init__(address)
        stamps = (
            (turn.timestamp_s, index) for index, one in enumerate(script) for turn in one.conversation.turns
        )
        self._order = [index for _, index in sorted(stamps)]
        self._sessions: list[str] = []
        self._moved = asyncio.Condition()
        self._next = 0

    async def start_session(self) -> str:
        index = len(self._sessions)
        self._sessions.append("")
        self._sessions[index] = await super().start_session()
        return self._sessions[index]

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        mine = self._sessions.index(session)
        async with self._moved:
            await self._moved.wait_for(lambda: self._order[self._next] == mine)
        try:
            return await super().turn(session, spec, on_tokens)
        finally:
            await asyncio.sleep(SETTLED_S)
            async with self._moved:
                self._next += 1
                self._moved.notify_all()


async def replayed(address: str, trace: Path, *, in_order: bool) -> tuple[TurnRecord, ...]:
    script = scripts(load(trace).conversations, Arrivals(recorded=True))
    target = InOrder(address, script) if in_order else PensieveTarget(address)
    info = await target.open()
    outcome = await replay(target, info, script, RunOptions())
    await target.close()
    assert not [record.message for record in outcome.records if record.error]
    return outcome.records


def counts(trace: Path, fields: Sequence[str]) -> list[list[list[int]]]:
    """The named fields of each session's turns; sessions in order of their first turn."""
    sessions: dict[str, list[dict[str, Any]]] = {}
    for row in sorted(rows(trace), key=lambda row: row["timestamp_s"]):
        sessions.setdefault(row["session_id"], []).append(row)
    assert all([row["turn"] for row in turns] == list(range(len(turns))) for turns in sessions.values())
    return [[[row[name] for name in fields] for row in turns] for turns in sessions.values()]


async def test_a_replay_in_order_has_the_same_counts_by_source(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Turns are so short here that the policy would take two sessions for equally idle.
    monkeypatch.setattr("pensieve.engine.cache.policy.SHORTEST_IDLE_S", 1e-9)
    first, second = tmp_path / "first.jsonl", tmp_path / "second.jsonl"
    async with serving(tmp_path, first) as address:
        await converse(address, seed=1, lanes=1)
    async with serving(tmp_path, second) as address:
        await replayed(address, first, in_order=True)
    for source in SOURCES:
        assert sum(row[source] for row in rows(first)), f"the load has no {source}"
    assert counts(second, COUNTS + SOURCES) == counts(first, COUNTS + SOURCES)


async def test_a_replay_of_concurrent_sessions_has_the_same_counts(tmp_path: Path) -> None:
    first, second = tmp_path / "first.jsonl.gz", tmp_path / "second.jsonl.gz"
    async with serving(tmp_path, first) as address:
        await converse(address, seed=2, lanes=6)
    async with serving(tmp_path, second) as address:
        receipts = await replayed(address, first, in_order=False)
    assert len(rows(first)) == len(receipts) == 30
    assert sorted(counts(second, COUNTS)) == sorted(counts(first, COUNTS))


@pytest.mark.fault(56)
async def test_nothing_of_text_tokens_and_names(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with serving(tmp_path, trace) as address, AsyncClient(address) as client:
        chat = await client.create_session(system_prompt="classified")
        turn = await chat.send("secret", max_output_tokens=4)
    text = trace.read_text()
    for word in ("classified", "secret", "acme", chat.id, turn.request_id, *filter(str.strip, [turn.text])):
        assert word not in text, word
    (row,) = rows(trace)
    assert set(row) == {
        *("session_id", "turn", "timestamp_s", "queue_s", "ttft_s", "end_s", "finish_reason", "committed"),
        *COUNTS,
        *SOURCES,
    }
    assert all(isinstance(value, str | int | float) for value in row.values())
    assert 0 <= row["ttft_s"] <= row["end_s"] and row["finish_reason"] == "length"


async def test_the_header_says_how_the_engine_was_set_up(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    for _ in range(2):
        async with serving(tmp_path, trace):
            pass
    heads = [json.loads(line) for line in trace.read_text().splitlines()]
    assert [head["schema"] for head in heads] == [SCHEMA, SCHEMA], "appended to, a header per start"
    engine = heads[0]["engine"]
    assert (engine["chunk_tokens"], engine["device_tokens"], engine["host_tokens"]) == (8, 256, 256)
    assert (engine["policy"], engine["max_batch_tokens"], engine["max_running"]) == ("lru", 512, 8)


async def test_a_turn_that_does_not_go_on_from_the_last_begins_a_session(tmp_path: Path) -> None:
    trace = tmp_path / "trace.jsonl"
    async with serving(tmp_path, trace) as address, AsyncClient(address) as client:
        chat = await client.create_session()
        await chat.send("one", max_output_tokens=4)
        branch = await chat.fork()
        await branch.send("two", max_output_tokens=4)
        await chat.regenerate(max_output_tokens=4)
        await chat.send("three", max_output_tokens=4)
        with pytest.raises(PensieveError):
            await chat.send("word " * 300)
        await chat.send("four", max_output_tokens=4)
    one, two, again, three, refused, four = rows(trace)
    assert one["input_tokens"] == one["context_tokens"]
    for row in (two, again):
        assert (row["turn"], row["input_tokens"]) == (0, row["context_tokens"])
    assert len({row["session_id"] for row in (one, two, again)}) == 3
    assert (three["session_id"], three["turn"]) == (again["session_id"], 1)
    assert three["context_tokens"] == again["context_tokens"] + again["output_tokens"] + three["input_tokens"]
    assert (refused["session_id"], refused["turn"], refused["committed"]) == (again["session_id"], 2, False)
    assert refused["finish_reason"] == "context_limit_exceeded"
    assert (four["session_id"], four["turn"], four["committed"]) == (again["session_id"], 2, True)


async def test_serving_goes_on_without_a_trace(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serving(tmp_path, Path("/dev/full")) as address:
        await converse(address, seed=3, lanes=3)
    assert [record.levelname for record in caplog.records if record.levelno >= logging.ERROR] == ["ERROR"]
