"""Plays scripts against a target: turns of one conversation one after the other, conversations side by side."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from pensieve.core import Usage
from pensieve.replay.schedule import Script
from pensieve.replay.targets import Target, TargetInfo, TurnFailed, TurnSpec

MAX_LAG_S = 0.25
_TICK_S = 0.02


@dataclass(slots=True)
class TurnRecord:
    """What happened to one turn. Times in seconds after the start of the replay; written by the runner only."""

    conversation: int
    turn: int
    input_tokens: int
    due_s: float
    """When it should have been sent."""
    sent_s: float = 0.0
    arrivals: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, time) of each piece of output."""
    done_s: float = 0.0
    usage: Usage | None = None
    error: str = ""
    """Code of the failure."""
    message: str = ""

    @property
    def output_tokens(self) -> int:
        return sum(count for count, _ in self.arrivals)

    @property
    def latency_s(self) -> float:
        return self.done_s - self.sent_s

    @property
    def ttft_s(self) -> float | None:
        """Time to first token."""
        return self.arrivals[0][1] - self.sent_s if self.arrivals else None


@dataclass(frozen=True, slots=True)
class RunOptions:
    force_lengths: bool = True
    concurrency: int | None = None
    """Conversations at once; None: as many as are due."""
    seed: int = 0
    ids: int = 0
    """Other input ids for another number: no run finds the inputs of an earlier one in a server's prefix cache."""
    max_lag_s: float = MAX_LAG_S
    """The measurement is void when a hundredth of the sends, or of the client's own timers, were later than this."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """All that a replay against one target gave."""

    target: str
    info: TargetInfo
    records: tuple[TurnRecord, ...]
    """In order of completion."""
    skipped_turns: int
    """Never sent, because a turn before them failed."""
    duration_s: float
    loop_lag_s: tuple[float, ...] = ()
    """How late the client's own timer fired, each time."""
    outside: tuple[TurnRecord, ...] = ()
    """Turns that ended outside the window of measurement; ``records`` are then those inside."""
    window_s: tuple[float, float] | None = None
    """Start and end of the window; None: the whole replay."""
    leftover: str = ""
    """Why a session could not be ended after the measurement."""


async def replay(
    target: Target,
    info: TargetInfo,
    scripts: Sequence[Script],
    options: RunOptions,
    on_turn: Callable[[TurnRecord], None] = lambda record: None,
    on_send: Callable[[], None] = lambda: None,
) -> Outcome:
    """Play all scripts; failed turns are recorded, and end their conversation. The target is open."""
    gate = asyncio.Semaphore(options.concurrency or len(scripts) or 1)
    records: list[TurnRecord] = []
    sessions: list[str] = []
    skipped = 0
    start = time.perf_counter()

    async def play(script: Script) -> None:
        nonlocal skipped
        await _sleep_until(start + script.due[0].at_s)
        async with gate:
            free = time.perf_counter() - start
            skipped += await _converse(script, free)

    async def _converse(script: Script, free: float) -> int:
        answered, session = free, ""
        turns = script.conversation.turns
        for index, turn in enumerate(turns):
            due = max(script.due[index].at_s, answered + script.due[index].after_answer_s)
            record = TurnRecord(script.number, index, turn.input_tokens, due)
            ids = script.input_ids(index, info.vocab_size, options.seed, options.ids)
            spec = TurnSpec(ids, turn.output_tokens, options.force_lengths and info.forces_lengths)
            try:
                if not session:
                    session = await target.start_session()
                    sessions.append(session)
                    # Opening a conversation is no part of its first turn's latency.
                    record.due_s = max(due, time.perf_counter() - start)
                await _sleep_until(start + due)
                on_send()
                await _send(target, session, spec, record, start)
            except TurnFailed as failure:
                record.error, record.message = failure.code, str(failure)
            record.done_s = answered = time.perf_counter() - start
            records.append(record)
            on_turn(record)
            if record.error:
                return len(turns) - index - 1
        return 0

    lags: list[float] = []
    watch = asyncio.create_task(_watch_loop(lags))
    try:
        async with asyncio.TaskGroup() as group:
            for script in scripts:
                group.create_task(play(script))
    finally:
        watch.cancel()
        await asyncio.gather(watch, return_exceptions=True)  # it notes a last time when cancelled
    duration = time.perf_counter() - start
    leftover = ""
    for session in sessions:
        try:
            await target.end_session(session)
        except TurnFailed as failure:  # what was measured is not lost for want of this
            leftover = str(failure)
    return Outcome(target.name, info, tuple(records), skipped, duration, tuple(lags), leftover=leftover)


async def _send(target: Target, session: str, spec: TurnSpec, record: TurnRecord, start: float) -> None:
    record.sent_s = time.perf_counter() - start
    record.usage = await target.turn(
        session, spec, lambda count, at: record.arrivals.append((count, at - start))
    )
    if spec.forced and record.output_tokens != spec.output_tokens:
        raise TurnFailed(
            "WRONG_LENGTH", f"{record.output_tokens} tokens came, {spec.output_tokens} were to be forced"
        )


async def _sleep_until(at: float) -> None:
    await asyncio.sleep(max(0.0, at - time.perf_counter()))


async def _watch_loop(lags: list[float]) -> None:
    """Note how late a timer fires: how long an answer may have waited for this process to look at it.

    A long stall is noted once for each time that the timer would have fired in it: what arrives then waits too.
    """
    while True:
        due = time.perf_counter() + _TICK_S
        try:
            await asyncio.sleep(_TICK_S)
        finally:
            late = max(0.0, time.perf_counter() - due)
            lags += [late - missed * _TICK_S for missed in range(1 + int(late / _TICK_S))]
