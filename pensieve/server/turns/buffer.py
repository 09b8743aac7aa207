"""The one buffer between an engine and the streams of a turn: what the turn has produced so far.

It is written as the engine's events are dealt out and read by any number of streams, each at its own speed. A stream
holds an index into each candidate's output, never a copy: one that has fallen behind costs nothing, and gets what it
missed in one delta.
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
        """Grows with each change of ``progress``."""
        self._outcome: TurnView | PensieveError | None = None
        self._waiting: dict[asyncio.Future[bool], float] = {}
        """The futures of those that wait for a change, and until when they do."""
        self._alarm: asyncio.TimerHandle | None = None
        """Due no later than the first of these times. One for all waits: a timer per token would be the larger cost."""
        self._waiting_for_end: set[asyncio.Future[bool]] = set()

    # ---- the turn writes

    def accept(self, accepted: Accepted, *outputs: OutputText) -> None:
        """The turn runs; ``outputs``, one per candidate, are read from here on, also while they grow."""
        self.accepted, self.outputs = accepted, outputs
        self._wake()

    def take(self, candidate: int, tokens: Iterable[int], logprobs: Iterable[TokenLogprob]) -> OutputText:
        """Append output tokens of a candidate, each with its log-probabilities or none with any; returns its output."""
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
        """The turn is over. Nothing is written afterwards."""
        self._outcome = outcome
        self._wake()
        for end in self._waiting_for_end:
            _set(end, True)
        if self._alarm is not None:
            self._alarm.cancel()

    # ---- streams read

    @property
    def ended(self) -> bool:
        return self._outcome is not None

    def next_candidate(self, sent: Sequence[int], last: int) -> int | None:
        """The candidate that a stream is to go on with: the next in turn after ``last`` that has something to show.

        ``sent``: how many tokens of each the stream has sent. None: it has sent all there is.
        """
        outputs = self.outputs
        if len(outputs) == 1:  # nearly all turns, asked twice for each delta
            return 0 if outputs[0].ready > sent[0] else None
        for step in range(last + 1, last + 1 + len(outputs)):
            candidate = step % len(outputs)
            if outputs[candidate].ready > sent[candidate]:
                return candidate
        return None

    def result(self) -> TurnView:
        """The turn as it ended. Raises the error it ended with."""
        if isinstance(self._outcome, PensieveError):
            # A copy for each caller: one exception object raised in many tasks would chain their tracebacks.
            raise copy.copy(self._outcome)
        assert self._outcome is not None
        return self._outcome

    def delta(self, candidate: int, start: int, limit: int | None, *, scores: bool = False) -> Delta:
        """The next delta of a stream that has sent ``start`` tokens of a candidate, which has more to show.

        ``scores``: with log-probabilities, if the turn has them.
        """
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
        """Wait for the end, whatever is written meanwhile; False when it did not come in time."""
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
        """Wait for the end. Raises the error the turn ended with."""
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
        """The alarm's time has come: end the waits that were to last until then, and see who is next."""
        self._alarm = None
        for change in [change for change, until in self._waiting.items() if until <= deadline]:
            del self._waiting[change]
            _set(change, False)
        if self._waiting:
            self._set_alarm(min(self._waiting.values()))


def _set(future: asyncio.Future[bool], value: bool) -> None:
    if not future.done():
        future.set_result(value)
