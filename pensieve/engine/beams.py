"""Beam search: ``BeamSearch`` ranks continuations, ``BeamDriver`` has the scheduler compute them. No torch, no I/O.

To the scheduler a search is a guided group of requests, one per beam, that all start from the turn's context.
After each step the driver has the most likely tokens of every beam. It decides how each continues: with a
token of its own, or replacing its beam by another one's context (``Scheduler.branch``). At the end it retires
all of them and returns the answer.

``BeamSearch`` is a state machine: log-probabilities in, parents and tokens of the next beams out. Its output
equals that of ``generate(num_beams=width, do_sample=False)`` of transformers, token for token. Its rules:

* A step ranks all continuations of all beams by their *sum*: the beam's sum plus the token's log-probability,
  added in float32. At the first step there is one beam, the prompt, with sum 0.
* Of the first ``width`` continuations those that end become *hypotheses*: with an end token, or all of them
  at the longest output. An end token further down is passed over. A hypothesis' *score* is its sum divided by
  ``output tokens ** length_penalty``; the best ``width`` of all steps are kept.
* The first ``width`` continuations that do not end are the next beams, best first.
* The search ends at the longest output, or once there are ``width`` hypotheses: with ``early_stopping`` at
  once, else when the best beam, scored as if it ended here, is not better than the worst of them. That is an
  estimate: with ``length_penalty > 0`` a longer continuation might still have won.

Where sums or scores are equal in float32, ``torch.topk`` leaves the order open. Here the better beam comes
first, then the earlier token of its row, and an older hypothesis before a newer one.

transformers ranks ``(1 + end tokens) * width`` continuations. No more than ``BeamSearch.candidates`` of one
beam can matter: the first ``width`` that do not end, and the end tokens in between.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

import msgspec
import numpy as np
import numpy.typing as npt

from pensieve.core import FinishReason, RequestKey, Sampling, common_prefix, packed_length
from pensieve.engine.messages import Submit
from pensieve.engine.scheduling.request import Request
from pensieve.engine.scheduling.scheduler import OutputToken, Scheduler

Row = Sequence[tuple[int, float]]
"""The most likely tokens after one beam: (token id, log-probability), best first; as ``TokenLogprob.top``.
Values are those of float32 ``log_softmax`` over raw logits."""

NOTHING = -1e9
"""Score of a missing hypothesis and sum of a missing beam, as in transformers."""


@dataclass(frozen=True, slots=True)
class Hypothesis:
    tokens: tuple[int, ...]
    """All tokens, the end token included."""
    score: float
    """Sum of log-probabilities divided by ``len(tokens) ** length_penalty``, in float32."""
    has_end_token: bool
    """Whether its last token is an end token. If not, it was cut at the longest output."""


@dataclass(frozen=True, slots=True)
class BeamStep:
    """The next beams, best first; or none, and the best hypothesis."""

    parents: tuple[int, ...] = ()
    """Previous beam that each next beam continues; all 0 after the first step."""
    tokens: tuple[int, ...] = ()
    """Newest token of each next beam."""
    finished: Hypothesis | None = None


@dataclass(frozen=True, slots=True)
class _EndedBeam:
    """A hypothesis without its tokens, which are looked up only for the best one."""

    score: float
    length: int
    parent: int
    token: int


class BeamSearch:
    """One search. Call ``step`` until it returns ``finished``."""

    def __init__(
        self,
        width: int,
        *,
        max_output_tokens: int,
        end_tokens: Collection[int] = (),
        length_penalty: float = 1.0,
        early_stopping: bool = False,
    ) -> None:
        """``max_output_tokens``: the longest output. Raises ValueError if there is nothing to search."""
        if width < 1 or max_output_tokens < 1:
            raise ValueError(f"nothing to search: {width} beams of at most {max_output_tokens} tokens")
        self.width = width
        self.max_output_tokens = max_output_tokens
        self.length = 0
        self._end_tokens = frozenset(end_tokens)
        self._length_penalty = length_penalty
        self._early_stopping = early_stopping
        self._sums = np.full(width, NOTHING, dtype=np.float32)
        self._sums[0] = 0.0
        self._steps: list[tuple[tuple[int, ...], tuple[int, ...]]] = []
        """Parents and tokens of the beams after each step; outputs are read from them backwards."""
        self._hypotheses: list[_EndedBeam] = []
        """The best ``width``, best first."""
        self._finished = False

    @classmethod
    def from_sampling(
        cls, sampling: Sampling, prompt_tokens: int, context_limit: int, eos_token_ids: Collection[int]
    ) -> BeamSearch:
        """Create the search for ``sampling`` after ``prompt_tokens`` tokens of at most ``context_limit``."""
        room = context_limit - prompt_tokens
        most = sampling.max_output_tokens
        return cls(
            sampling.beam_width,
            max_output_tokens=room if most is None else min(max(most, 1), room),
            end_tokens=end_tokens(sampling, eos_token_ids),
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
        )

    @property
    def candidates(self) -> int:
        """Tokens that each row needs, unless the vocabulary has fewer; more change nothing."""
        return self.width + len(self._end_tokens)

    def step(self, rows: Sequence[Row]) -> BeamStep:
        """Continue with one row per beam of the latest ``BeamStep``, in its order; at first with the prompt's row.

        Raises ValueError for a wrong number of rows, for rows that are too short, and when the search is over.
        """
        if self._finished or len(rows) != (self.width if self._steps else 1):
            raise ValueError(f"{len(rows)} rows after {self.length} tokens of {self.width} beams")
        # At the first step, beams with sum ``NOTHING`` accompany the prompt, with its row. They are chosen
        # only if the vocabulary has fewer tokens than there are beams.
        beams, tokens, sums = self._continuations(rows if self._steps else list(rows) * self.width)
        if not self._steps:
            beams[:] = 0
        self.length += 1
        ranked = np.argsort(-sums, kind="stable").tolist()
        ended, continuing = self._divide(tokens, ranked)
        new = [
            _EndedBeam(self._score(sums[at]), self.length, int(beams[at]), int(tokens[at])) for at in ended
        ]
        kept = [one for one in new if one.score > NOTHING]
        self._hypotheses = sorted([*self._hypotheses, *kept], key=lambda one: -one.score)[: self.width]
        if not continuing or self._should_stop(self._score(sums[continuing[0]])):
            self._finished = True
            at = continuing[0] if continuing else ranked[0]
            unscored = _EndedBeam(self._score(sums[at]), self.length, int(beams[at]), int(tokens[at]))
            # With a penalty so extreme that no score counts, transformers returns arbitrary tokens. Here the
            # best continuation is returned.
            return BeamStep(finished=self._hypothesis((*self._hypotheses, unscored)[0]))
        if len(continuing) < self.width:
            raise ValueError(f"rows of {[len(row) for row in rows]} tokens; {self.candidates} are needed")
        self._sums = sums[continuing]
        chosen = tuple(beams[continuing].tolist()), tuple(tokens[continuing].tolist())
        self._steps.append(chosen)
        return BeamStep(*chosen)

    def output(self, beam: int) -> tuple[int, ...]:
        parents, tokens = self._steps[-1]
        return self._path(self.length, parents[beam], tokens[beam])

    # -- inside a step -----------------------------------------------------------------------------------------------

    def _continuations(
        self, rows: Sequence[Row]
    ) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return beam, token and sum of each continuation; all [n], in the order of beams and of their rows."""
        beams = np.repeat(np.arange(len(rows)), [len(row) for row in rows])
        tokens = np.array([token for row in rows for token, _ in row], dtype=np.int64)
        logprobs = np.array([logprob for row in rows for _, logprob in row], dtype=np.float32)
        return beams, tokens, self._sums[beams] + logprobs

    def _divide(self, tokens: npt.NDArray[np.int64], ranked: list[int]) -> tuple[list[int], list[int]]:
        """Return the continuations that become hypotheses and those that become beams; both best first."""
        ended: list[int] = []
        continuing: list[int] = []
        last = self.length >= self.max_output_tokens
        for rank, at in enumerate(ranked):
            if rank >= self.width and (last or len(continuing) == self.width):
                break
            if last or int(tokens[at]) in self._end_tokens:
                if rank < self.width:
                    ended.append(at)
            else:
                continuing.append(at)
        return ended, continuing

    def _should_stop(self, best_beam: float) -> bool:
        """Whether to end although beams remain, the best of which would now score ``best_beam``."""
        full = len(self._hypotheses) == self.width
        worst = self._hypotheses[-1].score if full else NOTHING
        return (full and self._early_stopping) or not best_beam > worst

    def _score(self, total: np.float32) -> float:
        """Return the score of an output of the current length with sum ``total``."""
        try:
            divisor = self.length**self._length_penalty
        except OverflowError:
            divisor = math.inf
        with np.errstate(all="ignore"):
            return float(total / np.float32(divisor))

    def _hypothesis(self, ended: _EndedBeam) -> Hypothesis:
        tokens = self._path(ended.length, ended.parent, ended.token)
        return Hypothesis(tokens, ended.score, ended.token in self._end_tokens)

    def _path(self, length: int, parent: int, token: int) -> tuple[int, ...]:
        """Return the ``length`` tokens that end with ``token`` after beam ``parent`` of the step before."""
        backwards = [token]
        for parents, tokens in reversed(self._steps[: length - 1]):
            backwards.append(tokens[parent])
            parent = parents[parent]
        return tuple(reversed(backwards))


