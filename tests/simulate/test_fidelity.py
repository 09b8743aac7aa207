"""``turns`` against ``full``: runs of steps taken at once come to what the steps come to one by one."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import pytest

from pensieve.config import CacheConfig
from pensieve.replay.load.generators import generate
from pensieve.replay.load.workload import Conversation, Shaping, TurnLengths, shape
from pensieve.simulate.full import FullSimulation
from pensieve.simulate.run import EngineName, Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import ClientHints, Settings
from pensieve.simulate.turns.engine import TurnSimulation
from support.lengths import LONG, some

SIZE = 32
ENGINES: tuple[EngineName, ...] = ("full", "turns")
SOURCES = ("gpu_cached", "swapped_in", "recomputed")


def settings(device: int, host: int, *, slack: int = 0, overlapped: bool = True, **more: Any) -> Settings:
    machine = Machine(overlapped=overlapped)
    cache = CacheConfig(device, host, SIZE)
    limit = device * SIZE
    return Settings(machine, cache, machine.cost_model(SIZE, limit), limit, slack=slack, **more)


LOADS = {
    # The history is nearly all on the device; in all three places; a tenth on the device, while turns wait and are
    # suspended; in all three places, in contexts of which few fit.
    "light": ("sharegpt", 1.0, 30, 4.0, 5.0, 1500, 900),
    "moderate": ("sharegpt", 1.0, 40, 8.0, 5.0, 250, 350),
    "saturated": ("sharegpt", 1.0, 40, 40.0, 1.0, 150, 300),
    "long contexts": ("mooncake", 0.1, 200, 8.0, 10.0, 300, 500),
}
"""Workload and factor for its lengths, conversations, turns/s, pause in s, chunks of both tiers."""


def make(name: str, **more: Any) -> tuple[Settings, Load]:
    workload, scale, count, rate, think_s, device, host = LOADS[name]
    config = settings(device, host, **more)
    talks = shape(
        generate(workload, count, 3).conversations, Shaping(scale), config.context_limit
    ).conversations
    return config, Load(talks, None, rate, think_s, 3)


@functools.cache
def reported(
    engine: EngineName,
    name: str,
    overlapped: bool = True,
    slack: float = 0.0,
    hints: ClientHints | None = None,
) -> dict[str, Any]:
    """Report of one load; read it only. Several tests ask for the same."""
    config, lives = make(name, slack=int(slack * LOADS[name][-2]), overlapped=overlapped, hints=hints)
    return Simulation(config, lives, engine, "retention").run()


def cases() -> list[tuple[str, bool, float]]:
    """Every switch in either position with each other one, over the loads; all combinations in a long run."""
    if LONG:
        return list(itertools.product(LOADS, (False, True), (0.0, 0.08)))
    return [
        ("light", False, 0.08),
        ("moderate", True, 0.0),
        ("saturated", True, 0.08),
        ("long contexts", False, 0.0),
    ]


@pytest.mark.parametrize(("name", "overlapped", "slack"), cases())
def test_agrees_with_the_engine(name: str, overlapped: bool, slack: float) -> None:
    """Within 1 % of each count when victims are ranked at every need, within 5 % when that is done ahead."""
    truth, ours = (reported(engine, name, overlapped, slack) for engine in ENGINES)
    close = 0.05 if slack else 0.01
    assert ours["turns"] == truth["turns"] and ours["tokens"]["context"] == truth["tokens"]["context"]
    for source in SOURCES:
        assert ours["tokens"][source] == pytest.approx(truth["tokens"][source], rel=close), source
    for kind in ("cold", "warm"):
        assert ours["ttft_s"][kind]["mean"] == pytest.approx(truth["ttft_s"][kind]["mean"], rel=close)
    assert ours["answering_s"] == pytest.approx(truth["answering_s"], rel=0.01)
    assert ours["virtual_s"] == pytest.approx(truth["virtual_s"], rel=0.01)
    gaps, real = ours["inter_token_s"], truth["inter_token_s"]
    assert gaps["count"] == real["count"] and gaps["mean"] == pytest.approx(real["mean"], rel=0.01)
    for percentile in ("p50", "p90"):
        assert gaps[percentile] == pytest.approx(real[percentile], rel=0.03), percentile


@pytest.mark.parametrize("name", some(["saturated", "moderate"], 1))
def test_agrees_with_the_engine_on_what_sessions_share(name: str) -> None:
    """Within 3 % of each count: among equals of a run and its latest owner which go is not said."""
    config, lives = make(name)
    begins = {0: (("a", 700),), 1: (("a", 700), ("b", 300)), 2: (("a", 700), ("c", 1000)), 3: ()}
    talks = []
    for number, talk in enumerate(lives.conversations):
        prefix = begins[number % 4]
        first = talk.turns[0].input_tokens + sum(tokens for _, tokens in prefix)
        turns = (dataclasses.replace(talk.turns[0], input_tokens=first), *talk.turns[1:])
        talks.append(Conversation(talk.key, turns, prefix))
    talks = list(shape(talks, Shaping(), config.context_limit).conversations)
    load = dataclasses.replace(lives, conversations=talks)
    found = {}
    for sharing in (True, False):
        cache = dataclasses.replace(config.cache, prefix_sharing=sharing)
        some = dataclasses.replace(config, cache=cache)
        ours = Simulation(some, load, "turns", "retention").run()
        found[sharing] = ours["tokens"]
        if not sharing:
            continue  # as in the test above
        truth = Simulation(some, load, "full", "retention").run()
        for source in (*SOURCES, "new"):
            assert ours["tokens"][source] == pytest.approx(truth["tokens"][source], rel=0.03), source
        for kind in ("cold", "warm"):
            assert ours["ttft_s"][kind]["mean"] == pytest.approx(truth["ttft_s"][kind]["mean"], rel=0.03)
        assert not ours["receipts"]["violations"] and not truth["receipts"]["violations"]
    assert found[True]["new"] < found[False]["new"] - 10_000
    assert found[True]["recomputed"] < found[False]["recomputed"]


def test_the_loads_are_what_they_are_said_to_be() -> None:
    found = {}
    for name in LOADS:
        config, lives = make(name)
        simulation = TurnSimulation(config, "retention")
        tally = simulation.run(lives)
        shares = {
            source: tally.sources[source] / (tally.context - tally.sources["new"]) for source in SOURCES
        }
        found[name] = shares, simulation.replicas[0].suspensions
    assert found["light"][0]["gpu_cached"] > 0.5 and found["light"][1] == 0
    assert min(found["moderate"][0].values()) > 0.05
    assert found["saturated"][0]["gpu_cached"] < 0.3 and found["saturated"][1] > 5
    assert min(found["long contexts"][0].values()) > 0.05


def test_agrees_with_the_engine_on_what_hints_are_worth() -> None:
    """The same hints reach both caches: each recomputes far less than without, and as much as the other."""
    recomputed = {}
    for told in (None, ClientHints(0.3)):
        for engine in ENGINES:
            found = reported(engine, "moderate", hints=told)
            recomputed[engine, told] = found["tokens"]["recomputed"]
    for told in (None, ClientHints(0.3)):
        assert recomputed["turns", told] == pytest.approx(recomputed["full", told], rel=0.02)
    assert recomputed["full", ClientHints(0.3)] < 0.8 * recomputed["full", None]


@pytest.mark.parametrize("overlapped", [False, True])
def test_one_turn_step_by_step(overlapped: bool) -> None:
    """Alone there is nothing to be approximated: the same times to the last bit but those of sums in another order."""
    config = settings(100, 100, overlapped=overlapped)
    lives = Load(
        [Conversation("a", (TurnLengths(3000, 70), TurnLengths(1, 1), TurnLengths(40, 33)))],
        None,
        1.0,
        2.0,
        1,
    )
    truth, ours = (
        FullSimulation(config, "retention").run(lives),
        TurnSimulation(config, "retention").run(lives),
    )
    assert ours.last_end_s == pytest.approx(truth.last_end_s, rel=1e-9)
    assert ours.warm.total + ours.cold.total == pytest.approx(truth.warm.total + truth.cold.total, rel=1e-9)
    assert ours.sources == truth.sources


def test_what_a_server_adds_to_a_turn() -> None:
    config = settings(100, 100)
    slower = dataclasses.replace(config, machine=Machine(turn_s=0.5))
    lives = Load([Conversation("a", (TurnLengths(100, 20), TurnLengths(50, 20)))], None, 1.0, 2.0, 1)
    for simulation in (FullSimulation, TurnSimulation):
        plain, later = (simulation(settings, "retention").run(lives) for settings in (config, slower))
        for kind in ("cold", "warm"):
            assert getattr(later, kind).total == pytest.approx(getattr(plain, kind).total + 0.5)
