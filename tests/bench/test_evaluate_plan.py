"""The evaluation before it starts: the table of experiments, and what fits into the time on the devices."""

from __future__ import annotations

import importlib
import json
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import click
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pensieve.cli.main import cli
from pensieve.config import EngineTuning, PolicyName, parse_cache_size
from pensieve.machine import MachineMemory
from pensieve.replay.load.generators import generate
from pensieve.replay.load.schedule import Arrivals, Script, apply_run_in, scripts
from support.replay.benches import BENCH

SCALES = ["FULL", "SMALL"]


@pytest.fixture(autouse=True)
def bench_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))


def table() -> Any:
    return importlib.import_module("evaluation.experiments")


def scales() -> Any:
    return importlib.import_module("evaluation.scales")


def planning() -> Any:
    return importlib.import_module("evaluation.plan")


def all_lines(scale: str = "FULL") -> list[Any]:
    module = table()
    found = module.experiments(getattr(scales(), scale))
    return [line for experiment in found.values() for line in experiment.lines]


def option(command: tuple[str, ...], name: str, otherwise: str = "") -> str:
    """The value that counts: the last; ``otherwise`` where there is none."""
    given = [value for word, value in pairwise(command) if word == name]
    return given[-1] if given else otherwise


def test_the_issue_is_covered() -> None:
    found = table().experiments(scales().FULL)
    systems = {f"systems-{model}-{data}" for model in ("13b", "opt13b") for data in ("sharegpt", "ultrachat")}
    systems |= {f"systems-{family}-sharegpt" for family in ("70b", "gemma3", "qwen3next")}
    ablations = ("tiers", "policy", "unified", "swap-in", "swap-out", "chunk", "think", "kv-heads")
    bits = {"bits-13b-sharegpt", "bits-13b-ultrachat"}
    assert set(found) == systems | bits | {f"ablate-{name}" for name in ablations}
    for name in systems:
        assert len(found[name].lines) == 7
    for experiment in found.values():
        labels = [line.label for line in experiment.lines]
        assert len(set(labels)) == len(labels) > 1, experiment.name


def test_lazy_offload_is_vllms_own_json() -> None:
    """Braces are doubled in the table, since words may hold names in braces; the server gets them as JSON."""
    lines = table().experiments(scales().FULL)["systems-13b-sharegpt"].lines
    (command,) = [line.system.command for line in lines if line.label == "vLLM lazy offload"]
    config = json.loads(option(command, "--kv-transfer-config").format_map({}))
    assert config["kv_connector_extra_config"] == {"cpu_bytes_to_use": 32 << 30, "lazy_offload": True}
    assert option(command, "--kv-cache-memory-bytes") == str(40 << 30)
    assert "--kv-offloading-size" not in command


def test_every_policy_and_chunk_size_is_compared() -> None:
    found = table().experiments(scales().FULL)
    default = EngineTuning()
    for experiment, name, value, wanted in (
        ("ablate-policy", "--policy", default.policy, get_args(PolicyName)),
        ("ablate-chunk", "--chunk-tokens", default.chunk_tokens, (8, 16, 32, 64, 128, 256)),
    ):
        commands = [line.system.command for line in found[experiment].lines]
        assert [option(c, name) if name in c else str(value) for c in commands] == list(map(str, wanted))
    think = [line.workload.think_s for line in found["ablate-think"].lines]
    assert think == pytest.approx([1.5, 6, 15, 30, 60, 6])


@pytest.mark.parametrize("scale", SCALES)
def test_all_systems_of_an_experiment_have_the_same_memory(scale: str) -> None:
    whole = getattr(scales(), scale)
    families = {shape: family for family, shape in whole.others.items()}
    per_token = whole.device_bytes // parse_cache_size(whole.device_tier, 1) if scale == "SMALL" else 1
    for line in all_lines(scale):
        command, limits = line.system.command, whole.of(families.get(line.model, ""))
        if command[0] == "vllm":
            assert int(option(command, "--kv-cache-memory-bytes")) == limits.device_bytes
            assert option(command, "--tensor-parallel-size", "1") == str(limits.gpus)
            if "--kv-offloading-size" in command:
                assert float(option(command, "--kv-offloading-size")) * 2**30 == limits.host_bytes
        else:
            device = parse_cache_size(option(command, "--device-cache"), 1) * per_token
            assert device == limits.device_bytes * limits.gpus
            assert option(command, "--tensor-parallel", "1") == str(limits.gpus)
            host = parse_cache_size(option(command, "--host-cache"), 1) * per_token
            assert host == line.system.host_bytes and host in (limits.host_bytes, 0)
            assert not (host and "--stateless" in command), "a peer without cache has no host memory either"
            assert option(command, "--store").startswith("sqlite:///{scratch}/"), "history is kept, and anew"


