"""Shows a running replay on the terminal: turns done and running, tokens per second, errors, time left."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TaskID,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from pensieve.replay.play.runner import ReplayWatcher, RunWatcher
from pensieve.replay.records import TurnRecord

_RECENT_S = 10.0
"""Averaging time of tokens per second, by the ends of turns."""


class LiveProgress(ReplayWatcher):
    """A context manager with a line for each run, and for each server while it starts.

    Silent if the console is not a terminal.
    """

    def __init__(self, console: Console, *, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self.progress = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[running]}"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[errors]}", style="red"),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self.progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.progress.stop()

    @contextmanager
    def starting(self, target: str) -> Iterator[None]:
        task = self.progress.add_task(f"{target} is starting", total=None, running="", speed="", errors="")
        try:
            yield
        finally:
            self.progress.remove_task(task)

    def run(self, target: str, turns: int) -> RunLine:
        return RunLine(self.progress, target, turns, self._clock)


class RunLine(RunWatcher):
    def __init__(self, progress: Progress, name: str, turns: int, clock: Callable[[], float]) -> None:
        self._progress, self._clock = progress, clock
        self._recent: deque[tuple[float, int]] = deque()
        self._sent = self._ended = self._unsent = self._errors = 0
        self._start = clock()
        self._task: TaskID = progress.add_task(name, total=turns, running="", speed="", errors="")

    def on_send(self) -> None:
        self._sent += 1
        self._show()

    def on_turn_end(self, record: TurnRecord) -> None:
        now = self._clock()
        self._ended += 1
        self._unsent += not record.sent_s  # its conversation could not be opened
        self._errors += bool(record.error)
        self._recent.append((now, record.output_tokens))
        while self._recent[0][0] < now - _RECENT_S:
            self._recent.popleft()
        self._progress.advance(self._task)
        self._show()

    def _show(self) -> None:
        span = min(_RECENT_S, self._clock() - self._start)
        speed = sum(tokens for _, tokens in self._recent) / span if span > 0 else 0.0
        self._progress.update(
            self._task,
            running=f"{self._sent - self._ended + self._unsent} running",
            speed=f"{speed:,.0f} tok/s",
            errors=f"{self._errors} errors" if self._errors else "",
        )
