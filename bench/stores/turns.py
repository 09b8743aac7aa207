"""CPU time, rate and latency of a turn's begin and commit in a history store. Prints one JSON object.

python bench/stores/turns.py sqlite:////dev/shm/turns.db
python bench/common/before_after.py --before ../old --rounds 10 -- bench/stores/turns.py sqlite:////dev/shm/turns.db
"""

from __future__ import annotations

import asyncio
import json
import statistics
import time
from uuid import uuid4

import click

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.store import BeginRequest, Counts, HistoryStore, Key, open_store
from pensieve.store.records import Item, Record, RecordKind, SessionConfig, SessionRow, TurnResult

BURST = 48
"""Turns of one burst, over all connections."""
TOKENS, TEXT = pack_tokens(range(60)), "hello " * 60


@click.command(help=__doc__)
@click.argument("url")
@click.option("--connections", default=1, show_default=True, help="Sessions with turns at the same time.")
@click.option("--bursts", default=20, show_default=True, help="The first two are not counted.")
def main(url: str, connections: int, bursts: int) -> None:
    click.echo(json.dumps(asyncio.run(_measure(url, connections, bursts))))


async def _measure(url: str, connections: int, bursts: int) -> dict[str, float]:
    store, name = open_store(url), uuid4().hex
    await store.open()
    first = Record(revision=1, kind=RecordKind.CREATE, time_ms=1, config=SessionConfig(model="tiny"))
    rows = [
        await store.create(SessionRow(tenant="t", session_id=f"{name}-{number}"), first, "fp")
        for number in range(connections)
    ]
    cpu_ms, rates, latencies = [], [], []
    for burst in range(bursts + 2):
        cpu, wall = time.process_time(), time.perf_counter()
        found = await asyncio.gather(*(_turns(store, rows, number) for number in range(connections)))
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        if burst >= 2:
            turns = sum(map(len, found))
            cpu_ms.append(cpu / turns * 1e3)
            rates.append(turns / wall)
            latencies += [ms for one in found for ms in one]
    await store.close()
    return {
        "CPU ms a turn, lower quartile": statistics.quantiles(cpu_ms, n=4)[0],
        "turns/s, median": statistics.median(rates),
        "latency ms, p50": statistics.median(latencies),
        "latency ms, p99": statistics.quantiles(latencies, n=100)[98],
    }


async def _turns(store: HistoryStore, rows: list[SessionRow], number: int) -> list[float]:
    """One connection's part of a burst: the latency of each turn, ms."""
    found = []
    for _ in range(BURST // len(rows)):
        began = time.perf_counter()
        rows[number] = await _turn(store, rows[number])
        found.append((time.perf_counter() - began) * 1e3)
    return found


async def _turn(store: HistoryStore, row: SessionRow) -> SessionRow:
    base, key = row.revision, Key(row.tenant, row.session_id)
    request_id, token = f"r{base}", f"{row.session_id}-{base}"
    items = (
        Item(2 * base, Role.USER, TEXT, TOKENS, request_id),
        Item(2 * base + 1, Role.ASSISTANT, TEXT, TOKENS),
    )
    result = TurnResult(base_revision=base, finish_reason=FinishReason.EOS, input_items=1)
    record = Record(base + 1, RecordKind.TURN, 2, request_id, items=items, turn=result)
    request = BeginRequest(
        request_id=request_id, fingerprint="fp", token=token, owner="bench", attempt=token, lease_ms=60_000, seed=1,
        known_revision=base, known_head=row.head_hash, known_create_ms=row.create_ms,
    )  # fmt: skip
    await store.begin(key, request)
    return await store.commit(key, token, "fp", record, Counts(2 * base + 1, 2 * base, 120 * base))


if __name__ == "__main__":
    main()
