"""Simulated models whose layers differ: their memory is the engine's, their work that of each layer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pensieve.config import EngineOptions
from pensieve.core import RequestKey
from pensieve.engine.build import cache_config as engine_cache
from pensieve.engine.plan import Plan, Span
from pensieve.engine.worker.sizing import worker_info
from pensieve.model.folder import load_arch
from pensieve.replay.load.generators import generate
from pensieve.replay.load.workload import Shaping, shape
from pensieve.simulate.calibrate import machine_groups
from pensieve.simulate.command import simulate
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine, MachineError, MachineGroup, cache_config
from pensieve.simulate.scenario.settings import Settings
from support.engine.checkpoints import tiny_checkpoint
from support.model import recurrent_models

CHUNK = 16
FULL = MachineGroup(kind="full", layers=2, layer_bytes=1024)
NO_FULL = MachineGroup(kind="full", layers=0, layer_bytes=0)
WINDOW = MachineGroup(kind="window", layers=6, layer_bytes=1024, window=100)
STATE = MachineGroup(kind="state", layers=6, layer_bytes=1 << 16)
MACHINES = {
    name: Machine(name=name, kv_bytes=2048, groups=groups, overlapped=False)
    for name, groups in {
        "windows": (FULL, WINDOW), "windows alone": (NO_FULL, WINDOW), "states": (FULL, STATE),
        "states alone": (NO_FULL, STATE),
    }.items()
}  # fmt: skip


def seen_by_layer(machine: Machine, position: int) -> float:
    """Tokens that the token at ``position`` sees, itself included; the mean over layers that attend."""
    groups = machine.groups or (MachineGroup(kind="full", layers=1, layer_bytes=1),)
    windows = [group.window for group in groups for _ in range(group.layers) if group.kind != "state"]
    return (
        float(np.mean([min(position + 1, window or position + 1) for window in windows])) if windows else 0.0
    )


@given(
    name=st.sampled_from([*MACHINES, "full"]),
    start=st.integers(0, 400),
    length=st.integers(1, 300),
)
def test_work_is_that_of_each_token_in_each_layer(name: str, start: int, length: int) -> None:
    machine = MACHINES.get(name, Machine())
    span = Span(RequestKey(1), start, np.zeros(length, np.int32), 0)
    work = machine.work_of(Plan(1, (span,), (np.zeros(1, np.int32),)))
    seen = sum(seen_by_layer(machine, position) for position in range(start, start + length))
    assert (work.tokens, work.rows) == (length, 1)
    assert work.kv_read == pytest.approx(seen if length == 1 else 0)
    # Half a pair a token: the diagonal counts half.
    assert work.pairs == pytest.approx(seen - length / 2 if length > 1 else 0, abs=0.5 * length + 1)


@pytest.mark.parametrize("name", [*MACHINES, "full"])
def test_the_cost_of_a_chunk_bends_at_the_window(name: str) -> None:
    machine = MACHINES.get(name, Machine())
    cost = machine.cost_model(CHUNK, 1600)
    for end in (CHUNK, 48, 96, 112, 800, 1600):
        wanted = machine.pair_s * CHUNK * seen_by_layer(machine, end - 1)
        assert float(cost.attention_cost(end)) == pytest.approx(wanted)


@pytest.mark.parametrize("size", [("2048tokens", "1024tokens"), ("3MiB", "1MiB"), ("2MiB", "0")], ids=str)
@pytest.mark.parametrize("family", ["llama", "gemma3_text", "phi3", "bamba", "mamba2"])
def test_tiers_are_those_of_the_engine(
    family: Any, size: tuple[str, str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.getbasetemp() / "hybrid-machines"
    device, host = size
    if family in recurrent_models.FAMILIES:
        model = folder / family
        if not model.exists():
            recurrent_models.make_model(family, model)
    else:
        model = tiny_checkpoint(family, folder)
    options = EngineOptions(
        model=str(model), device="cpu", device_cache=device, host_cache=host, chunk_tokens=CHUNK
    )
    info = worker_info(options, load_arch(model))
    machine = Machine(
        kv_bytes=max(1, info.groups[0].page_bytes // CHUNK), groups=machine_groups(info), overlapped=False
    )
    ours = cache_config(machine, device, host, chunk_tokens=CHUNK, context_limit=info.context_limit)
    assert ours == engine_cache(options, info)
    assert (len(ours.groups) > 1) == (family != "llama")


def load() -> Load:
    talks = generate("sharegpt", 40, 3).conversations
    return Load(shape(talks, Shaping(0.5), 2000).conversations, None, 8.0, 5.0, 3)


def report(machine: Machine, device: str, host: str) -> dict[str, Any]:
    cache = cache_config(machine, device, host, chunk_tokens=CHUNK, context_limit=2000)
    settings = Settings(machine, cache, machine.cost_model(CHUNK, 2000), 2000)
    found = Simulation(settings, load(), "full" if machine.groups else "turns", "retention").run()
    assert not found["receipts"]["violations"]
    return found


@pytest.mark.parametrize("name", ["windows", "states alone"])
def test_turns_hit_more_than_with_all_layers_kept_whole(name: str) -> None:
    """In the same bytes; ``kv_bytes`` of all eight layers stand for a machine that keeps all of a context."""
    machine = MACHINES[name]
    found = report(machine, "16MiB", "16MiB")
    assert min(found["tokens"]["gpu_cached"], found["tokens"]["swapped_in"]) > 0
    if name == "windows":
        whole = report(Machine(kv_bytes=8 * 1024, overlapped=False), "16MiB", "16MiB")
        assert found["tokens"]["context"] == whole["tokens"]["context"]
        assert found["tokens"]["recomputed"] < 0.8 * whole["tokens"]["recomputed"]


def test_the_command_takes_such_a_machine(tmp_path: Path) -> None:
    machine, report = tmp_path / "machine.json", tmp_path / "report.json"
    machine.write_bytes(msgspec.json.encode(MACHINES["states"]))
    arguments = [
        "sharegpt", "--sessions", "5", "--rate", "2", "--think-time", "1", "--machine", str(machine),
        "--device-cache", "64MiB", "--host-cache", "32MiB", "--policy", "lru", "--json", str(report),
    ]  # fmt: skip
    refused = CliRunner().invoke(simulate, arguments)
    assert refused.exit_code == 2 and "use --engine full" in refused.output
    done = CliRunner().invoke(simulate, [*arguments, "--engine", "full"])
    assert done.exit_code == 0, done.output
    (target,) = json.loads(report.read_text())["targets"]
    assert target["turns"]["completed"] > 5


@pytest.mark.parametrize(
    "groups",
    [
        (FULL,),
        (WINDOW, FULL),
        (FULL, FULL),
        (FULL, msgspec.structs.replace(WINDOW, window=0)),
        (FULL, msgspec.structs.replace(STATE, window=9)),
        (FULL, msgspec.structs.replace(STATE, layers=-1)),
    ],
    ids=str,
)
def test_impossible_groups_are_refused(groups: tuple[MachineGroup, ...], tmp_path: Path) -> None:
    with pytest.raises(MachineError, match="group"):
        Machine(groups=groups)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"groups": [msgspec.to_builtins(group) for group in groups]}))
    with pytest.raises(MachineError, match=r"machine\.json"):
        Machine.from_json(path)
