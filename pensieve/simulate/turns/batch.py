"""One replica of the ``turns`` engine: the rules of ``Scheduler`` over whole runs of steps.

Steps that only generate differ only in positions: every context grows by a token, and some need another
chunk. So the steps between two changes of the batch are one event: their times form an arithmetic series, and
the chunks that they take follow from the positions of the contexts in their last chunks.
"""

from __future__ import annotations

import heapq
import math
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Final

from pensieve.engine.cache.chunk import Range, Restore, take_front
from pensieve.engine.scheduling.scheduler import SWAP_OUT_QUANTUM
from pensieve.simulate.scenario.load import SessionScript, hints_of
from pensieve.simulate.scenario.policies import Stamp
from pensieve.simulate.scenario.settings import Settings
from pensieve.simulate.turns.cache import TurnCache


@dataclass(slots=True, eq=False)
class LiveTurn:
    """A session with a turn that is due, waiting or running. ``Batch`` writes the fields below ``replica``."""

    script: SessionScript
    index: int = 0
    history: int = 0
    arrived: float = 0.0
    prompt: int = field(init=False)
    """Tokens of history and input."""
    output: int = field(init=False)
    replica: int = 0
    ticket: int = 0
    visible_step: int = 0
    """First step whose plan can include the turn."""
    restore: Restore | None = None
    """Result of the first admission. Costs of a later suspension are not part of the receipt."""
    missing: deque[Range] = field(default_factory=deque)
    computed: int = 0
    """Cached tokens when generation last began or resumed."""
    begin_step: int = 0
    """The step in which generation last began or resumed."""
    end_step: int = 0
    """Number of completed steps at which the turn leaves; 0: it is not generating."""
    answer_tokens: int = 0
    """Answer tokens at the last suspension."""
    last_token: float = 0.0
    """Time of the last answer token before the last suspension."""
    first_token: float = 0.0

    def __post_init__(self) -> None:
        new, self.output = self.script.turns[self.index]
        self.prompt = self.history + new


_EVEN_FACTOR = 1.01


@dataclass(slots=True)  # not frozen, which is slow: one is made at each event
class StepSeries:
    """Steps of ``first``, ``first + rise``, ``first + 2 * rise``, … seconds; ``rise`` is less than ``first``."""

    first: float
    rise: float = 0.0

    def last_s(self, count: int) -> float:
        return self.first + (count - 1) * self.rise

    def total_s(self, count: int) -> float:
        return count * (self.first + self.rise * (count - 1) / 2)

    def steps_until(self, total: float, most: int) -> int:
        """Number of steps until their sum reaches ``total``: at least one, at most ``most``."""
        if self.total_s(most) <= total:
            return most
        linear = self.first - self.rise / 2
        count = 2 * total / (linear + math.sqrt(linear * linear + 2 * self.rise * max(total, 0.0)))
        return min(max(math.ceil(count), 1), most)

    def is_even(self, count: int) -> bool:
        return self.last_s(count) <= _EVEN_FACTOR * self.first

    def even_runs(self, count: int) -> Iterator[tuple[float, int, float]]:
        """Split ``count`` steps into runs of nearly equal ones: (mean seconds, steps, end of the last one)."""
        last = self.last_s(count)
        if self.is_even(count):
            yield (self.first + last) / 2, count, self.total_s(count)
            return
        runs = min(count, math.ceil(math.log(last / self.first) / math.log(_EVEN_FACTOR)))
        begin = 0
        for run in range(1, runs + 1):
            end = count * run // runs
            yield self.first + self.rise * (begin + end - 1) / 2, end - begin, self.total_s(end)
            begin = end


_UNLIMITED: Final = 1 << 60
_NEVER: Final = float("inf")
TurnEnd = tuple[LiveTurn, float]
"""A turn and the time of its last token. Its chunks are released one step later, when that token is cached too."""
OnGap = Callable[[float, int, float], None]
"""Called with (seconds, count, now): ``count`` tokens each arrived ``seconds`` after the previous one."""


