"""What a turn costs a store: begin and commit, in bursts that alternate between two checkouts.

One process per checkout keeps its store open and makes a burst when it is told to. So both meet the same load of the
machine, and medians over the bursts can be compared.

python bench/stores/turns.py sqlite:////dev/shm/turns.db --against ../before
python bench/stores/turns.py redis://127.0.0.1:6379/0 --connections 8 --against ../before
"""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any
from uuid import uuid4

import click

BURST = 48
"""Turns of one burst, over all connections."""
HERE = Path(__file__).resolve().parents[2]


@click.command(help=__doc__)
@click.argument("url")
@click.option(
    "--connections", default=1, show_default=True, help="Sessions that have turns at the same time."
)
@click.option("--bursts", default=40, show_default=True)
@click.option(
    "--against", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Another checkout."
)
@click.option("--worker", is_flag=True, hidden=True)
def main(url: str, connections: int, bursts: int, against: Path | None, worker: bool) -> None:
    if worker:
        asyncio.run(_serve(url, connections))
        return
    trees = [HERE] if against is None else [against.resolve(), HERE]
    workers = [
        _start(tree, f"{url}.{number}" if url.startswith("sqlite") else url, connections)
        for number, tree in enumerate(trees)
    ]
    for one in workers:
        _line(one)
    measured: list[list[dict[str, Any]]] = [[] for _ in trees]
    for _ in range(bursts):
        for one, found in zip(workers, measured, strict=True):
            assert one.stdin is not None
            one.stdin.write("burst\n")
            one.stdin.flush()
            found.append(json.loads(_line(one)))
    for one, tree, found in zip(workers, trees, measured, strict=True):
        one.communicate()
        print(f"{tree.name}: {_summary(found[2:])}")


def _start(tree: Path, url: str, connections: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-P", __file__, url, "--connections", str(connections), "--worker"]
    environment = {**os.environ, "PYTHONPATH": str(tree)}
    return subprocess.Popen(
        command, env=environment, cwd=tree, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


def _line(worker: subprocess.Popen[str]) -> str:
    assert worker.stdout is not None
    line = worker.stdout.readline()
    if not line:
        raise click.ClickException("a worker has ended")
    return line


def _summary(bursts: list[dict[str, Any]]) -> str:
    def quantile(values: list[float], part: float) -> float:
        return sorted(values)[min(int(len(values) * part), len(values) - 1)]

    cpu = [one["cpu_ms"] for one in bursts]
    rate = [one["rate"] for one in bursts]
    latency = [ms for one in bursts for ms in one["latency_ms"]]
    return (
        f"CPU {quantile(cpu, 0.25):.3f} ms a turn (lower quartile of bursts), median {quantile(cpu, 0.5):.3f};"
        f" {quantile(rate, 0.5):.0f} turns/s (median), {quantile(rate, 0.75):.0f} (upper quartile);"
        f" p50 {quantile(latency, 0.5):.2f} ms, p99 {quantile(latency, 0.99):.1f} ms"
    )


async def _serve(url: str, connections: int) -> None:
    """A burst for each line of stdin; its figures, a line of JSON on stdout."""
    from pensieve.core import FinishReason, Role, pack_tokens
    from pensieve.store import BeginRequest, Counts, Key, open_store
    from pensieve.store.records import Item, Record, RecordKind, SessionConfig, SessionRow, TurnResult

    store = open_store(url)
    await store.open()
    name = uuid4().hex
    first = Record(revision=1, kind=RecordKind.CREATE, time_ms=1, config=SessionConfig(model="tiny"))
    rows = [
        await store.create(SessionRow(tenant="t", session_id=f"{name}-{number}"), first, "fp")
        for number in range(connections)
    ]
    latency: list[float] = []

    async def turn(number: int) -> None:
        row, base = rows[number], rows[number].revision
        key, request_id = Key(row.tenant, row.session_id), f"r{base}"
        token = f"{row.session_id}-{base}"
        items = (
            Item(2 * base, Role.USER, "hello " * 60, pack_tokens(range(60)), request_id),
            Item(2 * base + 1, Role.ASSISTANT, "hello " * 60, pack_tokens(range(60))),
        )
        result = TurnResult(base_revision=base, finish_reason=FinishReason.EOS, input_items=1)
        record = Record(base + 1, RecordKind.TURN, 2, request_id, items=items, turn=result)
        began = time.perf_counter()
        request = BeginRequest(
            request_id=request_id,
            fingerprint="fp",
            token=token,
            owner="bench",
            attempt=token,
            lease_ms=60_000,
            seed=1,
            known_revision=base,
            known_head=row.head_hash,
            known_create_ms=row.create_ms,
        )
        await store.begin(key, request)
        rows[number] = await store.commit(
            key, token, "fp", record, Counts(2 * base + 1, 2 * base, 120 * base)
        )
        latency.append((time.perf_counter() - began) * 1e3)

    async def turns(number: int) -> None:
        for _ in range(BURST // connections):
            await turn(number)

    print("ready", flush=True)
    while await asyncio.to_thread(sys.stdin.readline):
        latency.clear()
        cpu, wall = time.process_time(), time.perf_counter()
        await asyncio.gather(*map(turns, range(connections)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        print(
            json.dumps(
                {"cpu_ms": cpu / len(latency) * 1e3, "rate": len(latency) / wall, "latency_ms": latency}
            ),
            flush=True,
        )
    await store.close()


if __name__ == "__main__":
    main()
