"""A server that is offered more than it can serve, by everybody or by one tenant.

    python bench/service/overload.py                  # 1, 2, 5 and 10 times what is served
    python bench/service/overload.py --flood turns    # a small tenant beside one that floods

The engine is ``priced_engine``: the real scheduler around a model that only takes its time, so that a laptop can be
offered ten times what it serves. First it is measured what the server carries. Then each load runs on a server of its
own, on loopback, with the history in SQLite and the callers in processes of their own. Refused calls are not tried
again.
The last line is one JSON document.
"""

from __future__ import annotations

import json
import multiprocessing
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.servers import resident_bytes, stand_in, write_keys
from service.callers import Call, Load, flood, offer
from service.priced_engine import ENGINE, STEP_VARIABLE, TOKEN_VARIABLE

SETTLING = 0.25
"""Part of a load that is left out at its beginning: until the queue is what it will be."""
TENANTS = ("small", "flood")


@dataclass
class Server:
    """A running server; ``memory`` is the largest resident set seen of the front end, in MB."""

    address: str
    pid: int
    memory: float = 0.0

    def watch(self, over: threading.Event) -> None:
        while not over.wait(0.2):
            self.memory = max(self.memory, resident_bytes(self.pid) / 1e6)


def key(tenant: str) -> str:
    return f"ck_{tenant}_{tenant * 4}"


@contextmanager
def serving(options: Sequence[str], step_ms: float, token_us: float) -> Iterator[Server]:
    prices = {STEP_VARIABLE: str(step_ms), TOKEN_VARIABLE: str(token_us)}
    over = threading.Event()
    with tempfile.NamedTemporaryFile(suffix=".toml") as keys:
        write_keys(Path(keys.name), {tenant: tenant * 4 for tenant in TENANTS})
        words = ("--api-keys", keys.name, "--log-level", "warning", *options)
        with stand_in(ENGINE, *words, environment=prices) as running:
            server = Server(running.address, running.pid)
            threading.Thread(target=server.watch, args=(over,), daemon=True).start()
            try:
                yield server
            finally:
                over.set()


def percentile(values: Sequence[float], share: float) -> float | None:
    """The value below which ``share`` of all lie; None of none."""
    ordered = sorted(values)
    return round(ordered[int(share * (len(ordered) - 1))], 4) if ordered else None


def summary(calls: Sequence[Call], seconds: float) -> dict[str, Any]:
    """Figures of one tenant's load, its beginning left out."""
    begin = SETTLING * seconds
    ended = [call.at + call.ended_s for call in calls if not call.reason]
    counted = [call for call in calls if call.at >= begin]
    served = [call for call in counted if not call.reason]
    refused = [call for call in counted if call.reason in ("SERVER_OVERLOADED", "QUOTA_EXCEEDED")]
    others = Counter(call.reason for call in counted if call.reason)
    return {
        "offered_per_s": round(len(counted) / (seconds - begin), 1),
        "served_per_s": round(sum(begin <= at < seconds for at in ended) / (seconds - begin), 1),
        "first_token_p50_s": percentile([call.first_token_s for call in served], 0.5),
        "first_token_p99_s": percentile([call.first_token_s for call in served], 0.99),
        "refused_share": round(len(refused) / max(len(counted), 1), 3),
        "refusal_p50_s": percentile([call.ended_s for call in refused], 0.5),
        "refusal_p99_s": percentile([call.ended_s for call in refused], 0.99),
        "reasons": dict(others),
    }


class Bench:
    def __init__(
        self, seconds: float, step_ms: float, token_us: float, output: int, options: Sequence[str]
    ) -> None:
        self.seconds = seconds
        self.output = output
        self._prices = step_ms, token_us
        self._options = options
        self.pool = ProcessPoolExecutor(2, mp_context=multiprocessing.get_context("spawn"))

    def run(self, rate: float, seconds: float = 0.0) -> dict[str, Any]:
        """One tenant, at ``rate`` turns a second."""
        seconds = seconds or self.seconds
        with serving(self._options, *self._prices) as server:
            calls = self._offer(server, "small", rate, seconds).result()
            return summary(calls, seconds) | {"front_end_mb": round(server.memory)}

    def beside(self, rate: float, kind: str, flood_rate: float) -> dict[str, Any]:
        """A tenant at ``rate`` beside another that floods; ``kind`` "": beside nobody."""
        with serving(self._options, *self._prices) as server:
            other: Future[Any] | None = None
            if kind == "turns":
                other = self._offer(server, "flood", flood_rate, 1.3 * self.seconds)
            elif kind:
                load = Load(server.address, key("flood"), 0.0, 1.3 * self.seconds)
                other = self.pool.submit(flood, load, kind)
            found = summary(self._offer(server, "small", rate, self.seconds).result(), self.seconds)
            found["front_end_mb"] = round(server.memory)
            if other is not None:
                result = other.result()
                found["flood"] = result if isinstance(result, int) else summary(result, 1.3 * self.seconds)
            return found

    def _offer(self, server: Server, tenant: str, rate: float, seconds: float) -> Future[list[Call]]:
        load = Load(server.address, key(tenant), rate, seconds, self.output, seed=len(tenant))
        return self.pool.submit(offer, load)


@click.command(context_settings={"show_default": True})
@click.option("--times", type=float, multiple=True, default=(1, 2, 5, 10))
@click.option(
    "--flood",
    "floods",
    type=click.Choice(["turns", "listings", "counts", "bodies", "connections"]),
    multiple=True,
)
@click.option("--seconds", type=float, default=20.0, help="Of each load.")
@click.option("--step-ms", type=float, default=40.0, help="Price of a step.")
@click.option("--token-us", type=float, default=50.0, help="Price of a token in it.")
@click.option("--output-tokens", type=int, default=20, help="Of each answer.")
@click.option("--served", type=float, default=0.0, help="Turns a second that are served, if that is known.")
@click.option("--max-running", type=int, default=16)
@click.option(
    "--option", "options", multiple=True, help="Further option of the server, as --option=--max-wait=2s."
)
@click.option("--small-share", type=float, default=0.2, help="Of what is served: the small tenant.")
def main(
    times: tuple[float, ...], floods: tuple[str, ...], seconds: float, step_ms: float, token_us: float,
    output_tokens: int, served: float, max_running: int, options: tuple[str, ...], small_share: float,
) -> None:  # fmt: skip
    """Measure overload, or with --flood what one tenant does to another."""
    options = (f"--max-running={max_running}", *options)
    bench = Bench(seconds, step_ms, token_us, output_tokens, options)
    with bench.pool:
        ideal = max_running / (output_tokens * (step_ms + token_us * max_running / 1e3) / 1e3)
        served = served or bench.run(3 * ideal, max(seconds / 2, 2.0))["served_per_s"]
        click.echo(f"served: {served} turns/s")
        rows: dict[str, Any] = {}
        if floods:
            rows["alone"] = bench.beside(small_share * served, "", 0.0)
            click.echo(f"alone: {rows['alone']}")
        for kind in floods:
            rows[kind] = bench.beside(small_share * served, kind, 10 * served)
            click.echo(f"beside {kind}: {rows[kind]}")
        for factor in () if floods else times:
            rows[f"{factor:g}x"] = bench.run(factor * served)
            click.echo(f"{factor:g} times: {rows[f'{factor:g}x']}")
    click.echo(json.dumps({"served_per_s": served, "rows": rows}))


if __name__ == "__main__":
    main()