class Batch:
    """Queue, running set and clock of one replica. ``stamp``: see ``simulate.scenario.policies``."""

    def __init__(self, settings: Settings, cache: TurnCache, stamp: Stamp, on_gap: OnGap) -> None:
        self.cache = cache
        self._stamp = stamp
        self._on_gap = on_gap
        self.now = 0.0
        """End of the latest step, or the arrival of the first turn after it."""
        self.next_step_s = _NEVER
        """Start of the next step: ``now``, or infinity without work."""
        self.suspensions = 0
        self._settings = settings
        self._machine = settings.machine
        self._max_tokens = settings.max_batch_tokens
        self._max_running = settings.max_running
        self._lag = int(settings.machine.overlapped)
        self._size = settings.cache.chunk_tokens
        self._step = 0
        self._latest = 0.0
        self._waiting: list[tuple[int, LiveTurn]] = []
        self._running: dict[int, LiveTurn] = {}
        self._restoring: list[LiveTurn] = []
        """Running turns with an incomplete context, in order of arrival."""
        self._ends: list[tuple[int, int, LiveTurn]] = []
        """A heap of (completed steps at its end, ticket, turn), one entry per generation.

        The entry of a suspended turn stays and is skipped later: its turn then has another ``end_step``.
        """
        self._generating = 0
        self._kv = 0
        """Context tokens that all generations together read in the next step."""
        self._growth = [0] * self._size
        """Number of generations that take a chunk, by the step number modulo ``chunk_tokens``, which stays the same."""

    @property
    def active_turns(self) -> int:
        return len(self._waiting) + len(self._running)

    def submit(self, turn: LiveTurn, ticket: int, now: float) -> None:
        if self._waiting or self._running:
            turn.visible_step = self._step + self._lag
        else:
            self.now, turn.visible_step = max(self.now, now), self._step
            self.next_step_s = self.now
        turn.ticket = ticket
        heapq.heappush(self._waiting, (ticket, turn))

    def run(self, until: float) -> list[TurnEnd]:
        """Run the next step and the similar steps after it, up to the first one that ends after ``until``."""
        ended: list[TurnEnd] = []
        grown = self._growth[self._step % self._size]
        if grown > self.cache.unpinned:
            ended = self._make_room()
            grown = self._growth[self._step % self._size]
        if grown:
            self.cache.grow(grown, self.now)
        work: list[tuple[LiveTurn, list[Range]]] = []
        if self._restoring or self._waiting:
            self._admit(work, self._prefill(work, self._max_tokens - self._generating))
        begin, rows = self.now, self._generating
        series: StepSeries | None = None
        steps = 1
        if work or self._restoring:
            self._mixed_step(work)
        elif rows:
            series, steps = self._decode_steps(until)
        leaving = self._leave() if self._ends and self._ends[0][0] <= self._step else []
        if rows and series is not None and not series.is_even(steps):
            self._report_gaps(begin, rows, series, steps, len(leaving))
        elif rows:  # equal to ``_report_gaps``, for the common case of few and nearly equal steps
            seconds = self._latest if series is None else (series.first + self._latest) / 2
            self._on_gap(seconds, rows * steps - len(leaving), self.now)
        ended += leaving
        if self._running or self._waiting:
            self.next_step_s = self.now
        else:
            self.next_step_s = _NEVER
            self.cache.save_ahead(self.now, self.cache.config.device_chunks)
            self.cache.complete()
        return ended

    def clear(self) -> tuple[list[LiveTurn], int]:
        """Lose all state: return the turns to restart, in order of arrival, and how many of them were running."""
        running = len(self._running)
        turns = [*self._running.values(), *(turn for _, turn in self._waiting)]
        for turn in turns:
            turn.restore, turn.answer_tokens, turn.end_step, turn.first_token = None, 0, 0, 0.0
            turn.missing.clear()
        for state in (self._waiting, self._running, self._restoring, self._ends):
            state.clear()
        self._generating = self._kv = 0
        self._growth = [0] * self._size
        self.next_step_s = _NEVER
        self.cache.clear()
        return sorted(turns, key=lambda turn: turn.ticket), running

    # -- the plan ----------------------------------------------------------------------------------------------------

    def _make_room(self) -> list[TurnEnd]:
        """Suspend the youngest turns until the others have enough device pages for their next tokens."""
        ended: list[TurnEnd] = []
        while self._growth[self._step % self._size] > self.cache.unpinned:
            youngest = self._running[max(self._running)]
            cached, made = youngest.computed, youngest.answer_tokens
            if youngest.end_step:
                self._stop_generating(youngest)
                cached += self._step - youngest.begin_step
                made += 1 + self._step - youngest.begin_step
            else:
                self._restoring.remove(youngest)
            self._release(youngest, cached)
            if made >= youngest.output:
                ended.append((youngest, self.now))
            else:
                self._suspend(youngest, made)
        return ended

    def _suspend(self, turn: LiveTurn, made: int) -> None:
        self.suspensions += 1
        self.cache.suspend(turn.script.number, self.now)
        turn.missing.clear()
        turn.answer_tokens, turn.last_token = made, self.now
        heapq.heappush(self._waiting, (turn.ticket, turn))

    def _release(self, turn: LiveTurn, cached: int) -> None:
        """Remove a turn from the running set; ``cached`` tokens of it are cached, except the missing ranges."""
        del self._running[turn.ticket]
        turns = turn.index + 1
        stamp = self._stamp(self.now, turn.script.due(turns, self.now), turns)
        hints = hints_of(self._settings, turn.script, turn.index, self.now)
        self.cache.release(turn.script.number, cached, stamp, turn.missing, hints)

    def _prefill(self, work: list[tuple[LiveTurn, list[Range]]], budget: int) -> int:
        """Choose ranges of running restores and prefills for the next step; return the remaining token budget."""
        for turn in self._restoring:
            if budget <= 0:
                break
            ranges = take_front(turn.missing, budget)
            for start, end in ranges:
                budget -= end - start
            work.append((turn, ranges))
        return budget

    def _admit(self, work: list[tuple[LiveTurn, list[Range]]], budget: int) -> None:
        """Admit turns in order of arrival; no turn overtakes the head of the queue."""
        cache = self.cache
        while self._waiting and budget > 0 and len(self._running) < self._max_running:
            turn = self._waiting[0][1]
            number, context = turn.script.number, turn.prompt + turn.answer_tokens
            others = bool(self._running)
            prefix = turn.script.prefix
            if (others and turn.visible_step > self._step) or not cache.can_admit(
                number, context, prefix, reserve=others
            ):
                return
            heapq.heappop(self._waiting)
            restore = cache.admit(
                number, context if turn.answer_tokens else turn.history, context, self.now, prefix
            )
            turn.restore = turn.restore or restore
            turn.missing.extend(restore.missing)
            turn.computed = context
            self._running[turn.ticket] = turn
            self._restoring.append(turn)
            ranges = take_front(turn.missing, budget)
            for start, end in ranges:
                budget -= end - start
            work.append((turn, ranges))

    # -- steps -------------------------------------------------------------------------------------------------------

    def _mixed_step(self, work: list[tuple[LiveTurn, list[Range]]]) -> None:
        """Run one step of all generations and of the chosen restores and prefills."""
        tokens, kv, pairs = self._generating, float(self._kv), 0.0
        for _, ranges in work:
            for start, end in ranges:
                tokens += end - start
                if end - start == 1:
                    kv += end
                else:
                    pairs += (end - start) * (start + end) / 2
        machine = self._machine
        rows = self._generating + len(work)
        compute = machine.step_seconds(tokens=tokens, rows=rows, kv_read=kv, pairs=pairs)
        loaded = self.cache.loading * self._size
        if not loaded:
            self.cache.save_ahead(self.now, SWAP_OUT_QUANTUM)
        self.cache.complete()
        self._kv += self._generating
        self._step += 1
        self._latest = machine.seconds_with_copy(compute, machine.copy_seconds(loaded * machine.kv_bytes))
        self.now += self._latest
        for turn, _ in work:
            if not turn.missing:
                self._restoring.remove(turn)
                self._generate(turn)

    def _decode_steps(self, until: float) -> tuple[StepSeries, int]:
        """Run steps as one event, until a turn must leave, the queue's head may be admitted, or ``until``."""
        rows, machine = self._generating, self._machine
        most = self._steps_to_an_end()
        if self._waiting:
            most = min(most, self._steps_to_admission())
        first = machine.step_seconds(tokens=rows, rows=rows, kv_read=self._kv, pairs=0)
        series = StepSeries(first, machine.kv_s * rows)
        steps = series.steps_until(until - self.now, most)
        # Pages for the first step were reserved when it was planned; the other steps need theirs too.
        while (grown := self._chunks_after_first(steps)) > self.cache.unpinned:
            steps -= 1
        self.cache.save_ahead(self.now, steps * SWAP_OUT_QUANTUM)
        self.cache.complete()
        if grown:
            self.cache.grow(grown, self.now)
            self.cache.complete()
        self._kv += steps * rows
        self._step += steps
        self._latest = series.last_s(steps)
        self.now += series.total_s(steps)
        return series, steps

    def _report_gaps(self, begin: float, rows: int, series: StepSeries, steps: int, leaving: int) -> None:
        """Report the gaps before the tokens of these steps: one per generation and step.

        The ``leaving`` generations that ended had none in the last step, which only cached their last token.
        """
        done = 0
        for seconds, count, end in series.even_runs(steps):
            done += count
            self._on_gap(seconds, rows * count - (leaving if done == steps else 0), begin + end)

    def _steps_to_admission(self) -> int:
        """Number of steps after which the queue's head may be admitted although no turn leaves."""
        head = self._waiting[0][1]
        # A session whose chunks are copied now waits a step; one without room waits until a turn leaves.
        copying = self.cache.is_copying(head.script.number, head.script.prefix)
        return 1 if copying else max(head.visible_step - self._step, 0) or _UNLIMITED

    def _chunks_after_first(self, steps: int) -> int:
        """Chunks that the generations take in the next ``steps`` steps, except in the first of these."""
        if steps == 1:
            return 0
        # In ``chunk_tokens`` steps each generation takes exactly one chunk, whatever its position.
        rounds, rest = divmod(steps - 1, self._size)
        # The remainder is a stretch of ``_growth``, which is a ring: it may wrap around.
        at = (self._step + 1) % self._size
        beyond = at + rest - self._size
        partial = sum(self._growth[at : at + rest]) + (sum(self._growth[:beyond]) if beyond > 0 else 0)
        return rounds * self._generating + partial

    # -- generations -------------------------------------------------------------------------------------------------

    def _generate(self, turn: LiveTurn) -> None:
        """Start generating: the step that just ended completed the context and made the first answer token."""
        turn.first_token = turn.first_token or self.now
        if turn.answer_tokens:
            self._on_gap(self.now - turn.last_token, 1, self.now)
        turn.begin_step = self._step
        turn.end_step = self._step + turn.output - turn.answer_tokens
        heapq.heappush(self._ends, (turn.end_step, turn.ticket, turn))
        self._generating += 1
        self._kv += turn.computed + 1
        self._growth[(turn.begin_step - turn.computed) % self._size] += 1

    def _stop_generating(self, turn: LiveTurn) -> None:
        turn.end_step = 0  # invalidates its entry in ``_ends``
        self._generating -= 1
        self._kv -= turn.computed + self._step - turn.begin_step + 1
        self._growth[(turn.begin_step - turn.computed) % self._size] -= 1

    def _steps_to_an_end(self) -> int:
        while self._ends[0][2].end_step != self._ends[0][0]:  # suspended since
            heapq.heappop(self._ends)
        return self._ends[0][0] - self._step

    def _leave(self) -> list[TurnEnd]:
        """Remove the generations whose last token is now cached."""
        ended: list[TurnEnd] = []
        while self._ends and self._ends[0][0] <= self._step:
            ends, _, turn = heapq.heappop(self._ends)
            if turn.end_step != ends:
                continue
            self._stop_generating(turn)
            self._release(turn, turn.prompt + turn.output)
            ended.append((turn, self.now - self._latest))
        return ended
