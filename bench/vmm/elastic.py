"""An elastic device tier on this GPU: how soon memory is free, what steps feel of it, and two servers on one GPU.

    python bench/vmm/elastic.py

Section ``engine``: one engine, full of sessions, gives a part of its device tier back and takes it again, first without
a turn, then while it generates. Section ``neighbours``: two servers on one GPU, and a load that moves from one to the
other; once with half the memory each, once with ranges. Weights are random. ``--small`` runs a tiny model on a CPU.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import click
import numpy as np
import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import dummy_model
from common.provenance import commit, gpu_name, portable, table, write_report

from pensieve.config import EngineOptions
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.build import build_engine
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Evict, Failed, SetMemory, Submit
from pensieve.replay.targets.base import TurnFailed, TurnRequest
from pensieve.replay.targets.grpc_target import PensieveTarget
from pensieve.replay.targets.started_target import StartedTarget

Row = dict[str, Any]
SECTIONS: Final = ("engine", "neighbours")
MIB: Final = 1 << 20
WHOLE: Final = 0.99
"""Part of the wanted bytes that counts as all: units and handles are rounded."""
NEARBY: Final = 25
"""A step is compared with the median of 25 steps before it and 25 after it."""


@dataclass(frozen=True, slots=True)
class Sizes:
    shape: str
    model: tuple[str, ...]
    """Options that choose the model."""
    floor: int
    """MiB; likewise the next two."""
    ceiling: int
    returned: int
    host: str
    history: int
    """Tokens of a session that fills the tier."""
    batch: int
    """Generations during the changes under load, from ``context`` tokens on."""
    context: int
    steps: int
    """Between two changes."""
    half: str
    """Device tier of a server that has half of what is free."""
    range: str
    """Device tier of a server that may have nearly all of it."""
    sessions: int
    """Sessions of each of the two servers. The next two: tokens of a history, and callers of the busy server."""
    server_history: int
    callers: int
    turn: tuple[int, int]
    """Tokens in and out of their turns."""
    phase_s: float


LARGE = Sizes(
    "llama-2-13b-gqa10", ("--load-format", "dummy", "--device", "cuda", "--dtype", "bfloat16"),
    8 << 10, 24 << 10, 10 << 10, "32GiB", 4000, 32, 512, 300, "12GiB", "3GiB..22GiB", 12, 6000, 6, (64, 32), 15.0,
)  # fmt: skip
SMALL = Sizes(
    "tiny-llama-gqa8", ("--load-format", "dummy", "--device", "cpu"),
    4, 16, 8, "64MiB", 200, 2, 100, 40, "8MiB", "4MiB..12MiB", 3, 200, 2, (4, 2), 2.0,
)  # fmt: skip


class Loaded:
    """An engine and the sessions that its device tier is full of."""

    def __init__(self, engine: Engine, sizes: Sizes) -> None:
        self.engine, self.sizes = engine, sizes
        self.contexts: dict[str, list[int]] = {}
        self._requests = 0
        self._rng = np.random.default_rng(0)

    def free_bytes(self) -> int:
        """Bytes that others could have, from an arbitrary zero."""
        if torch.cuda.is_available():
            return int(torch.cuda.mem_get_info()[0])
        return -self.engine.stats().device_held

    def set_memory(self, num_bytes: int) -> None:
        self.engine.handle(SetMemory(1, num_bytes))

    def submit(self, session: str, new: int, output: int) -> None:
        tokens = self.contexts.setdefault(session, [])
        tokens += self._rng.integers(10, 400, new).tolist()
        self._requests += 1
        sampling = Sampling(max_output_tokens=output, ignore_eos=True)
        submit = Submit(self._requests, session, pack_tokens(np.array(tokens)), new, sampling)
        refused = [event for event in self.engine.handle(submit) if isinstance(event, Failed)]
        if refused:
            raise RuntimeError(str(refused))

    def run(self) -> None:
        while self.engine.has_work:
            self.engine.step()

    def fill(self) -> None:
        """Fill the device tier with sessions that are new to both tiers."""
        ceiling = self.engine.stats().device_ceiling
        self.set_memory(ceiling)
        self.engine.handle(Evict(1))
        for _ in range(int(0.97 * ceiling) // self._bytes(self.sizes.history)):
            self.submit(f"filling{self._requests}", self.sizes.history, 1)
        self.run()

    def _bytes(self, tokens: int) -> int:
        ready = self.engine.ready()
        return max(1, tokens * ready.device_ceiling // max(1, ready.device_capacity_tokens))

    def changes_alone(self) -> Iterator[Row]:
        """The tier gives memory back without a turn, and takes it again."""
        part = self.sizes.returned * MIB
        for _ in range(4):
            self.fill()
            held, free, before = self.engine.stats().device_held, self.free_bytes(), self.engine.stats()
            started = time.perf_counter()
            self.set_memory(held - part)
            while self.free_bytes() - free < WHOLE * part:
                if self.engine.has_work:
                    self.engine.step()
                if time.perf_counter() - started > 20:
                    break
            took, after = time.perf_counter() - started, self.engine.stats()
            yield {
                "when": "idle", "returned GiB": gib(self.free_bytes() - free), "held before GiB": gib(held),
                "s": round(took, 3),
                "copied out GiB": gib(after.swap_out_bytes_total - before.swap_out_bytes_total),
                "dropped": after.dropped_total - before.dropped_total,
            }  # fmt: skip

    def changes_under_load(self) -> Iterator[Row]:
        """The tier gives memory back and takes it again while a batch generates."""
        sizes, ceiling = self.sizes, self.engine.stats().device_ceiling
        part, steps = sizes.returned * MIB, sizes.steps
        self.fill()
        for _ in range(sizes.batch):
            self.submit(f"busy{self._requests}", sizes.context, 4 * steps + 2 * NEARBY + 60)
        times, plans, marks, before = [], [], {}, self.engine.stats()
        free = 0
        while self.engine.has_work:
            self.engine.step()
            times.append(time.perf_counter())
            plans.append(self.engine.stats().part_seconds_total["plan"])
            at = len(times) - 40  # the prompts
            if at == steps:
                free = self.free_bytes()
                self.set_memory(self.engine.stats().device_held - part)
                marks["shrink"] = len(times), time.perf_counter()
            elif at == 2 * steps:
                self.set_memory(ceiling)
                marks["grow"] = len(times), time.perf_counter()
            if "shrink" in marks and "returned" not in marks and self.free_bytes() - free >= WHOLE * part:
                marks["returned"] = len(times), time.perf_counter()
        after = self.engine.stats()
        walls = np.diff(times)
        relative = walls / np.array(
            [np.median(walls[max(0, i - NEARBY) : i + NEARBY + 1]) for i in range(len(walls))]
        )
        first, last = marks["shrink"][0], marks["grow"][0]
        calm = np.concatenate(
            [relative[first - steps + NEARBY : first - 1], relative[last + steps : last + 2 * steps]]
        )
        shared = {
            "step ms": round(1e3 * float(np.median(walls)), 2),
            "p99 ÷ median, calm": round(float(np.quantile(calm, 0.99)), 3),
        }
        for name, part_of in (("shrinking", slice(first, last)), ("growing", slice(last, last + steps))):
            p99 = float(np.quantile(relative[part_of], 0.99))
            row: Row = {"when": name, **shared, "p99 ÷ median": round(p99, 3)}
            row |= {
                "p99 ÷ calm": round(p99 / shared["p99 ÷ median, calm"], 3),
                "most": round(float(relative[part_of].max()), 2),
                "longest plan ms": round(1e3 * float(np.diff(plans)[part_of].max()), 1),
            }
            if name == "shrinking":
                row["s"] = (
                    round(marks["returned"][1] - marks["shrink"][1], 3)
                    if "returned" in marks
                    else "not reached"
                )
                row["steps"] = marks["returned"][0] - first if "returned" in marks else ""
                row["copied out GiB"] = gib(after.swap_out_bytes_total - before.swap_out_bytes_total)
                row["dropped"] = after.dropped_total - before.dropped_total
            yield row


def engine_rows(sizes: Sizes, folder: Path) -> list[Row]:
    """One engine. The first round of each kind does not count: it compiles."""
    given = dict(
        zip((word[2:].replace("-", "_") for word in sizes.model[::2]), sizes.model[1::2], strict=True)
    )
    options = EngineOptions(
        model=model_of(sizes, folder), cost_profile="estimate", max_running=64, host_cache=sizes.host,
        device_cache=f"{sizes.floor}MiB..{sizes.ceiling}MiB", **given,
    )  # fmt: skip
    with closing(build_engine(options)) as engine:
        loaded = Loaded(engine, sizes)
        rows = list(loaded.changes_alone())[1:]
        list(loaded.changes_under_load())
        for _ in range(3):
            rows += loaded.changes_under_load()
    return rows


class Server:
    """One of two servers and its sessions."""

    def __init__(self, name: str, words: Sequence[str], sizes: Sizes) -> None:
        self.sizes = sizes
        command = " ".join([sys.executable, "-P", "-m", "pensieve", "serve", *words])
        self.target = StartedTarget(
            command, None, lambda url: PensieveTarget(url.partition("://")[2]), name=name, timeout_s=300.0
        )
        self.sessions: list[str] = []
        self._rng = np.random.default_rng(1)

    async def open(self) -> None:
        await self.target.open()
        for _ in range(self.sizes.sessions):
            session = await self.target.start_session()
            await self._turn(session, self.sizes.server_history, 1)
            self.sessions.append(session)

    async def busy(self) -> int:
        """Turns that ended in one phase: each caller takes the session that waits longest."""
        until, turns = time.perf_counter() + self.sizes.phase_s, 0

        async def caller() -> None:
            nonlocal turns
            while time.perf_counter() < until:
                session = self.sessions.pop(0)
                await self._turn(session, *self.sizes.turn)
                self.sessions.append(session)
                turns += 1

        await asyncio.gather(*(caller() for _ in range(self.sizes.callers)))
        return turns

    async def _turn(self, session: str, new: int, output: int) -> None:
        ids = self._rng.integers(10, 400, new, dtype=np.int32)
        await self.target.turn(
            session, TurnRequest(ids, output_tokens=output, forced=True), lambda count, at: None
        )


async def neighbour_rows(sizes: Sizes, folder: Path) -> list[Row]:
    rows = []
    for name, words in (
        ("half each", ("--device-cache", sizes.half)),
        (
            "ranges",
            (
                "--device-cache",
                sizes.range,
                "--device-slack",
                "1GiB" if sizes is LARGE else "1MiB",
                "--idle-release",
                "2s",
            ),
        ),
    ):
        shared = (
            "--model", model_of(sizes, folder), *sizes.model, "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0",
            "--store", "memory:", "--cost-profile", "estimate", "--max-running", "64", "--host-cache", sizes.host,
            *words,
        )  # fmt: skip
        servers = [Server(f"{name} {number}", shared, sizes) for number in range(2)]
        try:
            for server in servers:
                await server.open()
            phases, started = [], time.perf_counter()
            for phase in range(4):
                begun = time.perf_counter()
                turns = await servers[phase % 2].busy()
                phases.append(turns / (time.perf_counter() - begun))
            rows.append({
                "memory": name, "turns/s": round(float(np.mean(phases)), 2),
                "s": round(time.perf_counter() - started, 1),
                "turns/s of each phase": " ".join(f"{rate:.2f}" for rate in phases),
            })  # fmt: skip
        finally:
            for server in servers:
                await server.target.close()
    return rows


def model_of(sizes: Sizes, folder: Path) -> str:
    return str(dummy_model.make(sizes.shape, folder))


def gib(num_bytes: float) -> float:
    return round(num_bytes / (1 << 30), 4 if abs(num_bytes) < 1 << 28 else 2)


@click.command(context_settings={"show_default": True})
@click.option("--section", "sections", multiple=True, type=click.Choice(SECTIONS), help="Default: both.")
@click.option("--small", is_flag=True, help="A tiny model on a CPU: shows that it runs.")
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@click.option("--name", default="elastic", help="Name of the report's files.")
def main(sections: tuple[str, ...], small: bool, out: Path, name: str) -> None:
    """Time an elastic device tier."""
    sizes, found = SMALL if small else LARGE, {}
    with tempfile.TemporaryDirectory() as folder, Console(stderr=True).status("") as status:
        for section in sections or SECTIONS:
            status.update(section)
            if section == "engine":
                found[section] = engine_rows(sizes, Path(folder))
                torch.cuda.empty_cache()
            else:
                try:
                    found[section] = asyncio.run(neighbour_rows(sizes, Path(folder)))
                except TurnFailed as error:
                    raise click.ClickException(str(error)) from error
    report = {
        "schema": "pensieve.elastic/1", "command": portable(["python", *sys.argv]), "commit": commit(),
        "device": gpu_name(), "torch": torch.__version__, "sizes": str(sizes), "sections": found,
    }  # fmt: skip
    lines = [
        f"`{report['command']}`", "",
        f"{sizes.shape} on {report['device'] or 'a CPU'}, torch {report['torch']}, commit "
        f"{report['commit']}.",
    ]  # fmt: skip
    for section, rows in found.items():
        lines += ["", f"## {section}", "", *table(rows)]
    write_report(out, name, report, lines)
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
