"""Several replicas: who gets a session, what is lost with one of them, and what it costs when it comes back."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pensieve.config import CacheConfig
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.simulate.command import simulate
from pensieve.simulate.run import EngineName, Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Router, Routing, Settings
from pensieve.simulate.scenario.tally import Tally
from pensieve.simulate.turns.engine import TurnSimulation

SIZE = 8
MACHINE = Machine(overlapped=False)
ENGINES = ("turns", "full")


def settings(replicas: int, routing: Routing = "affine", chunks: int = 400, **more: Any) -> Settings:
    cache = CacheConfig(chunks, chunks, SIZE)
    limit = chunks * SIZE
    cost = MACHINE.cost_model(SIZE, limit)
    return Settings(MACHINE, cache, cost, limit, replicas=replicas, routing=routing, **more)


def every_ten_seconds(name: str, turns: int) -> Conversation:
    """Each turn adds 14 tokens to the history, and takes far less than ten seconds."""
    return Conversation(name, tuple(TurnLengths(10, 4, 10.0 * turn) for turn in range(turns)))


@pytest.mark.parametrize("engine", ENGINES)
def test_a_replica_is_lost_and_comes_back(engine: EngineName) -> None:
    """Session 0 is at replica 0, session 1 at the other; replica 0 is away from second 15 to second 25.

    Session 0 finds its history at 10 s; at 20 s it is at replica 1, which has none of its 28 tokens; at 30 s it is
    back, and a server that has started again has none of its 42; at 40 s all is as before.
    """
    config = settings(2, lose_replica_at=15.0, replica_returns_at=25.0)
    load = Load([every_ten_seconds("a", 5), every_ten_seconds("b", 5)])
    told = Simulation(config, load, engine, "retention", row_s=10.0).run()
    assert told["tokens"]["recomputed"] == 28 + 42 and told["repeated_turns"] == 0
    assert [row["tokens"]["recomputed"] for row in told["timeline"]] == [0, 0, 28, 42, 0]
    assert [row["tokens"]["history"] for row in told["timeline"]] == [0, 28, 56, 84, 112]
    assert [row["start_s"] for row in told["timeline"]] == [0.0, 10.0, 20.0, 30.0, 40.0]
    assert [row["hit_rate"] for row in told["timeline"]] == [None, 1.0, 0.5, 0.5, 1.0]
    first, second = told["by_replica"]
    assert (first["replica"], first["turns"], second["replica"], second["turns"]) == (0, 4, 1, 6)
    assert (first["tokens"]["recomputed"], second["tokens"]["recomputed"]) == (42, 28)
    assert first["ttft_s"]["cold"]["count"] == 1 and first["ttft_s"]["warm"]["count"] == 3


@pytest.mark.parametrize("engine", ENGINES)
def test_what_ran_there_begins_again_when_its_lease_has_lapsed(engine: EngineName) -> None:
    """An answer of some 14 s, lost after five: it waits for ten, and its client for its first token since second 0."""
    config = settings(2, lose_replica_at=5.0, lease_s=10.0)
    told = Simulation(config, Load([Conversation("a", (TurnLengths(10, 2000, 0.0),))]), engine, "lru").run()
    assert told["repeated_turns"] == 1 and [row["replica"] for row in told["by_replica"]] == [1]
    assert 15.0 < told["ttft_s"]["cold"]["max"] < 15.1
    assert told["receipts"] == {"checked": 1, "violations": 0, "examples": []}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--replica-returns-at", "5"], "needs --lose-replica-at"),
        (["--lose-replica-at", "5", "--replica-returns-at", "5"], "has to be later"),
    ],
)
def test_bad_options(arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(simulate, ["sharegpt", "--sessions", "9", "--replicas", "2", *arguments])
    assert result.exit_code == 2 and says in result.output


def test_the_report_tells_how_evenly_replicas_were_used(tmp_path: Path) -> None:
    """Twelve sessions of one turn, dealt out to four replicas in turn; two rows of time."""
    rows = [
        {"session_id": f"s{at}", "turn": 0, "input_tokens": 20, "output_tokens": 10, "timestamp_s": at}
        for at in range(12)
    ]
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(json.dumps(row) for row in rows))
    arguments = [
        str(trace),
        "--policy",
        "lru",
        "--replicas",
        "4",
        "--row",
        "6",
        "--jobs",
        "1",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code == 0, result.output
    assert "the busiest replica had 1.00 times the mean of the turns" in " ".join(result.output.split())
    report = json.loads(out.read_text())
    (target,) = report["targets"]
    assert [row["turns"] for row in target["by_replica"]] == [3, 3, 3, 3]
    assert [(row["start_s"], row["turns"]) for row in target["timeline"]] == [(0.0, 6), (6.0, 6)]
    assert report["simulation"]["settings"]["lease_s"] == 10.0


def found(router: Router, sessions: int, *, lost: bool = False) -> list[int]:
    return [router.route(session, 0, lost=lost) for session in range(sessions)]


def nobody(replica: int) -> int:
    return 0


@pytest.mark.parametrize("routing", ["affine", "hash"])
def test_only_the_sessions_of_the_lost_replica_move(routing: Routing) -> None:
    router = Router(settings(5, routing), nobody)
    before, after = found(router, 4000), found(router, 4000, lost=True)
    moved = Counter(now for was, now in zip(before, after, strict=True) if was == 0)
    assert all(was == now for was, now in zip(before, after, strict=True) if was)
    assert set(moved) == {1, 2, 3, 4} and max(moved.values()) < 1.5 * min(moved.values()), "spread over all"


def test_a_ring_is_as_even_as_it_has_points() -> None:
    def busiest(points: int) -> float:
        counts = Counter(found(Router(settings(16, "hash", ring_points=points), nobody), 20_000))
        return max(counts.values()) / (20_000 / 16)

    assert busiest(16) > 1.3 and busiest(1600) < 1.1


def test_bounded_loads_pass_over_who_has_more_than_its_share() -> None:
    """Five, one and none under way: with the one that comes seven; a quarter more, rounded up, nine; three for each."""
    load = [5, 1, 0]
    router, plain = (Router(settings(3, routing), lambda at: load[at]) for routing in ("bounded", "hash"))
    pairs = list(zip(found(plain, 300), found(router, 300), strict=True))
    assert {now for was, now in pairs if was == 0} == {1, 2}
    assert all(was == now for was, now in pairs if was)
    load[1] = 2  # eight, ten, four each: nothing changes but that
    assert found(router, 300) == [now for _, now in pairs]
    load[:] = [2, 2, 2]
    assert found(router, 300) == found(plain, 300)


def test_each_alone_is_as_all_together(monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for all: what is saved ahead depends on where a run of steps is cut, which is not the matter here."""
    talks = [
        Conversation(str(number), tuple(TurnLengths(20 + number % 30, 15) for _ in range(1 + number % 5)))
        for number in range(40)
    ]
    config = settings(4, "hash", 2000, lose_replica_at=3.0, replica_returns_at=6.0, lease_s=1.0)
    for turn_s in (0.0, 0.5):
        slower = replace(config, machine=Machine(overlapped=False, turn_s=turn_s))
        load = Load(talks, 180, 60.0, 2.0, 3)
        simulation = TurnSimulation(slower, "retention", tally=Tally(row_s=1.0))
        begun = simulation.replicas[0]
        alone = simulation.run(load).summary()
        assert simulation.replicas[0] is not begun, "who starts again has learned nothing"
        with monkeypatch.context() as patch:
            patch.setattr(Router, "independent", False)
            together = TurnSimulation(slower, "retention", tally=Tally(row_s=1.0)).run(load).summary()
        assert alone["tokens"] == together["tokens"] and alone["tokens"]["recomputed"] > 0
        assert alone["repeated_turns"] == together["repeated_turns"] > 0
        assert alone["virtual_s"] == pytest.approx(together["virtual_s"])
        for key in ("by_replica", "timeline"):
            assert len(alone[key]) == len(together[key]) > 3
            for one, other in zip(alone[key], together[key], strict=True):
                assert one["turns"] == other["turns"] and one["tokens"] == other["tokens"]
                assert one["ttft_s"]["warm"]["mean"] == pytest.approx(other["ttft_s"]["warm"]["mean"])
