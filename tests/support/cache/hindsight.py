"""Turns of the past played again on the real cache: the oracle of the gap that ``pensieve simulate --store`` finds.

Each turn is laid out when it was admitted and ends when it ended; there is no model and no clock. The history of turns
that came back is summed up by where it was. The cache is empty at the beginning, sessions share nothing, and copies
take no time. The clairvoyant policy knows the future up to the last of these turns alone.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec
import numpy as np

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import Restore
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.simulate.scenario import policies

NEVER_S: Final = 1e9
"""From now: when a session comes back that does not."""
AHEAD: Final = 256
"""Chunks copied out ahead of time at once, at most."""
PLAIN_COST: Final = (((0, 0.0), (1 << 17, 4.0)), 1.0)
"""Where the engine does not tell what its chunks cost."""


class PastTurn(msgspec.Struct, frozen=True, array_like=True):
    """One turn. Seconds of any clock."""

    session: str
    admitted: float
    ended: float
    context: int
    history: int
    """How much of the context was there before."""
    output: int
    receipt: tuple[int, int, int]
    """Tokens of the context that were on the device, on the host, recomputed."""
    counted: bool


class HindsightOrder(msgspec.Struct, frozen=True):
    """What to play again: turns by ``admitted``, and the cache that they had."""

    device_chunks: int
    host_chunks: int
    chunk_tokens: int
    policy: PolicyName
    swap_watermark: float
    attention_cost: tuple[tuple[int, float], ...]
    other_cost: float
    turns: tuple[PastTurn, ...]


@dataclass(slots=True)
class Brought:
    """Tokens of history by where they were."""

    device: int = 0
    host: int = 0
    recomputed: int = 0

    def add(self, device: int, host: int, recomputed: int) -> None:
        self.device += device
        self.host += host
        self.recomputed += recomputed

    def shares(self) -> dict[str, float]:
        """Of all of them; no history was all on the device."""
        total = self.device + self.host + self.recomputed
        if not total:
            return {"device": 1.0, "host": 0.0, "recomputed": 0.0}
        return {
            "device": self.device / total,
            "host": self.host / total,
            "recomputed": self.recomputed / total,
        }


@dataclass
class _Again:
    """The turns under one policy."""

    order: HindsightOrder
    policy: str
    brought: Brought = field(default_factory=Brought)

    def play(self, coming: Sequence[float]) -> Brought:
        """``coming``: when the session of each turn comes back."""
        order = self.order
        rule, stamp = policies.make_policy(self.policy)
        config = CacheConfig(
            order.device_chunks,
            order.host_chunks,
            order.chunk_tokens,
            swap_watermark=order.swap_watermark,
            prefix_sharing=False,
        )
        attention, other = (order.attention_cost, order.other_cost) if order.attention_cost else PLAIN_COST
        self._cache = cache = CacheManager(config, CostModel(attention, other, order.chunk_tokens), rule)
        self._longest = np.zeros(cache.capacity_tokens + 1, np.int32)
        self._running: set[SessionKey] = set()
        ends: list[tuple[float, int]] = []
        seen: set[str] = set()
        for number, turn in enumerate(order.turns):
            while ends and (ends[0][0] <= turn.admitted or not self._admissible(turn)):
                _, ended = heapq.heappop(ends)
                self._end(order.turns[ended], stamp, coming[ended])
            if not self._admissible(turn):
                continue
            self._begin(turn, again=turn.session in seen)
            seen.add(turn.session)
            heapq.heappush(ends, (max(turn.ended, turn.admitted), number))
        return self.brought

    def _admissible(self, turn: PastTurn) -> bool:
        key = SessionKey(turn.session)
        if key in self._running or turn.context >= len(self._longest):
            return False
        return self._cache.can_admit(key, self._longest[: turn.context], 0)

    def _begin(self, turn: PastTurn, *, again: bool) -> None:
        cache, key = self._cache, SessionKey(turn.session)
        num_new = turn.context - (turn.history if again else 0)
        restore: Restore = cache.admit(key, self._longest[: turn.context], num_new, turn.admitted)
        self._running.add(key)
        for start, end in restore.missing:
            cache.computed(key, start, end)
        if again and turn.counted:
            self.brought.add(restore.gpu_cached, restore.swapped_in, restore.recomputed)
        self._launch(turn.admitted)

    def _end(self, turn: PastTurn, stamp: policies.Stamp, coming: float) -> None:
        cache, key = self._cache, SessionKey(turn.session)
        total = min(turn.context + turn.output, cache.capacity_tokens)
        if total > turn.context and cache.extend(key, total, turn.ended):
            cache.computed(key, turn.context, total)
        else:
            total = turn.context
        self._running.discard(key)
        cache.release(key, stamp(turn.ended, coming, 2), self._longest[:total])
        self._launch(turn.ended)

    def _launch(self, now: float) -> None:
        self._cache.swap_out_ahead(now, AHEAD)
        self._cache.take_copies()
        self._cache.complete_copies()


def returns(turns: Sequence[PastTurn]) -> list[float]:
    """When the session of each turn comes back after it."""
    following: dict[str, float] = {}
    coming = [0.0] * len(turns)
    for number in range(len(turns) - 1, -1, -1):
        turn = turns[number]
        coming[number] = following.get(turn.session, turn.ended + NEVER_S)
        following[turn.session] = turn.admitted
    return coming


def look_back(order: HindsightOrder) -> dict[str, object]:
    """The figures: ``turns``, ``history_tokens``, and shares ``measured``, ``replayed`` and ``clairvoyant``."""
    measured, count = Brought(), 0
    seen: set[str] = set()
    for turn in order.turns:
        if turn.session in seen and turn.counted:
            measured.add(*turn.receipt)
            count += 1
        seen.add(turn.session)
    coming = returns(order.turns)
    return {
        "turns": count,
        "history_tokens": measured.device + measured.host + measured.recomputed,
        "measured": measured.shares(),
        "replayed": _Again(order, order.policy).play(coming).shares(),
        "clairvoyant": _Again(order, "clairvoyant").play(coming).shares(),
    }
