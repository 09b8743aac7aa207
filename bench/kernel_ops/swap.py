"""Bandwidth of swapping on this GPU by size of run and mechanism, and what it costs a step that runs beside it.

A section of ``bench/ops.py``. Runs are scattered on both sides; every figure is a median.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from common.provenance import table

from pensieve.engine.kv.mechanisms import RunCopy, make_copy
from pensieve.engine.kv.pools import KvFormat, KvPools, PinnedMemory
from pensieve.engine.kv.swap import SwapEngine
from pensieve.engine.kv.timeline import Lane
from pensieve.engine.plan import Copy, Plan
from pensieve.kernels.chunk_copy import ChunkCopy, runs_of
from pensieve.model.arch import Arch

RUN_KIB = (16, 64, 160, 640)
LAYERS = 8
POOL_BYTES = 256 << 20
STEP_RUN_KIB = 160
"""The run of the 13B model with 10 KV heads."""
Row = dict[str, Any]
NOTE = """bandwidth: of the wire, behind other work; a mechanism whose `submit_us` (of all runs, on an idle stream)
is longer than that takes that long. step: a graph of memory-bound bf16 products, alone and beside copies without a
pause of 160 KiB runs; p50 and p99 as multiples of the step alone just before. engine: 64 chunks of a 40-layer model
through `SwapEngine`, all that it costs included. cpu: `before_step`, `after_step` and `counters` together."""


@dataclass(frozen=True, slots=True)
class Side:
    """One direction: a copy, the numbers it takes, and the stream it runs on."""

    copy: RunCopy
    pairs: torch.Tensor
    stream: torch.cuda.Stream

    def queue(self) -> None:
        with torch.cuda.stream(self.stream):
            self.copy(self.pairs, first=0, count=len(self.pairs) * LAYERS, layers=range(LAYERS))


class Pools:
    """A device and a pinned host pool of ``POOL_BYTES`` each, random data."""

    def __init__(self, run_bytes: int) -> None:
        self.pages = POOL_BYTES // (run_bytes * LAYERS)
        self.num_bytes = self.pages * run_bytes * LAYERS
        self.device = torch.randint(-(2**62), 2**62, (LAYERS, self.pages, run_bytes // 8), device="cuda")
        self._memory = PinnedMemory(self.num_bytes, unit=LAYERS * run_bytes)
        host = self._memory.tensor.view(torch.int64).view(self.pages, LAYERS, -1)
        host.copy_(self.device.transpose(0, 1))
        self.host = runs_of(host, chunk_first=True)

    def sides(self, make: Callable[[torch.Tensor, torch.Tensor], RunCopy]) -> tuple[Side, Side]:
        """A side that copies in and one that copies out, on pages of their own, so that both may run at once."""
        order = [torch.randperm(self.pages) for _ in range(2)]
        half = self.pages // 2
        first, second = (torch.stack([a, b], 1).int().pin_memory() for a, b in zip(
            (order[0][:half], order[0][half:]), (order[1][:half], order[1][half:]), strict=True,
        ))  # fmt: skip
        streams = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
        inwards = Side(make(self.device, self.host), first, streams[0])
        return inwards, Side(
            make(self.host, self.device), second.flip(1).contiguous().pin_memory(), streams[1]
        )

    def close(self) -> None:
        torch.cuda.synchronize()
        self._memory.close()


def gb_per_s(sides: tuple[Side, ...], num_bytes: int, repeats: int = 7) -> float:
    """Bytes of all sides together over the time that the slower one takes."""
    taken = []
    for repeat in range(repeats + 1):
        torch.cuda.synchronize()
        torch.cuda._sleep(4_000_000)  # all submissions are made meanwhile
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for side in sides:
            side.stream.wait_event(begin)
            side.queue()
        for side in sides:
            torch.cuda.current_stream().wait_stream(side.stream)
        end.record()
        end.synchronize()
        if repeat:
            taken.append(begin.elapsed_time(end) / 1e3)
    return num_bytes * len(sides) / float(np.median(taken)) / 1e9


def submit_us(side: Side) -> float:
    taken = []
    for _ in range(9):
        torch.cuda.synchronize()
        started = time.perf_counter()
        side.queue()
        taken.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return sorted(taken)[4] * 1e6


def bandwidth_rows() -> list[Row]:
    """One row per size of run and mechanism."""
    rows: list[Row] = []
    for kib in RUN_KIB:
        pools = Pools(kib << 10)
        for mechanism in ("kernel", "batch"):
            sides = pools.sides(functools.partial(make_copy, mechanism))
            half = pools.pages // 2 * LAYERS * (kib << 10)
            rows.append({
                "run_kib": kib, "mechanism": mechanism, "runs": pools.pages // 2 * LAYERS,
                "h2d_gb_per_s": round(gb_per_s(sides[:1], half), 1),
                "d2h_gb_per_s": round(gb_per_s(sides[1:], half), 1),
                "duplex_gb_per_s": round(gb_per_s(sides, half), 1),
                "submit_us": round(submit_us(sides[0])),
            })  # fmt: skip
        pools.close()
    return rows


def step_graph() -> torch.cuda.CUDAGraph:
    """About a millisecond of matrix products that read 283 MB of weights each, as a decode step does."""
    weights = [torch.randn(5120, 27648, device="cuda", dtype=torch.bfloat16) for _ in range(13)]
    x = torch.randn(16, 5120, device="cuda", dtype=torch.bfloat16)
    graph = torch.cuda.CUDAGraph()
    for weight in weights[:2]:
        x @ weight
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        for weight in weights:
            x @ weight
    return graph


def beside(graph: torch.cuda.CUDAGraph, sides: tuple[Side, ...], num_bytes: int, replays: int = 150) -> Row:
    """Times of a step while ``sides`` copy without a pause, and how much they copied."""
    marks: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    spans = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in sides]
    torch.cuda.synchronize()
    for side, (begin, _) in zip(sides, spans, strict=True):
        begin.record(side.stream)
    calls = 0
    for _ in range(replays):
        while sides and calls * num_bytes / 45e9 < (len(marks) + 3) * 1.4e-3:
            for side in sides:
                side.queue()
            calls += 1
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        marks.append((begin, end))
    for side, (_, end) in zip(sides, spans, strict=True):
        end.record(side.stream)
    torch.cuda.synchronize()
    taken = np.array([begin.elapsed_time(end) * 1e3 for begin, end in marks[10:]])
    copied = [round(calls * num_bytes / begin.elapsed_time(end) / 1e6, 1) for begin, end in spans]
    return {
        "step_p50_us": round(float(np.percentile(taken, 50)), 1),
        "step_p99_us": round(float(np.percentile(taken, 99)), 1), "gb_per_s": copied,
    }  # fmt: skip


def step_rows(programs: tuple[int, ...]) -> list[Row]:
    """One row per mechanism and direction, each with the same step alone just before: the clocks wander."""
    graph, pools = step_graph(), Pools(STEP_RUN_KIB << 10)
    half = pools.pages // 2 * LAYERS * (STEP_RUN_KIB << 10)
    makes: dict[str, Callable[[torch.Tensor, torch.Tensor], RunCopy]] = {
        name: functools.partial(make_copy, name) for name in ("batch", "kernel")
    }
    makes |= {f"kernel of {count}": functools.partial(ChunkCopy, programs=count) for count in programs}
    rows: list[Row] = []
    for name, make in makes.items():
        sides = pools.sides(make)
        for direction, used in (("h2d", sides[:1]), ("d2h", sides[1:]), ("duplex", sides)):
            alone, busy = beside(graph, (), half), beside(graph, used, half)
            rows.append({
                "copies": f"{name} {direction}", "alone_p50_us": alone["step_p50_us"],
                "alone_p99_us": alone["step_p99_us"], **busy,
                "p50": round(busy["step_p50_us"] / alone["step_p50_us"], 3),
                "p99": round(busy["step_p99_us"] / alone["step_p99_us"], 3),
            })  # fmt: skip
    pools.close()
    return rows


def make_pools(kv_heads: int) -> KvPools:
    """The pools of a model of 40 layers in bfloat16, with 16 KiB a run and KV head."""
    arch = cast(Arch, SimpleNamespace(num_layers=40, num_kv_heads=kv_heads, head_dim=128))
    return KvPools(
        arch, device_chunks=256, host_chunks=128, form=KvFormat(32, torch.bfloat16), device=torch.device("cuda")
    )  # fmt: skip


def pairs(count: int, first: int = 0) -> tuple[Copy, ...]:
    return tuple(Copy(first + page, first + page) for page in range(count))


def cpu_rows() -> list[Row]:
    """CPU microseconds of the engine's three calls for a plan, with runs of 160 KiB."""
    pools = make_pools(10)
    plans = {
        "no copies": Plan(0), "1 chunk in": Plan(0, swap_in=pairs(1)), "16 chunks in": Plan(0, swap_in=pairs(16)),
        "16 chunks out": Plan(0, swap_out=pairs(16, 100)),
    }  # fmt: skip
    rows: list[Row] = []
    for mechanism in ("batch", "kernel"):
        swap = SwapEngine(pools, torch.cuda.Stream(), pipelined=True, mechanism=mechanism)
        for name, plan in plans.items():
            taken = []
            for _ in range(20):
                started = time.perf_counter()
                swap.before_step(plan)
                swap.after_step(plan)
                swap.counters()
                taken.append(time.perf_counter() - started)
                swap.drain()
            us = round(float(np.median(taken)) * 1e6)
            rows.append({"mechanism": mechanism, "plan": name, "us": us})
        swap.close()
    pools.close()
    return rows


