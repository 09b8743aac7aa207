"""Plays scripts against a target: turns of a conversation in sequence, conversations side by side.

A ``Player`` runs in its own process and event loop. ``replay`` uses one player; ``player_pool`` uses several
processes with one each. Both return the same ``Outcome``.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import numpy as np

from pensieve.core import Hints
from pensieve.replay.load.schedule import Script
from pensieve.replay.records import Outcome, PlayResult, RunOptions, TurnRecord, merge_results
from pensieve.replay.targets.base import SupportsWarm, Target, TargetInfo, TurnFailed, TurnRequest

_STREAM = 1
"""Number of the random stream, different from the stream of input ids."""
_TICK_S = 0.02
_MAX_DELETIONS = 32
_MAX_HISTORIES = 16
"""Histories that a process sends at the same time: few, so that they are computed nearly in order."""
OnTurn = Callable[[TurnRecord], None]
OnSend = Callable[[], None]


def hint_of(script: Script, place: int, now_s: float, *, noise: float, seed: int) -> Hints:
    """Hints of the turn at ``place`` in the script, which is sent at ``now_s`` of the replay.

    The coming pause is multiplied by a lognormal factor with median 1 and sigma ``noise``; with 0 it is
    exact. With recorded times the pause counts from now, because the duration of the answer is not known yet.
    """
    if place + 1 == len(script.due):
        return Hints(finished=True)
    due = script.due[place + 1]
    pause = max(due.after_answer_s, due.at_s - now_s)
    generator = np.random.default_rng([seed, script.number, script.first_turn + place, 0, _STREAM])
    return Hints(next_turn_s=pause * math.exp(noise * generator.standard_normal()))


class RunWatcher:
    """Watches one run against one target; this one does nothing."""

    def on_send(self) -> None:
        """Called when a turn is sent. Every sent turn completes, fails, or is cut short."""

    def on_turn_end(self, record: TurnRecord) -> None:
        """Called when a turn has ended. It was never sent if its conversation could not be opened."""


class ReplayWatcher:
    """Watches a whole replay; this one does nothing."""

    def starting(self, target: str) -> AbstractContextManager[None]:
        return nullcontext()

    def run(self, target: str, turns: int) -> RunWatcher:
        return RunWatcher()


@dataclass(slots=True)
class _LiveConversation:
    script: Script
    place: int = 0
    opening: asyncio.Task[str] | None = None
    failed: bool = False

    def record(self, due_s: float) -> TurnRecord:
        script = self.script
        wanted = script.conversation.turns[self.place].input_tokens
        return TurnRecord(script.number, script.first_turn + self.place, wanted, due_s)


class Player:
    """Plays conversations in this process. ``on_turn`` gets each ended turn, in order."""

    def __init__(
        self, target: Target, info: TargetInfo, options: RunOptions, on_turn: OnTurn, on_send: OnSend
    ) -> None:
        self._target, self._info, self._options = target, info, options
        self._on_turn, self._on_send = on_turn, on_send
        self._start = 0.0
        self._openings: list[asyncio.Task[str]] = []
        """One per requested session, including those of conversations that were then cut short."""
        self._prepared: dict[int, _LiveConversation] = {}
        """Conversations whose histories ``prepare`` has played, by script number."""
        self._cut_short: list[TurnRecord] = []
        self._skipped = 0
        self._warming: set[asyncio.Task[None]] = set()
        self._warm_calls: Counter[str] = Counter()

    async def prepare(self, scripts: Sequence[Script]) -> None:
        """Play the histories before time 0, a few at a time, in order of their last activity.

        These turns end at 0: the times of each count from its own end.
        """
        gate = asyncio.Semaphore(_MAX_HISTORIES)
        self._start = time.perf_counter()

        async def play(conversation: _LiveConversation) -> None:
            try:
                record = conversation.record(0.0)
                await self._turn(conversation, record)
            finally:
                gate.release()
            record.end_at_zero(self._now())
            self._on_turn(record)

        with_history = [script for script in scripts if script.has_history]
        async with asyncio.TaskGroup() as group:
            for script in sorted(with_history, key=lambda script: script.due[0].at_s):
                self._prepared[script.number] = conversation = _LiveConversation(script)
                await gate.acquire()
                group.create_task(play(conversation))

    async def play(self, scripts: Sequence[Script], start: float) -> PlayResult:
        """Play ``scripts``, in order of their starts, until all have ended or the replay must stop.

        ``prepare`` has played their histories. ``start`` is time 0 on the clock of ``time.perf_counter``,
        which all processes share.
        """
        self._start = start
        lags: list[float] = []
        watch = asyncio.create_task(_watch_loop(lags))
        stop_s = self._options.stop_s
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout_at(None if stop_s is None else loop.time() + stop_s - self._now()):
                await self._play_all(scripts)
        except TimeoutError:
            assert stop_s is not None
        finally:
            for task in (watch, *self._warming):
                task.cancel()
            # `_watch_loop` records a last time.
            await asyncio.gather(watch, *self._warming, return_exceptions=True)
        warmed = dict(self._warm_calls)
        return PlayResult(self._now(), self._skipped, tuple(self._cut_short), tuple(lags), warmed)

    async def end_sessions(self) -> str:
        """Delete the opened sessions; return why one could not be deleted, or an empty string."""
        gate = asyncio.Semaphore(_MAX_DELETIONS)

        async def end(opening: asyncio.Task[str]) -> str:
            try:
                session = await opening
            except TurnFailed:
                return ""  # there is nothing to delete
            try:
                async with gate:
                    await self._target.end_session(session)
            except TurnFailed as failure:  # this must not lose the measurement
                return str(failure)
            return ""

        reasons = await asyncio.gather(*map(end, self._openings))
        return next(filter(None, reasons), "")

    async def _play_all(self, scripts: Sequence[Script]) -> None:
        gate = asyncio.Semaphore(self._options.concurrency or len(scripts) or 1)

        async def play(script: Script, free_s: float) -> None:
            try:
                await self._play_conversation(
                    self._prepared.get(script.number) or _LiveConversation(script), free_s
                )
            finally:
                gate.release()

        async with asyncio.TaskGroup() as group:
            for script in scripts:
                await self._sleep_until(script.start_s)
                await gate.acquire()
                group.create_task(play(script, self._now()))

    async def _play_conversation(self, conversation: _LiveConversation, free_s: float) -> None:
        """Play the remaining turns of a conversation, up to one that fails. ``free_s``: when its client became free."""
        answered = free_s
        for due in conversation.script.due[conversation.place :]:
            if conversation.failed:
                return
            record = conversation.record(max(due.at_s, answered + due.after_answer_s))
            await self._turn(conversation, record)
            record.done_s = answered = self._now()
            self._on_turn(record)

    async def _turn(self, conversation: _LiveConversation, record: TurnRecord) -> None:
        turn, due = conversation.script.conversation.turns[conversation.place], record.due_s
        ids = conversation.script.input_ids(
            conversation.place, self._info.vocab_size, self._options.seed, self._options.ids
        )
        forced = self._options.force_lengths and self._info.forces_lengths
        try:
            if conversation.opening is None:
                conversation.opening = asyncio.create_task(self._target.start_session())
                self._openings.append(conversation.opening)
                # Shielded: a server may still create the session after a stop; it is deleted later.
                await asyncio.shield(conversation.opening)
                # Opening a conversation is not part of its first turn's latency: the turn is due from now on.
                record.due_s = max(due, self._now())
            session = conversation.opening.result()
            ahead_s = self._options.warm_ahead_s
            if ahead_s is not None and conversation.place and due > self._now():
                await self._sleep_until(due - ahead_s)
                self._warm(session)
            await self._sleep_until(due)
            spec = TurnRequest(ids, turn.output_tokens, forced, self._hints(conversation))
            await self._send(session, spec, record)
        except TurnFailed as failure:
            record.error, record.message = failure.code, str(failure)
        except asyncio.CancelledError:
            record.done_s = self._options.stop_s or self._now()
            self._cut_short.append(record)
            raise
        conversation.place += 1
        if record.error:
            conversation.failed = True
            self._skipped += len(conversation.script.due) - conversation.place

    def _hints(self, conversation: _LiveConversation) -> Hints | None:
        noise, now = self._options.hints, self._now()
        if noise is None:
            return None
        if conversation.script.has_history and not conversation.place:
            now = 0.0  # a history ends at 0, whenever it is sent
        return hint_of(conversation.script, conversation.place, now, noise=noise, seed=self._options.seed)

    def _warm(self, session: str) -> None:
        async def ask() -> None:
            assert isinstance(self._target, SupportsWarm)
            try:
                self._warm_calls[await self._target.warm(session)] += 1
            except TurnFailed as failure:
                self._warm_calls[failure.code] += 1

        task = asyncio.create_task(ask())
        self._warming.add(task)
        task.add_done_callback(self._warming.discard)

    async def _send(self, session: str, spec: TurnRequest, record: TurnRecord) -> None:
        start, arrivals = self._start, record.arrivals
        self._on_send()
        record.sent_s = self._now()
        record.usage = await self._target.turn(
            session, spec, lambda count, at: arrivals.append((count, at - start))
        )
        if spec.forced and record.output_tokens != spec.output_tokens:
            raise TurnFailed(
                "WRONG_LENGTH",
                f"{record.output_tokens} tokens arrived instead of the forced {spec.output_tokens}",
            )

    def _now(self) -> float:
        return time.perf_counter() - self._start

    async def _sleep_until(self, at_s: float) -> None:
        await asyncio.sleep(max(0.0, at_s - self._now()))


async def replay(
    target: Target,
    info: TargetInfo,
    scripts: Sequence[Script],
    options: RunOptions,
    on_turn: OnTurn = lambda record: None,
    on_send: OnSend = lambda: None,
) -> Outcome:
    """Play all scripts in this process against an open target. A failed turn is recorded and ends its conversation."""
    records: list[TurnRecord] = []

    def on_end(record: TurnRecord) -> None:
        records.append(record)
        on_turn(record)

    player = Player(target, info, options, on_end, on_send)
    await player.prepare(scripts)
    played = await player.play(scripts, time.perf_counter())
    return merge_results(target.name, info, records, [played], await player.end_sessions())


async def _watch_loop(lags: list[float]) -> None:
    """Record how late a timer fires: how long an answer may have waited for this process.

    A long stall is recorded once for each tick that it delayed, because arrivals in it waited too.
    """
    while True:
        due = time.perf_counter() + _TICK_S
        try:
            await asyncio.sleep(_TICK_S)
        finally:
            late = max(0.0, time.perf_counter() - due)
            lags += [late - missed * _TICK_S for missed in range(1 + int(late / _TICK_S))]
