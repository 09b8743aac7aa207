"""Figures, times and foreign words as a terminal shows them."""

from __future__ import annotations

from collections.abc import Mapping

from pensieve.cli.untrusted import clean

_DAY_S = 86_400.0


def count(number: float) -> str:
    """At most seven characters: ``999``, ``12,345``, ``1.2M``."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}G"
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    if number >= 100 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.1f}"


def seconds(duration_s: float) -> str:
    """A latency: ``8.4 ms``, ``120 ms``, ``2.4 s``."""
    if duration_s < 1.0:
        milliseconds = duration_s * 1e3
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    return f"{duration_s:.1f} s" if duration_s < 100 else f"{duration_s:.0f} s"


def age(duration_s: float) -> str:
    """A long time in its largest unit: ``12s``, ``5m``, ``3h``, ``9d``."""
    for length, unit in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "m")):
        if duration_s >= length:
            return f"{duration_s / length:.0f}{unit}"
    return f"{max(duration_s, 0.0):.0f}s"


def share(part: float, whole: float) -> str:
    """``62 %``; what is little and not nothing is ``<1 %``."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def bytes_of(number: float) -> str:
    """``1.5 MB``."""
    for length, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= length:
            return f"{number / length:.1f} {unit}"
    return f"{number:.0f} B"


def labels(some: Mapping[str, str]) -> str:
    """``k=v k2=v2``."""
    return clean(" ".join(f"{key}={value}" for key, value in sorted(some.items())), lines=False)
