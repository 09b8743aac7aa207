"""A client that remembers what it was promised, and the audit that holds a server to it."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from typing import Any

from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pensieve import rpc_status
from pensieve.errors import PensieveError
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as pb_grpc
from support.engine.hash_engine import expected_output

PATIENCE_S = 40.0
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
AGAIN = ("TURN_IN_PROGRESS", "TURN_FENCED")
"""Reasons after which trying again helps, beside everything that is UNAVAILABLE or no answer of the server's."""
BROKEN = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")
"""Codes of a connection that was cut, by whoever reports it."""
ids = Random(20251121)


def uid(random: Random = ids) -> str:
    return str(uuid.UUID(int=random.getrandbits(128), version=4))


@dataclass
class Talk:
    """One session, and what this client knows of it."""

    name: str
    acked: dict[str, pb.Turn] = field(default_factory=dict)
    """Turns whose ``completed`` arrived, by request id."""
    open: dict[str, pb.TurnSpec] = field(default_factory=dict)
    """Turns that were sent and not acked."""

    def spec(self, text: str, outputs: int = 12, **fields: Any) -> pb.TurnSpec:
        """A turn of a known length."""
        turn = pb.TurnSpec(
            request_id=uid(),
            input=[pb.InputItem(role=pb.ROLE_USER, text=text)],
            sampling=pb.SamplingParams(max_output_tokens=outputs, ignore_eos=True, temperature=0),
            output=pb.OutputOptions(token_ids=True),
            **fields,
        )
        self.open[turn.request_id] = turn
        return turn


class Refused(Exception):
    """A call ended with ``error``."""

    def __init__(self, error: PensieveError) -> None:
        super().__init__(str(error))
        self.error = error

    @classmethod
    def of(cls, error: aio.AioRpcError) -> Refused:
        return cls(rpc_status.from_rpc_error(error))


def may_try_again(error: PensieveError) -> bool:
    broken = error.reason == rpc_status.TRANSPORT and error.metadata["grpc_code"] in BROKEN
    return broken or error.code == "UNAVAILABLE" or error.reason in AGAIN


