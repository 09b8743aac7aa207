"""Everything else that a front end, an operator or a machine may do to an engine: ``Driver`` plays conversations."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import msgspec

from pensieve.config import CacheConfig
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.messages import (
    Cancel,
    Choose,
    Evict,
    Failed,
    GetResidency,
    GetStrips,
    Memory,
    ResidentTokens,
    SetMemory,
    Strips,
    Submit,
)
from pensieve.engine.plan import Plan, StepResult
from pensieve.engine.ranks.codec import decode, encode
from support.engine.engine_driver import Clock, Driver, Turn
from support.engine.hybrid_worker import HybridWorker


@dataclass
class TickingClock(Clock):
    """Time passes inside a step as well."""

    rng: random.Random = field(default_factory=lambda: random.Random(0))

    def __call__(self) -> float:
        self.now += self.rng.choice((0.0, 1e-6, 1e-3))
        return self.now


class WideWorker(HybridWorker):
    """Runs each plan as the other ranks get it, and answers with what a device measures."""

    def __init__(self, config: CacheConfig, rng: random.Random) -> None:
        super().__init__(config)
        self.rng = rng
        self.backlog = 0

    def run(self, plan: Plan) -> StepResult:
        same = decode(encode(plan))
        assert same is not None
        spans = [
            msgspec.structs.replace(sent, sample=span.sample)
            for span, sent in zip(plan.spans, same.spans, strict=True)
        ]
        for span, sent in zip(plan.spans, same.spans, strict=True):
            assert (span.sample is None) == (sent.sample is None)
            assert span.sample is None or sent.sample is None or span.sample.late == sent.sample.late
        result = super().run(replace(same, spans=tuple(spans)))
        self.backlog = max(self.backlog + len(plan.swap_out) - self.rng.choice((0, 1, 8, 100)), 0)
        seconds = self.rng.choice((0.0, 1e-3, 2e-3, 3.0))
        return replace(
            result,
            swap_out_backlog=self.backlog,
            timings={"device": seconds, "gap": seconds * self.rng.random()},
        )


class WideDriver(Driver):
    """A driver some of whose actions are those that no conversation consists of."""

    eos: tuple[int, ...] = ()
    """The model's end tokens."""
    answer: Callable[[Sequence[int], int], Sequence[int]]
    """(context, count): the greedy answer of a stateless run."""

    def limited(self, sampling: Sampling, context_tokens: int, want: int) -> Sampling:
        """At times the context limit is the only one, and the model's end tokens count."""
        if sampling.beam_width > 1:
            return super().limited(sampling, context_tokens, want)
        fills = context_tokens + want == self.limit and self.rng.random() < 0.7
        return msgspec.structs.replace(
            sampling,
            max_output_tokens=None if fills else want,
            ignore_eos=self.rng.random() < 0.5,
            min_output_tokens=self.rng.choice((0, 0, 1, 3, 100)),
        )

    def completed(self, submit: Submit) -> Submit:
        """At times with a prediction, of which more or less is right."""
        turn = self.turns[submit.request]
        if self.rng.random() < 0.6:
            return submit
        guess = list(self.answer(turn.context, self.rng.randrange(1, 12)))
        if self.rng.random() < 0.5:
            guess[self.rng.randrange(len(guess))] = self.rng.randrange(self.vocabulary)
        return msgspec.structs.replace(submit, predicted=pack_tokens(guess), origin=submit.session)

    def ends(self, turn: Turn, output: Sequence[int]) -> list[bool]:
        sampling = turn.sampling
        ends: list[bool] = []
        for number, token in enumerate(output, 1):
            at_end = token in self.eos
            stops = token in sampling.stop_token_ids or (at_end and not sampling.ignore_eos)
            guided = at_end and sampling.grammar is not None
            ends.append(guided or (stops and number > sampling.min_output_tokens))
        return ends

    def act(self) -> None:
        if self.rng.random() < 0.6:
            super().act()
            return
        session = f"s{self.rng.randrange(6)}"
        self.rng.choice(
            (
                self.stop,
                self.choose,
                self.look,
                self.be_refused,
                self.move,
                self.leap,
                self.resize,
                self.forget,
            )
        )(session)

    def stop(self, session: str) -> None:
        """Stop a candidate of a turn, in whatever phase, or one that there is not."""
        groups = [key for key, turn in self.turns.items() if len(turn.outputs) > 1]
        key = self.rng.choice(groups if groups and self.rng.random() < 0.8 else [*self.turns, 0])
        number = self.rng.choice((0, 0, 1, 2, 7))
        known = self.engine._turns.get(key)  # type: ignore[call-overload]
        events = self.engine.handle(Cancel(key, number))
        if known is not None and number in known.finish_reasons and number not in self.turns[key].ended:
            self.turns[key].stopped.add(number)
            self.turns[key].ended.add(number)
        self._take(events)

    def choose(self, session: str) -> None:
        """Choose an answer that may be gone, of a turn that may run."""
        self.engine.handle(Choose(session, self.rng.randrange(4)))

    def look(self, session: str) -> None:
        """Ask where the chunks of sessions are, and for all numbers."""
        (held,) = self.engine.handle(GetResidency(1, session))
        assert isinstance(held, ResidentTokens) and min(held.device_tokens, held.host_tokens) >= 0
        at, seen = 0, set[str]()
        while True:
            (strips,) = self.engine.handle(GetStrips(1, at))
            assert isinstance(strips, Strips)
            seen |= {one.session for one in strips.sessions}
            assert all(one.idle_s >= 0.0 and one.tokens >= 0 for one in strips.sessions)
            if not strips.next:
                break
            assert strips.next > at
            at = strips.next
        assert seen == set(self.engine._cache.sessions)
        stats = self.engine.stats()
        assert stats.running + stats.queued >= 0 and stats.cached_sessions == len(seen)
        assert min(stats.device_free, stats.device_used, stats.device_reclaimable) >= 0
        assert min(stats.host_free, stats.host_used) >= 0

    def be_refused(self, session: str) -> None:
        """Submit what cannot be served."""
        tokens, one = pack_tokens([1, 2, 3]), Sampling(max_output_tokens=1)
        candidates = self.engine._scheduler.config.max_running + 1
        too_long = pack_tokens([1] * self.engine._scheduler.context_limit)
        refused = [
            Submit(9_999_999, session, tokens, 4, one),
            Submit(9_999_999, session, b"", 0, one),
            Submit(9_999_999, session, too_long, 1, one),
            Submit(9_999_999, session, tokens, 1, msgspec.structs.replace(one, candidates=candidates)),
            *(Submit(key, session, tokens, 1, one) for key in self.engine._turns),
        ]
        (answer,) = self.engine.handle(self.rng.choice(refused))
        assert isinstance(answer, Failed), answer

    def move(self, session: str) -> None:
        """Move a session to another scope: from now on it shares its KV there, or not at all."""
        if not any(turn.session == session for turn in self.turns.values()):
            self.scopes[session] = self.rng.choice(("a", "b", ""))

    def leap(self, session: str) -> None:
        """Let much time pass in which nothing happens."""
        self.clock.now += self.rng.choice((1e2, 1e4, 1e9))

    def resize(self, session: str) -> None:
        sizes = self.engine.stats()
        low, high = sizes.device_floor, sizes.device_ceiling
        wanted = self.rng.choice((None, low, high, self.rng.randint(low, high), low - 1, high + 1))
        (answer,) = self.engine.handle(SetMemory(1, wanted))
        assert isinstance(answer, Memory)
        fits = self.engine._scheduler.elastic is not None and wanted is not None and low <= wanted <= high
        assert (answer.refused == "") == (fits or wanted is None)
        assert not fits or answer.wanted == wanted

    def forget(self, session: str) -> None:
        """Evict a session or all, and cancel a request that there may not be."""
        self.engine.handle(Evict(1, self.rng.choice((session, ""))))
        self.engine.handle(Cancel(self.rng.choice((0, self._next))))

    def leave_nothing(self) -> None:
        """With all turns ended, nothing but idle sessions holds memory."""
        self.run_until_idle()
        self.engine.handle(Evict(1))
        self.run_until_idle()
        stats = self.engine.stats()
        left = stats.cached_sessions, stats.device_used, stats.host_used, stats.running, stats.queued
        assert left == (0, 0, 0, 0, 0), left
        assert not self.engine._turns and not self.engine._candidates and not self.engine._beams._searches