@pytest.mark.parametrize("dataset", ["sharegpt", "ultrachat"])
def test_the_peer_has_the_same_bits(dataset: str) -> None:
    commands = [
        line.system.command for line in table().experiments(scales().FULL)[f"bits-13b-{dataset}"].lines
    ]
    names = ("--kv-dtype", "--weights")
    ours = [[option(command, name) for name in names if name in command] for command in commands[:-1]]
    assert ours == [[], ["fp8"], ["fp8"], ["fp8", "fp8"]]
    assert option(commands[-1], "--kv-cache-dtype") == option(commands[-1], "--quantization") == "fp8"
    assert option(commands[-1], "--kv-offloading-size") == "32"


@pytest.mark.parametrize("family", ["gemma3", "qwen3next"])
def test_hybrids_fit_one_gpu_and_meet_the_same_conversations(family: str) -> None:
    limits = scales().FULL.of(family)
    assert limits.device_bytes < scales().FULL.device_bytes
    lines = table().experiments(scales().FULL)[f"systems-{family}-sharegpt"].lines
    assert len({line.workload.most for line in lines}) == 1
    assert len({line.workload.conversations for line in lines}) == 1
    triton = ["--gdn-prefill-backend" in line.system.command for line in lines]
    assert triton == [family == "qwen3next" and line.system.name.startswith("vLLM") for line in lines]


@pytest.mark.parametrize("scale", SCALES)
def test_pensieve_takes_every_command_line(scale: str, tmp_path: Path) -> None:
    names = {"python": "python", "model": "demo", "port": "1", "context": "64", "scratch": str(tmp_path)}
    seen = set()
    for line in all_lines(scale):
        command = [word.format_map(names) for word in line.system.command]
        if command[0] == "vllm" or tuple(command) in seen:
            continue
        seen.add(tuple(command))
        assert command[1:5] == ["-P", "-m", "pensieve", "serve"]
        done = CliRunner().invoke(cli, [*command[4:], "--print-config"])
        assert done.exit_code == 0, f"{line.label}: {done.output}"


def test_an_ablation_changes_one_thing() -> None:
    for name, experiment in table().experiments(scales().FULL).items():
        if name in ("ablate-think", "ablate-kv-heads") or name.startswith(("systems", "bits")):
            continue
        common = table().pensieve(scales().FULL, "any").command
        assert all(line.system.command[: len(common)] == common for line in experiment.lines), name
        extras = [line.system.command[len(common) :] for line in experiment.lines]
        assert all(len(extra) <= 2 or extra == table().STATELESS for extra in extras), name
        assert len(set(extras)) == len(extras), name


@pytest.mark.parametrize("scale", SCALES)
def test_conversations_last_until_the_window_ends(scale: str) -> None:
    for workload in {line.workload for line in all_lines(scale)}:
        rate = max(workload.most, *workload.rates)
        talks = generate(workload.dataset, workload.conversations, 0).conversations
        last = scripts(talks, Arrivals(rate, workload.think_s))[-1]
        assert last.due[0].at_s > workload.run_in_s + workload.measured_s, workload


def test_the_default_is_measured_once() -> None:
    """It is a line of every ablation at that load, under another name; so is it at the load of the policies."""
    found = table().experiments(scales().FULL)
    ablations = [name for name in found if name.startswith("ablate-")]
    jobs = planning().jobs_for([(name, line) for name in ablations for line in found[name].lines])
    *others, default = sorted((job.uses for job in jobs), key=len)
    assert {name for name, _ in default} == set(ablations) - {
        "ablate-tiers",
        "ablate-policy",
        "ablate-kv-heads",
    }
    shared = {tuple(sorted(name for name, _ in uses)) for uses in others if len(uses) > 1}
    assert shared == {
        ("ablate-kv-heads", "ablate-tiers"),
        ("ablate-kv-heads", "ablate-think", "ablate-tiers"),
        ("ablate-policy", "ablate-think"),
    }
    assert len(dict(default)) == len(default), "one experiment has a line twice"