class Caller:
    """Stubs on one server."""

    def __init__(self, data: aio.Channel, admin: aio.Channel) -> None:
        self.data: Any = pb_grpc.ConversationServiceStub(data)
        self.admin: Any = pb_grpc.AdminServiceStub(admin)
        self._health: Any = health_pb2_grpc.HealthStub(data)

    async def health(self) -> int:
        status: int = (await self._health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
        return status

    async def becomes(self, status: int, seconds: float = PATIENCE_S) -> None:
        async with asyncio.timeout(seconds):
            while await self.health() != status:
                await asyncio.sleep(0.01)

    async def talk(self) -> Talk:
        """A new session."""
        request = pb.CreateSessionRequest(request_id=uid(), config=pb.SessionConfig(system_prompt="be brief"))
        return Talk((await self.data.CreateSession(request, timeout=PATIENCE_S)).session.name)

    async def session(self, talk: Talk) -> pb.Session:
        request = pb.GetSessionRequest(name=talk.name)
        session: pb.Session = (await self.data.GetSession(request, timeout=10)).session
        return session

    async def free(self, talk: Talk) -> None:
        """Returns when nobody holds the session: the lease of a dead server has lapsed."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.session(talk)).HasField("active_turn"):
                await asyncio.sleep(0.02)

    def call(self, talk: Talk, spec: pb.TurnSpec, **fields: Any) -> Any:
        request = pb.StreamTurnRequest(session=talk.name, turn=spec, **fields)
        return self.data.StreamTurn(request, timeout=PATIENCE_S)

    async def turn(self, talk: Talk, spec: pb.TurnSpec, started: asyncio.Event | None = None) -> pb.Turn:
        """One try. ``started`` is set at the first delta. Raises Refused."""
        tokens: list[int] = []
        try:
            async for event in self.call(talk, spec):
                if event.HasField("delta"):
                    assert event.delta.token_offset == len(tokens), "a token was lost or doubled"
                    tokens += event.delta.tokens.ids
                    if started is not None:
                        started.set()
                elif event.HasField("completed"):
                    return self._ack(talk, spec, event.completed, tokens)
        except aio.AioRpcError as error:
            raise Refused.of(error) from error
        raise AssertionError("a stream ended well without its last message")

    async def until_done(self, talk: Talk, spec: pb.TurnSpec, seconds: float = PATIENCE_S) -> pb.Turn:
        """The turn, with as many tries as it takes; each failure must be one after which trying again makes sense."""
        async with asyncio.timeout(seconds):
            while True:
                try:
                    return await self.turn(talk, spec)
                except Refused as refused:
                    assert may_try_again(refused.error), refused.error
                    # The server says when it is sure to make sense (the rest of a lease); mostly it does much sooner.
                    await asyncio.sleep(min(refused.error.retry_after_s or 0.02, 0.02))

    async def say(self, talk: Talk, text: str, outputs: int = 12) -> pb.Turn:
        return await self.until_done(talk, talk.spec(text, outputs))

    @staticmethod
    def _ack(talk: Talk, spec: pb.TurnSpec, turn: pb.Turn, tokens: list[int]) -> pb.Turn:
        assert turn.state == pb.Turn.STATE_COMMITTED and turn.request_id == spec.request_id
        assert turn.usage.output_tokens == len(tokens) == spec.sampling.max_output_tokens
        usage = turn.usage
        sources = usage.gpu_cached_tokens + usage.swapped_in_tokens + usage.recomputed_tokens
        assert usage.context_tokens == sources + usage.new_tokens, f"the receipt does not add up: {usage}"
        before = talk.acked.setdefault(spec.request_id, turn)
        assert (before.revision, before.output.text) == (turn.revision, turn.output.text), "two outcomes"
        talk.open.pop(spec.request_id, None)
        return turn

    async def items(self, talk: Talk) -> tuple[list[pb.Item], int]:
        """Live items with tokens, and their revision."""
        items: list[pb.Item] = []
        page = ""
        while True:
            request = pb.ListItemsRequest(
                name=talk.name, include_tokens=True, page_size=1000, page_token=page
            )
            answer = await self.data.ListItems(request, timeout=PATIENCE_S)
            items += answer.items
            page = answer.next_page_token
            if not page:
                return items, answer.revision


@asynccontextmanager
async def calling(grpc: str, admin: str) -> AsyncIterator[Caller]:
    """No retries by the library: these tests are about the first answer."""
    options = (("grpc.enable_retries", 0), ("grpc.use_local_subchannel_pool", 1))
    async with (
        aio.insecure_channel(grpc, options=options) as data,
        aio.insecure_channel(admin, options=options) as operators,
    ):
        yield Caller(data, operators)


async def check_history(caller: Caller, talk: Talk) -> None:
    """Contiguous, exact, every acked turn once; a turn that was not acked at most once."""
    items, revision = await caller.items(talk)
    session = await caller.session(talk)
    assert not session.HasField("active_turn") and session.state == pb.Session.STATE_ACTIVE
    system, rest = items[:1], items[1:]
    assert [item.role for item in system] == [pb.ROLE_SYSTEM]
    assert [item.item for item in items] == list(range(1, len(items) + 1)), "history has a gap"
    assert [item.role for item in rest] == [pb.ROLE_USER, pb.ROLE_ASSISTANT] * (len(rest) // 2)
    assert session.revision == revision == 1 + len(rest) // 2 and session.item_count == len(items)
    committed = [item.request_id for item in rest[1::2]]
    assert committed == [item.request_id for item in rest[::2]], "an answer to another question"
    assert len(set(committed)) == len(committed), "a turn was appended twice"
    assert set(committed) <= set(talk.acked) | set(talk.open), "a turn nobody asked for"
    for request_id, turn in talk.acked.items():
        assert committed.index(request_id) + 2 == turn.revision, "an acked turn is not where it was acked"
        answer = rest[2 * committed.index(request_id) + 1]
        assert answer.text == turn.output.text and answer.item == turn.output.item
    context = list(system[0].tokens.ids)
    for question, answer in zip(rest[::2], rest[1::2], strict=True):
        turn = await get_turn(caller, talk, answer.request_id)
        count = turn.usage.output_tokens
        prompt, output = list(answer.tokens.ids)[:-count], list(answer.tokens.ids)[-count:]
        context += [*question.tokens.ids, *prompt]
        assert turn.usage.context_tokens == len(context)
        assert output == expected_output(context, count), f"item {answer.item} is not the exact answer"
        context += output
    assert session.context_tokens == len(context)


async def get_turn(caller: Caller, talk: Talk, request_id: str) -> pb.Turn:
    request = pb.GetTurnRequest(session=talk.name, request_id=request_id)
    turn: pb.Turn = (await caller.data.GetTurn(request, timeout=PATIENCE_S)).turn
    return turn


async def check_idle(caller: Caller) -> None:
    """SERVING, nothing runs or waits, and after EvictCache both tiers are empty."""
    await caller.becomes(SERVING)
    stats = None
    async with asyncio.timeout(PATIENCE_S):
        while stats is None or stats.running_turns or stats.queued_turns:
            stats = await caller.admin.GetStats(pb.GetStatsRequest(), timeout=10)
            await asyncio.sleep(0.02)
    await caller.admin.EvictCache(pb.EvictCacheRequest(), timeout=10)
    async with asyncio.timeout(PATIENCE_S):
        while stats.gpu_tokens_used or stats.host_tokens_used:
            stats = await caller.admin.GetStats(pb.GetStatsRequest(), timeout=10)
            await asyncio.sleep(0.02)
    assert stats.store_state == "serving"


async def audit(caller: Caller, talks: list[Talk]) -> None:
    """What must hold after any fault: every session goes on exactly, nothing was lost, nothing leaked."""
    for talk in talks:
        await caller.say(talk, "and then?", 5)
        await check_history(caller, talk)
    await check_idle(caller)
