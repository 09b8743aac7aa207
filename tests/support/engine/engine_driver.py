"""Drives an engine with random conversations under a virtual clock and compares every answer with the oracle."""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Grammar, Hints, Sampling, TenantQos, Usage, pack_tokens
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.elastic import ElasticTier
from pensieve.engine.engine import Engine
from pensieve.engine.grammar import Structured
from pensieve.engine.messages import (
    Cancel,
    CandidateFinished,
    Choose,
    EngineReady,
    Evict,
    Failed,
    Finished,
    Output,
    Started,
    Submit,
    Warm,
    Warmed,
)
from pensieve.engine.plan import StepWorker
from pensieve.engine.scheduling.scheduler import Scheduler
from support.engine.random_masks import ANY, RandomMasks
from support.lengths import at_length

CHECKED = at_length(4, 1)
"""The cache is checked once in this many steps: a check costs more than a step, and what is wrong in it stays."""
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
    seed: int | None = None
    """Of the first candidate; None when all are greedy."""
    beams: Sampling | None = None
    sampling: Sampling = field(default_factory=Sampling)
    outputs: list[list[int]] = field(default_factory=lambda: [[]])
    """Of each candidate."""
    ended: set[int] = field(default_factory=set)
    stopped: set[int] = field(default_factory=set)
    """Candidates that were cancelled alone."""
    usage: Usage | None = None
    drafts: tuple[int, int] = (0, 0)
    """How many drafts the first candidate has had so far, and how many of them were accepted."""
    failed: str | None = None


SCOPES = {"s0": "a", "s1": "a", "s2": "a", "s3": "a", "s4": "b", "s5": ""}
"""Of each session: two tenants, and one that shares with nobody."""
Verify = Callable[[Sequence[int], Sequence[int], int], None]
"""(context, output, seed): raises AssertionError unless a stateless run over the context gives that output."""


