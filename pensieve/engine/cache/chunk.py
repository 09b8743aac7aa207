"""A chunk (the unit of caching, eviction and swapping) and the sessions that hold it.

A session has a list of chunks. The leading ones may be shared with other sessions, the rest are its own. Consecutive
chunks with the same owners form a ``SharedRun``. A session that owns a chunk owns all chunks before it. So a
session's shared chunks are whole runs, and the owners of each run are a subset of the owners of the run before it.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import takewhile
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from pensieve.core import SessionKey, TokenArray, common_prefix
from pensieve.engine.cache.rates import NO_HINT, Hint

NOWHERE = -1
"""Stands for a page number where the chunk has no page in that tier."""

Range = tuple[int, int]
"""Half-open range of positions."""


class Place(enum.Enum):
    """The tiers that hold a chunk's KV-tokens."""

    DEVICE = "device"
    BOTH = "both"
    """On the device, with a clean host copy: the device page can be taken at once."""
    HOST = "host"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class SliceFields:
    """The fields of a ``Slice``, which is what one KV group keeps of a chunk.

    Only ``Tiers`` writes these fields. The ``filled`` leading positions hold valid KV once all plans made so far
    have run. The others must be computed before use. A dropped slice, a half recomputed one and a tail with room
    differ only in this number. Valid KV is never overwritten while more than one session owns the chunk. In a
    group of states, the page holds the state after the first ``filled`` tokens of the chunk: it is a checkpoint
    when the chunk is full, and before that the state that a running request goes on from.
    """

    group: ClassVar[int]

    filled: int = 0
    device: int = NOWHERE
    host: int = NOWHERE
    pins: int = 0
    """Running requests that use it. A pinned slice with KV keeps its device page."""
    saving: bool = False
    """A copy to ``host`` is planned and its plan not yet launched."""
    loading: bool = False
    """A copy into ``device`` is planned and its plan not yet launched: the source of the copy must stay."""

    @property
    def place(self) -> Place:
        """Next to a device page, a host copy counts only once the plan that makes it is launched."""
        if self.device != NOWHERE:
            clean = self.host != NOWHERE and not self.saving
            return Place.BOTH if clean else Place.DEVICE
        return Place.HOST if self.host != NOWHERE else Place.DROPPED

    @property
    def cached(self) -> bool:
        return self.device != NOWHERE or self.host != NOWHERE


@dataclass(slots=True, eq=False)
class Chunk(SliceFields):
    """``chunk_tokens`` consecutive positions of a context. Only ``SharedChunks`` writes the fields below."""

    group: ClassVar[int] = 0

    index: int = field(kw_only=True)
    digest: bytes = b""
    """Address within the tenant, derived from its tokens and all tokens before them; b"": none yet."""
    holder: CachedSession | SharedRun = field(kw_only=True)
    other: OtherSlice | None = None
    """The second group's slice; None in a model with one group."""

    @property
    def shared(self) -> bool:
        return isinstance(self.holder, SharedRun)

    @property
    def copying(self) -> bool:
        """Whether the plan being made copies any of its slices in or out."""
        other = self.other
        return self.saving or self.loading or (other is not None and (other.saving or other.loading))


@dataclass(slots=True, eq=False)
class OtherSlice(SliceFields):
    """The second group's part of a chunk: keys and values of layers with a window, or states."""

    group: ClassVar[int] = 1

    chunk: Chunk = field(kw_only=True)
    leftover: bool = False
    """Only a turn that begins before the end of its holder would read it: see ``cache.tails``."""

    @property
    def index(self) -> int:
        return self.chunk.index

    @property
    def holder(self) -> CachedSession | SharedRun:
        return self.chunk.holder


Slice = Chunk | OtherSlice
"""A chunk is the slice of its first group itself; ``other`` is that of the second."""


@dataclass(slots=True, eq=False)
class SharedRun:
    """Consecutive chunks that the same sessions own, at least two of them."""

    row: int
    own_chunks: list[Chunk]
    owners: dict[CachedSession, None]
    tenant: int
    strip: str | None = None
    """Cached text for ``engine.strips``; None after any change."""

    @property
    def first_index(self) -> int:
        """Index of its first chunk in its owners' contexts."""
        return self.own_chunks[0].index


