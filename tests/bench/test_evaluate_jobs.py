"""Jobs of the evaluation with servers that are cheap, that do not start, that die, and that never end."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import json
import re
import shlex
import socket
import sys
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from pensieve.replay.presentation.curves import read_report
from support.replay.benches import BENCH
from support.replay.dying_server import LAST_WORDS

SUPPORT = Path(__file__).parents[1] / "support"
STUB = ("{python}", str(SUPPORT / "replay" / "openai_stub.py"), "--port", "{port}")
DYING = ("{python}", str(SUPPORT / "replay" / "dying_server.py"), "{port}", "6")
REFUSING = ("{python}", "-c", "import sys; print('no such device'); sys.exit(9)")
RATES = (30.0, 15.0)


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def program(name: str) -> Any:
    return importlib.import_module(name)


def make_line(
    label: str, command: tuple[str, ...], *, url: str = "http://127.0.0.1:{port}", **more: Any
) -> Any:
    table = program("evaluation.experiments")
    few = ("--stop-after-window", "--scale-lengths", "0.05", "--max-turns", "2", "--max-lag", "60")
    load = table.Workload("sharegpt", 0.05, RATES, 0.2, 0.3, 0.8, few)
    return table.Line(label, table.System(label, command, 1.0, url, **more), "tiny-llama-gqa2", load)


def make_evaluation(folder: Path, *lines: Any, budget_s: float = 1000, keep_logs: bool = False) -> Any:
    """(evaluation, jobs)"""
    evaluate, table, plan = program("evaluate"), program("evaluation.experiments"), program("evaluation.plan")
    experiment = table.Experiment("fakes", "nothing", tuple(lines))
    origin = program("evaluate_report").Origin("python x", "abc", "", "2026-01-01T00:00:00+00:00")
    deadline = time.monotonic() + budget_s
    evaluation = evaluate.Evaluation([experiment], folder / "results", origin, keep_logs, deadline)
    return evaluation, plan.jobs_for([("fakes", line) for line in lines])


def make_site(folder: Path, lines: Any) -> Any:
    evaluate, jobs = program("evaluate"), program("evaluation.jobs")
    (folder / "scratch").mkdir(exist_ok=True)
    return jobs.Site(folder / "scratch", evaluate.make_models(lines, folder / "models"))


async def run_all(folder: Path, *lines: Any, **more: Any) -> dict[str, Any]:
    """The report that was written, after all lines ran one after the other."""
    evaluation, jobs = make_evaluation(folder, *lines, **more)
    (cpu,) = program("evaluation.jobs").devices(["cpu"])
    await evaluation.run([jobs], [cpu], make_site(folder, lines))
    report: dict[str, Any] = json.loads((folder / "results/fakes.json").read_text(encoding="utf-8"))
    if report["targets"]:
        assert read_report(folder / "results/fakes.json") == report
    return report


async def test_a_system_that_fails_does_not_stop_the_others(tmp_path: Path) -> None:
    lines = (make_line("refuses", REFUSING), make_line("dies", DYING), make_line("works", STUB))
    report = await run_all(tmp_path, *lines, keep_logs=True)

    works = [summary for summary in report["targets"] if summary["target"] == "works"]
    assert [summary["rate"] for summary in works] == sorted(RATES)
    assert all(summary["turns"]["completed"] and not summary["turns"]["failed"] for summary in works)
    assert [report["runs"][summary["run"]]["rate"] for summary in works] == sorted(RATES)

    jobs = {job["target"]: job for job in report["jobs"]}
    assert list(jobs) == ["refuses", "dies", "works"]
    errors = {missing["target"]: missing["error"] for missing in report["unreached"]}
    assert "no such device" in errors["refuses"] and "no such device" in jobs["refuses"]["log_tail"]
    assert jobs["refuses"]["start_up_s"] is None
    assert LAST_WORDS in jobs["dies"]["log_tail"]
    assert "dies" in errors or any(problem.startswith("dies, ") for problem in report["problems"])
    assert not jobs["works"]["error"] and not jobs["works"]["log_tail"] and jobs["works"]["start_up_s"] > 0

    page = program("evaluate_report").markdown(report)
    assert "no such device" in page and "| works | 30 |" in page
    assert errors["refuses"].startswith("the replay ended with status 1") and "SERVER" in errors["refuses"]
    assert str(tmp_path) not in page and str(BENCH) not in page and sys.executable not in page

    log = (tmp_path / "results/evaluate.log").read_text(encoding="utf-8")
    assert LAST_WORDS in log and "=== fakes: works on device cpu" in log


def test_folders_of_this_machine_are_not_told() -> None:
    cut = program("evaluation.jobs").without_folders
    assert cut('File "/opt/me/x-1/a.py", line 3') == 'File "a.py", line 3'
    assert (
        cut("--model /tmp/models/m --url http://127.0.0.1:80/v1/models")
        == "--model m --url http://127.0.0.1:80/v1/models"
    )
    assert cut("sqlite:////tmp/x/history.sqlite3 and/or 3/4 /x") == "sqlite:///history.sqlite3 and/or 3/4 /x"


ORIGIN = ("python x", "abc", "", "2026-01-01T00:00:00+00:00")


async def run_one(folder: Path, line: Any) -> Any:
    _, (job,) = make_evaluation(folder, line)
    (cpu,) = program("evaluation.jobs").devices(["cpu"])
    return await program("evaluation.jobs").run_job(
        job, cpu, make_site(folder, [line]), lambda text: None, lambda: 60.0
    )


async def test_numbers_are_those_of_the_replay(tmp_path: Path) -> None:
    """Merging changes no number beyond its sixth digit, and the servers' folders are not told."""
    line, pages = make_line("works", STUB), program("evaluate_report")
    result = await run_one(tmp_path, line)
    assert result.error == ""
    experiment = program("evaluation.experiments").Experiment("fakes", "s", (line,))
    merged = pages.combine([pages.job_report(experiment, result, pages.Origin(*ORIGIN))])
    text = pages.compact(merged)
    assert json.loads(text) == merged
    assert len(merged["targets"]) == len(result.report["targets"]) == len(RATES)
    for ours, theirs in zip(merged["targets"], result.report["targets"], strict=True):
        for path in ("turns", "tokens", "errors", "run", "rate"):
            assert ours[path] == theirs[path]
        for path in ("normalised_latency_s", "latency_s", "inter_token_s"):
            assert ours[path] == pytest.approx(theirs[path], rel=1e-5)
        assert ours["ttft_quantiles_s"]["cold"] == pytest.approx(theirs["ttft_quantiles_s"]["cold"], rel=1e-5)
    assert str(tmp_path) not in text and sys.executable not in text

    write_again(tmp_path / "again", text)
    assert json.loads((tmp_path / "again/fakes.json").read_text(encoding="utf-8")) == json.loads(text)
    assert "| works | 30 |" in (tmp_path / "again/fakes.md").read_text(encoding="utf-8")
    assert (tmp_path / "again/fakes.png").read_bytes().startswith(b"\x89PNG")