def end_tokens(sampling: Sampling, eos_token_ids: Collection[int]) -> frozenset[int]:
    """Return the tokens that end a hypothesis: the stop tokens, and the model's end tokens unless ignored."""
    return frozenset(sampling.stop_token_ids) | frozenset(() if sampling.ignore_eos else eos_token_ids)


@dataclass(frozen=True, slots=True)
class BeamPlacement:
    """The assignment of beams to group members."""

    members: tuple[int, ...]
    branches: tuple[tuple[int, int], ...]
    """(source, target): ``target`` takes over the context that ``source`` had before the newest token. No
    source is a target."""


def place_beams(parents: Sequence[int], members: Sequence[int], width: int) -> BeamPlacement:
    """Assign the next beams to members with the fewest branches; ``members`` has the parents' members.

    The first child of a beam stays with its member. The others go to members whose beams have no children.
    """
    staying: dict[int, int] = {}
    for beam, parent in enumerate(parents):
        staying.setdefault(members[parent], beam)
    free = (member for member in range(width) if member not in staying)
    placed: list[int] = []
    branches: list[tuple[int, int]] = []
    for beam, parent in enumerate(parents):
        source = members[parent]
        if staying[source] == beam:
            placed.append(source)
        else:
            target = next(free)
            placed.append(target)
            branches.append((source, target))
    return BeamPlacement(tuple(placed), tuple(branches))


