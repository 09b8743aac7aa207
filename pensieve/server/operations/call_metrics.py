"""Metrics of gRPC calls, by method and status code. Health checks are not counted, nor methods that do not exist."""

from __future__ import annotations

from typing import Final

from prometheus_client import CollectorRegistry, Counter, Histogram

_SECONDS: Final = (0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)


class CallMetrics:
    """``method`` is the bare name (``StreamTurn``): no two services of this server have one of the same name."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._started = Counter(
            "pensieve_rpc_started_total", "gRPC calls that came.", ["method"], registry=registry
        )
        self._handled = Counter(
            "pensieve_rpc_handled_total",
            "gRPC calls that have ended, by status code as gRPC writes it.",
            ["method", "code"],
            registry=registry,
        )
        self._seconds = Histogram(
            "pensieve_rpc_seconds",
            "From a call's headers to its end; of a stream that is the time of the whole answer.",
            ["method"],
            buckets=_SECONDS,
            registry=registry,
        )

    def started(self, method: str) -> None:
        self._started.labels(method).inc()

    def handled(self, method: str, code: str, seconds: float) -> None:
        self._handled.labels(method, code).inc()
        self._seconds.labels(method).observe(seconds)
