"""What the server says of itself over a window: counters as differences, gauges as means of samples."""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from urllib.error import URLError
from urllib.request import urlopen

from prometheus_client.parser import text_string_to_metric_families

SAMPLE_S = 0.5
Numbers = dict[str, float]
"""Sample name with its labels, as in the exposition text, to its value."""


def scrape(admin: str) -> tuple[Numbers, Numbers]:
    """(counters, gauges) of the admin port at HOST:PORT. Raises OSError."""
    with urlopen(f"http://{admin}/metrics", timeout=10) as response:
        text = response.read().decode()
    counters: Numbers = {}
    gauges: Numbers = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name.endswith("_created"):
                continue
            labels = ",".join(f'{key}="{value}"' for key, value in sorted(sample.labels.items()))
            name = f"{sample.name}{{{labels}}}" if labels else sample.name
            (gauges if family.type == "gauge" else counters)[name] = sample.value
    return counters, gauges


class Window:
    """Scrapes in a thread of its own, from ``begin`` to ``end`` (``time.monotonic``)."""

    def __init__(self, admin: str, begin: float, end: float) -> None:
        self._admin, self._begin, self._end = admin, begin, end
        self._first: Numbers = {}
        self._last: Numbers = {}
        self._samples: defaultdict[str, list[float]] = defaultdict(list)
        self._taken: list[float] = []
        self._problem = ""
        self._thread = threading.Thread(target=self._run, name="metrics", daemon=True)
        self._thread.start()

    def finish(self) -> dict[str, object]:
        """``seconds`` between first and last scrape, ``counters`` (growth), ``gauges`` (mean and max), ``problem``."""
        self._thread.join(self._end - time.monotonic() + 15)
        grown = {name: value - self._first.get(name, 0.0) for name, value in self._last.items()}
        return {
            "seconds": self._taken[-1] - self._taken[0] if self._taken else 0.0,
            "counters": {name: value for name, value in grown.items() if value},
            "gauges": {
                name: {"mean": sum(values) / len(values), "max": max(values)}
                for name, values in self._samples.items()
            },
            "problem": self._problem,
        }

    def _run(self) -> None:
        time.sleep(max(0.0, self._begin - time.monotonic()))
        try:
            while time.monotonic() < self._end:
                self._sample()
                time.sleep(max(0.0, min(SAMPLE_S, self._end - time.monotonic())))
            self._sample()
        except (OSError, URLError, ValueError) as error:
            self._problem = f"{type(error).__name__}: {error}"

    def _sample(self) -> None:
        self._last, gauges = scrape(self._admin)
        self._first = self._first or self._last
        self._taken.append(time.monotonic())
        for name, value in gauges.items():
            self._samples[name].append(value)
