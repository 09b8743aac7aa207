"""Matchers: one per answer that follows a grammar. Masks are computed on threads while the engine goes on.

When the engine learns output tokens it calls ``push`` for each and then ``start``; a thread advances the matchers and
computes the masks of the next tokens. Before the engine chooses those it calls ``collect``, which waits only briefly:
an answer whose mask is late gets no token in that step, and the others do not wait for it.

A mask takes some ten microseconds, but a grammar can make it take a thousand times as long, and building lexer states
in the middle of an answer takes tens of milliseconds. So there are three lanes, of which each has a thread:

* together: the answers whose masks are known to be quick, all in one call of the library;
* trial: the first masks of an answer, and those of a call that took too long, one by one. Their time is measured;
* slow: answers whose latest mask was slow. It yields to the steps on a busy machine.

Slow answers delay neither the masks of others nor a step, since ``is_expected`` says no until their mask is there.
After ``SLOWEST_MASKS`` masks of more than ``LONGEST_MASK_S`` an answer fails. Times are those that the library's thread
computed, so an answer does not pay for a busy machine.

The library keeps the interpreter's lock while it serves one matcher, and releases it for two or more. So a matcher
that is advanced alone has company: an idle one.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Final

import numpy as np

from pensieve.core import RequestKey
from pensieve.engine.grammar.prototypes import Prototype, first_line
from pensieve.engine.plan import TokenMask

if TYPE_CHECKING:
    from llguidance import LLExecutor, LLMatcher

PATIENCE_S: Final = 0.001
"""A step waits at least this long for masks: ordinary ones are there by then."""
MOST_PATIENCE_S: Final = 0.01
PATIENCE_ALONE_S: Final = 0.05
"""Longest wait if no token of the step can be chosen yet."""
SLOW_S: Final = 0.005
"""A mask that took longer was slow. In long bounded strings (``maxLength``) masks take 1 to 3 ms."""
USUAL_S: Final = 0.0001
"""Time that an answer may add to a call for several."""
TRIALS: Final = 2
"""Masks of a new answer that are measured."""
LONGEST_MASK_S: Final = 0.05
SLOWEST_MASKS: Final = 3
NICENESS: Final = 5
"""Lowers the priority of the slow lane: on a busy machine the steps of the model go first."""


@dataclass(slots=True, eq=False)
class _Row:
    """One answer. After ``start`` the lane's thread alone writes ``matcher``, ``idle``, ``mask``, ``seconds``,
    ``long_masks``, ``trials`` and ``problem``, and last ``ready``. The engine's thread writes the rest."""

    prototype: Prototype
    matcher: LLMatcher | None = None
    """Copied from the prototype for the second token: a queue of requests needs few."""
    idle: LLMatcher | None = None
    """Keeps ``matcher`` company."""
    mask: TokenMask = field(init=False)
    seconds: float = 0.0
    """Time of the latest mask that was measured."""
    long_masks: int = 0
    trials: int = TRIALS
    """Masks to measure before the answer is known to be quick."""
    problem: str = ""
    """Why no mask can be computed any more, in one line."""
    ready: int = 0
    """Number of output tokens before the one that ``mask`` is for."""
    tokens: list[int] = field(default_factory=list)
    """Output tokens pushed so far."""
    late: bool = False
    """The mask being computed was not there when it was wanted."""

    def __post_init__(self) -> None:
        self.mask = self.prototype.mask

    @property
    def is_ready(self) -> bool:
        return self.ready == len(self.tokens)

    @property
    def is_slow(self) -> bool:
        return self.seconds > SLOW_S

    def advance(self, executor: LLExecutor, clock: Callable[[], float]) -> None:
        """Advance by the latest token and compute the next mask, alone. ``clock`` gives the executor's CPU seconds."""
        started = clock()
        try:
            self.problem = self._advance(executor)
        except BaseException as error:  # a panic of the library is no Exception; the thread must go on
            self.problem = f"the matcher failed ({type(error).__name__})"
        self.seconds = clock() - started
        self.trials = max(0, self.trials - 1)
        if self.seconds > LONGEST_MASK_S:
            self.long_masks += 1
        if self.long_masks >= SLOWEST_MASKS and not self.problem:
            self.problem = f"{self.long_masks} tokens took more than {1000 * LONGEST_MASK_S:.0f} ms each"
        self.ready = len(self.tokens)

    def _advance(self, executor: LLExecutor) -> str:
        """Return why it cannot be done, or ""."""
        tokens = self.tokens[-1:]
        if self.matcher is None or self.idle is None:
            self.matcher, self.idle = self.prototype.matcher.deep_copy(), self.prototype.idle.deep_copy()
            tokens = self.tokens
        for token in tokens:
            executor.consume_token_par([(self.matcher, token), (self.idle, token)])
        if not self.matcher.is_error():
            masks = np.empty((2, len(self.mask)), np.int32)
            _compute(executor, [self.matcher, self.idle], masks)
            self.mask = masks[0]
        return _problem(self.matcher)


