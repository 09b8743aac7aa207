"""The buffer between an engine and the streams of a turn: the turn's output so far.

The engine's events write it; any number of streams read it, each at its own speed. A stream holds an index
into each candidate's output, never a copy. A slow stream costs nothing, and gets what it missed in one delta.
"""

from __future__ import annotations

import asyncio
import copy
import itertools
from collections.abc import Iterable, Sequence

from pensieve.core import TokenLogprob
from pensieve.errors import PensieveError
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, Delta, ProgressView, TurnView


class TurnBuffer:
    """Written by one turn and read by its streams, all on one event loop."""

    def __init__(self) -> None:
        self.accepted: Accepted | None = None
        self.outputs: tuple[OutputText, ...] = ()
        """One per candidate; set together with ``accepted``."""
        self.progress = ProgressView()
        self.progress_count = 0
        self._outcome: TurnView | PensieveError | None = None
        self._waiting: dict[asyncio.Future[bool], float] = {}
        """Futures of ``wait_for_change`` and their deadlines."""
        self._alarm: asyncio.TimerHandle | None = None
        """Fires at or before the first deadline. One timer for all waits: one per token would cost more."""
        self._waiting_for_end: set[asyncio.Future[bool]] = set()

    # ---- written by the turn

    def accept(self, accepted: Accepted, *outputs: OutputText) -> None:
        """The turn runs: streams read ``outputs``, one per candidate, while they grow."""
        self.accepted, self.outputs = accepted, outputs
        self._wake()

    def take(self, candidate: int, tokens: Iterable[int], logprobs: Iterable[TokenLogprob]) -> OutputText:
        """Append tokens to a candidate's output, with log-probabilities for each or for none; return the output."""
        output = self.outputs[candidate]
        for token, score in itertools.zip_longest(tokens, logprobs):
            output.push(token, score)
        self._wake()
        return output

    def report(self, progress: ProgressView) -> None:
        self.progress = progress
        self.progress_count += 1
        self._wake()

    def end(self, outcome: TurnView | PensieveError) -> None:
        """Set the outcome. Nothing is written afterwards."""
        self._outcome = outcome
        self._wake()
        for end in self._waiting_for_end:
            _set(end, True)
        if self._alarm is not None:
            self._alarm.cancel()

    # ---- read by streams

    @property
    def ended(self) -> bool:
        return self._outcome is not None

    def next_candidate(self, sent: Sequence[int], last: int) -> int | None:
        """The next candidate after ``last`` of which a stream has ``sent`` fewer tokens than are ready; None
        if there is none."""
        outputs = self.outputs
        if len(outputs) == 1:  # nearly all turns; called twice per delta
            return 0 if outputs[0].ready > sent[0] else None
        for step in range(last + 1, last + 1 + len(outputs)):
            candidate = step % len(outputs)
            if outputs[candidate].ready > sent[candidate]:
                return candidate
        return None

    def result(self) -> TurnView:
        if isinstance(self._outcome, PensieveError):
            # A copy for each caller: one exception raised in many tasks would chain their tracebacks.
            raise copy.copy(self._outcome)
        assert self._outcome is not None
        return self._outcome

    def delta(self, candidate: int, start: int, limit: int | None, *, scores: bool = False) -> Delta:
        """The next delta of a stream that has sent ``start`` tokens. ``scores``: include log-probabilities,
        if any."""
        output = self.outputs[candidate]
        end = output.slice(start, limit)
        return Delta(
            start,
            tuple(output.tokens[start:end]),
            "".join(output.pieces[start:end]),
            output.scores(start, end) if scores else (),
            candidate,
        )

    async def wait_for_change(self, timeout_s: float) -> bool:
        """Wait for the next write; False when none came in time."""
        loop = asyncio.get_running_loop()
        change: asyncio.Future[bool] = loop.create_future()
        deadline = self._waiting[change] = loop.time() + timeout_s
        if self._alarm is None or self._alarm.when() > deadline:
            self._set_alarm(deadline)
        try:
            return await change
        finally:
            self._waiting.pop(change, None)

    async def ends_within(self, timeout_s: float) -> bool:
        """Wait for the end, ignoring other writes; False when it did not come in time."""
        if self.ended:
            return True
        loop = asyncio.get_running_loop()
        end: asyncio.Future[bool] = loop.create_future()
        late = loop.call_later(timeout_s, _set, end, False)
        self._waiting_for_end.add(end)
        try:
            return await end
        finally:
            late.cancel()
            self._waiting_for_end.discard(end)

    async def wait_for_end(self) -> None:
        while not await self.ends_within(3600.0):
            continue

    async def outcome(self) -> TurnView:
        await self.wait_for_end()
        return self.result()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, {}
        for change in waiting:
            _set(change, True)

    def _set_alarm(self, deadline: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm = asyncio.get_running_loop().call_at(deadline, self._late, deadline)

    def _late(self, deadline: float) -> None:
        """End the waits that are due, and set the alarm for the next one."""
        self._alarm = None
        for change in [change for change, until in self._waiting.items() if until <= deadline]:
            del self._waiting[change]
            _set(change, False)
        if self._waiting:
            self._set_alarm(min(self._waiting.values()))


def _set(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