@dataclass(slots=True, eq=False)
class CachedSession:
    """A session in the cache: its token ids and its chunks.

    Only ``SharedChunks`` writes ``chunks`` and ``shared``; ``CacheManager`` and the eviction index write the rest.
    """

    key: SessionKey
    row: int
    """Row of its own chunks in the eviction index."""
    is_candidate: bool = False
    """Belongs to a further candidate. It returns only if chosen, so the policy learns nothing from it."""
    scope: str = ""
    """Chunks are shared within a scope; "": with no other session."""
    tenant: int = 0
    """Number of its tenant: see ``cache.tenants``."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Token ids that the chunks stand for, int32 [n]."""
    chunks: list[Chunk] = field(default_factory=list)
    shared: int = 0
    """Number of leading chunks that are shared."""
    length: int = 0
    """Number of its tokens, generated ones included, which ``tokens`` gets at the end of the request."""
    last_active: float = 0.0
    running: bool = False
    warming: bool = False
    """A warm-up runs, not a turn."""
    new_tokens: int = 0
    kind: int = 0
    """Kind that the policy assigned at the end of its latest turn: see ``Policy.on_turn_end``."""
    hint: Hint = NO_HINT
    strip: str | None = None
    """Cached text of its own chunks for ``engine.strips``; None after any change."""
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device page of each chunk while running, int32 [chunks]. Grows by replacement, so earlier slices stay valid."""
    table_moves: int = 0
    """``Tiers.moves`` when ``table`` was made."""
    runs: deque[Range] = field(default_factory=deque)
    """While running, in a model with two groups: the ranges of its context that are yet to be computed. Only ``Tails``
    writes this and the four below."""
    held: dict[OtherSlice, None] = field(default_factory=dict)
    """While running: the slices of the second group that it pins."""
    held_from: int = 0
    """Chunks before this one hold nothing of the second group that the request needs."""
    window_table: tuple[int, npt.NDArray[np.int32]] | None = None
    """``Tiers.moves``, and the device pages of ``held`` as of then; None after any change of ``held``."""
    promised: int = 0
    """Pages of the second group that are kept for it, besides those of ``held``."""
    resume_points: tuple[int, ...] = ()
    """Positions at which a turn may go on again: where the latest turn began, and the last token of its prompt."""

    @property
    def own_chunks(self) -> list[Chunk]:
        """Chunks that no other session owns."""
        return self.chunks[self.shared :] if self.shared else self.chunks

    @property
    def first_index(self) -> int:
        return self.shared

    def common_chunks(self, origin: CachedSession, full: int) -> int:
        """Return how many of the first ``full`` chunks of ``origin`` the session has."""
        pairs = zip(self.chunks, origin.chunks[:full], strict=False)
        return sum(1 for _ in takewhile(lambda pair: pair[0] is pair[1], pairs))

    @property
    def copying(self) -> bool:
        if self.two_groups:
            return any(chunk.copying for chunk in self.chunks)
        return any(chunk.saving or chunk.loading for chunk in self.chunks)

    @property
    def has_cached_chunks(self) -> bool:
        """Whether any chunk is in a tier, or pinned by a running session that shares it."""
        return any(
            chunk.cached or chunk.pins or (chunk.other is not None and chunk.other.cached)
            for chunk in reversed(self.chunks)
        )

    @property
    def two_groups(self) -> bool:
        return bool(self.chunks) and self.chunks[0].other is not None

    def shared_runs(self) -> Iterator[SharedRun]:
        at = 0
        while at < self.shared:
            run = self.chunks[at].holder
            assert isinstance(run, SharedRun)
            yield run
            at += len(run.own_chunks)

    def matching_tokens(self, tokens: TokenArray) -> int:
        """Return how many leading ``tokens`` equal the session's."""
        return common_prefix(self.tokens, tokens)

    def residency(self) -> TierTokens:
        device = sum(chunk.filled for chunk in self.chunks if chunk.device != NOWHERE)
        host = sum(chunk.filled for chunk in self.chunks if chunk.place is Place.HOST)
        return TierTokens(device, host)


@dataclass(frozen=True, slots=True)
class Restore:
    """The sources of an admitted context. Input that was found in the cache counts as cached."""

    missing: tuple[Range, ...]
    """Ranges whose KV must be computed, ascending, not adjacent."""
    gpu_cached: int
    swapped_in: int
    recomputed: int
    """Missing history. Missing tokens after the history are new."""


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Valid KV-tokens of one session by tier. A chunk on both tiers counts for the device."""

    device: int
    host: int


def tokens_in(ranges: Iterable[Range]) -> int:
    return sum(end - start for start, end in ranges)


def take_front(ranges: deque[Range], budget: int) -> list[Range]:
    """Remove up to ``budget`` positions from the front of ``ranges``; return them as ranges."""
    taken: list[Range] = []
    while budget > 0 and ranges:
        start, end = ranges.popleft()
        cut = min(end, start + budget)
        taken.append((start, cut))
        budget -= cut - start
        if cut < end:
            ranges.appendleft((cut, end))  # the budget is used up
    return taken
