"""Every metric of a server, and ``docs/metrics.md``, whose tables are made of them.

    python tests/support/metrics_page.py            what the page says
    python tests/support/metrics_page.py --write    write the page

Nothing is served for it: the registries are filled as a server fills them, each thing that is counted having happened
once, so that every label has a value.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parents[1])]

from prometheus_client import CollectorRegistry  # noqa: E402

from pensieve.config import DoorSettings  # noqa: E402
from pensieve.core import Usage  # noqa: E402
from pensieve.engine.messages import Stats  # noqa: E402
from pensieve.http.app import HttpMetrics  # noqa: E402
from pensieve.server.gateway import Gateway, GatewayCommand  # noqa: E402
from pensieve.server.links.engine_link import LinkState  # noqa: E402
from pensieve.server.operations.metrics import Metrics  # noqa: E402
from pensieve.server.operations.usage import TenantCounts, TenantUse, UsageTracker  # noqa: E402
from pensieve.server.values import TurnEnd  # noqa: E402
from pensieve.store import Key, TenantUsage  # noqa: E402
from pensieve.store.memory_store import MemoryStore  # noqa: E402
from support.sources import ROOT  # noqa: E402

PAGE = ROOT / "docs" / "metrics.md"
HEAD = """# Metrics

A server exposes its metrics in Prometheus' text format at `/metrics` on the admin port (`--admin`, default
127.0.0.1:25051). `pensieve gateway`, the HTTP server as a process of its own, exposes its metrics at `/metrics` of its
port. Counters end in `_total`, histograms have series with `_bucket`, `_sum` and `_count`, times are seconds. No label
names a session or a request; labels name tenants only with `--tenant-metrics`. Counters of the engine and of the HTTP
server begin again at zero with a new process; Prometheus' `rate` and `increase` handle that.

[Operations](operations.md) says which of them to watch. The tables are made from the registered metrics:
`python tests/support/metrics_page.py --write`.
"""
GROUPS = {
    "pensieve_tenant_": ("Tenants, with `--tenant-metrics`", ""),
    "pensieve_http_": ("The HTTP server, with `--http`", ""),
    "pensieve_rpc_": ("gRPC calls", ""),
    "pensieve_turn": ("Turns", ""),
    "process_": (
        "The front end's process",
        "These come from prometheus_client. `pensieve_engine_process_…` and `pensieve_http_process_…` are the same for "
        "the engine (the first of several ranks) and for the HTTP server.",
    ),
    "pensieve_": ("Engine, cache, store and the rest", ""),
}
"""Beginning of a name → heading of its table and what stands above it. The first that fits counts."""


@dataclass(frozen=True, order=True)
class Family:
    """One metric as it is scraped; ``name`` with ``_total`` for a counter."""

    name: str
    kind: str
    labels: tuple[str, ...]
    help: str

    @property
    def series(self) -> set[str]:
        """Names that a query may use."""
        if self.kind == "histogram":
            return {f"{self.name}_{part}" for part in ("bucket", "sum", "count")}
        return {self.name}


class _Engine:
    state = LinkState.SERVING
    stats = Stats(part_seconds_total={"plan": 1.0})
    restarts_total = condemned_turns_total = condemned_sessions_total = 0


class _Queue:
    waiting = 0
    expected_wait_s = 0.0


def families_in(registry: CollectorRegistry) -> Iterator[Family]:
    """What a scrape of it would show; the times at which counters were made are left out."""
    for metric in registry.collect():
        samples = [sample for sample in metric.samples if not sample.name.endswith("_created")]
        labels = {label for sample in samples for label in sample.labels} - {"le"}
        name, kind = metric.name, metric.type
        if kind == "info":
            name, kind = f"{name}_info", "gauge"
        if kind == "counter":
            name = f"{name}_total"
        yield Family(name, kind, tuple(sorted(labels)), metric.documentation)


def all_families() -> dict[str, Family]:
    """By name: those of a server with every option that adds some, after each thing that is counted happened once."""
    metrics = Metrics(by_tenant=True)
    metrics.watch_engine(_Engine())
    metrics.watch_queue(_Queue())
    metrics.processes.watch_engine(os.getpid)
    metrics.processes.describe(model="", device="", dtype="")
    Gateway(GatewayCommand(DoorSettings(""))).watch_in(metrics.registry)
    metrics.turn_ended(TurnEnd(Key("t", "s"), "eos", True, 1, 1, Usage(), 0.0, 0.0, 0.0))
    metrics.turn_refused("t", "QUEUE_FULL")
    book = UsageTracker(MemoryStore(), lambda: {"t": (1, 1)}, lambda: ())
    book.latest = [TenantUse("t", TenantCounts(), 1, 1, TenantUsage(1, 1))]
    metrics.watch_usage(book)
    metrics.on_generation_end("eos")
    metrics.warm_ended("accepted")
    metrics.compacted("compacted")
    metrics.calls.call_started("RunTurn")
    metrics.calls.call_handled("RunTurn", "OK", 0.0)
    door = HttpMetrics()
    door.calls.labels("/v1/models", "200")
    door.first_byte.labels("/v1/models")
    found = [*families_in(metrics.registry), *families_in(door.registry)]
    return {family.name: family for family in found}


def render() -> str:
    """The page."""
    tables: dict[str, list[Family]] = {prefix: [] for prefix in GROUPS}
    for family in sorted(all_families().values()):
        twin = family.name.startswith(("pensieve_engine_process_", "pensieve_http_process_"))
        if not twin:  # they are told beside the first
            tables[next(prefix for prefix in GROUPS if family.name.startswith(prefix))].append(family)
    text = HEAD
    for prefix, (title, above) in GROUPS.items():
        text += f"\n## {title}\n\n" + (f"{above}\n\n" if above else "")
        text += "| metric | kind | labels | meaning |\n|---|---|---|---|\n"
        for family in tables[prefix]:
            labels = ", ".join(f"`{label}`" for label in family.labels)
            text += f"| `{family.name}` | {family.kind} | {labels} | {family.help} |\n"
    return text


if __name__ == "__main__":
    if "--write" in sys.argv[1:]:
        PAGE.write_text(render(), encoding="utf-8")
    else:
        print(render(), end="")