def _compute(executor: LLExecutor, matchers: list[LLMatcher], masks: np.ndarray) -> None:
    pairs = [(matcher, at) for at, matcher in enumerate(matchers)]
    executor.unsafe_compute_mask_ptr(pairs, masks.ctypes.data, masks.strides[0], len(pairs))


def _problem(matcher: LLMatcher) -> str:
    return first_line(matcher.get_error()) if matcher.is_error() else ""


def _advance_together(executor: LLExecutor, rows: list[_Row]) -> None:
    """Advance several rows by their latest tokens and compute their masks. An exception leaves their matchers in an
    unknown state."""
    matchers = [row.matcher for row in rows if row.matcher is not None]
    assert len(matchers) == len(rows)
    started = time.perf_counter()
    executor.consume_token_par(
        [(matcher, row.tokens[-1]) for matcher, row in zip(matchers, rows, strict=True)]
    )
    masks = np.empty((len(rows), len(rows[0].mask)), np.int32)
    _compute(executor, matchers, masks)
    took_long = time.perf_counter() - started > SLOW_S + USUAL_S * len(rows)
    for row, matcher, mask in zip(rows, matchers, masks, strict=True):
        row.mask, row.problem, row.trials = mask, _problem(matcher), int(took_long)
        row.ready = len(row.tokens)


def _measured_executor(name: str) -> tuple[LLExecutor, Callable[[], float]]:
    """Return an executor of one thread, and a clock of that thread's CPU seconds (of elapsed time outside Linux).

    The calling thread is given ``name``, which must be unique in the process: a new thread inherits it.
    """
    from llguidance import LLExecutor

    if sys.platform != "linux":
        return LLExecutor(1), time.perf_counter
    Path("/proc/thread-self/comm").write_text(name)
    executor, own = LLExecutor(1), threading.get_native_id()
    named = [
        int(path.parent.name)
        for path in Path("/proc/self/task").glob("*/comm")
        if path.read_text() == f"{name}\n"
    ]
    (thread,) = [number for number in named if number != own]
    clock = ~thread << 3 | 6  # as pthread_getcpuclockid makes it: bits for a thread and for CPU time
    return executor, lambda: time.clock_gettime(clock)


