"""Both engines: receipts, determinism, the same plans as a worker with real KV, the clairvoyant policy, memory."""

from __future__ import annotations

import random
from typing import Any

import pytest

from pensieve.config import CacheConfig
from pensieve.core import SessionKey
from pensieve.engine.plan import Plan, StepResult
from pensieve.replay.workload import Conversation, Turn
from pensieve.simulate import policies
from pensieve.simulate.full import Clock, CostWorker, FullSimulation
from pensieve.simulate.load import Load
from pensieve.simulate.machine import Machine
from pensieve.simulate.report import EngineName, simulate
from pensieve.simulate.settings import Settings
from pensieve.simulate.turns import TurnSimulation
from support.hash_worker import HashWorker

SIZE = 8
MACHINE = Machine(overlapped=False)


def settings(device: int = 60, host: int = 60, **more: Any) -> Settings:
    cache = CacheConfig(device, host, SIZE)
    limit = device * SIZE
    return Settings(MACHINE, cache, MACHINE.cost(SIZE, limit), limit, **more)


def talks(seed: int, count: int = 30, longest: int = 400) -> list[Conversation]:
    rng = random.Random(seed)
    found = []
    for number in range(count):
        turns, total = [], 0
        for _ in range(rng.randrange(1, 7)):
            turn = Turn(rng.randrange(1, 60), rng.randrange(1, 30))
            total += turn.input_tokens + turn.output_tokens
            if total < longest:
                turns.append(turn)
        found.append(Conversation(str(number), tuple(turns)))
    return found


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
    assert result["turns"] == sum(len(talk.turns) for talk in load.conversations)
    assert result["receipts"]["violations"] == 0
    assert tokens["context"] == sum(tokens[name] for name in ("gpu_cached", "swapped_in", "recomputed", "new"))
    assert tokens["new"] == sum(turn.input_tokens for talk in load.conversations for turn in talk.turns)
    assert tokens["output"] == sum(turn.output_tokens for talk in load.conversations for turn in talk.turns)
    assert tokens["recomputed"] > 0 and result["recomputed_cost_s"] > 0
    assert sum(row["turns"] for row in result["by_turn"]) == result["turns"]


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
    assert sum(plan.num_tokens for plan in workers[0].plans) > with_kv.context - with_kv.sources["gpu_cached"] - (
        with_kv.sources["swapped_in"]
    )


@pytest.mark.parametrize("seed", range(6))
def test_nobody_beats_the_future(seed: int) -> None:
    config = settings(50, 70)
    load = Load(talks(seed, 60, 300), None, 2.0, 10.0, seed)
    costs = {name: TurnSimulation(config, name).run(load).recomputed_cost_s for name in policies.NAMES}
    seer = TurnSimulation(config, "clairvoyant")
    ended = seer.run(load).ended
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
    assert affine["tokens"]["recomputed"] < min(one["tokens"]["recomputed"], scattered["tokens"]["recomputed"])
    assert affine["turns"] == scattered["turns"] == one["turns"]
    assert affine["receipts"]["violations"] == scattered["receipts"]["violations"] == 0


@pytest.mark.parametrize("engine", ["turns", "full"])
def test_a_lost_replica(engine: EngineName) -> None:
    load = Load(talks(3, 10), None, 20.0, 1.0, 3)
    whole = simulate(settings(200, 200, replicas=2), load, engine, "retention")
    lossy = simulate(settings(200, 200, replicas=2, lose_replica_at=whole["virtual_s"] / 2), load, engine, "retention")
    assert lossy["turns"] == whole["turns"] and lossy["receipts"]["violations"] == 0
    assert lossy["tokens"]["recomputed"] > whole["tokens"]["recomputed"]


def test_memory_follows_sessions_alive_not_sessions_seen() -> None:
    def held(sessions: int) -> tuple[int, int]:
        simulation = TurnSimulation(settings(60, 60), "retention")
        simulation.run(Load(talks(1), sessions, 20.0, 1.0, 3))
        return simulation.most_alive, len(simulation.replicas[0].cache.index._residents)

    small, large = held(500), held(2000)
    assert large[0] < 2 * small[0] < 500 and large[1] < 2 * small[1] < 500


def test_suspended_turns_keep_their_receipt() -> None:
    load = Load([Conversation("a", (Turn(100, 250),)), Conversation("b", (Turn(100, 250),))], None, 1e6, 0.0, 1)
    simulation = FullSimulation(settings(50, 100), "clairvoyant")
    tally = simulation.run(load)
    assert simulation._replicas[0].scheduler.suspensions > 0
    assert (tally.turns, tally.violations, tally.sources["recomputed"]) == (2, 0, 0)
    assert SessionKey("0") not in simulation._replicas[0].cache.restores
