"""Prometheus metrics: every name in one table. Labels never name a session, and a tenant only when asked to.

What the engine counts is read from its latest ``Stats`` when somebody scrapes. Its counters start again at zero with a
new engine process, which Prometheus takes for what it is, a reset. What only the front end sees is counted here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, Literal, Protocol

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pensieve.core import Usage
from pensieve.engine.messages import Stats
from pensieve.server.links.engine_link import LinkState
from pensieve.server.operations.call_metrics import CallMetrics
from pensieve.server.operations.process_metrics import ProcessMetrics
from pensieve.server.operations.tenant_metrics import TenantMetrics
from pensieve.server.operations.turn_metrics import TurnMetrics
from pensieve.server.operations.usage import UsageBook
from pensieve.server.values import TurnEnd

_SECONDS: Final = (0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 60.0)
_TOKEN_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0, 5.0)

Sample = tuple[tuple[str, ...], float]


@dataclass(frozen=True, slots=True)
class EngineMetric:
    """One family whose samples are read from ``Stats``."""

    name: str
    kind: Literal["counter", "gauge"]
    help: str
    read: Callable[[Stats], Iterable[Sample]]
    labels: tuple[str, ...] = ()


def _one(read: Callable[[Stats], float]) -> Callable[[Stats], Iterable[Sample]]:
    return lambda stats: [((), read(stats))]


def _rate(amount: float, seconds: float) -> float:
    return amount / seconds if seconds > 0 else 0.0


ENGINE_METRICS: Final = (
    EngineMetric(
        "pensieve_context_tokens_total",
        "counter",
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
        "pensieve_swap_bytes_total",
        "counter",
        "Bytes copied between the tiers; in is host to device.",
        lambda s: [(("in",), s.swap_in_bytes_total), (("out",), s.swap_out_bytes_total)],
        ("direction",),
    ),
    EngineMetric(
        "pensieve_swap_seconds_total",
        "counter",
        "Seconds during which copies between the tiers ran.",
        lambda s: [(("in",), s.swap_in_seconds_total), (("out",), s.swap_out_seconds_total)],
        ("direction",),
    ),
    EngineMetric(
        "pensieve_swap_bytes_per_second",
        "gauge",
        "Mean bandwidth of copies between the tiers while they ran, since the engine started.",
        lambda s: [
            (("in",), _rate(s.swap_in_bytes_total, s.swap_in_seconds_total)),
            (("out",), _rate(s.swap_out_bytes_total, s.swap_out_seconds_total)),
        ],
        ("direction",),
    ),
    EngineMetric(
        "pensieve_cache_tokens",
        "gauge",
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
    EngineMetric(
        "pensieve_cached_sessions", "gauge", "Sessions with cached state.", _one(lambda s: s.cached_sessions)
    ),
    EngineMetric(
        "pensieve_running_requests", "gauge", "Generations in the batch.", _one(lambda s: s.running)
    ),
    EngineMetric(
        "pensieve_queued_requests", "gauge", "Generations that wait to join.", _one(lambda s: s.queued)
    ),
    EngineMetric(
        "pensieve_batch_tokens", "gauge", "Tokens of the latest step.", _one(lambda s: s.last_batch_tokens)
    ),
    EngineMetric("pensieve_steps_total", "counter", "Steps made.", _one(lambda s: s.steps_total)),
    EngineMetric(
        "pensieve_step_seconds_total",
        "counter",
        "Seconds spent in steps.",
        _one(lambda s: s.step_seconds_total),
    ),
    EngineMetric(
        "pensieve_step_part_seconds_total",
        "counter",
        "Seconds of steps by part: what the host does, what it waits for, what the device says of itself.",
        lambda s: [((part,), seconds) for part, seconds in s.part_seconds_total.items()],
        ("part",),
    ),
    EngineMetric(
        "pensieve_last_step_seconds",
        "gauge",
        "Seconds of the latest step.",
        _one(lambda s: s.last_step_seconds),
    ),
    EngineMetric(
        "pensieve_output_tokens_total", "counter", "Tokens generated.", _one(lambda s: s.output_total)
    ),
    EngineMetric(
        "pensieve_dropped_tokens_total",
        "counter",
        "Cached tokens dropped for want of room; they are recomputed if their session returns.",
        _one(lambda s: s.dropped_total),
    ),
    EngineMetric(
        "pensieve_suspensions_total",
        "counter",
        "Running generations taken out of the batch for want of room.",
        _one(lambda s: s.suspensions_total),
    ),
)


class EngineView(Protocol):
    """The part of a link that the collector reads."""

    @property
    def state(self) -> LinkState: ...

    @property
    def stats(self) -> Stats: ...

    @property
    def restarts_total(self) -> int: ...

    @property
    def condemned_turns_total(self) -> int: ...

    @property
    def condemned_sessions_total(self) -> int: ...


class QueueView(Protocol):
    """The part of the gate that is shown."""

    @property
    def waiting(self) -> int: ...

    @property
    def expected_wait_s(self) -> float: ...


class _EngineCollector(Collector):
    def __init__(self, engine: EngineView) -> None:
        self._engine = engine

    def collect(self) -> Iterator[Metric]:
        stats = self._engine.stats
        for metric in ENGINE_METRICS:
            family_type = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = family_type(metric.name, metric.help, labels=metric.labels)
            for labels, value in metric.read(stats):
                family.add_metric(labels, value)
            yield family
        restarts = self._engine.restarts_total
        yield CounterMetricFamily("pensieve_engine_restarts_total", "Engines replaced.", value=restarts)
        turns = self._engine.condemned_turns_total
        text = "Turns that were found to end engines; they are refused for a while."
        yield CounterMetricFamily("pensieve_quarantined_turns_total", text, value=turns)
        sessions = self._engine.condemned_sessions_total
        text = "Times that all turns of a session were refused, because two had ended engines."
        yield CounterMetricFamily("pensieve_quarantined_sessions_total", text, value=sessions)
        up = float(self._engine.state is LinkState.SERVING)
        yield GaugeMetricFamily("pensieve_engine_up", "Whether an engine serves.", value=up)


class Metrics:
    """One server's metrics. Also a ``GenerationObserver``."""

    def __init__(self, *, by_tenant: bool = False) -> None:
        """``by_tenant``: also what each tenant uses, under its name."""
        self.registry = CollectorRegistry()
        self._tenants = TenantMetrics(self.registry) if by_tenant else None
        self._turns = TurnMetrics(self.registry)
        self.calls = CallMetrics(self.registry)
        self.processes = ProcessMetrics(self.registry)
        self._refusals = Counter(
            "pensieve_refusals_total",
            "Turns that were refused before they began, by reason; lower case.",
            ["reason"],
            registry=self.registry,
        )
        self._generations = Counter(
            "pensieve_generations_total",
            "Generations ended, by finish reason (lower case), cancelled, or the reason of the failure.",
            ["outcome"],
            registry=self.registry,
        )
        self._warm_calls = Counter(
            "pensieve_warm_calls_total",
            "Sessions asked to be warmed: accepted, why it was refused, or the reason of the error; lower case.",
            ["outcome"],
            registry=self.registry,
        )
        self._first_token = Histogram(
            "pensieve_time_to_first_token_seconds",
            "From submission to the engine to the first token; warm: some of the context was cached in either tier.",
            ["start"],
            buckets=_SECONDS,
            registry=self.registry,
        )
        self._inter_token = Histogram(
            "pensieve_inter_token_seconds",
            "Between tokens of one generation.",
            buckets=_TOKEN_SECONDS,
            registry=self.registry,
        )
        self._store_errors = Counter(
            "pensieve_store_errors_total", "Calls the history store could not serve.", registry=self.registry
        )
        self._store_regressions = Counter(
            "pensieve_store_regressions_total",
            "Times that the history store no longer had what was acknowledged, by who had seen it.",
            ["seen_by"],
            registry=self.registry,
        )
        self._auth_failures = Counter(
            "pensieve_auth_failures_total", "Calls refused for their credential.", registry=self.registry
        )
        self._auth_held_back = Counter(
            "pensieve_auth_held_back_total",
            "Refusals that were held back, because many logins from one address had failed.",
            registry=self.registry,
        )
        for start in ("cold", "warm"):
            self._first_token.labels(start)
        for seen_by in ("server", "client"):
            self._store_regressions.labels(seen_by)

    def watch_engine(self, engine: EngineView) -> None:
        """Serve this engine's numbers from now on. Called once."""
        self.registry.register(_EngineCollector(engine))

    def first_token(self, seconds: float, usage: Usage) -> None:
        warm = usage.gpu_cached_tokens + usage.swapped_in_tokens > 0
        self._first_token.labels("warm" if warm else "cold").observe(seconds)

    def next_tokens(self, seconds: float, tokens: int) -> None:
        for _ in range(tokens):
            self._inter_token.observe(seconds / tokens)

    def ended(self, outcome: str) -> None:
        self._generations.labels(outcome).inc()

    def turn_ended(self, end: TurnEnd) -> None:
        """A turn that held its session is over."""
        self._turns.ended(end)
        if self._tenants is not None:
            self._tenants.turn_ended(end.key.tenant, end.outcome, end.usage)

    def turn_refused(self, tenant: str, reason: str) -> None:
        """A turn did not begin."""
        self._refusals.labels(reason.lower()).inc()
        if self._tenants is not None:
            self._tenants.turn_refused(tenant, reason.lower())

    def watch_queue(self, gate: QueueView) -> None:
        """Show what waits at this gate from now on. Called once."""
        waiting = Gauge(
            "pensieve_waiting_turns", "Turns admitted and not yet computed.", registry=self.registry
        )
        waiting.set_function(lambda: gate.waiting)
        wait = Gauge(
            "pensieve_expected_wait_seconds",
            "How long it takes to begin all that waits, at the speed measured.",
            registry=self.registry,
        )
        wait.set_function(lambda: gate.expected_wait_s)

    def watch_usage(self, book: UsageBook) -> bool:
        """Show what tenants hold from now on; whether that is to be shown. Called once."""
        if self._tenants is not None:
            self._tenants.watch(book)
        return self._tenants is not None

    def warm_ended(self, outcome: str) -> None:
        """``outcome``: see ``SessionWarmer``."""
        self._warm_calls.labels(outcome).inc()

    def store_error(self) -> None:
        self._store_errors.inc()

    def store_regression(self, seen_by: str) -> None:
        """``seen_by``: ``server``, or ``client`` for one that says so."""
        self._store_regressions.labels(seen_by).inc()

    def auth_failure(self) -> None:
        self._auth_failures.inc()

    def auth_held_back(self) -> None:
        self._auth_held_back.inc()
