"""Requests that belong together: the candidates of one turn, or the beams of one search.

The first of them is an ordinary request, the leader. The others share the full chunks of its context and have a tail of
their own each. The front end hears of all of them under one key, and they are suspended together.

Candidates branch off when the leader is admitted, and go on by themselves from there, with random numbers of their own.

Beams branch off after the leader's first step, and wait for each other at every step: where a step leaves the members
(``Beams.slots``) follows from what all of them found. A beam that goes on stays where it is; one that branches takes
the place of one that was given up, in the next plan (``Beams.branches``).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import msgspec
import numpy as np

from pensieve.core import FinishReason, RequestKey, Sampling, SessionKey
from pensieve.engine.beams import BeamSearch, Hypothesis, Row, place
from pensieve.engine.cache.chunk import common_prefix
from pensieve.engine.plan import Sampled
from pensieve.engine.request import Request

_SEEDS = 1 << 64


@dataclass(slots=True, eq=False)
class Beams:
    """Where the beams of a search are, and what is known of its step."""

    search: BeamSearch
    sampling: Sampling
    """What each beam asks of its logits: the most likely tokens."""
    slots: list[Request]
    """Which request holds each beam, best first; at first the leader alone."""
    rows: dict[RequestKey, Row] = field(default_factory=dict)
    """What those that have been computed found."""
    awaited: set[RequestKey] = field(default_factory=set)
    """Those that are being computed."""
    branches: list[tuple[Request, Request]] = field(default_factory=list)
    """(source, target): before its next token the target takes over what the source has cached."""


@dataclass(slots=True, eq=False)
class Group:
    """The members of a group. ``Scheduler`` lets them run, the engine keeps count of how candidates end."""

    leader: Request
    size: int
    beams: Beams | None = None
    """None: these are candidates."""
    members: list[Request] = field(default_factory=list)
    """By number, once they have branched off; until then the leader alone."""
    unwanted: set[int] = field(default_factory=set)
    """Candidates that were cancelled one by one."""
    ended: dict[int, FinishReason] = field(default_factory=dict)
    """Why each of those that have ended did."""

    def __post_init__(self) -> None:
        self.members.append(self.leader)

    @property
    def to_branch(self) -> list[int]:
        """Which candidates branch off when the leader is admitted; none when they have."""
        if self.leader.receipt is not None or self.beams is not None:
            return []
        return [candidate for candidate in range(1, self.size) if candidate not in self.unwanted]

    @property
    def over(self) -> bool:
        """Whether no candidate goes on."""
        return len(self.unwanted | self.ended.keys()) == self.size

    def in_batch(self) -> list[Request]:
        """Those that run."""
        return [member for member in self.members if member.in_batch]

    def bequeath(self, leaver: Request) -> None:
        """One leaves before its time. What the first had still to compute for all, the next one computes."""
        running = self.in_batch()
        if len(running) < 2 or leaver is not running[0] or leaver.output_tokens or not leaver.missing:
            return
        heir = running[1]
        if not heir.missing:
            return
        start = heir.missing[0][0]
        owed = [(low, min(high, start)) for low, high in leaver.missing if low < start]
        heir.missing.extendleft(reversed(owed))

    @property
    def branches(self) -> list[tuple[Request, Request]]:
        """(source, target) of the beams that branch before the next step."""
        return [] if self.beams is None else self.beams.branches

    # -- beams -------------------------------------------------------------------------------------------------------

    def further_pages(self, chunk_tokens: int) -> int:
        """Device pages that a search needs beside its leader's, to begin or to go on after it was parked."""
        if self.beams is None:
            return 0
        if self.leader.receipt is None:
            return self.size - 1
        return sum(
            -(-member.length // chunk_tokens) - self.shared_with_leader(member) // chunk_tokens
            for member in self.beams.slots
            if member is not self.leader
        )

    def shared_with_leader(self, member: Request) -> int:
        """How many leading tokens a member has in common with the leader."""
        return common_prefix(self.leader.context, member.context)

    def take_row(self, request: Request, sampled: Sampled) -> Hypothesis | None:
        """One beam was computed. When all were, the search takes a step; returns the best hypothesis at its end."""
        beams = self.beams
        assert beams is not None and sampled.logprob is not None
        beams.awaited.discard(request.key)
        beams.rows[request.key] = sampled.logprob.top
        if len(beams.rows) < len(beams.slots):
            return None
        step = beams.search.step([beams.rows[member.key] for member in beams.slots])
        beams.rows.clear()
        if step.finished is not None:
            return step.finished
        while len(self.members) < self.size:
            self.members.append(member_of(self.leader, len(self.members)))
        placed = place(step.parents, [self.members.index(member) for member in beams.slots], self.size)
        contexts = [beams.slots[parent].context.copy() for parent in step.parents]
        beams.slots = [self.members[number] for number in placed.members]
        for member, context, token in zip(beams.slots, contexts, step.tokens, strict=True):
            member.go_on_from(context, token)
        if self.leader.in_batch:
            beams.branches = [
                (self.members[source], self.members[target]) for source, target in placed.branches
            ]
        return None

    def nearest(self, hypothesis: Hypothesis) -> Request:
        """The running member that has most of a hypothesis cached; the leader, when none runs."""
        tokens = np.array(hypothesis.tokens, dtype=np.int32)
        start = self.leader.prompt_tokens
        running = self.in_batch() or [self.leader]
        return max(running, key=lambda member: common_prefix(member.context[start:], tokens))


def candidate_key(session: SessionKey, candidate: int) -> SessionKey:
    """Under which a candidate's KV is cached: the first one's as the session's."""
    return SessionKey(f"{session}#{candidate}") if candidate else session


def session_of(key: SessionKey) -> SessionKey:
    """Whose candidate it is that has its KV under ``key``."""
    return SessionKey(key.partition("#")[0])


def member_of(leader: Request, candidate: int) -> Request:
    """A further member, with the leader's context. Its tickets follow the leader's."""
    seed = (leader.sampling.seed + candidate) % _SEEDS
    member = Request(
        RequestKey(-leader.arrival - candidate),
        candidate_key(leader.session, candidate),
        leader.arrival + candidate,
        leader.context.copy(),
        leader.prompt_tokens,
        leader.num_new,
        msgspec.structs.replace(leader.sampling, seed=seed),
        leader.submitted,
        scope=leader.scope,
        standing=leader.standing,
        candidate=candidate,
    )
    member.admitted, member.receipt = leader.admitted, leader.receipt
    return member


def search_of(leader: Request, search: BeamSearch) -> Group:
    """The group of a beam search."""
    sampling = msgspec.structs.replace(leader.sampling, top_logprobs=search.candidates)
    return Group(leader, search.width, Beams(search, sampling, [leader]))