def make_engine(
    cache: CacheConfig,
    scheduler: SchedulerConfig,
    worker: StepWorker,
    clock: Clock,
    vocabulary: int = 97,
    *,
    overlapped: bool = False,
    elastic: Callable[[CacheManager], ElasticTier] | None = None,
    structured: Structured | None = None,
) -> Engine:
    """An engine around any worker. ``elastic``: makes what decides the size of an elastic device tier."""
    manager = CacheManager(cache, COST)
    planner = Scheduler(scheduler, manager, None if elastic is None else elastic(manager))
    ready = EngineReady(
        planner.context_limit,
        vocabulary,
        "test",
        "float32",
        cache.device_chunks * cache.chunk_tokens,
        cache.host_chunks * cache.chunk_tokens,
        cache.chunk_tokens,
    )
    return Engine(planner, worker, ready, clock, overlapped=overlapped, structured=structured)


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
        self.failed = 0
        self.verify_beams: Callable[[Sequence[int], Sequence[int], Sampling], None] | None = None
        """As ``verify``, of a beam search; none are started without."""
        self.masks: RandomMasks | None = None
        """With it some answers follow a grammar."""
        self.tenants = False
        self._steps = 0
        """Several tenants, with weights, priorities and shares of the cache, or none."""
        self.groups = 0.1
        """Share of turns that have several candidates, or are a beam search."""
        self.prompts = [[rng.randrange(vocabulary) for _ in range(count)] for count in (3, 33, 70)]
        """Contexts that many sessions begin with."""
        self.warmed: Counter[str] = Counter()
        """How often warming was refused, by reason."""
        self.scopes = dict(SCOPES)
        self.sharing = engine._cache.config.prefix_sharing
        self._next = 1
        self._computed: dict[str, set[int]] = {}
        """Hashes of all contexts that were computed, and of all that they begin with, by scope; "s5": by session s5."""

    def start_turn(
        self,
        session: str,
        input_tokens: Sequence[int],
        want: int,
        sampling: Sampling | None = None,
        hints: Hints | None = None,
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
        sampling = self.limited(sampling or Sampling(), len(context), want)
        self.turns[key] = turn = Turn(session, context, len(input_tokens), want, sampling.stop_token_ids)
        turn.sampling, turn.beams = sampling, sampling if sampling.beam_width > 1 else None
        # A greedy draw has no seed: its candidates are all the same.
        turn.seed = sampling.seed if sampling.temperature > 0.0 else None
        turn.outputs = [[] for _ in range(sampling.candidates)]
        about = self.scopes.get(session, ""), hints, self._standing(session)
        submit = Submit(key, session, pack_tokens(context), len(input_tokens), sampling, *about)
        self._take(self.engine.handle(self.completed(submit)))
        return key

    def limited(self, sampling: Sampling, context_tokens: int, want: int) -> Sampling:
        """The sampling with what ends an answer of ``want`` tokens at most."""
        return msgspec.structs.replace(sampling, max_output_tokens=want, ignore_eos=True)

    def completed(self, submit: Submit) -> Submit:
        """The command as it is sent."""
        return submit

    def ends(self, turn: Turn, output: Sequence[int]) -> list[bool]:
        """Whether each token of an output ends it, whatever its length."""
        return [token in turn.stops for token in output]

    def _standing(self, session: str) -> TenantQos:
        """One tenant or several; those who share KV are of one."""
        tenant = (self.scopes.get(session) or session) if self.tenants else ""
        weight = {"a": 1.0, "b": 2.5}.get(tenant, 0.5)
        share = {"a": 0.4, "b": 0.25}.get(tenant, 0.0)
        return TenantQos(tenant, weight, len(self.turns) % 3 if self.tenants else 0, share)

    def _hints(self) -> Hints | None:
        """Mostly none; else anything that a client may say, true or not."""
        if self.rng.random() < 0.5:
            return None
        pause = self.rng.choice((None, 0.0, 1e-9, 2.0, 60.0, 1e12))
        importance = self.rng.choice((1.0, 1.0, 0.0, 3.0, 1e30))
        return Hints(next_turn_s=pause, importance=importance, finished=self.rng.random() < 0.2)

    def warm(self, session: str) -> str:
        """Ask for a session's history to be warmed; returns why it was refused. A turn of it is a reason."""
        history = self.history.get(session, [])
        busy = any(turn.session == session for turn in self.turns.values())
        scope = self.scopes.get(session, "")
        standing = self._standing(session)
        (answer,) = self.engine.handle(Warm(1, session, pack_tokens(history), scope, standing))
        assert isinstance(answer, Warmed)
        # A turn whose grammar is being compiled ends the warm-up later.
        assert not busy or self.masks or answer.refused in ("running", "nothing_to_do"), answer
        self.warmed[answer.refused] += 1
        if not answer.refused:
            self._remember(session, history)  # what was not there is computed
        return answer.refused

    def step(self) -> None:
        """One engine step, and time passes."""
        self.clock.now += self.rng.choice((0.001, 0.01, 1.0, 30.0))
        if self.masks is not None and self.rng.random() < 0.5:
            self.masks.finish()
        self._take(self.engine.step())
        self._steps += 1
        if self._steps % CHECKED == 0:
            self.engine.check()

    def run_until_idle(self, bound: int = 20_000) -> None:
        """Step until no turn runs. Fails when that takes implausibly long: something is stuck."""
        for _ in range(bound):
            if not self.turns and not self.engine.has_work:
                self.engine.check()
                return
            self.step()
        raise AssertionError(f"still running after {bound} steps: {list(self.turns.values())[:3]}")

    def act(self) -> None:
        """One random thing a client or operator may do."""
        session = f"s{self.rng.randrange(6)}"
        if self.rng.random() < 0.1:
            self.warm(session)
        if self.rng.random() < 0.03:
            self.lull()
        dice = self.rng.random()
        history = self.history.setdefault(session, [])
        busy = [key for key, turn in self.turns.items() if turn.session == session]
        if dice < 0.55:
            count = self.rng.choice((1, 2, 5, 17, 40))
            tokens = [self.rng.randrange(self.vocabulary) for _ in range(count)]
            want = self.rng.choice((self.rng.randrange(1, 20), self.rng.randrange(1, 60)))
            grouped = self.rng.random() < self.groups
            sampling = self._group() if grouped else self._sampling()
            self.start_turn(session, tokens, want, sampling, self._hints())
        elif dice < 0.63 and busy:
            self.cancel(busy[0], keep=self.rng.random() < 0.5)
        elif dice < 0.70 and not busy and len(history) > 1:
            del history[self.rng.randrange(1, len(history)) :]
        elif dice < 0.74 and not busy and history:
            self.start_turn(session, [], self.rng.randrange(1, 8))
        elif dice < 0.78:
            self.engine.handle(Evict(1, session if dice < 0.76 else ""))
        elif dice < 0.82 and not busy:
            history[:] = self.rng.choice(([], *self.prompts))
        elif dice < 0.90 and not busy:
            self.fork(session)
        elif dice < 0.93:
            self.start_together()
        elif dice < 0.96:
            self.edit_beside(session)
        elif busy and len(self.turns[busy[0]].outputs) > 1:
            turn = self.turns[busy[0]]
            running = {number for number, output in enumerate(turn.outputs) if output} - turn.ended
            if running:
                turn.stopped.add(number := self.rng.choice(sorted(running)))
                turn.ended.add(number)
                self._take(self.engine.handle(Cancel(busy[0], number)))

    def lull(self) -> None:
        """All turns end; then sessions are warmed, and what follows may come in the middle of that."""
        self.run_until_idle()
        for number in self.rng.sample(range(6), 3):
            self.warm(f"s{number}")
            for _ in range(self.rng.randrange(3)):
                self.step()

    def fork(self, session: str) -> None:
        """Let a session's history be that of another, or the beginning of it; its own tail may be running."""
        source = self.history.get(f"s{self.rng.randrange(6)}") or []
        keep = self.rng.choice((len(source), self.rng.randrange(len(source) + 1)))
        self.history[session] = source[:keep]
        if keep and self.rng.random() < 0.3:  # the same behind something else
            self.history[session][self.rng.randrange(keep)] = self.rng.randrange(self.vocabulary)

    def edit_beside(self, session: str) -> None:
        """While one session goes on, one that has the same history is cut and goes another way, in the same step."""
        other = f"s{self.rng.randrange(6)}"
        mine, its = self.history[session], self.history.get(other, [])
        common = next((i for i, pair in enumerate(zip(mine, its, strict=False)) if len({*pair}) > 1), 0)
        if common < 2 or any(turn.session in (session, other) for turn in self.turns.values()):
            return
        self.start_turn(other, [1, 2], 3)
        del mine[self.rng.randrange(max(1, common - 5), common) :]
        self.start_turn(session, [3], 3)

    def start_together(self) -> None:
        """Several sessions with one prompt have their turns at once."""
        prompt = self.rng.choice(self.prompts)
        for number in range(self.rng.randrange(2, 6)):
            session = f"s{number}"
            if not any(turn.session == session for turn in self.turns.values()):
                self.history[session] = list(prompt)
                self.start_turn(session, [number] * self.rng.randrange(1, 9), self.rng.randrange(1, 12))

    def _group(self) -> Sampling:
        if self.verify_beams is None or self.rng.random() < 0.5:
            # On hashed KV candidates draw with seeds of their own; what checkpoints give is compared with greedy ones.
            drawn = {"temperature": 1.0} if self.verify_beams is not None else {}
            seed, count = self.rng.randrange(1 << 64), self.rng.randrange(2, 6)
            return Sampling(seed=seed, candidates=count, grammar=self._grammar(), **drawn)
        return Sampling(
            beam_width=self.rng.randrange(2, 6),
            length_penalty=self.rng.choice((0.5, 1.0, 2.0)),
            early_stopping=self.rng.random() < 0.5,
            stop_token_ids=tuple(self.rng.sample(range(self.vocabulary), self.rng.choice((0, 0, 2, 8)))),
        )

    def _sampling(self) -> Sampling:
        """Mostly plain; at times with stop tokens, or looking at its own output in a way that changes nothing."""
        stops = (
            self.rng.sample(range(self.vocabulary), self.vocabulary // 12) if self.rng.random() < 0.25 else ()
        )
        penalty = -1e-30 if self.rng.random() < 0.15 else 0.0
        return Sampling(stop_token_ids=tuple(stops), presence_penalty=penalty, grammar=self._grammar())

    def _grammar(self) -> Grammar | None:
        return ANY if self.masks is not None and self.rng.random() < 0.4 else None

    def cancel(self, key: int, *, keep: bool) -> None:
        """Cancel a turn; its history either gains what was produced or nothing."""
        turn = self.turns.pop(key)
        self.engine.handle(Cancel(key))
        if keep and turn.beams is None:
            self._verify(turn)
            self.history[turn.session] = turn.context + turn.outputs[0]

    def _take(self, events: Sequence[object]) -> None:
        for event in events:
            match event:
                case Started(request, usage):
                    turn = self.turns[request]
                    turn.usage = usage
                    assert usage.reconciles, usage
                    assert usage.context_tokens == len(turn.context) and usage.new_tokens <= turn.num_new
                    assert usage.new_tokens == turn.num_new or self.scopes.get(turn.session)
                    self._check_found(turn, usage)
                case Output(request, token_ids, _, candidate):
                    turn = self.turns[request]
                    if candidate == 0:
                        turn.drafts = event.drafted, event.accepted
                    assert candidate not in turn.ended
                    turn.outputs[candidate].extend(token_ids)
                    self._remember(turn.session, turn.context + turn.outputs[candidate])
                case CandidateFinished(request, candidate, _):
                    self.turns[request].ended.add(candidate)
                case Finished(request, _, usage):
                    turn = self.turns.pop(request)
                    turn.usage = usage
                    self._verify(turn)
                    assert len(turn.outputs[0]) == usage.output_tokens
                    assert turn.drafts == (usage.drafted_tokens, usage.accepted_tokens)
                    for number in set(range(len(turn.outputs))) - turn.stopped if turn.beams is None else ():
                        output = turn.outputs[number]
                        stopped = self.ends(turn, output)
                        assert not any(stopped[:-1]) and (stopped[-1] or len(output) == turn.want)
                    chosen = self.rng.randrange(len(turn.outputs))
                    if chosen and self.rng.random() < 0.7:
                        self.engine.handle(Choose(turn.session, chosen))
                    self.history[turn.session] = turn.context + turn.outputs[chosen]
                    self.finished.append(turn)
                case Failed(request, reason, _):
                    self.turns.pop(request).failed = reason
                    self.failed += 1

    def _check_found(self, turn: Turn, usage: Usage) -> None:
        """What a turn finds cached, somebody in its scope has computed: a right answer alone would not tell."""
        found = usage.gpu_cached_tokens + usage.swapped_in_tokens
        computed = self._computed.get(self._scope(turn.session), set())
        assert not found or _prefixes(turn.context)[found - 1] in computed, (
            f"{turn.session} found {found} tokens that its scope never computed"
        )
        self._remember(turn.session, turn.context)

    def _remember(self, session: str, tokens: list[int]) -> None:
        self._computed.setdefault(self._scope(session), set()).update(_prefixes(tokens))

    def _scope(self, session: str) -> str:
        """Return the name under which a session finds computed contexts: its scope, or its own without one."""
        return (self.scopes.get(session) or session) if self.sharing else session

    def _verify(self, turn: Turn) -> None:
        try:
            if turn.beams is not None:
                assert self.verify_beams is not None
                self.verify_beams(turn.context, turn.outputs[0], turn.beams)
            for number, output in enumerate(turn.outputs if turn.beams is None else ()):
                seed = 0 if turn.seed is None else (turn.seed + number) % (1 << 64)
                self.verify(turn.context, output, seed)
        except AssertionError as error:
            error.add_note(f"session {turn.session}, {turn.num_new} of {len(turn.context)} tokens new")
            raise


def _prefixes(tokens: Sequence[int]) -> list[int]:
    """A hash of the first 1, 2, … tokens."""
    return list(itertools.accumulate(tokens, lambda last, token: hash((last, token)), initial=0))[1:]
