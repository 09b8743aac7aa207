"""A client leaves in the middle of a turn and comes back at once, hundreds of times; everything in one process.

In one process, so that tasks, memory and the books of the cache can be looked at directly.
"""

from __future__ import annotations

import asyncio
import gc
import os
import resource
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from random import Random

import pytest
from grpc import aio

from pensieve.config import EngineOptions
from pensieve.engine.engine import Engine
from pensieve.server.conversations import Conversations
from pensieve.server.operations.health import HealthMonitor
from pensieve.server.rpc.auth import Authenticator
from pensieve.server.rpc.grpc_server import add_health_and_reflection, make_server
from pensieve.server.rpc.interceptor import Interceptor
from pensieve.server.rpc.service import AdminService, ConversationService
from pensieve.server.settings import TurnSettings
from pensieve.store import Key
from pensieve.store.memory_store import MemoryStore
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2_grpc as pb_grpc
from support.faults.fault_client import (
    Caller,
    Refused,
    Talk,
    calling,
    check_history,
    check_idle,
    may_try_again,
)
from support.faults.fault_engine import build
from support.lengths import at_length
from support.service.inprocess_link import InProcessLink
from support.service.server_process import model_folder

LANES = 5
ROUNDS_OF_A_TALK = 3
ROUNDS = at_length(320, 800)
MAY_GROW_BYTES = at_length(5, 12) << 20
"""What the memory store keeps of some hundred sessions, and what allocators do. A leaked turn is > 20 KiB."""


class DistantStore(MemoryStore):
    """Takes its time to let go of a lease, so that who comes back meets the turn that is being discarded."""

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        await asyncio.sleep(0.002)
        await super().abort(key, token, called_off=called_off)


@dataclass
class Inside:
    """The server's parts, and a client."""

    caller: Caller
    conversations: Conversations
    engine: Engine
    link: InProcessLink


@asynccontextmanager
async def serving(folder: Path, grace_s: float, pace_s: float) -> AsyncIterator[Inside]:
    """The whole server but its processes."""
    model = model_folder(folder / "model")
    (model / "pace").write_text(str(pace_s))
    options = EngineOptions(
        model=str(model), device_cache="256tokens", host_cache="128tokens", chunk_tokens=8, max_running=8
    )
    engine = build(options)
    async with AsyncExitStack() as stack:
        store = DistantStore()
        await store.open()
        stack.push_async_callback(store.close)
        link = InProcessLink(lambda: engine)
        await link.start()
        stack.push_async_callback(link.stop)
        settings = TurnSettings(replica="r", disconnect_grace_s=grace_s)
        conversations = Conversations(store, link, ChatTokenizer.from_folder(model), settings)
        stack.push_async_callback(conversations.close)
        monitor = HealthMonitor(link, store)
        await monitor.start()
        stack.push_async_callback(monitor.stop)
        server: aio.Server = make_server([Interceptor(Authenticator(None))])
        pb_grpc.add_ConversationServiceServicer_to_server(ConversationService(conversations), server)
        pb_grpc.add_AdminServiceServicer_to_server(AdminService(link, conversations), server)
        add_health_and_reflection(server, monitor.servicer, [])
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, None)
        caller = await stack.enter_async_context(calling(address, address))
        yield Inside(caller, conversations, engine, link)


async def _leave(caller: Caller, talk: Talk, messages: int) -> str:
    """Start a turn and leave: after so many messages, or with 0 after the first delta. Its request id."""
    spec = talk.spec("tell me a story", 24)
    call = caller.call(talk, spec)
    seen = 0
    async for event in call:
        seen += 1
        if seen == messages or (not messages and event.HasField("delta")):
            break
    call.cancel()
    return spec.request_id


async def _lane(caller: Caller, number: int, rounds: int) -> int:
    """Rounds in sessions of this lane's own; how many of the left turns are not in history."""
    discarded, random = 0, Random(number)
    for first in range(0, rounds, ROUNDS_OF_A_TALK):
        talk = await caller.talk()
        for index in range(first, min(first + ROUNDS_OF_A_TALK, rounds)):
            left = await _leave(caller, talk, 0 if index % 4 else random.randrange(1, 12))
            if (index + number) % 3 == 0:
                # The same request again: it joins the turn that still runs, or starts again.
                spec = talk.open[left]
                await caller.until_done(talk, spec) if index % 2 else await _leave_again(caller, talk, left)
            await caller.say(talk, "never mind", 3)
        await check_history(caller, talk)
        items, _ = await caller.items(talk)
        discarded += len(set(talk.open) - {item.request_id for item in items})
    return discarded


async def _leave_again(caller: Caller, talk: Talk, request_id: str) -> None:
    call = caller.call(talk, talk.open[request_id])
    try:
        await anext(aiter(call))
    except aio.AioRpcError as error:
        assert may_try_again(Refused.of(error).error), error
    call.cancel()


async def _rounds(caller: Caller, rounds: int) -> int:
    return sum(await asyncio.gather(*(_lane(caller, lane, rounds // LANES) for lane in range(LANES))))


async def _idle(inside: Inside) -> tuple[set[str], int, int]:
    """Names of tasks, number of open files, resident bytes, once nothing runs."""
    async with asyncio.timeout(20):
        while inside.conversations.turns.running or inside.link.stats.running or inside.link.stats.queued:
            await asyncio.sleep(0.02)
    await asyncio.sleep(0.3)
    gc.collect()
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    tasks = {task.get_name() for task in asyncio.all_tasks() if not task.done()}
    tasks.discard("store ping")  # the health check runs one now and then
    return tasks, len(os.listdir("/proc/self/fd")), pages * resource.getpagesize()


@pytest.mark.fault(1)
@pytest.mark.parametrize(
    ("grace_s", "pace_s", "rounds"), [(0.0, 0.0, ROUNDS), (0.02, 0.002, at_length(100, 200))]
)
async def test_leave_and_come_back(tmp_path: Path, grace_s: float, pace_s: float, rounds: int) -> None:
    async with serving(tmp_path, grace_s, pace_s) as inside:
        await _rounds(inside.caller, rounds // 8)
        tasks, files, memory = await _idle(inside)
        discarded = await _rounds(inside.caller, rounds)
        after = await _idle(inside)
        inside.engine.check()  # not before: the engine is a thread, and discards the last turns
        assert discarded > rounds // 3, "hardly any turn was left in the middle"
        assert len(after[0]) <= len(tasks), f"tasks leaked: {sorted(after[0] - tasks)}"
        assert after[1] <= files, "open files leaked"
        assert after[2] - memory < MAY_GROW_BYTES, f"{(after[2] - memory) >> 10} KiB more than after warm-up"
        await check_idle(inside.caller)
        inside.engine.check()
        stats = inside.engine.stats()
        assert (stats.device_used, stats.host_used, stats.cached_sessions) == (0, 0, 0)
        assert stats.dropped_total and stats.recomputed_total and stats.swapped_in_total, (
            "the tiers were too large"
        )
