"""Debug switches and failpoints. The only module that reads Pensieve's environment variables.

``PENSIEVE_DEBUG=1`` enables debug logging. ``PENSIEVE_FAILPOINTS`` arms named places in the code with a fault, for
tests of crash safety::

    PENSIEVE_FAILPOINTS="before_commit=crash,mid_decode@5=stall(2.5),in_renew=raise"

``name=action`` triggers at every hit, ``name@N=action`` only at the N-th hit in this process. Actions: ``crash``
(``os._exit(137)``, as after kill -9), ``stall(SECONDS)`` and ``raise`` (``FailpointError``). An unarmed failpoint
costs one truth test of an empty dict.
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
        "before_compaction_fork",
        "before_compaction_commit",
        "after_compaction_commit",
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

    def triggers(self) -> bool:
        self.hits += 1
        return self.only_hit is None or self.hits == self.only_hit


def _parse(spec: str) -> dict[str, _Fault]:
    faults: dict[str, _Fault] = {}
    for part in filter(None, (piece.strip() for piece in spec.split(","))):
        match = _SPEC.fullmatch(part)
        if match is None:
            raise ValueError(
                f"failpoint {part!r}: must be name=crash, name=raise, name=stall(SECONDS) or name@N=..."
            )
        if match["name"] not in FAILPOINTS:
            raise ValueError(
                f"failpoint {match['name']!r} is unknown; known are {', '.join(sorted(FAILPOINTS))}"
            )
        faults[match["name"]] = _Fault(
            action=match["action"].partition("(")[0],
            seconds=float(match["seconds"] or 0),
            only_hit=int(match["hit"]) if match["hit"] else None,
        )
    return faults


_armed: dict[str, _Fault] = _parse(os.environ.get(_FAILPOINTS_VARIABLE, ""))


def arm(spec: str) -> None:
    """Replace the faults armed in this process; "" disarms all. Raises ValueError on an invalid spec."""
    faults = _parse(spec)
    _armed.clear()
    _armed.update(faults)


def failpoint(name: str) -> None:
    """Trigger the fault if armed. A stall blocks the thread, and with it an event loop: the process looks frozen."""
    if _armed:
        seconds = _trigger(name)
        if seconds:
            time.sleep(seconds)


async def async_failpoint(name: str) -> None:
    """Like ``failpoint``, but a stall blocks only the calling task."""
    if _armed:
        seconds = _trigger(name)
        if seconds:
            await asyncio.sleep(seconds)


def _trigger(name: str) -> float:
    """Crash or raise if such a fault triggers at ``name``; else return the seconds to stall."""
    fault = _armed.get(name)
    if fault is None or not fault.triggers():
        return 0.0
    print(f"failpoint {name}: {fault.action} at hit {fault.hits}", file=sys.stderr, flush=True)
    if fault.action == "crash":
        os._exit(CRASH_STATUS)
    if fault.action == "raise":
        raise FailpointError(f"failpoint {name}")
    return fault.seconds


def debug_enabled() -> bool:
    return os.environ.get("PENSIEVE_DEBUG", "") not in ("", "0")


def child_environment(*, failpoints: bool = True) -> dict[str, str]:
    """Return the environment for a child that imports the same modules, and none from its working directory.

    ``failpoints=False`` omits the armed faults: a process restarted after a crash must not hit the same fault again.
    """
    environment = dict(os.environ)
    environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
    if not failpoints:
        environment.pop(_FAILPOINTS_VARIABLE, None)
    return environment
