"""What tenants use, through real gRPC and beside what can be counted otherwise: a real scheduler and a real cache."""

from __future__ import annotations

import asyncio
from collections import Counter, defaultdict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

from prometheus_client import generate_latest

from pensieve.client import AsyncClient
from pensieve.config import EngineOptions
from pensieve.engine.cache.chunk import NOWHERE, Chunk
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Report, Stats
from pensieve.errors import Unavailable
from pensieve.server.keys import TenantLimits, TenantTable
from pensieve.server.operations.metrics import Metrics
from pensieve.store import TenantUsage
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.engine.hash_engine import build
from support.service.inprocess_link import InProcessLink
from support.service.service_rig import Rig, refusal, serving, spec, uid

SIZE = 8
OPTIONS = EngineOptions(model="", device_cache="216tokens", host_cache="96tokens", chunk_tokens=SIZE)
"""Tiers that hold a part of the load below."""
TENANTS = ("acme", "bolt", "cog")
REFUSED, IDLE = "refused", "idle"
TABLE = TenantTable({REFUSED: TenantLimits(tokens_per_minute=1)}, names=[*TENANTS, REFUSED, IDLE])
LIMIT_S = 30.0
Totals = dict[str, Counter[str]]


@asynccontextmanager
async def served() -> AsyncIterator[tuple[Rig, Engine]]:
    engine = build(OPTIONS)
    link = InProcessLink(lambda: engine)
    await link.start()
    try:
        async with serving(link=link, context_limit=200, tenants=TABLE) as rig:
            yield rig, engine
    finally:
        await link.stop()


def of(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("tenant", tenant),)


def recounted(engine: Engine) -> dict[str, tuple[int, int]]:
    """What each tenant holds, chunk by chunk. The engine must be idle."""
    cache = engine._cache
    names = {number: name for name, number in cache.shares._numbers.items()}
    chunks: set[Chunk] = {chunk for session in cache.sessions.values() for chunk in session.chunks}
    device, host = Counter[str](), Counter[str]()
    for chunk in chunks:
        device[names[chunk.holder.tenant]] += SIZE * (chunk.device != NOWHERE)
        host[names[chunk.holder.tenant]] += SIZE * (chunk.host != NOWHERE)
    return {name: (device[name], host[name]) for name in device if device[name] or host[name]}


async def converse(rig: Rig, tenant: str, seed: int, totals: Totals) -> None:
    """Some sessions of one tenant, some of which begin alike, and one is deleted. What each turn says is added up."""
    random, names = Random(seed), []
    for number in range(3):
        config = pb.SessionConfig(system_prompt="the same beginning " * (number % 2))
        made = await rig.api.CreateSession(pb.CreateSessionRequest(config=config), metadata=of(tenant))
        names.append(made.session.name)
    for _ in range(8):
        sampling = pb.SamplingParams(max_output_tokens=random.randint(1, 6), ignore_eos=True)
        turn = spec("words " * random.randint(1, 4), sampling=sampling)
        request = pb.RunTurnRequest(session=random.choice(names), turn=turn)
        usage = (await rig.api.RunTurn(request, metadata=of(tenant))).turn.usage
        totals[tenant].update(
            turns=1,
            recomputed=usage.recomputed_tokens,
            computed=usage.new_tokens + usage.recomputed_tokens,
            cached=usage.gpu_cached_tokens + usage.swapped_in_tokens,
            output=usage.output_tokens,
        )
    await rig.api.DeleteSession(pb.DeleteSessionRequest(name=names[0]), metadata=of(tenant))


async def stats(rig: Rig) -> dict[str, pb.TenantUsage]:
    answer = await rig.admin.GetStats(pb.GetStatsRequest())
    assert [one.tenant for one in answer.tenants] == sorted(one.tenant for one in answer.tenants)
    return {one.tenant: one for one in answer.tenants}


def held(told: dict[str, pb.TenantUsage]) -> dict[str, tuple[int, int]]:
    pairs = {name: (one.device_tokens, one.host_tokens) for name, one in told.items()}
    return {name: pair for name, pair in pairs.items() if any(pair)}