def write_again(folder: Path, text: str) -> None:
    folder.mkdir()
    (folder / "part.json").write_text(text, encoding="utf-8")
    program("evaluate_report").main(folder, [folder / "part.json"])


def fake_result(job: Any, *, sha: str = "a", rates: tuple[float, ...] = RATES, lost: bool = False) -> Any:
    """A report with nothing in it but what combining looks at."""
    details: dict[str, str] = {}
    summary = {
        "target": job.line.label, "details": details, "turns": {"failed": 0}, "receipts": {"violations": 0},
        "window": {"steady": True}, "errors": {},
    }  # fmt: skip
    report = {
        "runs": [{"rate": rate, "seed": 0, "dataset_sha256": sha} for rate in sorted(rates)],
        "targets": [summary | {"rate": rate, "run": run} for run, rate in enumerate(sorted(rates))],
        "options": {"arrivals": {"rate": min(rates), "think_time_s": 1.0}}, "dataset": {}, "workload": {},
        "intervals": [{"target": job.line.label}], "valid": True, "invalid_reasons": ["late"],
        "unreached": [{"target": job.line.label, "error": "gone", "run": 0}] if lost else [],
    }  # fmt: skip
    error = "gone" if lost else ""
    return program("evaluation.jobs").JobResult(
        job, "cpu", "", "", 1.0, 1.0, report, error, {"server.log": ""}
    )


