"""Both engines: receipts, determinism, the same plans as a worker with real KV, the clairvoyant policy, memory."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from pensieve.config import CacheConfig
from pensieve.core import SessionKey, Usage
from pensieve.engine.plan import Plan, StepResult
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.simulate.full import Clock, CostWorker, FullSimulation
from pensieve.simulate.run import EngineName, Simulation
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Settings
from pensieve.simulate.scenario.tally import CompletedTurn, Tally, TimeWindow
from pensieve.simulate.turns.engine import TurnSimulation
from support.engine.hash_worker import HashWorker
from support.lengths import at_length

SIZE = 8
MACHINE = Machine(overlapped=False)


def settings(device: int = 60, host: int = 60, **more: Any) -> Settings:
    cache = CacheConfig(device, host, SIZE)
    limit = device * SIZE
    return Settings(MACHINE, cache, MACHINE.cost_model(SIZE, limit), limit, **more)


def talks(seed: int, count: int = 30, longest: int = 400) -> list[Conversation]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        turns, total = [], 0
        for _ in range(rng.randrange(1, 7)):
            turn = TurnLengths(rng.randrange(1, 60), rng.randrange(1, 30))
            total += turn.input_tokens + turn.output_tokens
            if total < longest:
                turns.append(turn)
        found.append(Conversation(str(number), tuple(turns)))
    return found


def simulate(
    config: Settings, load: Load, engine: EngineName, policy: str, window: TimeWindow | None = None
) -> dict[str, Any]:
    return Simulation(config, load, engine, policy, window).run()


def steady(report: dict[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in report.items() if key not in ("wall_s", "peak_rss_mib")}


class TimedHashWorker(HashWorker):
    """Real KV, on the clock of the cost model."""

    def __init__(self, config: CacheConfig, clock: Clock) -> None:
        super().__init__(config.device_chunks, config.host_chunks, config.chunk_tokens)
        self._cost = CostWorker(MACHINE, config.chunk_tokens, clock)
        self._clock = clock

    def run(self, plan: Plan) -> StepResult:
        self._clock.now += self._cost.seconds(plan)
        return super().run(plan)


@pytest.mark.parametrize("policy", policies.NAMES)
@pytest.mark.parametrize("engine", ["turns", "full"])
def test_receipts_add_up(engine: EngineName, policy: str) -> None:
    load = Load(talks(1, 14), None, 20.0, 1.0, 3)
    result = simulate(settings(50, 20), load, engine, policy)
    tokens = result["tokens"]
    assert result["turns"]["completed"] == sum(len(talk.turns) for talk in load.conversations)
    assert result["receipts"]["violations"] == 0
    assert tokens["context"] == sum(
        tokens[name] for name in ("gpu_cached", "swapped_in", "recomputed", "new")
    )
    assert tokens["new"] == sum(turn.input_tokens for talk in load.conversations for turn in talk.turns)
    assert tokens["output"] == sum(turn.output_tokens for talk in load.conversations for turn in talk.turns)
    assert tokens["recomputed"] > 0 and result["recomputed_cost_s"] > 0
    assert result["inter_token_s"]["count"] == tokens["output"] - result["turns"]["completed"]
    mean = result["answering_s"] / result["inter_token_s"]["count"]
    assert result["inter_token_s"]["mean"] == pytest.approx(mean, rel=0.02), (
        "gaps make up the time of the answers"
    )
    assert sum(row["turns"] for row in result["by_turn"]) == result["turns"]["completed"]
    for name, count in tokens.items():
        assert sum(row["tokens"][name] for row in result["by_turn"]) == count


@dataclass(frozen=True)
class Seen:
    """A turn as the tally was told of it."""

    turn: int
    usage: Usage
    cost: float
    ttft: float
    arrived: float
    ended: float


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Seen]:
    found: list[Seen] = []
    add = Tally.add_turn

    def spy(self: Tally, turn: CompletedTurn) -> None:
        arrived = turn.end_s - turn.ttft - turn.answering
        found.append(Seen(turn.number, turn.usage, turn.cost, turn.ttft, arrived, turn.end_s))
        add(self, turn)

    monkeypatch.setattr(Tally, "add_turn", spy)
    return found


@pytest.mark.parametrize("window", [None, (2.0, 5.0)])
@pytest.mark.parametrize("engine", ["turns", "full"])
def test_numbers_are_those_of_the_turns(
    engine: EngineName, window: TimeWindow | None, seen: list[Seen]
) -> None:
    load = Load(talks(1, 30), None, 20.0, 1.0, 3)
    result = simulate(settings(50, 20), load, engine, "retention", window)
    start, end = window or (0.0, max(turn.ended for turn in seen))
    inside = [turn for turn in seen if window is None or start <= turn.ended < end]
    assert 20 < len(inside) == result["turns"]["completed"] and (
        window is None or len(inside) < len(seen) - 20
    )
    assert result["window"]["turns_outside"] == len(seen) - len(inside)
    assert result["turns_per_s"] == pytest.approx(len(inside) / (end - start))
    output = sum(turn.usage.output_tokens for turn in inside)
    assert result["output_tokens_per_s"] == pytest.approx(output / (end - start))
    assert result["recomputed_cost_s"] == pytest.approx(sum(turn.cost for turn in inside))
    latencies = [turn.ended - turn.arrived for turn in inside]
    each = [late / turn.usage.output_tokens for late, turn in zip(latencies, inside, strict=True)]
    warm = [turn.ttft for turn in inside if turn.turn]
    for told, values in (
        (result["latency_s"], latencies), (result["normalised_latency_s"], each), (result["ttft_s"]["warm"], warm),
    ):  # fmt: skip
        assert told["count"] == len(values) and told["mean"] == pytest.approx(np.mean(values))
        rank = np.percentile(values, 90, method="inverted_cdf")
        assert told["p90"] == pytest.approx(rank, rel=0.011) and told["max"] == pytest.approx(max(values))
    quantiles = result["ttft_quantiles_s"]["warm"]
    assert len(quantiles) == 101 and quantiles == sorted(quantiles)
    assert quantiles[0] == pytest.approx(min(warm), rel=0.011) and quantiles[-1] == pytest.approx(
        max(warm), rel=0.011
    )
    active = result["active_sessions"]
    assert active["bins"][0]["turns"] == len(inside) and active["largest_within_limit"] == active["mean"] > 0
    if window is not None:
        in_flight = sum(max(0.0, min(turn.ended, end) - max(turn.arrived, start)) for turn in seen)
        assert result["running_turns"]["mean"] == pytest.approx(in_flight / (end - start))


@pytest.mark.parametrize("engine", ["turns", "full"])
def test_active_sessions_are_open_from_arrival_to_last_answer(engine: EngineName) -> None:
    """One session alone: a pause of 8 s and two answers that take milliseconds."""
    talk = Conversation("a", (TurnLengths(10, 4, 0.0), TurnLengths(10, 4, 8.0)))
    result = simulate(settings(), Load([talk]), engine, "retention", (2.0, 6.0))
    assert result["active_sessions"]["mean"] == pytest.approx(1.0) and result["turns"]["completed"] == 0
    whole = simulate(settings(), Load([talk]), engine, "retention")
    assert whole["active_sessions"]["mean"] == pytest.approx(1.0) and whole["turns"]["completed"] == 2


@pytest.mark.parametrize(("rate", "steady"), [(3.0, True), (400.0, False)])
def test_a_load_that_piles_up_is_not_steady(rate: float, steady: bool) -> None:
    sessions = at_length(600, 3000)
    load = Load(talks(1, 200), sessions, rate, 0.5, 1)
    span = sessions / load.starts_per_s
    result = simulate(settings(400, 400), load, "turns", "retention", (span / 2, span))
    assert result["window"]["steady"] is steady


@pytest.mark.parametrize("engine", ["turns", "full"])
def test_a_seed_fixes_everything(engine: EngineName) -> None:
    def run(seed: int) -> dict[str, Any]:
        return steady(simulate(settings(seed=seed), Load(talks(1), 12, 20.0, 1.0, seed), engine, "retention"))

    assert run(5) == run(5)
    assert run(5) != run(6)


def test_full_engine_makes_the_plans_of_an_engine_with_kv() -> None:
    config = settings()
    load = Load(talks(2, 12), None, 20.0, 1.0, 3)
    workers: list[TimedHashWorker] = []

    def make(clock: Clock) -> TimedHashWorker:
        workers.append(TimedHashWorker(config.cache, clock))
        return workers[-1]

    with_kv = FullSimulation(config, "retention", make_worker=make).run(load)
    alone = FullSimulation(config, "retention").run(load)
    assert with_kv.summary() == alone.summary()
    assert with_kv.sources["recomputed"] > 0 and with_kv.sources["swapped_in"] > 0
    assert (
        sum(plan.num_tokens for plan in workers[0].plans)
        > with_kv.context - with_kv.sources["gpu_cached"] - (with_kv.sources["swapped_in"])
    )


@pytest.mark.parametrize("seed", range(at_length(3, 6)))
def test_nobody_beats_the_future(seed: int) -> None:
    config = settings(50, 70)
    load = Load(talks(seed, 60, 300), None, 2.0, 10.0, seed)
    costs = {name: TurnSimulation(config, name).run(load).recomputed_cost_s for name in policies.NAMES}
    seer = TurnSimulation(config, "clairvoyant")
    ended = seer.run(load).last_end_s
    assert seer.bound is not None
    least = seer.bound.least_recomputed(120, ended)
    assert costs["retention"] > 0, "no pressure: the test shows nothing"
    assert least <= costs["clairvoyant"] == min(costs.values()), costs


def test_bound_is_tight_where_space_is_all() -> None:
    config = settings(50, 0)
    simulation = TurnSimulation(config, "clairvoyant")
    simulation.run(Load(talks(1), None, 5.0, 1.0, 3))
    assert simulation.bound is not None
    everything = simulation.bound.least_recomputed(0, 1.0)
    assert everything > 0
    assert simulation.bound.least_recomputed(10**9, 1e9) == pytest.approx(0, abs=1e-9)
    assert 0 < simulation.bound.least_recomputed(5, 10.0) < everything


@pytest.mark.parametrize("engine", ["turns", "full"])
def test_replicas(engine: EngineName) -> None:
    load = Load(talks(3, 16), None, 20.0, 1.0, 3)
    one = simulate(settings(), load, engine, "retention")
    affine = simulate(settings(replicas=3), load, engine, "retention")
    scattered = simulate(settings(replicas=3, routing="random"), load, engine, "retention")
    assert affine["tokens"]["recomputed"] < min(
        one["tokens"]["recomputed"], scattered["tokens"]["recomputed"]
    )
    assert affine["turns"] == scattered["turns"] == one["turns"]
    assert affine["receipts"]["violations"] == scattered["receipts"]["violations"] == 0


@pytest.mark.parametrize("engine", ["turns", "full"])
def test_a_lost_replica(engine: EngineName) -> None:
    load = Load(talks(3, 10), None, 20.0, 1.0, 3)
    whole = simulate(settings(200, 200, replicas=2), load, engine, "retention")
    lossy = simulate(
        settings(200, 200, replicas=2, lose_replica_at=whole["virtual_s"] / 2), load, engine, "retention"
    )
    assert lossy["turns"] == whole["turns"] and lossy["receipts"]["violations"] == 0
    assert lossy["tokens"]["recomputed"] > whole["tokens"]["recomputed"]


def test_a_session_that_no_device_holds_is_refused() -> None:
    load = Load([Conversation("a", (TurnLengths(5, 4), TurnLengths(50, 22)))], 10, 20.0, 1.0, 3)
    simulate(settings(11), load, "turns", "lru")
    with pytest.raises(ValueError, match="81 tokens"):
        simulate(settings(10), load, "turns", "lru")


def test_memory_follows_sessions_alive_not_sessions_seen() -> None:
    def held(sessions: int) -> tuple[int, int]:
        simulation = TurnSimulation(settings(60, 60), "retention")
        simulation.run(Load(talks(1), sessions, 20.0, 1.0, 3))
        return simulation.peak_sessions, len(simulation.replicas[0].cache.index._holders)

    small, large = held(150), held(at_length(600, 1200))
    assert large[0] < 2 * small[0] < 500 and large[1] < 2 * small[1] < 500


def test_suspended_turns_keep_their_receipt() -> None:
    load = Load(
        [Conversation("a", (TurnLengths(100, 250),)), Conversation("b", (TurnLengths(100, 250),))],
        None,
        1e6,
        0.0,
        1,
    )
    simulation = FullSimulation(settings(50, 100), "clairvoyant")
    tally = simulation.run(load)
    assert simulation._replicas[0].scheduler.suspensions > 0
    assert (tally.turns, tally.violations, tally.sources["recomputed"]) == (2, 0, 0)
    assert SessionKey("0") not in simulation._replicas[0].cache.restores