@pytest.mark.parametrize("scale", SCALES)
def test_systems_get_the_same_conversations_each_at_its_own_rates(scale: str) -> None:
    module = table()
    for name, experiment in module.experiments(getattr(scales(), scale)).items():
        loads = [line.workload for line in experiment.lines]
        assert len({(load.dataset, load.window_s) for load in loads}) == 1, name
        if name != "ablate-think":  # where the time before is longer, and has more of them
            assert len({load.conversations for load in loads}) == 1, name


def test_tiers_are_lines_of_the_systems() -> None:
    """Run together, nothing is measured twice."""
    found = table().experiments(scales().FULL)
    names = ("systems-13b-sharegpt", "ablate-tiers")
    jobs = planning().jobs_for([(name, line) for name in names for line in found[name].lines])
    assert len(jobs) == len(found["systems-13b-sharegpt"].lines)


def turns_due(found: list[Script], start: float, end: float, token_s: float = 0.02) -> int:
    """If an answer takes ``token_s`` per token."""
    count = 0
    for script in found:
        answered = 0.0
        for turn, due in zip(script.conversation.turns, script.due, strict=True):
            at = max(due.at_s, answered + due.after_answer_s)
            count += start <= at < end
            answered = at + turn.output_tokens * token_s
    return count


def test_what_is_offered_in_a_window_hardly_rises() -> None:
    """The load changes by less than what is called unsteady; without the run-in it would change by more."""
    found = table().experiments(scales().FULL).items()
    loads = [experiment.lines[0].workload for name, experiment in found if name.startswith("systems-")]
    # The rise is the same at any rate, and chance less at a high one.
    for many in {replace(load, rates=(400.0,), most=400.0) for load in loads}:
        rises = {}
        talks = generate(many.dataset, many.conversations, 0).conversations
        drawn = scripts(talks, Arrivals(400.0, many.think_s))
        edges = [many.warm_up_s + half * many.window_s / 2 for half in range(3)]
        for run_in_s in (0.0, many.run_in_s):
            left = apply_run_in(drawn, run_in_s)
            first, second = (turns_due(left, *half) for half in pairwise(edges))
            rises[run_in_s] = 2 * (second / first - 1)  # over the whole window
        assert abs(rises[many.run_in_s]) < 0.2 < rises[0.0], (many, rises)


def jobs_of(shapes: list[tuple[int, float]]) -> list[Any]:
    """Jobs from (rates, seconds to start)."""
    module = table()
    found = []
    for number, (count, start) in enumerate(shapes):
        load = module.Workload("sharegpt", 1.0, tuple(float(10 - i) for i in range(count)), 5.0, 10.0, 20.0)
        system = module.System(str(number), ("serve", str(number)), start)
        found.append(("e", module.Line(str(number), system, "demo", load)))
    jobs: list[Any] = planning().jobs_for(found)
    return jobs


PLANS = st.lists(st.tuples(st.integers(1, 5), st.floats(1, 100)), min_size=1, max_size=12)


@given(shapes=PLANS, devices=st.integers(1, 5), seconds=st.floats(1, 3000))
def test_a_plan_fits_and_is_fair(shapes: list[tuple[int, float]], devices: int, seconds: float) -> None:
    jobs, module = jobs_of(shapes), planning()

    def makespan_with(rates: int) -> float:
        cut = [module.replace(job, rates=job.rates[:rates]) for job in jobs]
        return float(module.makespan(module.pack(cut, devices)))

    try:
        queues = module.fit(jobs, devices, seconds)
    except module.NoTime:
        assert makespan_with(1) > seconds
        return
    planned = {job.uses: job for queue in queues for job in queue}
    assert sum(map(len, queues)) == len(planned) == len(jobs) and len(queues) == devices
    assert module.makespan(queues) <= seconds
    every = max(kept for kept in range(1, 6) if makespan_with(kept) <= seconds)
    for job in jobs:
        rates = planned[job.uses].rates
        assert rates == job.rates[: len(rates)] and len(rates) >= min(every, len(job.rates))
    for queue in queues:
        left = seconds - module.total(queue)
        starved = [job for job in queue if len(job.rates) < len(job.line.workload.rates)]
        assert all(job.step_s > left for job in starved), "time is left over"