def max_pages(context_tokens: int, width: int, max_output_tokens: int, chunk_tokens: int) -> int:
    """Return the most pages that ``width`` beams need at once: full chunks of the context once, the rest per beam.

    Assumes that a member frees its pages before it takes over others.
    """
    shared = context_tokens // chunk_tokens
    whole = math.ceil((context_tokens + max_output_tokens) / chunk_tokens)
    return shared + width * (whole - shared)


@dataclass(slots=True, eq=False)
class _Search:
    """A running search. Its requests change only in ``BeamDriver._advance`` and ``_end``."""

    search: BeamSearch
    members: list[Request]
    beams: list[Request]
    """Member of each beam, best first; before the first step the first member holds the only one."""
    rows: dict[Request, tuple[int, Row]] = field(default_factory=dict)
    """Latest row of each member, and the length of the context it is for."""

    @property
    def complete(self) -> bool:
        """Whether all beams have their rows and their KV, or their KV will be restored as a whole."""
        return not any(
            member.missing or member.awaits_logprobs or self.rows.get(member, (0, ()))[0] != member.length
            for member in self.members
        )


class BeamDriver:
    """The beam searches of one engine. The engine passes it each step's tokens."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._cache = scheduler.cache
        self._searches: dict[RequestKey, _Search] = {}

    def needs(self, submit: Submit) -> tuple[int, int]:
        """Return the most device pages that the search may need at once, and the length of its longest context."""
        tokens, sampling = packed_length(submit.tokens), submit.sampling
        output = min(sampling.max_output_tokens or 1, self._scheduler.context_limit - tokens)
        return self._pages(tokens, sampling.beam_width, output), tokens + output

    def submit(self, submit: Submit, now: float) -> Request:
        """Queue a search; return its leader, the request that gets the answer."""
        tokens, sampling = packed_length(submit.tokens), submit.sampling
        longest = self._scheduler.context_limit
        # Limit the output so that the search fits the device tier.
        width = sampling.beam_width
        while not self._cache.can_hold(self._pages(tokens, width, longest - tokens), width, longest):
            longest -= 1
        search = BeamSearch.from_sampling(sampling, tokens, longest, self._scheduler.config.eos_token_ids)
        wanted = msgspec.structs.replace(sampling, top_logprobs=search.candidates)
        leader = self._scheduler.submit(
            msgspec.structs.replace(submit, sampling=wanted), now, members=search.width, guided=True
        )
        assert leader.group is not None
        members = list(leader.group.members)
        made = _Search(search, members, [leader])
        self._searches.update((member.key, made) for member in members)
        return leader

    def owner(self, key: RequestKey) -> RequestKey:
        """Return the front end's request for one that may be a beam."""
        search = self._searches.get(key)
        return key if search is None else search.members[0].key

    def on_tokens(self, tokens: list[OutputToken], now: float) -> list[OutputToken]:
        """Take in a step's tokens; return those for the front end: answers found, and no tokens of beams."""
        if not self._searches:
            return tokens
        visible: list[OutputToken] = []
        for token in tokens:
            search = self._searches.get(token.request)
            if search is None:
                visible.append(token)
                continue
            assert token.logprob is not None
            member = next(one for one in search.members if one.key == token.request)
            search.rows[member] = member.length, token.logprob.top
            if search.complete:
                visible += self._advance(search, now)
        return visible

    def cancel(self, key: RequestKey, now: float) -> None:
        """End the search of a request, if it has one. The session keeps its first beam's KV."""
        search = self._searches.get(key)
        if search is not None:
            self._end(search, search.members[0], now)

    def _advance(self, search: _Search, now: float) -> list[OutputToken]:
        """Advance a search whose beams were all computed. Returns the answer at its end."""
        first = search.search.length == 0
        step = search.search.step([search.rows[member][1] for member in search.beams])
        if step.finished is not None:
            return self._answer(search, step.finished, now)
        members = search.members
        if first:  # all members computed the same context
            placed = BeamPlacement(tuple(range(len(members))), ())
        else:
            holding = [members.index(member) for member in search.beams]
            placed = place_beams(step.parents, holding, len(members))
        contexts = [search.beams[parent].context for parent in step.parents]
        search.beams = [members[number] for number in placed.members]
        for member, context, token in zip(search.beams, contexts, step.tokens, strict=True):
            member.continue_with(context, token)
        if members[0].in_batch:  # else all branch off the leader when the group resumes
            for source, target in placed.branches:
                self._scheduler.branch(members[source], members[target])
        return []

    def _answer(self, search: _Search, found: Hypothesis, now: float) -> list[OutputToken]:
        """End a search and return the tokens of its answer."""
        leader = search.members[0]
        self._end(search, _nearest(search.members, found), now)
        leader.set_output(found.tokens)
        limit = self._scheduler.context_limit
        if found.has_end_token:
            reason = leader.end_reason(found.tokens[-1], limit, self._scheduler.config.eos_token_ids)
        else:
            reason = leader.limit_reason(leader.length, limit)
        *others, last = [OutputToken(leader.key, token, None, None) for token in found.tokens]
        return [*others, msgspec.structs.replace(last, finished=reason or FinishReason.CONTEXT_FULL)]

    def _end(self, search: _Search, best: Request, now: float) -> None:
        """Retire all members. The KV of ``best`` becomes the session's."""
        leader = search.members[0]
        for member in reversed(search.members):
            del self._searches[member.key]
            self._scheduler.retire(member, now, free_kv=member is not best)
        if best is not leader:
            self._cache.replace(leader.session, best.session)

    def _pages(self, tokens: int, width: int, output: int) -> int:
        return max_pages(tokens, width, output, self._cache.config.chunk_tokens)


def _nearest(members: Sequence[Request], hypothesis: Hypothesis) -> Request:
    """Return the running member with most of a hypothesis cached; the first member when none runs."""
    tokens = np.array(hypothesis.tokens, dtype=np.int32)
    running = [member for member in members if member.in_batch] or [members[0]]
    return max(running, key=lambda member: common_prefix(member.context[member.prompt_tokens :], tokens))
