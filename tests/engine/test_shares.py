"""Tenants share the engine by their weights, whatever one asks for; within one it is first come, first served."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import HEAD_START_S, Sampling, TenantQos, pack_tokens
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Failed, Finished, Output, RequestProgress, Submit
from pensieve.engine.scheduling.queue import FairQueue, max_min_shares
from pensieve.engine.scheduling.request import Request
from support.engine.engine_driver import Clock, make_engine
from support.engine.hash_worker import HashWorker, verify_tokens

_numbers = itertools.count()


def request(
    tenant: str, *, tokens: int = 1, weight: float = 1.0, priority: int = 0, at: float = 0.0
) -> Request:
    number = next(_numbers)
    standing = TenantQos(tenant, weight, priority)
    submit = Submit(number, f"{tenant}/{number}", pack_tokens([0] * tokens), tokens, Sampling(), qos=standing)
    return Request.from_submit(submit, number, at)


def fill(queue: FairQueue, *requests: Request) -> None:
    for one in requests:
        queue.arrive(one)
        queue.add(one)


def serve(queue: FairQueue) -> Request:
    """Compute all of the next request."""
    head = queue.heads()[0]
    queue.remove(head)
    queue.charge(head, len(head.tokens))
    queue.depart(head)
    return head


TENANTS = ("a", "b", "c")
backlogs = st.fixed_dictionaries(
    {name: st.lists(st.integers(1, 40), min_size=1, max_size=60) for name in TENANTS}
)
weights = st.fixed_dictionaries({name: st.sampled_from((0.5, 1.0, 3.0)) for name in TENANTS})


@settings(max_examples=150, deadline=None)
@given(backlogs, weights, st.lists(st.tuples(st.sampled_from(TENANTS), st.integers(1, 40)), max_size=40))
def test_backlogged_tenants_are_served_by_weight(
    sizes: dict[str, list[int]], weight: dict[str, float], later: list[tuple[str, int]]
) -> None:
    """The oracle is the bound itself: as long as two tenants wait, what each got by weight differs by no more than one
    request of each."""
    queue = FairQueue(8)
    for name in TENANTS:
        fill(queue, *(request(name, tokens=size, weight=weight[name]) for size in sizes[name]))
    served: list[Request] = []
    while len(queue):
        if later and len(served) % 2:
            name, size = later.pop()
            fill(queue, request(name, tokens=size, weight=weight[name]))
        served.append(serve(queue))
    for one, other in itertools.combinations(TENANTS, 2):
        last = min(max(i for i, r in enumerate(served) if r.tenant == name) for name in (one, other))
        until = 0  # both have waited since the beginning
        got = Counter({one: 0.0, other: 0.0})
        first_gap = 40 / weight[one] + 40 / weight[other]
        for until, done in enumerate(served):
            waiting = {r.tenant for r in served[until:]}
            if until > last or not {one, other} <= waiting or _was_away(served[:until], sizes, one, other):
                break
            got[done.tenant] += len(done.tokens) / weight[done.tenant]
            assert abs(got[one] - got[other]) <= first_gap, (one, other, until)


def _was_away(served: Sequence[Request], sizes: dict[str, list[int]], *names: str) -> bool:
    """Whether a tenant may have had nothing left for a moment: then the two no longer count from the same point."""
    done = Counter(one.tenant for one in served)
    return any(done[name] >= len(sizes[name]) for name in names)


def test_who_was_away_has_saved_nothing_up() -> None:
    queue = FairQueue(8)
    fill(queue, *(request("a") for _ in range(200)))
    for _ in range(100):
        serve(queue)
    fill(queue, *(request("b") for _ in range(50)))
    order = "".join(serve(queue).tenant for _ in range(40))
    assert 19 <= order.count("b") <= 21


def test_whoever_comes_while_another_floods_is_next() -> None:
    queue = FairQueue(8)
    fill(queue, *(request("flood", tokens=9) for _ in range(500)))
    for _ in range(20):
        serve(queue)
    fill(queue, request("small"))
    assert "small" in [serve(queue).tenant for _ in range(2)]


def test_one_tenant_is_served_in_order_of_arrival() -> None:
    queue = FairQueue(8)
    mine = [request("a", tokens=n % 7 + 1, at=float(n)) for n in range(50)]
    fill(queue, *mine)
    assert [queue.position(one) for one in mine] == list(range(50))
    assert [serve(queue) for _ in mine] == mine


def test_priority_is_a_head_start_within_the_tenant_only() -> None:
    queue = FairQueue(8)
    plain, late = request("a", at=0.0), request("a", at=2.5 * HEAD_START_S)
    urgent = request("a", priority=2, at=1.5 * HEAD_START_S)  # came 15 s later, and counts as 5 s earlier
    waited = request("a", priority=1, at=3.0 * HEAD_START_S)  # whoever has waited long enough comes first
    fill(queue, waited, late, urgent, plain)
    others = [request("b", at=50 * HEAD_START_S), request("b", at=51 * HEAD_START_S)]
    fill(queue, *others)
    order = [serve(queue) for _ in range(6)]
    assert [one for one in order if one.tenant == "a"] == [urgent, plain, waited, late]
    assert (
        order.index(others[0]) < 2 and order.index(others[1]) < 4
    )  # another tenant's priority is none of theirs


@settings(max_examples=200, deadline=None)
@given(
    st.integers(0, 200),
    st.dictionaries(st.sampled_from("abcd"), st.integers(0, 300), min_size=1),
    st.fixed_dictionaries({name: st.sampled_from((0.5, 1.0, 4.0)) for name in "abcd"}),
)
def test_a_budget_is_split_fairly_and_none_of_it_is_lost(
    budget: int, demands: dict[str, int], weight: dict[str, float]
) -> None:
    got = max_min_shares(budget, demands, weight)
    assert sum(got.values()) == min(budget, sum(demands.values()))
    assert all(0 <= got[name] <= demands[name] for name in demands)
    for one, other in itertools.permutations(demands, 2):
        if (
            got[one] < demands[one]
        ):  # who wants more has no less, by weight, than anybody else; rounding aside
            assert got[one] / weight[one] >= got[other] / weight[other] - len(demands) / min(weight.values())


def test_the_least_served_get_the_remainder_of_rounding() -> None:
    """Else a budget of one token went to the same tenant in each step. A beam search of its had no room beside the
    restore of the other, and began anew each time."""
    assert max_min_shares(1, {"a": 8, "b": 4}, {"a": 1.0, "b": 0.5}) == {"a": 1, "b": 0}
    assert max_min_shares(1, {"b": 4, "a": 8}, {"a": 1.0, "b": 0.5}) == {"b": 1, "a": 0}
    queue = FairQueue(8)
    fill(queue, request("a", tokens=3), request("b"))
    serve(queue)
    assert queue.least_served_first(["a", "b"]) == ["b", "a"]


def test_a_full_queue_still_takes_those_who_have_less_than_their_share() -> None:
    queue = FairQueue(8)
    for _ in range(10):
        assert not queue.is_full("flood", 10)
        fill(queue, request("flood"))
    assert queue.is_full("flood", 10)
    for _ in range(5):
        assert not queue.is_full("small", 10)
        fill(queue, request("small"))
    assert queue.is_full("small", 10) and len(queue) < 20


# -- in the engine ---------------------------------------------------------------------------------------------------

CACHE = CacheConfig(device_chunks=200, host_chunks=0, chunk_tokens=4)
SCHEDULER = SchedulerConfig(context_limit=160, max_batch_tokens=16, max_running=8)


class Bench:
    """An engine on hashed KV, and what it computed for whom."""

    def __init__(self, cache: CacheConfig = CACHE, scheduler: SchedulerConfig = SCHEDULER) -> None:
        self.clock = Clock()
        self.worker = HashWorker(cache.device_chunks, cache.host_chunks, cache.chunk_tokens)
        self.engine: Engine = make_engine(cache, scheduler, self.worker, self.clock)
        self.of: dict[int, tuple[str, list[int]]] = {}
        self.said: dict[int, list[int]] = {}
        self.first_step: dict[int, int] = {}
        """The step in which each got its first token."""
        self.ended: list[int] = []
        self.steps = 0

    def submit(self, tenant: str, tokens: int, output: int, *, weight: float = 1.0, priority: int = 0) -> int:
        number = len(self.of) + 1
        context = [(number * 7 + i) % 90 for i in range(tokens)]
        self.of[number] = tenant, context
        sampling = Sampling(max_output_tokens=output, ignore_eos=True)
        standing = TenantQos(tenant, weight, priority)
        message = Submit(number, f"s{number}", pack_tokens(context), tokens, sampling, tenant, None, standing)
        (event,) = self.engine.handle(message)
        assert isinstance(event, RequestProgress | Failed)
        return number

    def step(self) -> Counter[str]:
        """One step; tokens computed, by tenant."""
        self.steps += 1
        self.clock.now += 0.01
        before = len(self.worker.plans)
        for event in self.engine.step():
            if isinstance(event, Output):
                self.first_step.setdefault(event.request, self.steps)
                self.said.setdefault(event.request, []).extend(event.token_ids)
            elif isinstance(event, Finished):
                self.ended.append(event.request)
                verify_tokens(self.of[event.request][1], self.said[event.request], 0)
        self.engine.check()
        computed: Counter[str] = Counter()
        for plan in self.worker.plans[before:]:
            for span in plan.spans:
                computed[self.of[span.request][0]] += len(span.tokens)
        return computed

    def finish(self) -> None:
        for _ in range(20_000):
            if not self.engine.has_work:
                return
            self.step()
        raise AssertionError("stuck")


@pytest.mark.fault(36)
def test_a_newcomer_joins_while_another_tenant_prefills() -> None:
    bench = Bench()
    for _ in range(20):
        bench.submit("flood", 150, 1)
    bench.step()
    small = bench.submit("small", 6, 1)
    bench.step()
    assert bench.first_step[small] == bench.steps
    bench.finish()


def test_long_prefills_share_the_steps_by_weight() -> None:
    bench = Bench()
    for _ in range(12):
        bench.submit("a", 140, 1, weight=1.0)
        bench.submit("b", 140, 1, weight=3.0)
    total: Counter[str] = Counter()
    while {bench.of[number][0] for number in bench.ended} == set() or len(bench.ended) < 12:
        total += bench.step()
    assert total["b"] / total["a"] == pytest.approx(3.0, rel=0.25)
    bench.finish()


def test_what_a_tenant_decodes_counts_like_what_it_prefills() -> None:
    bench = Bench(scheduler=replace(SCHEDULER, max_running=1))
    long = bench.submit("a", 4, 20)
    bench.step()
    older, younger = bench.submit("a", 4, 1), bench.submit("b", 4, 1)
    bench.finish()
    assert bench.ended == [long, younger, older]


@pytest.mark.fault(36)
def test_a_tenant_that_fills_the_batch_makes_room_for_another() -> None:
    bench = Bench()
    flood = [bench.submit("flood", 3, 100) for _ in range(30)]
    for _ in range(4):
        bench.step()
    assert bench.engine.stats().running == SCHEDULER.max_running
    small = [bench.submit("small", 3, 2) for _ in range(4)]
    bench.step()
    assert bench.engine.stats().suspensions_total == 4  # half of the places, and no more
    assert {bench.first_step[number] for number in small} == {bench.steps}
    bench.finish()
    assert sorted(bench.ended) == sorted(flood + small)


def test_the_device_tier_is_shared_by_what_each_holds() -> None:
    """Whoever has to go when pages run out is the youngest of the tenant that holds most, not the youngest of all."""
    bench = Bench(CacheConfig(device_chunks=24, host_chunks=0, chunk_tokens=4, decode_reserve=0.0))
    for _ in range(3):
        bench.submit("large", 20, 40)
    bench.step()
    bench.step()
    bench.step()
    bench.step()
    small = bench.submit("small", 4, 12)
    for _ in range(60):
        bench.step()
        if small in bench.ended:
            break
    assert bench.engine.stats().suspensions_total > 0
    assert bench.ended == [small]
    assert bench.first_step[small] + 11 == bench.steps  # it has never had to wait
    bench.finish()


def test_groups_are_one_request_of_their_tenant() -> None:
    bench = Bench(scheduler=replace(SCHEDULER, max_running=6))
    sampling = Sampling(max_output_tokens=30, ignore_eos=True, candidates=3)
    for number in (1, 2):
        bench.of[number] = "flood", []
        bench.engine.handle(
            Submit(
                number, f"g{number}", pack_tokens([1, 2, 3]), 3, sampling, "flood", None, TenantQos("flood")
            )
        )
    for _ in range(3):
        bench.engine.step()
    assert bench.engine.stats().running == 6
    small = bench.submit("small", 3, 2)
    bench.engine.step()
    assert bench.engine.stats().suspensions_total == 3  # the younger group, all of it
    for _ in range(400):
        if not bench.engine.has_work:
            break
        bench.engine.step()
    assert not bench.engine.has_work and small
    bench.engine.check()


def test_the_queue_keeps_a_place_for_other_tenants() -> None:
    bench = Bench(scheduler=replace(SCHEDULER, max_queued=4))
    for _ in range(4):
        bench.submit("flood", 9, 1)
    assert len(bench.engine._scheduler.queue) == 4
    bench.submit("flood", 9, 1)
    assert len(bench.engine._scheduler.queue) == 4
    bench.submit("small", 9, 1)
    assert len(bench.engine._scheduler.queue) == 5


def test_once_all_have_left_the_past_counts_no_more() -> None:
    """A tenant served long ago competes as an equal with one that was never here."""
    queue = FairQueue(8)
    fill(queue, request("heavy", tokens=1000), request("other", tokens=1))
    while len(queue):
        serve(queue)
    fill(queue, *(request(name, tokens=10) for name in ("new", "heavy", "new", "heavy")))
    order = [serve(queue).tenant for _ in range(4)]
    assert sorted(order[:2]) == sorted(order[2:]) == ["heavy", "new"], "by turns, from the first request on"
    assert queue.weight("other") == 1.0
