"""Plain callers of a real server beside others: plain ones, costly grammars, and schemas that are slow to compile.

A section of ``structured.py``. The other callers are in a process of their own. They send every form once, so that none
is found compiled.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import multiprocessing
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from typing import Any

import click
import numpy as np

from pensieve.client import AsyncClient
from pensieve.debug import child_environment
from pensieve.errors import InvalidArgument
from pensieve.replay.targets.started_target import read_counters
from pensieve.spawn import wait_ready

PLAIN_CALLERS = 4
ANSWER = 60
"""Tokens of an answer."""
START_LIMIT_S = 300.0
LATE = "pensieve_late_masks_total"
Row = dict[str, Any]
Times = tuple[list[float], list[float]]
"""Seconds to the first piece of each turn, and between two pieces."""


def plain(name: str) -> Row:
    return {"ignore_eos": True}


def costly_token(name: str) -> Row:
    """A form whose tokens cost as much work as the limits allow, or more."""
    kinds: tuple[Row, ...] = (
        {"lark": f'start: a\na: "x" a "y" | a a | "x" | "{name}"'},
        {"regex": f"(a|b|ab)*c(a|b|ab)*d(.{{0,400}}{name}){{3}}"},
        {"lark": f"start: (X|Y|Z)*\nX: /.{{0,300}}a.{{0,300}}/\nY: /.{{0,300}}{name}.{{0,300}}/\nZ: /[a-z ]{{0,500}}/"},
        {"schema": {"type": "object", "properties": {f"{name}_{at}": {"type": "string"} for at in range(800)}}},
    )  # fmt: skip
    return _one_of(kinds, name)


def slow_to_compile(name: str) -> Row:
    """A schema that is large or deep, or multiplies out."""
    fields, deep = [f"{name}_{at}" for at in range(60)], {"const": name}
    for _ in range(48):
        deep = {"type": "array", "items": deep}
    text, pattern = {"type": "string"}, "(a|b|ab)*c.{0,200}"
    kinds: tuple[Row, ...] = (
        {"type": "object", "properties": {one: {"enum": [f"{one} {n}" for n in range(60)]} for one in fields}},
        {"allOf": [{"anyOf": [{"properties": {side + one: text}} for side in "ab"]} for one in fields[:12]]},
        {"patternProperties": {f"^{one}[a-z]{{1,200}}$": {"type": "string", "pattern": pattern} for one in fields}},
        {"enum": [f"{one} {n} of many" for one in fields for n in range(30)]},
        deep,
    )  # fmt: skip
    return {"schema": _one_of(kinds, name)}


def _one_of(kinds: Sequence[Row], name: str) -> Row:
    return kinds[int(name.rpartition("n")[2]) % len(kinds)]


FORMS: dict[str, Callable[[str], Row]] = {
    "plain": plain,
    "costly tokens": costly_token,
    "slow to compile": slow_to_compile,
}
"""Arguments of a turn by its name, which makes them unique."""
PAIRS = (("costly tokens", 8), ("slow to compile", 40))
"""Kinds and callers at a time. Each is compared with as many plain callers."""


def besiege(address: str, kind: str, callers: int, seconds: float, salt: str) -> tuple[int, int]:
    """Run callers of a kind; return how many turns ended, and how many were refused or failed for their form."""
    form = FORMS[kind]
    numbers, ended, refused = itertools.count(), 0, 0
    until = time.monotonic() + seconds

    async def call(client: AsyncClient) -> None:
        nonlocal ended, refused
        session = await client.create_session()
        while time.monotonic() < until:
            number = next(numbers)
            options = {"temperature": 1.0, "seed": number, "max_output_tokens": ANSWER}
            try:
                await session.send("Tell me.", **options, **form(f"{salt}n{number}"))
                ended += 1
            except InvalidArgument:
                refused += 1
            if number % 8 == 0:  # before the context is full
                session = await client.create_session()

    async def run() -> None:
        async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
            for _ in range(callers):
                group.create_task(call(client))

    asyncio.run(run())
    return ended, refused


async def plain_callers(address: str, seconds: float) -> Times:
    first: list[float] = []
    gaps: list[float] = []
    until = time.monotonic() + seconds

    async def call(client: AsyncClient, seed: int) -> None:
        while time.monotonic() < until:
            session = await client.create_session()
            for _ in range(4):
                last, times = time.perf_counter(), first
                options = {"temperature": 1.0, "seed": seed, "max_output_tokens": ANSWER, "ignore_eos": True}
                async for _piece in session.stream("Tell me.", **options):
                    now = time.perf_counter()
                    times.append(now - last)
                    last, times = now, gaps

    async with AsyncClient(address) as client, asyncio.TaskGroup() as group:
        for seed in range(PLAIN_CALLERS):
            group.create_task(call(client, seed))
    return first, gaps


@contextmanager
def serving(model: str, device: str) -> Iterator[tuple[str, str]]:
    """A server with dummy weights; its addresses for calls and for its metrics."""
    words = (
        f"--model {model} --load-format dummy --device {device} --store memory: --listen 127.0.0.1:0 "
        "--admin 127.0.0.1:0 --max-wait 0 --host-cache 0 --device-cache 65536tokens --log-level error"
    )  # fmt: skip
    threads = ["--threads", "1"] if device == "cpu" else []
    with subprocess.Popen(
        [sys.executable, "-P", "-m", "pensieve", "serve", *words.split(), *threads], stdout=subprocess.PIPE, text=True,
        env=child_environment(failpoints=False),
    ) as process:  # fmt: skip
        try:
            yield wait_ready(process, START_LIMIT_S)
        finally:
            process.terminate()


def rows(model: str, device: str, seconds: float, repeats: int) -> list[Row]:
    """Times of plain callers beside each kind of others, by turns; a row for each repeat and kind."""
    with serving(model, device) as (address, admin):
        return asyncio.run(_alternate(address, admin, seconds, repeats))


async def _alternate(address: str, admin: str, seconds: float, repeats: int) -> list[Row]:
    found: list[Row] = []
    every: dict[str, Times] = {}
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as others:
        for repeat, (kind, callers) in itertools.product(range(repeats + 1), PAIRS):
            length = seconds if repeat else 2.0  # the first of each warms up
            rows: list[Row] = []
            for one in ("plain", kind):
                row, times = await _beside(others, address, admin, one, callers, length, f"r{repeat}")
                rows.append(row)
                if repeat:
                    for all_of, some in zip(every.setdefault(row["beside"], ([], [])), times, strict=True):
                        all_of.extend(some)
            if repeat:
                found += [{"run": repeat, **rows[0]}, {"run": repeat, **rows[1], **_ratios(rows[1], rows[0])}]
                click.echo(json.dumps(found[-2:]), err=True)
    for kind, callers in PAIRS:
        base, row = (
            {"beside": name, **_times(every[name])} for name in (f"{callers} plain", f"{callers} {kind}")
        )
        found += [{"run": "all", **base}, {"run": "all", **row, **_ratios(row, base)}]
    return found


async def _beside(
    others: ProcessPoolExecutor, address: str, admin: str, kind: str, callers: int, seconds: float, salt: str
) -> tuple[Row, Times]:
    """Return the times of plain callers beside ``callers`` of a kind, which ``others`` runs."""
    loop = asyncio.get_running_loop()
    await loop.run_in_executor(others, besiege, address, "plain", 0, 0.0, "import")
    before = read_counters(admin)
    siege = loop.run_in_executor(others, besiege, address, kind, callers, seconds, salt)
    times = await plain_callers(address, seconds)
    ended, refused = await siege
    late = int(read_counters(admin)[LATE] - before[LATE])
    name = f"{callers} {kind}"
    return {
        "beside": name,
        **_times(times),
        "others ended": ended,
        "refused": refused,
        "late masks": late,
    }, times


def _times(times: Times) -> Row:
    first, gaps = times
    return {
        "turns": len(first), "TTFT p50 ms": _ms(first, 0.5), "TTFT p99 ms": _ms(first, 0.99),
        "token p50 ms": _ms(gaps, 0.5), "token p99 ms": _ms(gaps, 0.99),
    }  # fmt: skip


def _ratios(row: Row, base: Row) -> Row:
    return {f"{name} ÷": round(row[name] / base[name], 2) for name in ("TTFT p99 ms", "token p99 ms")}


def _ms(seconds: Sequence[float], quantile: float) -> float:
    return round(1e3 * float(np.quantile(seconds, quantile)), 1)
