"""Debug switches and failpoints. The only module that reads Pensieve's environment variables.

``PENSIEVE_DEBUG=1`` switches debug logging on. ``PENSIEVE_FAILPOINTS`` arms named places in the code with a fault, for
tests of crash safety::

    PENSIEVE_FAILPOINTS="before_commit=crash,mid_decode@5=stall(2.5),in_renew=raise"

``name=action`` strikes at every hit, ``name@N=action`` at the N-th hit of this process only. Actions: ``crash``
(``os._exit(137)``, as after kill -9), ``stall(SECONDS)`` and ``raise`` (``FailpointError``). Unset, a failpoint costs
one truth test of an empty dict.
"""

from __future__ import annotations

import asyncio
import os
import re
import sys
import time
from dataclasses import dataclass
from typing import Final

FAILPOINTS: Final = frozenset(
    {
        "before_begin",
        "after_begin",
        "mid_decode",
        "before_commit",
        "after_commit_before_ack",
        "engine_mid_step",
        "in_renew",
    }
)
CRASH_STATUS: Final = 137
_FAILPOINTS_VARIABLE: Final = "PENSIEVE_FAILPOINTS"
_SPEC = re.compile(
    r"(?P<name>\w+)(?:@(?P<hit>[1-9]\d*))?=(?P<action>crash|raise|stall\((?P<seconds>\d+(?:\.\d+)?)\))"
)


class FailpointError(RuntimeError):
    """Raised by a failpoint with the action ``raise``."""


@dataclass(slots=True)
class _Fault:
    action: str
    seconds: float
    only_hit: int | None
    hits: int = 0

    def strikes(self) -> bool:
        self.hits += 1
        return self.only_hit is None or self.hits == self.only_hit


def _parse(spec: str) -> dict[str, _Fault]:
    faults: dict[str, _Fault] = {}
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        match = _SPEC.fullmatch(part)
        if match is None:
            raise ValueError(
                f"failpoint {part!r}: want name=crash, name=raise, name=stall(SECONDS) or name@N=..."
            )
        if match["name"] not in FAILPOINTS:
            raise ValueError(
                f"failpoint {match['name']!r} is unknown; there are {', '.join(sorted(FAILPOINTS))}"
            )
        faults[match["name"]] = _Fault(
            action=match["action"].partition("(")[0],
            seconds=float(match["seconds"] or 0),
            only_hit=int(match["hit"]) if match["hit"] else None,
        )
    return faults


_armed: dict[str, _Fault] = _parse(os.environ.get(_FAILPOINTS_VARIABLE, ""))


def arm(spec: str) -> None:
    """Replace the faults that are armed in this process; "" disarms all. Raises ValueError on a bad spec."""
    faults = _parse(spec)
    _armed.clear()
    _armed.update(faults)


def failpoint(name: str) -> None:
    """Strike here if armed. A stall blocks the thread, and with it an event loop: the process looks frozen."""
    if _armed:
        seconds = _strike(name)
        if seconds:
            time.sleep(seconds)


async def async_failpoint(name: str) -> None:
    """Like ``failpoint``, but a stall holds up only the calling task."""
    if _armed:
        seconds = _strike(name)
        if seconds:
            await asyncio.sleep(seconds)


def _strike(name: str) -> float:
    """Crash or raise if a fault is armed at ``name`` that says so; else returns the seconds to stall."""
    fault = _armed.get(name)
    if fault is None or not fault.strikes():
        return 0.0
    print(f"failpoint {name}: {fault.action} at hit {fault.hits}", file=sys.stderr, flush=True)
    if fault.action == "crash":
        os._exit(CRASH_STATUS)
    if fault.action == "raise":
        raise FailpointError(f"failpoint {name}")
    return fault.seconds


def debug_enabled() -> bool:
    """Whether ``PENSIEVE_DEBUG`` asks for debug logging."""
    return os.environ.get("PENSIEVE_DEBUG", "") not in ("", "0")


def child_environment(*, failpoints: bool = True) -> dict[str, str]:
    """The environment for a child that imports exactly what this process does, and nothing from its working directory.

    ``failpoints=False`` leaves the armed faults out: a process that is started again after a crash must not meet the
    fault that ended the one before, or no recovery could ever be seen.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if not failpoints:
        environment.pop(_FAILPOINTS_VARIABLE, None)
    return environment
