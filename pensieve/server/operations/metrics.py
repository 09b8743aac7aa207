"""Prometheus metrics. Labels never name a session, and a tenant only on request.

Engine counters are read from its latest ``Stats`` at each scrape. They restart at zero with a new engine process,
which Prometheus treats as a counter reset. Events that only the front end sees are counted here.
"""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pensieve.core import Usage
from pensieve.engine.messages import Stats
from pensieve.server.admission import AdmissionGate
from pensieve.server.links.base import BaseLink
from pensieve.server.links.engine_link import LinkState
from pensieve.server.operations.usage import UsageTracker
from pensieve.server.values import TurnEnd

_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    kind: type[CounterMetricFamily] | type[GaugeMetricFamily]
    name: str
    help: str
    read: Callable[[Stats], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _gauge(name: str, text: str, read: Callable[[Stats], float]) -> EngineMetric:
    return EngineMetric(GaugeMetricFamily, name, text, lambda stats: [((), read(stats))])


def _counter(name: str, text: str, read: Callable[[Stats], float]) -> EngineMetric:
    return EngineMetric(CounterMetricFamily, name, text, lambda stats: [((), read(stats))])


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


ENGINE_METRICS: Final = (
    EngineMetric(
        CounterMetricFamily,
        "pensieve_context_tokens_total",
        "Tokens of contexts that generations started from, by where their attention state came from.",
        lambda s: [
            (("device",), s.gpu_cached_total),
            (("host",), s.swapped_in_total),
            (("recomputed",), s.recomputed_total),
            (("new",), s.new_total),
        ],
        ("source",),
    ),
    EngineMetric(
        CounterMetricFamily,
        "pensieve_swap_bytes_total",
        "Bytes copied between the tiers; in is host to device.",
        lambda s: [(("in",), s.swap_in_bytes_total), (("out",), s.swap_out_bytes_total)],
        ("direction",),
    ),
    EngineMetric(
        CounterMetricFamily,
        "pensieve_swap_seconds_total",
        "Seconds during which copies between the tiers ran.",
        lambda s: [(("in",), s.swap_in_seconds_total), (("out",), s.swap_out_seconds_total)],
        ("direction",),
    ),
    EngineMetric(
        GaugeMetricFamily,
        "pensieve_swap_bytes_per_second",
        "Mean bandwidth of copies between the tiers while they ran, since the engine started.",
        lambda s: [
            (("in",), _rate(s.swap_in_bytes_total, s.swap_in_seconds_total)),
            (("out",), _rate(s.swap_out_bytes_total, s.swap_out_seconds_total)),
        ],
        ("direction",),
    ),
    EngineMetric(
        GaugeMetricFamily,
        "pensieve_cache_tokens",
        "Token slots of each tier: free, reclaimable (on the device with a clean host copy), used.",
        lambda s: [
            (("device", "free"), s.device_free),
            (("device", "reclaimable"), s.device_reclaimable),
            (("device", "used"), s.device_used),
            (("host", "free"), s.host_free),
            (("host", "used"), s.host_used),
        ],
        ("tier", "state"),
    ),
    _gauge(
        "pensieve_device_cache_held_bytes",
        "Bytes of the device tier that memory backs, over all ranks.",
        lambda s: s.device_held,
    ),
    _gauge(
        "pensieve_device_cache_wanted_bytes",
        "Size of the device tier that the operator wants.",
        lambda s: s.device_wanted,
    ),
    _gauge(
        "pensieve_device_cache_floor_bytes",
        "Bytes that the device tier holds at least.",
        lambda s: s.device_floor,
    ),
    _gauge(
        "pensieve_device_cache_ceiling_bytes",
        "Bytes that the device tier holds at most; equal to the floor for a tier of one size.",
        lambda s: s.device_ceiling,
    ),
    _gauge("pensieve_cached_sessions", "Sessions with cached state.", lambda s: s.cached_sessions),
    _gauge("pensieve_running_requests", "Generations in the batch.", lambda s: s.running),
    _gauge("pensieve_queued_requests", "Generations waiting to join the batch.", lambda s: s.queued),
    _gauge("pensieve_batch_tokens", "Tokens of the latest step.", lambda s: s.last_batch_tokens),
    _counter("pensieve_steps_total", "Steps made.", lambda s: s.steps_total),
    _counter("pensieve_step_seconds_total", "Seconds spent in steps.", lambda s: s.step_seconds_total),
    EngineMetric(
        CounterMetricFamily,
        "pensieve_step_part_seconds_total",
        "Seconds of steps by part: host work, waiting (`choose`: for late choices) and the device's own time.",
        lambda s: [((part,), seconds) for part, seconds in s.part_seconds_total.items()],
        ("part",),
    ),
    _gauge("pensieve_last_step_seconds", "Seconds of the latest step.", lambda s: s.last_step_seconds),
    _counter("pensieve_output_tokens_total", "Tokens generated.", lambda s: s.output_total),
    _counter(
        "pensieve_dropped_tokens_total",
        "Cached tokens dropped for lack of space; they are recomputed if their session returns.",
        lambda s: s.dropped_total,
    ),
    _counter(
        "pensieve_suspensions_total",
        "Running generations preempted for lack of space.",
        lambda s: s.suspensions_total,
    ),
    _counter(
        "pensieve_drafted_tokens_total",
        "Drafts: tokens that were guessed and computed ahead.",
        lambda s: s.drafted_total,
    ),
    _counter("pensieve_accepted_tokens_total", "Drafts that became output.", lambda s: s.accepted_total),
    _counter(
        "pensieve_late_masks_total",
        "Masks of answers with a form that were not there in time; their answers got no token in that step.",
        lambda s: s.late_masks_total,
    ),
)


class _EngineCollector(Collector):
    def __init__(self, engine: BaseLink) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for metric in ENGINE_METRICS:
            family = metric.kind(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(stats):
                family.add_metric(labels, value)
            yield family
        restarts = self._engine.restarts_total
        yield CounterMetricFamily("pensieve_engine_restarts_total", "Engines replaced.", value=restarts)
        turns = self._engine.condemned_turns_total
        text = "Turns found to crash engines; they are refused for a while."
        yield CounterMetricFamily("pensieve_quarantined_turns_total", text, value=turns)
        sessions = self._engine.condemned_sessions_total
        text = "Times that all turns of a session were refused because two of them had crashed engines."
        yield CounterMetricFamily("pensieve_quarantined_sessions_total", text, value=sessions)
        up = float(self._engine.state is LinkState.SERVING)
        yield GaugeMetricFamily("pensieve_engine_up", "Whether an engine serves.", value=up)


def _makers(registry: CollectorRegistry) -> tuple[partial[Counter], partial[Histogram]]:
    return partial(Counter, registry=registry), partial(Histogram, registry=registry)


class Metrics:
    """All metrics of a front end, in a registry of its own. Called on the event loop."""

    def __init__(self, *, by_tenant: bool = False) -> None:
        """``by_tenant``: also export usage per tenant, labelled with its name."""
        self.registry = CollectorRegistry()
        counter, histogram = _makers(self.registry)
        self._tenants = TenantMetrics(self.registry) if by_tenant else None
        self._turns = TurnMetrics(self.registry)
        self.calls = CallMetrics(self.registry)
        self.processes = ProcessMetrics(self.registry)
        self._refusals = counter(
            "pensieve_refusals_total",
            "Turns that were refused before they began, by reason; lower case.",
            ["reason"],
        )
        self._generations = counter(
            "pensieve_generations_total",
            "Generations ended, by finish reason (lower case), cancelled, or the reason of the failure.",
            ["outcome"],
        )
        self._warm_calls = counter(
            "pensieve_warm_calls_total",
            "Calls to warm a session: accepted, the reason of the refusal, or the reason of the error; lower case.",
            ["outcome"],
        )
        self._compactions = counter(
            "pensieve_compactions_total",
            "Compactions that the sessions' compact_at began: compacted, or the reason of the error; lower case.",
            ["outcome"],
        )
        self._first_token = histogram(
            "pensieve_time_to_first_token_seconds",
            "From submission to the engine to the first token; warm: some of the context was cached in either tier.",
            ["start"],
            buckets=_SECONDS,
        )
        self._inter_token = histogram(
            "pensieve_inter_token_seconds", "Between tokens of one generation.", buckets=_TOKEN_SECONDS
        )
        self.store_error = counter(
            "pensieve_store_errors_total", "Calls the history store could not serve."
        ).inc
        self._store_regressions = counter(
            "pensieve_store_regressions_total",
            "Times that the history store had lost acknowledged data, by the side that noticed.",
            ["seen_by"],
        )
        self.auth_failure = counter("pensieve_auth_failures_total", "Calls refused for their credential.").inc
        self.auth_held_back = counter(
            "pensieve_auth_held_back_total",
            "Refusals that were delayed after many failed logins from one address.",
        ).inc
        self._recorded = counter(
            "pensieve_recorded_turns_total",
            "Turns that --record has written, and those lost because the disk took no writes for too long.",
            ["outcome"],
        )
        for outcome in ("written", "lost"):
            self._recorded.labels(outcome)
        for start in ("cold", "warm"):
            self._first_token.labels(start)
        for seen_by in ("server", "client"):
            self._store_regressions.labels(seen_by)

    def watch_engine(self, engine: BaseLink) -> None:
        self.registry.register(_EngineCollector(engine))

    def first_token(self, seconds: float, usage: Usage) -> None:
        warm = usage.gpu_cached_tokens + usage.swapped_in_tokens > 0
        self._first_token.labels("warm" if warm else "cold").observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def on_generation_end(self, outcome: str) -> None:
        self._generations.labels(outcome).inc()

    def turn_ended(self, end: TurnEnd) -> None:
        self._turns.turn_ended(end)
        if self._tenants is not None:
            self._tenants.turn_ended(end)

    def turn_refused(self, tenant: str, reason: str) -> None:
        self._refusals.labels(reason.lower()).inc()
        if self._tenants is not None:
            self._tenants.turn_refused(tenant, reason.lower())

    def watch_queue(self, gate: AdmissionGate) -> None:
        waiting = Gauge(
            "pensieve_waiting_turns", "Turns admitted and not yet computed.", registry=self.registry
        )
        waiting.set_function(lambda: gate.waiting)
        wait = Gauge(
            "pensieve_expected_wait_seconds",
            "Time to begin all waiting work at the measured speed.",
            registry=self.registry,
        )
        wait.set_function(lambda: gate.expected_wait_s)

    def watch_usage(self, tracker: UsageTracker) -> bool:
        """Export usage per tenant from now on, if enabled. Return whether it is. Call once."""
        if self._tenants is not None:
            self._tenants.watch(tracker)
        return self._tenants is not None

    def compacted(self, outcome: str) -> None:
        """Count a compaction by policy; see ``IdleCompaction``."""
        self._compactions.labels(outcome).inc()

    def warm_ended(self, outcome: str) -> None:
        """``outcome``: see ``SessionWarmer``."""
        self._warm_calls.labels(outcome).inc()

    def store_regression(self, seen_by: str) -> None:
        """``seen_by``: the side that noticed, ``server`` or ``client``."""
        self._store_regressions.labels(seen_by).inc()

    def recorded(self, outcome: str, turns: int) -> None:
        """``outcome``: see ``TraceRecorder``. Thread-safe."""
        self._recorded.labels(outcome).inc(turns)


_TURN_SECONDS: Final = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 50.0, 100.0, 300.0)
STAGES: Final = ("queue", "prefill", "decode", "other")


class TurnMetrics:
    """Counters and times of turns that have ended."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = _makers(registry)
        self._ended = counter(
            "pensieve_turns_total",
            "Turns ended, by finish reason or by the reason of the error that discarded them; lower case.",
            ["outcome"],
        )
        self._seconds = histogram(
            "pensieve_turn_seconds",
            "Committed turns: from the arrival of the request to the durable commit.",
            buckets=_TURN_SECONDS,
        )
        stage_seconds = counter(
            "pensieve_turn_stage_seconds_total",
            "Seconds of committed turns by stage; other: beginning, tokenising and committing.",
            ["stage"],
        )
        self._stage_seconds = {stage: stage_seconds.labels(stage) for stage in STAGES}

    def turn_ended(self, end: TurnEnd) -> None:
        self._ended.labels(end.outcome).inc()
        if not end.committed:
            return
        total, usage = end.ended_at - end.arrived_at, end.usage
        self._seconds.observe(total)
        seconds = {"queue": usage.queue_s, "prefill": usage.prefill_s, "decode": usage.decode_s}
        # Rounded in the receipt, the parts can exceed the whole a little.
        seconds["other"] = max(0.0, total - sum(seconds.values()))
        for stage, amount in seconds.items():
            self._stage_seconds[stage].inc(amount)


_CALL_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class CallMetrics:
    """Metrics of gRPC calls. ``method`` is the bare name (``StreamTurn``), unique over all services here."""

    def __init__(self, registry: CollectorRegistry) -> None:
        counter, histogram = _makers(registry)
        self._started = counter("pensieve_rpc_started_total", "gRPC calls received.", ["method"])
        self._handled = counter(
            "pensieve_rpc_handled_total",
            "gRPC calls that have ended, by status code as gRPC writes it.",
            ["method", "code"],
        )
        self._seconds = histogram(
            "pensieve_rpc_seconds",
            "From a call's headers to its end; of a stream that is the time of the whole answer.",
            ["method"],
            buckets=_CALL_SECONDS,
        )

    def call_started(self, method: str) -> None:
        self._started.labels(method).inc()

    def call_handled(self, method: str, code: str, seconds: float) -> None:
        self._handled.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)


_LAG_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LIBRARIES: Final = ("torch", "grpcio")
"""Distributions whose versions explain most differences between servers."""


class ProcessMetrics:
    """Process metrics: ``process_*`` is the front end, ``pensieve_engine_process_*`` the engine."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        ProcessCollector(registry=registry)
        self._lag = _makers(registry)[1](
            "pensieve_event_loop_lag_seconds",
            "How late the front end's event loop wakes up; sampled several times a second.",
            buckets=_LAG_SECONDS,
        )

    def observe_lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def watch_engine(self, pid: Callable[[], int | None]) -> None:
        """Export metrics of the process with this id (with several ranks: rank 0), or none while it is None."""
        ProcessCollector("pensieve_engine", pid=lambda: pid() or "none", registry=self._registry)

    def describe(self, **labels: str) -> None:
        """Export ``pensieve_build_info`` with these labels and library versions. Call once."""
        versions = {name: _version(name) for name in ("pensieve", *_LIBRARIES)}
        info = Info("pensieve_build", "Versions, model and device; always 1.", registry=self._registry)
        info.info(
            {"version": versions.pop("pensieve"), "python": platform.python_version(), **versions, **labels}
        )


def _version(distribution: str) -> str:
    """Return a version from package metadata: the front end never imports torch."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""


class _UsageCollector(Collector):
    """Current usage per tenant. Store usage is from the last poll of ``UsageTracker``: a scrape never waits for the
    store."""

    def __init__(self, tracker: UsageTracker) -> None:
        self._tracker = tracker

    def collect(self) -> Iterator[Metric]:
        cached = GaugeMetricFamily(
            "pensieve_tenant_cache_tokens",
            "Token slots of the pages that a tenant holds, by tier. A chunk in both tiers counts in both.",
            labels=["tenant", "tier"],
        )
        for tenant, (device, host) in self._tracker.cache_use.items():
            cached.add_metric([tenant, "device"], device)
            cached.add_metric([tenant, "host"], host)
        sessions = GaugeMetricFamily(
            "pensieve_tenant_sessions", "Sessions in the history store, by tenant.", labels=["tenant"]
        )
        stored = GaugeMetricFamily(
            "pensieve_tenant_stored_bytes",
            "Bytes of records in the history store, by tenant.",
            labels=["tenant"],
        )
        for use in self._tracker.latest:
            if use.stored is not None:
                sessions.add_metric([use.tenant], use.stored.sessions)
                stored.add_metric([use.tenant], use.stored.bytes)
        yield from (cached, sessions, stored)


class TenantMetrics:
    """Counters labelled by tenant. Tenants come from credentials, so their number is bounded."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        counter, _ = _makers(registry)
        self._turns = counter(
            "pensieve_tenant_turns_total",
            "Turns ended, by tenant and outcome as in pensieve_turns_total.",
            ["tenant", "outcome"],
        )
        self._refusals = counter(
            "pensieve_tenant_refusals_total",
            "Turns refused before they began, by tenant and reason; lower case.",
            ["tenant", "reason"],
        )
        self._tokens = counter(
            "pensieve_tenant_tokens_total",
            "Tokens of ended turns, by tenant: computed, found in the cache, generated.",
            ["tenant", "kind"],
        )

    def watch(self, tracker: UsageTracker) -> None:
        self._registry.register(_UsageCollector(tracker))

    def turn_ended(self, end: TurnEnd) -> None:
        tenant, usage = end.key.tenant, end.usage
        self._turns.labels(tenant, end.outcome).inc()
        self._tokens.labels(tenant, "computed").inc(usage.new_tokens + usage.recomputed_tokens)
        self._tokens.labels(tenant, "cached").inc(usage.gpu_cached_tokens + usage.swapped_in_tokens)
        self._tokens.labels(tenant, "output").inc(end.generated_tokens)

    def turn_refused(self, tenant: str, reason: str) -> None:
        self._refusals.labels(tenant, reason).inc()
