"""Drives an engine with random conversations under a virtual clock and compares every answer with the oracle."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Sampling, Usage, pack_tokens
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost.model import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Cancel, EngineReady, Evict, Failed, Finished, Output, Started, Submit
from pensieve.engine.plan import StepWorker
from pensieve.engine.scheduler import Scheduler

COST = CostModel(((0, 0.0), (1024, 1.0)), 0.2, 32)


@dataclass
class Clock:
    """Virtual seconds."""

    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass
class Turn:
    """A running turn, as a client sees it."""

    session: str
    context: list[int]
    num_new: int
    want: int
    stops: tuple[int, ...] = ()
    output: list[int] = field(default_factory=list)
    usage: Usage | None = None
    failed: str | None = None


Verify = Callable[[Sequence[int], Sequence[int]], None]
"""(context, output): raises AssertionError unless a stateless run over the context gives that output."""


def make_engine(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    worker: StepWorker,
    clock: Clock,
    vocabulary: int = 97,
    *,
    overlapped: bool = False,
) -> Engine:
    """An engine around any worker."""
    planner = Scheduler(scheduler, CacheManager(cache, COST))
    ready = EngineReady(
        planner.context_limit,
        vocabulary,
        "test",
        "float32",
        cache.device_chunks * cache.chunk_tokens,
        cache.host_chunks * cache.chunk_tokens,
        cache.chunk_tokens,
    )
    return Engine(planner, worker, ready, clock, overlapped=overlapped)


class Driver:
    """Random sessions against one engine. Histories are kept here, as the front end would keep them."""

    def __init__(
        self, engine: Engine, clock: Clock, rng: random.Random, verify: Verify, vocabulary: int, limit: int
    ) -> None:
        self.engine = engine
        self.clock = clock
        self.rng = rng
        self.verify = verify
        self.vocabulary = vocabulary
        self.limit = limit
        self.history: dict[str, list[int]] = {}
        self.turns: dict[int, Turn] = {}
        self.finished: list[Turn] = []
        self._next = 1

    def start_turn(
        self, session: str, input_tokens: Sequence[int], want: int, sampling: Sampling | None = None
    ) -> int | None:
        """Submit a turn; None when the session is busy or the context would not fit."""
        history = self.history.setdefault(session, [])
        if any(turn.session == session for turn in self.turns.values()):
            return None
        context = history + list(input_tokens)
        if not context or len(context) + want > self.limit:
            return None
        key = self._next
        self._next += 1
        sampling = msgspec.structs.replace(sampling or Sampling(), max_output_tokens=want, ignore_eos=True)
        self.turns[key] = Turn(session, context, len(input_tokens), want, sampling.stop_token_ids)
        self._take(
            self.engine.handle(Submit(key, session, pack_tokens(context), len(input_tokens), sampling))
        )
        return key

    def step(self) -> None:
        """One engine step, and time passes."""
        self.clock.now += self.rng.choice((0.001, 0.01, 1.0, 30.0))
        self._take(self.engine.step())
        self.engine.check()

    def run_until_idle(self, bound: int = 20_000) -> None:
        """Step until no turn runs. Fails when that takes implausibly long: something is stuck."""
        for _ in range(bound):
            if not self.turns and not self.engine.has_work:
                return
            self.step()
        raise AssertionError(f"still running after {bound} steps: {list(self.turns.values())[:3]}")

    def act(self) -> None:
        """One random thing a client or operator may do."""
        session = f"s{self.rng.randrange(6)}"
        dice = self.rng.random()
        history = self.history.setdefault(session, [])
        busy = [key for key, turn in self.turns.items() if turn.session == session]
        if dice < 0.55:
            count = self.rng.choice((1, 2, 5, 17, 40))
            tokens = [self.rng.randrange(self.vocabulary) for _ in range(count)]
            self.start_turn(session, tokens, self.rng.randrange(1, 20), self._sampling())
        elif dice < 0.63 and busy:
            self.cancel(busy[0], keep=self.rng.random() < 0.5)
        elif dice < 0.70 and not busy and len(history) > 1:
            del history[self.rng.randrange(1, len(history)) :]
        elif dice < 0.74 and not busy and history:
            self.start_turn(session, [], self.rng.randrange(1, 8))
        elif dice < 0.78:
            self.engine.handle(Evict(1, session if dice < 0.76 else ""))
        elif dice < 0.82 and not busy:
            history.clear()

    def _sampling(self) -> Sampling:
        """Mostly plain; at times with stop tokens, or looking at its own output in a way that changes nothing."""
        stops = (
            self.rng.sample(range(self.vocabulary), self.vocabulary // 12) if self.rng.random() < 0.25 else ()
        )
        penalty = -1e-30 if self.rng.random() < 0.15 else 0.0
        return Sampling(stop_token_ids=tuple(stops), presence_penalty=penalty)

    def cancel(self, key: int, *, keep: bool) -> None:
        """Cancel a turn; its history either gains what was produced or nothing."""
        turn = self.turns.pop(key)
        self.engine.handle(Cancel(key))
        if keep:
            self._verify(turn)
            self.history[turn.session] = turn.context + turn.output

    def _take(self, events: Sequence[object]) -> None:
        for event in events:
            match event:
                case Started(request, usage):
                    turn = self.turns[request]
                    turn.usage = usage
                    assert usage.reconciles, usage
                    assert usage.context_tokens == len(turn.context) and usage.new_tokens == turn.num_new
                case Output(request, token_ids, _):
                    self.turns[request].output.extend(token_ids)
                case Finished(request, _, usage):
                    turn = self.turns.pop(request)
                    turn.usage = usage
                    self._verify(turn)
                    assert len(turn.output) == usage.output_tokens
                    stopped = [token in turn.stops for token in turn.output]
                    assert not any(stopped[:-1]) and (stopped[-1] or len(turn.output) == turn.want)
                    self.history[turn.session] = turn.context + turn.output
                    self.finished.append(turn)
                case Failed(request, reason, _):
                    self.turns.pop(request).failed = reason

    def _verify(self, turn: Turn) -> None:
        try:
            self.verify(turn.context, turn.output)
        except AssertionError as error:
            error.add_note(f"session {turn.session}, {turn.num_new} of {len(turn.context)} tokens new")
            raise