def fake_report(label: str, *, gpu: str = "", **more: Any) -> dict[str, Any]:
    """The report of one job, in an experiment with the lines one and two; line two is lost in its first run."""
    lines = tuple(make_line(name, (*STUB, name)) for name in ("one", "two"))
    _, made = make_evaluation(Path("unused"), *lines)
    (job,) = (job for job in made if job.line.label == label)
    pages = program("evaluate_report")
    origin = pages.Origin("python x", "abc", gpu, "2026-01-01T00:00:00+00:00")
    experiment = program("evaluation.experiments").Experiment("fakes", "s", lines)
    result = fake_result(job, lost=label == "two", **more)
    found: dict[str, Any] = pages.job_report(experiment, result, origin)
    return found


def test_a_shared_job_has_its_own_name_in_each_experiment() -> None:
    table, pages = program("evaluation.experiments"), program("evaluate_report")
    line = make_line("one", STUB)
    other = dataclasses.replace(line, label="uno")
    (job,) = program("evaluation.plan").jobs_for([("fakes", line), ("others", other)])
    result = fake_result(job, lost=True)
    for name, label in (("fakes", "one"), ("others", "uno")):
        report = pages.job_report(table.Experiment(name, "s", (line, other)), result, pages.Origin(*ORIGIN))
        for key in ("targets", "intervals", "unreached", "jobs"):
            assert {row["target"] for row in report[key]} == {label}, key
        assert report["invalid_reasons"] == [f"{label}: late"]


def test_jobs_are_combined_in_the_order_of_the_table() -> None:
    merged = program("evaluate_report").combine([fake_report("two", rates=RATES[:1]), fake_report("one")])
    assert [(s["target"], s["rate"]) for s in merged["targets"]] == [("one", 15), ("one", 30), ("two", 30)]
    assert [merged["runs"][s["run"]]["rate"] for s in merged["targets"]] == [15, 30, 30]
    assert [job["target"] for job in merged["jobs"]] == ["one", "two"]
    assert merged["problems"] == [] and len(merged["runs"]) == 2
    other = program("evaluate_report").combine([fake_report("one"), fake_report("two", rates=RATES[:1])])
    assert other["targets"] != merged["targets"] == program("evaluate_report").combine([merged])["targets"]
    for found in (merged, other):
        (lost,) = found["unreached"]
        assert lost["target"] == "two" and found["runs"][lost["run"]]["rate"] == 30


def test_unequal_work_is_a_problem() -> None:
    merged = program("evaluate_report").combine(
        [fake_report("one"), fake_report("two", sha="b", rates=RATES[:1])]
    )
    assert merged["problems"] == ["two and one did not get the same work at 30 turns/s"]


def test_loads_that_were_not_steady_are_a_problem() -> None:
    report = fake_report("one")
    for summary in report["targets"]:
        summary["window"] = {"steady": False}
    expected = "one: the load rose or fell in the measured window at 15, 30 turns/s"
    assert program("evaluate_report").combine([report])["problems"] == [expected]


def test_results_of_several_machines_are_not_one() -> None:
    with pytest.raises(ValueError, match="differ in `machine`"):
        program("evaluate_report").combine([fake_report("one"), fake_report("two", gpu="H200")])