async def test_usage_is_what_can_be_counted_otherwise() -> None:
    totals: Totals = defaultdict(Counter)
    async with served() as (rig, engine):
        await asyncio.gather(*(converse(rig, tenant, seed, totals) for seed, tenant in enumerate(TENANTS)))
        assert all(sum(totals.values(), Counter())[kind] for kind in ("recomputed", "cached")), (
            "too little load"
        )
        await refused_turn(rig)
        async with asyncio.timeout(LIMIT_S):
            while held(await stats(rig)) != recounted(engine):
                await asyncio.sleep(0.02)
        expected = recounted(engine)
        assert len(expected) > 1 and any(host for _, host in expected.values()), "too little load"
        told = await stats(rig)
        assert set(told) == {*TENANTS, REFUSED, IDLE}
        for tenant in TENANTS:
            one, sums = told[tenant], totals[tenant]
            assert (one.turns, one.computed_tokens) == (sums["turns"], sums["computed"])
            assert (one.cached_tokens, one.output_tokens) == (sums["cached"], sums["output"])
            stored = await rig.store.usage(tenant)
            assert (one.sessions, one.stored_bytes) == (stored.sessions, stored.bytes) == (2, stored.bytes)
            own = (await rig.api.GetUsage(pb.GetUsageRequest(), metadata=of(tenant))).usage
            assert own == one, "a tenant is told what the operator is, of itself alone"
            async with AsyncClient(rig.target, metadata=of(tenant)) as client:
                sdk = await client.usage()
            assert (sdk.tenant, sdk.turns, sdk.cached_tokens) == (tenant, one.turns, one.cached_tokens)
            assert (sdk.device_tokens, sdk.host_tokens) == (one.device_tokens, one.host_tokens)
            assert (sdk.sessions, sdk.stored_bytes) == (2, stored.bytes)
        assert (told[REFUSED].refused_turns, told[REFUSED].turns) == (1, 1)
        assert told[IDLE] == pb.TenantUsage(tenant=IDLE, sessions=0, stored_bytes=0)
        await rig.admin.EvictCache(pb.EvictCacheRequest())
        async with asyncio.timeout(LIMIT_S):
            while held(await stats(rig)):
                await asyncio.sleep(0.02)


async def refused_turn(rig: Rig) -> None:
    made = await rig.api.CreateSession(pb.CreateSessionRequest(), metadata=of(REFUSED))
    request = pb.RunTurnRequest(session=made.session.name, turn=spec("more than a minute's tokens"))
    await rig.api.RunTurn(request, metadata=of(REFUSED))
    request.turn.request_id = uid()
    assert (await refusal(rig.api.RunTurn(request, metadata=of(REFUSED)))).reason == "QUOTA_EXCEEDED"


def test_what_is_held_stays_known_between_two_reports_of_it() -> None:
    link = InProcessLink(lambda: build(OPTIONS))
    link._receive(Report((), Stats(held={"acme": (16, 8)})))
    link._receive(Report((), Stats(steps_total=5)))
    assert link.stats.held == {"acme": (16, 8)} and link.stats.steps_total == 5
    link._receive(Report((), Stats(held={})))
    assert link.stats.held == {}


def test_many_tenants_are_no_part_of_every_report() -> None:
    shares = build(OPTIONS)._cache.shares
    assert shares.tokens_if_due(1.0) == {}
    assert shares.tokens_if_due(1.4) is None
    assert shares.tokens_if_due(1.6) == {}


class SilentStore(MemoryStore):
    """Serves turns and does not tell what tenants store."""

    async def usage(self, tenant: str) -> TenantUsage:
        raise Unavailable("on purpose", reason="STORE_UNAVAILABLE")


async def test_a_store_that_does_not_answer_hides_nothing_else() -> None:
    async with serving(store=SilentStore()) as rig:
        await rig.run(await rig.create(), "hello")
        told = (await stats(rig))["acme"]
        assert told.turns == 1 and told.output_tokens
        assert not told.HasField("sessions") and not told.HasField("stored_bytes")


async def test_metrics_show_what_tenants_hold() -> None:
    async with serving() as rig:
        rig.link.stats = Stats(held={"acme": (64, 32)})
        await rig.create()
        book = rig.conversations.usage
        metrics = Metrics(by_tenant=True)
        assert metrics.watch_usage(book) and not Metrics().watch_usage(book)
        usage, failures = rig.store.usage, iter([RuntimeError("a bug")])

        async def fails_once(tenant: str) -> TenantUsage:
            for failure in failures:
                raise failure
            return await usage(tenant)

        rig.store.usage = fails_once
        watching = asyncio.create_task(book.watch(0.01))
        async with asyncio.timeout(LIMIT_S):
            while not book.latest:
                await asyncio.sleep(0.01)
        watching.cancel()
        stored: Any = await rig.store.usage("acme")
        text = generate_latest(metrics.registry).decode()
        assert 'pensieve_tenant_cache_tokens{tenant="acme",tier="device"} 64.0' in text
        assert 'pensieve_tenant_cache_tokens{tenant="acme",tier="host"} 32.0' in text
        assert 'pensieve_tenant_sessions{tenant="acme"} 1.0' in text
        assert f'pensieve_tenant_stored_bytes{{tenant="acme"}} {float(stored.bytes)}' in text