def engine_rows() -> list[Row]:
    """What the engine chooses by itself, and its rate from the first byte of 64 idle chunks to the last."""
    rows: list[Row] = []
    for kv_heads in (1, 4, 10, 40):
        pools = make_pools(kv_heads)
        started = time.perf_counter()
        swap = SwapEngine(pools, torch.cuda.Stream(), pipelined=True)
        start_ms = round((time.perf_counter() - started) * 1e3)
        for lane, plan in ((Lane.IN, Plan(0, swap_in=pairs(64))), (Lane.OUT, Plan(0, swap_out=pairs(64)))):
            swap.counters()
            for _ in range(5):
                swap.before_step(plan)
                swap.drain()
            moved, choice = swap.counters(), swap.lanes.choices[lane]
            rate = (moved.in_bytes + moved.out_bytes) / (moved.in_seconds + moved.out_seconds) / 1e9
            rows.append({
                "run_kib": 16 * kv_heads, "direction": lane.value, "choice": choice.mechanism,
                "gb_per_s": round(rate, 1), "start_ms": start_ms,
                **{f"{name}_trial_gb_per_s": round(t.gb_per_s, 1) for name, t in choice.trials.items()},
                **{f"{name}_us_per_run": round(t.submit_us_per_run, 2) for name, t in choice.trials.items()},
            })  # fmt: skip
        swap.close()
        pools.close()
    return rows


def section() -> tuple[list[Row], str]:
    """Everything that the report holds, and its tables."""
    parts = {
        "bandwidth": bandwidth_rows(), "step": step_rows((8, 12)), "engine": engine_rows(), "cpu": cpu_rows(),
    }  # fmt: skip
    lines = [NOTE, ""]
    for what, rows in parts.items():
        lines += [f"**{what}**", "", *table(rows), ""]
    return [{"what": what, **row} for what, rows in parts.items() for row in rows], "\n".join(lines)