class Matchers:
    """The matchers of one engine, by request. The engine's thread owns it."""

    def __init__(self, threads: int) -> None:
        """``threads``: threads of the library for the masks of quick answers."""
        self.late_masks = 0
        """Masks that were not there when a step wanted them, so that their answers sat it out."""
        self._rows: dict[RequestKey, _Row] = {}
        self._done: SimpleQueue[list[_Row]] = SimpleQueue()
        """Rows whose mask is complete, for ``collect`` to wake up."""
        self._pushed: list[_Row] = []
        """Quick rows of this step."""
        self._together: SimpleQueue[list[_Row] | None] = SimpleQueue()
        self._trial: SimpleQueue[_Row | None] = SimpleQueue()
        self._slow: SimpleQueue[_Row | None] = SimpleQueue()
        self._num_threads = threads
        self._threads: list[threading.Thread] = []

    def begin(self, key: RequestKey, prototype: Prototype) -> None:
        """Begin the answer of a request."""
        if not self._threads:
            works = (self._work_together, self._work_on_trials, self._work_on_slow_rows)
            self._threads = [threading.Thread(target=work, name="masks", daemon=True) for work in works]
            for thread in self._threads:
                thread.start()
        self._rows[key] = _Row(prototype)

    def push(self, key: RequestKey, token: int) -> None:
        """Take in an output token that is not the last; ``start`` must follow. No effect for a request without a
        grammar."""
        row = self._rows.get(key)
        if row is not None:
            assert row.is_ready, f"request {key}: a token was chosen without its mask"
            row.tokens.append(token)
            row.late = False
            if row.is_slow:
                self._slow.put(row)
            elif row.trials:
                self._trial.put(row)
            else:
                self._pushed.append(row)

    def start(self) -> None:
        """Compute the masks after the tokens pushed."""
        if self._pushed:
            self._together.put(self._pushed)
            self._pushed = []

    def drop(self, key: RequestKey) -> None:
        """Forget a request that has ended, if it had a grammar."""
        self._rows.pop(key, None)

    def is_expected(self, key: RequestKey, output_index: int) -> bool:
        """Whether the mask for output ``output_index`` is there, or should be when it is wanted. True for a request
        that needs none any more."""
        row = self._rows.get(key)
        if row is None or row.ready == output_index:
            return True
        if row.is_slow:
            self._note_if_late(row)
        return not (row.late or row.is_slow)

    def collect(
        self, keys: Collection[RequestKey], *, tokens: int, step_s: float
    ) -> dict[RequestKey, TokenMask]:
        """Return the masks for the next token of these requests, as far as they are ready in time; read only.

        ``tokens`` is the number of tokens that the step chooses, ``step_s`` about how long a step takes. To wait costs
        every token that time; not to wait costs the missing ones a step. So it waits for that share of a step.
        """
        while not self._done.empty():
            self._done.get_nowait()
        rows = {key: self._rows[key] for key in keys if key in self._rows}
        awaited = {row for row in rows.values() if not row.is_ready}
        started = time.monotonic()
        while awaited:
            share = step_s * len(awaited) / tokens
            alone = len(awaited) == tokens
            patience = PATIENCE_ALONE_S if alone else min(max(share, PATIENCE_S), MOST_PATIENCE_S)
            try:
                done = self._done.get(timeout=max(0.0, started + patience - time.monotonic()))
            except Empty:
                break
            awaited.difference_update(row for row in done if row.is_ready)
        for row in awaited:
            self._note_if_late(row)
        return {key: row.mask for key, row in rows.items() if row.is_ready and not row.problem}

    def problems(self) -> list[tuple[RequestKey, str]]:
        """Return the requests that cannot go on, and why."""
        return [(key, row.problem) for key, row in self._rows.items() if row.problem and row.is_ready]

    def close(self) -> None:
        """Stop the threads after the masks that they compute."""
        for lane in (self._together, self._trial, self._slow):
            lane.put(None)
        for thread in self._threads:
            thread.join()

    def _note_if_late(self, row: _Row) -> None:
        if not row.late and not row.is_ready:
            row.late = True
            self.late_masks += 1

    def _work_together(self) -> None:
        from llguidance import LLExecutor

        executor = LLExecutor(self._num_threads)
        while (rows := self._together.get()) is not None:
            try:
                _advance_together(executor, rows)
            except (
                BaseException
            ):  # a panic of the library is no Exception; alone, the answer that causes it fails
                for row in rows:
                    row.matcher, row.trials = None, TRIALS
                    self._trial.put(row)
            else:
                self._done.put(rows)

    def _work_on_trials(self) -> None:
        self._work_alone(self._trial, "masks-trial")

    def _work_on_slow_rows(self) -> None:
        # Elsewhere than on Linux this is the priority of the whole process.
        if sys.platform == "linux":
            os.nice(NICENESS)
        self._work_alone(self._slow, "masks-slow")

    def _work_alone(self, lane: SimpleQueue[_Row | None], name: str) -> None:
        executor, clock = _measured_executor(f"{name}-{id(self) % 1000}")
        while (row := lane.get()) is not None:
            row.advance(executor, clock)
            self._done.put([row])
