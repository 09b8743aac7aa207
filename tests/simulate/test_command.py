"""``pensieve simulate`` as a program."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner

from pensieve.replay.command import make_plan, workload_options
from pensieve.replay.load.generators import generate
from pensieve.replay.load.schedule import Gaps, apply_run_in, scripts
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.replay.presentation.curves import panels, read_report
from pensieve.replay.session import ReplayPlan
from pensieve.simulate import command
from pensieve.simulate.command import simulate
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import NEVER, Load, with_run_in
from pensieve.simulate.scenario.machine import Machine
from support.lengths import LONG
from support.processes import alive, children, until


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    rows = [
        {
            "session_id": f"s{s}",
            "turn": t,
            "input_tokens": 20 + s,
            "output_tokens": 10,
            "timestamp_s": s + 5.0 * t,
        }
        for s in range(12)
        for t in range(3)
    ]
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(json.dumps(row) for row in rows))
    return path


def test_writes_table_and_json(trace: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.json"
    arguments = [
        "--device-cache",
        "256tokens",
        "--host-cache",
        "128tokens",
        "--chunk-tokens",
        "8",
        "--json",
        str(out),
    ]
    result = CliRunner().invoke(
        simulate, [str(trace), "--policy", "lru", "--policy", "clairvoyant", "--jobs", "1", *arguments]
    )
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["schema"] == "pensieve.replay/1" and report["workload"]["conversations"] == 12
    assert report["workload"]["turns"] == 36 and report["simulation"]["settings"]["chunk_tokens"] == 8
    lru, seer = report["targets"]
    assert (lru["target"], lru["turns"]["completed"], lru["receipts"]["violations"]) == ("lru", 36, 0)
    assert seer["over_clairvoyant"] == 1.0 and lru["over_clairvoyant"] > 1.0
    assert seer["least_recomputed_cost_s"] <= seer["recomputed_cost_s"]
    assert "clairvoyant" in result.output and "space-time bound" in result.output


def test_a_sweep_is_drawn_and_compared_like_a_replay(tmp_path: Path) -> None:
    out, page, plots = tmp_path / "out.json", tmp_path / "page.html", tmp_path / "plots"
    arguments = ["sharegpt", "--sessions", "40", "--think-time", "2", "--rates", "4,12", "--seeds", "1,2"]
    arguments += [
        "--policy",
        "lru",
        "--policy",
        "clairvoyant",
        "--warm-up",
        "5",
        "--device-cache",
        "9000tokens",
    ]
    arguments += ["--host-cache", "3000tokens", "--jobs", "1", "--json", str(out), "--html", str(page)]
    result = CliRunner().invoke(simulate, [*arguments, "--plots", str(plots)])
    assert result.exit_code == 0, result.output
    assert "12 turns/s" in result.output and "Throughput at equal normalised latency" in result.output
    report = read_report(out)
    assert [(row["rate"], row["seed"]) for row in report["runs"]] == [(4, 1), (4, 2), (12, 1), (12, 2)]
    assert [(row["run"], row["target"]) for row in report["targets"]] == [
        (run, name) for run in range(4) for name in ("lru", "clairvoyant")
    ]
    for lru, seer in zip(report["targets"][::2], report["targets"][1::2], strict=True):
        assert lru["over_clairvoyant"] == lru["recomputed_cost_s"] / seer["recomputed_cost_s"] > 1
        assert seer["least_recomputed_cost_s"] is None, (
            "it is a bound of all turns, not of those in the window"
        )
    for row in report["targets"]:
        assert row["window"]["rule"] == "given" and row["window"]["turns_outside"] > 0
        turns = report["runs"][row["run"]]["workload"]["turns"]
        assert row["turns"]["completed"] + row["window"]["turns_outside"] == turns
    assert {(row["target"], row["rate"]) for row in report["intervals"]} == {
        (name, rate) for name in ("lru", "clairvoyant") for rate in (4, 12)
    }
    (panel,) = panels([report])
    assert {name: len(points) for name, points in panel.points.items()} == {"lru": 2, "clairvoyant": 2}
    text = page.read_text(encoding="utf-8")
    assert "<h1>Simulation: sharegpt</h1>" in text and "clairvoyant" in text
    assert {path.stem for path in plots.glob("*.png")} == {"latency", "ttft", "sources", "sessions"}


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--rate", "1", "--rates", "1,2"], "--rate or --rates"),
        (["--rates", "1,1"], "distinct"),
        (["--warm-up", "1e6"], "nothing is left"),
        (["--device-cache", "lots"], "cache size 'lots'"),
        (["--device-cache", "4tokens"], "does not hold one chunk"),
        (["--lose-replica-at", "5"], "--replicas 2"),
        (["--policy", "best"], "'best' is not one of"),
        (["--run-in", "5"], "a run-in needs a load with a rate"),
        (
            ["--run-in", "5", "--rate", "1", "--think-time", "1", "--sessions", "3"],
            "each session of a trace once",
        ),
        (["--run-in", "5", "--rate", "1", "--replicas", "2", "--lose-replica-at", "1"], "give one of them"),
        (["--run-in", "1e6", "--rate", "1", "--think-time", "1"], "ask for more sessions"),
    ],
)
def test_bad_options(trace: Path, arguments: list[str], says: str) -> None:
    result = CliRunner().invoke(simulate, [str(trace), *arguments])
    assert result.exit_code == 2 and says in result.output


def test_run_in_of_a_built_in_workload_takes_one_seed() -> None:
    load = ["sharegpt", "--sessions", "9", "--rate", "1", "--think-time", "1", "--run-in", "5"]
    result = CliRunner().invoke(simulate, [*load, "--seeds", "1,2"])
    assert result.exit_code == 2 and "takes one --seed" in result.output


def test_a_built_in_workload_needs_a_number_of_sessions() -> None:
    result = CliRunner().invoke(simulate, ["sharegpt", "--rate", "1", "--think-time", "1"])
    assert result.exit_code == 2 and "--sessions" in result.output


def test_a_trace_without_times_needs_a_rate(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text('{"session_id": "a", "turn": 0, "input_tokens": 5, "output_tokens": 5}')
    result = CliRunner().invoke(simulate, [str(path)])
    assert result.exit_code == 2 and "give a rate and a think time" in result.output


def test_machine_files(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    path.write_text('{"name": "mine", "token_s": 1e-4}')
    assert Machine.from_json(path) == Machine(name="mine", token_s=1e-4)
    for text in ('{"tokens_s": 1}', '{"token_s": 0}', "["):
        path.write_text(text)
        with pytest.raises(ValueError, match=r"machine\.json"):
            Machine.from_json(path)


def test_the_machine_meets_what_was_measured() -> None:
    machine = Machine()
    decodes = [(1, 1024, 6.72), (8, 1024, 7.31), (16, 1024, 7.87), (64, 1024, 10.76), (128, 1024, 14.26),
               (256, 1024, 22.61), (1, 4096, 6.91), (8, 4096, 8.45), (16, 4096, 10.59), (64, 4096, 19.59),
               (128, 4096, 31.96)]  # fmt: skip
    for rows, context, ms in decodes:
        ours = machine.step_seconds(tokens=rows, rows=rows, kv_read=rows * context, pairs=0)
        assert ours * 1e3 == pytest.approx(ms, rel=0.09)
    for tokens, ms in [(512, 19.88), (1024, 37.57), (2048, 78.68), (4096, 156.23), (8192, 334.61)]:
        steps = -(-tokens // 2048)
        one = machine.step_seconds(
            tokens=tokens // steps, rows=1, kv_read=0, pairs=tokens * tokens / 2 / steps
        )
        assert steps * one * 1e3 == pytest.approx(ms, rel=0.09)


def test_load_is_streamed_and_ordered() -> None:
    first, second = (TurnLengths(1, 2, 10.0), TurnLengths(3, 4, 15.0)), (TurnLengths(5, 6, 2.0),)
    talks = [Conversation("a", first), Conversation("b", second)]
    recorded = list(Load(talks))
    assert [(life.start, life.turns) for life in recorded] == [(0.0, ((5, 6),)), (8.0, ((1, 2), (3, 4)))]
    assert (recorded[1].due(1, 9.0), recorded[1].due(1, 20.0), recorded[1].due(2, 20.0)) == (
        13.0,
        20.0,
        NEVER,
    )
    many = iter(Load(talks, 10**9, 5.0, 1.0, 1))
    starts = [next(many).start for _ in range(9000)]
    assert starts == sorted(starts)
    assert 9000 / starts[-1] == pytest.approx(5.0 * 2 / 3, rel=0.1)


@click.command()
@workload_options
@click.pass_context
def planned(context: click.Context, **workload: Any) -> None:
    """What ``pensieve replay`` with these options plans to play."""
    context.obj.append(make_plan(workload))


def test_a_load_in_progress_has_the_turns_of_a_replay_with_run_in(monkeypatch: pytest.MonkeyPatch) -> None:
    options = ["sharegpt", "--rate", "8", "--think-time", "2", "--run-in", "20", "--seed", "3"]
    plans: list[ReplayPlan] = []
    assert CliRunner().invoke(planned, [*options, "--conversations", "200"], obj=plans).exit_code == 0
    talks = plans[0].dataset.conversations
    found = apply_run_in(scripts(talks, plans[0].arrivals), plans[0].arrivals.run_in_s)
    works: list[Simulation] = []
    monkeypatch.setattr(command, "_run_with_progress", lambda work, jobs: works.extend(work) or [])
    monkeypatch.setattr(command, "_HISTORY_TOKEN_COST", 1e-3 / Machine().token_s)
    CliRunner().invoke(simulate, [*options, "--sessions", "200", "--policy", "lru"])
    load = works[0].load
    lives, zero = list(load), load.zero_s
    assert len(lives) == load.session_count == len(found) and [life.start for life in lives] == sorted(
        life.start for life in lives
    )
    of = {life.number: life for life in lives}
    histories = sorted(
        (script for script in found if script.has_history), key=lambda script: script.due[0].at_s
    )
    tokens = [script.conversation.turns[0].input_tokens for script in histories]
    assert min(len(histories), sum(script.is_over for script in found), len(found) - len(histories)) > 5
    assert zero == pytest.approx(1e-3 * sum(tokens)), "one after the other, and all before time 0"
    for place, script in enumerate(histories):
        assert of[script.number].start == pytest.approx(1e-3 * sum(tokens[:place]))
    for script in found:
        life = of[script.number]
        assert life.turns == tuple(
            (turn.input_tokens, turn.output_tokens) for turn in script.conversation.turns
        )
        if not script.has_history:
            assert life.start == zero + script.start_s
        for turn, due in enumerate(script.due[1:], 1):
            for answered in (zero - 5.0, zero + due.at_s + 7.0):
                expected = max(zero + due.at_s, answered + due.after_answer_s)
                assert life.due(turn, answered) == pytest.approx(expected)


@pytest.mark.parametrize("engine", ["turns", "full"])
def test_windows_count_from_the_start_of_a_load_in_progress(
    engine: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out.json"
    monkeypatch.setattr(command, "_HISTORY_TOKEN_COST", 2000.0)  # histories take minutes, so that it matters
    load = ["sharegpt", "--sessions", "150", "--rate", "8", "--think-time", "2"]
    load += ["--run-in", "40", "--policy", "lru"]
    window = ["--warm-up", "1", "--window", "20", "--engine", engine, "--jobs", "1", "--json", str(out)]
    result = CliRunner().invoke(simulate, [*load, *window])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    (row,) = report["targets"]
    assert (row["window"]["start_s"], row["window"]["end_s"]) == (1.0, 21.0)
    assert report["options"]["arrivals"]["run_in_s"] == 40.0
    assert row["turns_per_s"] == pytest.approx(8.0, rel=0.35) and 5 < row["active_sessions"]["mean"] < 40
    assert row["ttft_s"]["warm"]["count"] > 20 and row["hit_rate"] == 1.0, (
        "histories are there when they come back"
    )
    gaps = row["tokens"]["output"] - row["turns"]["completed"]
    assert row["inter_token_s"]["count"] == pytest.approx(gaps, rel=0.2)
    if engine == "full" and not LONG:
        return  # where a window ends that was not given does not depend on the engine
    assert CliRunner().invoke(simulate, [*load, "--warm-up", "1", *window[4:]]).exit_code == 0
    lives = with_run_in(Load(generate("sharegpt", 150, 0).conversations, None, 8.0, 2.0), 40.0, 0.0)
    (row,) = json.loads(out.read_text())["targets"]
    assert row["window"]["end_s"] == pytest.approx(max(life.start for life in lives)), (
        "when the last one starts"
    )


def test_pauses_can_be_drawn_from_the_gaps_of_a_trace(trace: Path) -> None:
    talks = [Conversation("a", (TurnLengths(1, 2), TurnLengths(3, 4), TurnLengths(5, 6)))]
    gaps = Gaps("there", "", (7.0, 11.0))
    lives = list(Load(talks, 400, 5.0, None, 1, gaps))
    drawn = [wait for life in lives for wait in life.waits]
    assert set(drawn) == {7.0, 11.0} and 0.4 < drawn.count(7.0) / len(drawn) < 0.6
    assert not lives[0].earliest and lives[0].due(1, 100.0) - 100.0 in {7.0, 11.0}
    assert list(Load(talks, 400, 5.0, None, 1, gaps)) == lives != list(Load(talks, 400, 5.0, None, 2, gaps))
    with pytest.raises(ValueError, match="not both"):
        Load(talks, 400, 5.0, 60.0, 1, gaps)


def test_think_from(trace: Path, tmp_path: Path) -> None:
    """All gaps of this trace are 5 s: with little memory the pause decides how much is recomputed."""
    lengths = tmp_path / "lengths.jsonl"
    rows = [{"session_id": "a", "turn": turn, "input_tokens": 20, "output_tokens": 10} for turn in range(3)]
    lengths.write_text("\n".join(json.dumps(row) for row in rows))
    out = tmp_path / "out.json"
    options = ["--policy", "gittins", "--sessions", "3", "--rate", "0.001", "--jobs", "1", "--json", str(out)]
    result = CliRunner().invoke(simulate, [str(lengths), "--think-from", str(trace), *options])
    assert result.exit_code == 0, result.output
    report = json.loads(out.read_text())
    assert report["options"]["arrivals"]["think_gaps"]["name"] == "trace.jsonl"
    assert report["targets"][0]["turns"]["completed"] == 9
    (tmp_path / "once.jsonl").write_text(json.dumps(rows[0]))
    refused = CliRunner().invoke(
        simulate, [str(lengths), "--think-from", str(tmp_path / "once.jsonl"), *options]
    )
    assert refused.exit_code == 2 and "there are no gaps" in refused.output


@pytest.mark.skipif(sys.platform != "linux", reason="asks the kernel of Linux")
def test_what_works_for_it_ends_with_it(trace: Path) -> None:
    command = [
        sys.executable,
        "-P",
        "-m",
        "pensieve",
        "simulate",
        str(trace),
        "--sessions",
        "10000000",
        "--rate",
        "1",
    ]
    program = subprocess.Popen(
        [*command, "--policy", "lru", "--policy", "retention"], stderr=subprocess.DEVNULL
    )
    workers: list[int] = []

    def busy() -> bool:
        workers[:] = [
            child for child in children(program.pid)
            if b"spawn_main" in Path(f"/proc/{child}/cmdline").read_bytes()
        ]  # fmt: skip
        return len(workers) == 2

    try:
        until(busy, "no workers began")
    finally:
        program.kill()
        program.wait()
    until(lambda: not any(map(alive, workers)), "workers outlived the program")


def test_needs_no_torch() -> None:
    code = "import sys; sys.modules['torch'] = sys.modules['triton'] = None; import pensieve.simulate.command"
    subprocess.run([sys.executable, "-P", "-c", code], check=True, timeout=60)
