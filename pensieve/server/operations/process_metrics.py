"""Metrics of the program itself: what was built, what its processes use, and how late the event loop is."""

from __future__ import annotations

import platform
from collections.abc import Callable
from importlib.metadata import PackageNotFoundError, version
from typing import Final

from prometheus_client import CollectorRegistry, Histogram, Info, ProcessCollector

_LAG_SECONDS: Final = (0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)
_LIBRARIES: Final = ("torch", "grpcio")
"""Distributions whose versions explain most differences between two servers."""


class ProcessMetrics:
    """``process_*`` is the front end, ``pensieve_engine_process_*`` the engine, by prometheus_client's collector."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        ProcessCollector(registry=registry)
        self._lag = Histogram(
            "pensieve_event_loop_lag_seconds",
            "How much later than asked the front end's event loop woke up; looked at several times a second.",
            buckets=_LAG_SECONDS,
            registry=registry,
        )

    def lag(self, seconds: float) -> None:
        self._lag.observe(seconds)

    def watch_engine(self, pid: Callable[[], int | None]) -> None:
        """Show what the process with this id uses: of several ranks the first. Nothing while there is none."""
        ProcessCollector("pensieve_engine", pid=lambda: pid() or "none", registry=self._registry)

    def describe(self, **labels: str) -> None:
        """Show ``pensieve_build_info`` with these labels and the versions of what the server runs on. Called once."""
        versions = {name: _version(name) for name in ("pensieve", *_LIBRARIES)}
        info = Info(
            "pensieve_build", "What runs: versions, model, device; always 1.", registry=self._registry
        )
        info.info(
            {"version": versions.pop("pensieve"), "python": platform.python_version(), **versions, **labels}
        )


def _version(distribution: str) -> str:
    """From the package's metadata: the front end never imports torch."""
    try:
        return version(distribution)
    except PackageNotFoundError:
        return ""
