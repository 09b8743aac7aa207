"""Loads whose sessions begin alike, in both engines and as a program."""

from __future__ import annotations

import dataclasses
import json
import random
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from pensieve.config import CacheConfig
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.simulate.command import simulate
from pensieve.simulate.run import EngineName, Simulation
from pensieve.simulate.scenario import policies
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Settings
from pensieve.simulate.turns.sharing import ChunkAddresses
from support.lengths import LONG

SIZE = 8
BEGINNINGS = (
    (("system", 100),),
    (("system", 100), ("document", 90)),
    (("system", 100), ("letter", 40)),
    (),
)


def settings(*, sharing: bool = True, device: int = 120, host: int = 120, **more: Any) -> Settings:
    machine = Machine(overlapped=False)
    cache = CacheConfig(device, host, SIZE, prefix_sharing=sharing)
    limit = device * SIZE
    return Settings(machine, cache, machine.cost_model(SIZE, limit), limit, **more)


def load(seed: int, count: int = 60) -> Load:
    rng = random.Random(seed)
    talks = []
    for number in range(count):
        prefix = BEGINNINGS[number % len(BEGINNINGS)]
        turns = [TurnLengths(rng.randrange(1, 60), rng.randrange(1, 30)) for _ in range(rng.randrange(1, 6))]
        begins = sum(tokens for _, tokens in prefix)
        turns[0] = dataclasses.replace(turns[0], input_tokens=begins + turns[0].input_tokens)
        talks.append(Conversation(str(number), tuple(turns), prefix))
    return Load(talks, None, 8.0, 4.0, seed)


def run(config: Settings, lives: Load, engine: EngineName, policy: str) -> dict[str, Any]:
    return Simulation(config, lives, engine, policy).run()


@pytest.mark.parametrize(
    ("engine", "policy"),
    [
        *(("turns", policy) for policy in policies.NAMES),
        *(("full", policy) for policy in (policies.NAMES if LONG else ("retention", "clairvoyant"))),
    ],
)
def test_sharing_saves_what_others_have_computed(engine: EngineName, policy: str) -> None:
    lives = load(1)
    shared, alone = (run(settings(sharing=sharing), lives, engine, policy) for sharing in (True, False))
    for report in (shared, alone):
        assert report["receipts"] == {"checked": alone["turns"]["completed"], "violations": 0, "examples": []}
    assert shared["shared_input_tokens"] > 3000 and alone["shared_input_tokens"] == 0
    assert shared["tokens"]["context"] == alone["tokens"]["context"]
    assert shared["tokens"]["new"] == alone["tokens"]["new"] - shared["shared_input_tokens"]
    assert shared["recomputed_cost_s"] < alone["recomputed_cost_s"]
    assert shared["least_recomputed_cost_s"] is None, "one page serves many: it is no bound"


@pytest.mark.parametrize("slack", [0, 16])
def test_replicas_share_each_by_itself_and_one_is_lost(slack: int) -> None:
    lives = load(2, 120)
    one = run(settings(slack=slack), lives, "turns", "retention")
    found = run(
        settings(slack=slack, replicas=2, routing="random", lose_replica_at=6.0), lives, "turns", "retention"
    )
    assert found["repeated_turns"] > 0 and not found["receipts"]["violations"]
    assert 0 < found["shared_input_tokens"] < one["shared_input_tokens"]


def test_without_common_beginnings_nothing_is_said_of_them() -> None:
    plain = Load([dataclasses.replace(talk, prefix=()) for talk in load(1).conversations], None, 8.0, 4.0, 1)
    for engine in ("turns", "full"):
        shared, alone = (run(settings(sharing=s), plain, engine, "retention") for s in (True, False))  # type: ignore[arg-type]
        for report in (shared, alone):
            assert "shared_input_tokens" not in report
            del report["wall_s"], report["peak_rss_mib"]
        assert shared == alone


def test_a_chunk_has_an_address_where_all_of_it_is_common() -> None:
    addresses = ChunkAddresses(SIZE)
    a = addresses.for_prefix((("system", 20), ("document", 13)))
    assert len(a) == 4, "33 tokens"
    same = addresses.for_prefix((("system", 20), ("document", 30)))
    other = addresses.for_prefix((("system", 20), ("letter", 30)))
    longer = addresses.for_prefix((("system", 30),))
    assert same[:4] == a and len(same) == 6
    assert other[:2] == a[:2] and other[2] != a[2], "the third chunk begins with the same 4 tokens"
    assert longer[:2] == a[:2] and longer[2] != a[2]
    assert len({*a, *other[2:], *longer[2:]}) == 4 + 4 + 1
    split = addresses.for_prefix((("system", 20), ("document", 5), ("document", 30)))
    assert split[:3] == a[:3] and split[3] != a[3], "the text begins anew"


def test_the_program_says_what_sharing_is_worth(tmp_path: Path) -> None:
    rows = [
        {"session_id": f"s{s}", "turn": t, "input_tokens": 90, "output_tokens": 10, "timestamp_s": s + 5.0 * t}
        | ({"prefix": "system", "prefix_tokens": 64} if t == 0 else {})
        for s in range(12)
        for t in range(2)
    ]  # fmt: skip
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    trace.write_text("\n".join(json.dumps(row) for row in rows))

    def report(*more: str) -> dict[str, Any]:
        arguments = [str(trace), "--policy", "lru", "--chunk-tokens", "8", "--jobs", "1", "--json", str(out)]
        result = CliRunner().invoke(simulate, [*arguments, *more])
        assert result.exit_code == 0, result.output
        assert ("already cached by other sessions" in result.output) == ("--no-sharing" not in more)
        found: dict[str, Any] = json.loads(out.read_text())
        return found

    shared, alone, longer = report(), report("--no-sharing"), report("--system-tokens", "80")
    tokens = [found["targets"][0]["shared_input_tokens"] for found in (shared, alone, longer)]
    assert tokens == [11 * 64, 0, 11 * (64 + 80)]
    switches = [found["simulation"]["settings"]["prefix_sharing"] for found in (shared, alone)]
    assert switches == [True, False]
    assert (shared["options"]["shape"], longer["options"]["shape"]) == ({}, {"system_tokens": 80})