@given(shapes=PLANS, devices=st.integers(1, 5))
def test_devices_are_filled_evenly(shapes: list[tuple[int, float]], devices: int) -> None:
    """No device could give its last job to another one and be better off."""
    module = planning()
    queues = module.pack(jobs_of(shapes), devices)
    for queue in queues:
        assert [job.seconds for job in queue] == sorted((job.seconds for job in queue), reverse=True)
    longest = max(queues, key=module.total)
    rest = module.total(longest) - longest[-1].seconds
    assert all(module.total(queue) >= rest - 1e-6 for queue in queues)


def test_dry_run_says_what_would_run() -> None:
    main = importlib.import_module("evaluate").main
    arguments = ["systems-13b-sharegpt", "--devices", "0,1", "--dry-run", "--budget", "900", "--results", "x"]
    done = CliRunner().invoke(main, arguments, catch_exceptions=False)
    assert done.exit_code == 0
    for label in ("Pensieve", "Pensieve (GPU cache)", "Pensieve stateless", "vLLM", "vLLM CPU offload"):
        assert f"systems-13b-sharegpt: {label}, rates" in done.output
    assert "device 0" in done.output and "device 1" in done.output
    assert "expected: " in done.output and "of 900 s" in done.output


def test_impossible_requests_are_refused() -> None:
    main = importlib.import_module("evaluate").main
    for arguments, words in (
        (["ablate-unified", "--budget", "20"], "--budget is too short"),
        (["ablate-unified", "--only", "Pansieve"], "no system of these experiments is called Pansieve"),
        (["ablate-unified", "--devices", ",".join(map(str, range(999)))], "999 devices, but only"),
        (["ablate-unified", "--rates", "a"], "is not a list of numbers"),
        (["nothing"], "nothing"),
    ):
        done = CliRunner().invoke(main, [*arguments, "--results", "x", "--dry-run"])
        assert done.exit_code == 2 and words in done.output


def test_tiers_that_do_not_fit_into_memory_are_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only the server with the largest host tier counts on each device: its servers run one after the other."""
    evaluate = importlib.import_module("evaluate")
    found = table().experiments(scales().FULL)["systems-13b-sharegpt"]
    jobs = {job.uses[0][1]: job for job in planning().jobs_for([("e", line) for line in found.lines])}
    ours, peer, none = jobs["Pensieve"], jobs["vLLM CPU offload"], jobs["Pensieve stateless"]
    monkeypatch.setattr(evaluate, "memory", lambda: MachineMemory(1 << 40, 63 << 30))
    evaluate.check_memory([[ours, peer], [none, jobs["vLLM"], jobs["Pensieve (GPU cache)"]]])
    with pytest.raises(click.UsageError, match="up to 64 GiB at once, but 63 GiB are available"):
        evaluate.check_memory([[ours], [none, peer]])
    monkeypatch.setattr(evaluate, "memory", lambda: MachineMemory(1 << 40, 31 << 30))
    done = CliRunner().invoke(evaluate.main, ["ablate-tiers", "--devices", "0", "--results", "x"])
    assert done.exit_code == 2 and "up to 32 GiB at once" in done.output


@pytest.mark.parametrize(("shape", "heads"), [("llama-2-13b-gqa20", 20), ("tiny-llama-gqa2", 2)])
def test_shapes_with_any_number_of_kv_heads(shape: str, heads: int, tmp_path: Path) -> None:
    folder = importlib.import_module("dummy_model").make(shape, tmp_path)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    assert config["num_key_value_heads"] == heads


@pytest.mark.parametrize("shape", ["llama-2-13b-gqa3", "llama-2-13b-gqa0", "llama-3-8b-gqa2", "none"])
def test_shapes_that_do_not_exist(shape: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=shape):
        importlib.import_module("dummy_model").make(shape, tmp_path)