async def test_a_system_that_never_comes_up_is_stopped_in_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And nothing of it is left, though it does not listen to SIGTERM."""
    monkeypatch.setattr(program("evaluation.jobs"), "INTERRUPT_GRACE_S", 1.0)
    mark = f"stubborn-{tmp_path.name}"
    stubborn = f"import signal, time; signal.signal(15, signal.SIG_IGN); time.sleep(99)  # {mark}"
    line = make_line("stubborn", ("{python}", "-c", stubborn))
    _, (job,) = make_evaluation(tmp_path, line)
    jobs = program("evaluation.jobs")
    deadline = time.monotonic() + 3
    result = await jobs.run_job(
        job,
        *jobs.devices(["cpu"]),
        make_site(tmp_path, [line]),
        lambda text: None,
        lambda: deadline - time.monotonic(),
    )
    assert (
        re.fullmatch(r"stopped after \d+ s: no time was left", result.error or "") and result.report is None
    )
    assert running_with(mark) == []


def running_with(text: str) -> list[str]:
    found = []
    for entry in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = entry.read_bytes()
        except OSError:
            continue  # it has ended
        found += [str(entry)] if text.encode() in words else []
    return found


async def test_what_was_done_when_it_is_stopped_is_there(tmp_path: Path) -> None:
    line = make_line("works", STUB)
    _, (job,) = make_evaluation(tmp_path, line)
    jobs, site = program("evaluation.jobs"), make_site(tmp_path, [line])

    def left_s() -> float:
        return 0.0 if list(site.scratch.glob("*/report.json")) else 60.0

    slow = dataclasses.replace(job, rates=(*RATES, 14.0, 13.0, 12.0, 11.0, 10.0))
    result = await jobs.run_job(slow, *jobs.devices(["cpu"]), site, lambda text: None, left_s)
    assert result.error.endswith("no time was left")
    rates = [summary["rate"] for summary in result.report["targets"]]
    assert rates and rates == sorted(slow.rates)[: len(rates)] and len(rates) < len(slow.rates)


async def test_without_time_a_system_is_not_run(tmp_path: Path) -> None:
    report = await run_all(tmp_path, make_line("works", STUB), budget_s=1)
    assert report["unreached"] == [{"target": "works", "error": "not run: no time was left", "run": None}]


async def test_with_little_time_the_less_telling_rates_are_left_out(tmp_path: Path) -> None:
    _, (job,) = make_evaluation(tmp_path, make_line("works", STUB))
    least = program("evaluation.plan").replace(job, rates=RATES[:1]).seconds
    report = await run_all(tmp_path, make_line("works", STUB), budget_s=least + 1)
    assert [summary["rate"] for summary in report["targets"]] == [RATES[0]]


async def test_names_in_a_command_line(tmp_path: Path) -> None:
    say = (
        "import os, sys; print(os.environ['SAID'], os.environ['CUDA_VISIBLE_DEVICES'], sys.argv[1:]);"
        "print('cores', sorted(os.sched_getaffinity(0)))"
    )
    system = ("{python}", "-c", say, "{context}", "{model}", "{scratch}")
    line = make_line("speaks", system, environment=(("SAID", "it's"),))
    _, device = program("evaluation.jobs").devices(["0", "3"])
    _, (job,) = make_evaluation(tmp_path, line)
    site = make_site(tmp_path, [line])
    result = await program("evaluation.jobs").run_job(job, device, site, lambda text: None, lambda: 60.0)
    model = site.models["tiny-llama-gqa2"]
    assert f"it's 3 ['4096', '{model}', '{site.scratch}/job" in result.logs["server.log"]
    assert f"cores {list(device.cores)}" in result.logs["server.log"]
    words = shlex.split(result.replay)
    told = dict(pairwise(words))
    assert words[:3] == ["pensieve", "replay", "sharegpt"] and told["--rates"] == "15,30"
    times = {"--think-time": 0.05, "--run-in": 0.2, "--warm-up": 0.3, "--window": 0.8}
    assert {name: float(told[name]) for name in times} == times
    assert result.command.startswith("SAID=it's {python} -c ") and "{model}" in result.command
    assert str(tmp_path) not in result.replay + result.command + result.error


def test_devices_share_no_core() -> None:
    jobs = program("evaluation.jobs")
    one, two = jobs.devices(["0", "1"])
    assert one.cores and not set(one.cores) & set(two.cores) and len(one.cores) == len(two.cores)
    with pytest.raises(ValueError, match="cores"):
        jobs.devices(["0"] * 9999)


def test_a_port_is_given_once_and_no_client_gets_it(monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = program("evaluation.jobs")
    monkeypatch.setattr(jobs, "_ports", itertools.count(29000))  # where no other test has servers
    with socket.socket() as taken:
        free = jobs._free_port()
        taken.bind(("127.0.0.1", free + 1))
        ports = [free, *(jobs._free_port() for _ in range(20))]
    assert len(set(ports)) == len(ports) and free + 1 not in ports and max(ports) < 32768
