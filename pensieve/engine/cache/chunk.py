"""A chunk, which is the unit of caching, eviction and swap; who holds it; what there is to say about it.

A session holds a list of chunks. The leading ones it may share with other sessions, the others are its own. Chunks in a
row that have the same owners are a ``SharedRun``. Whoever owns a chunk owns all that come before it, so a session's
shared chunks are whole runs, the owners of each among those of the one before, and end where its own chunks begin.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.rates.hints import NO_HINT, Hint

NOWHERE = -1
"""In place of a page's number: the chunk has none in that tier."""

Range = tuple[int, int]
"""Half-open range of positions."""


class Place(enum.Enum):
    """Where a chunk's KV-tokens are."""

    DEVICE = "device"
    BOTH = "both"
    """On the device, with a clean host copy: its device page can be taken at once."""
    HOST = "host"
    DROPPED = "dropped"


@dataclass(slots=True, eq=False)
class Chunk:
    """``chunk_tokens`` consecutive positions of a context.

    ``Tiers`` alone writes where it is, what it holds and its pins; ``SharedChunks`` alone its holder and its address.

    ``filled`` leading positions hold valid KV, once all plans made so far have run; the rest is missing and must be
    computed before use. So a dropped chunk, a half-recomputed one and a tail with room are the same thing with another
    number. Valid KV is never written again while more than one session owns the chunk.
    """

    index: int
    filled: int = 0
    device: int = NOWHERE
    """Its page in the device tier, or NOWHERE."""
    host: int = NOWHERE
    """Its page in the host tier, or NOWHERE."""
    pins: int = 0
    """Running requests that use it. Pinned chunks keep their device page."""
    saving: bool = False
    """A copy to ``host`` is planned, and its plan not yet launched."""
    loading: bool = False
    """A copy into ``device`` is planned, and its plan not yet launched: what it is copied from must stay."""
    digest: bytes = b""
    """Its address among the chunks of its tenant, from its tokens and all before it; b"" has none."""
    holder: CachedSession | SharedRun = field(kw_only=True)

    @property
    def place(self) -> Place:
        """Where its KV is. While the device has it, a host copy counts only when its plan is launched."""
        if self.device != NOWHERE:
            clean = self.host != NOWHERE and not self.saving
            return Place.BOTH if clean else Place.DEVICE
        return Place.HOST if self.host != NOWHERE else Place.DROPPED

    @property
    def cached(self) -> bool:
        """Whether it is in a tier."""
        return self.device != NOWHERE or self.host != NOWHERE

    @property
    def shared(self) -> bool:
        return isinstance(self.holder, SharedRun)


@dataclass(slots=True, eq=False)
class SharedRun:
    """Chunks in a row that the same sessions own, two at least: what sessions have in common, as far as they do."""

    row: int
    """Of this run in the eviction index."""
    own_chunks: list[Chunk]
    owners: dict[CachedSession, None]
    tenant: int
    """Of all its owners."""
    strip: str | None = None
    """Where they lie, as somebody has seen it since they last changed: see ``engine.strips``."""

    @property
    def first_index(self) -> int:
        """Index of its first chunk in the contexts of its owners."""
        return self.own_chunks[0].index


@dataclass(slots=True, eq=False)
class CachedSession:
    """What the cache knows of one session: its token ids and its chunks.

    ``SharedChunks`` alone writes ``chunks`` and ``shared``, ``CacheManager`` and the eviction index the rest.
    """

    key: SessionKey
    row: int
    """Of its own chunks in the eviction index."""
    is_candidate: bool = False
    """A further candidate's: nobody comes back for it unless it is chosen, so its policy learns nothing from it."""
    scope: str = ""
    """Within which it shares chunks; "": with nobody."""
    tenant: int = 0
    """Whose it is: see ``cache.tenants``."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Token ids that the chunks stand for, int32 [n]."""
    chunks: list[Chunk] = field(default_factory=list)
    shared: int = 0
    """How many leading chunks it shares; the others are its own."""
    last_active: float = 0.0
    running: bool = False
    warming: bool = False
    """What runs is not a turn, but brings its chunks to the device ahead of one."""
    new_tokens: int = 0
    """How many tokens of its latest turn were input."""
    kind: int = 0
    """How its policy classed it when its latest turn ended: see ``Policy.on_turn_end``."""
    hint: Hint = NO_HINT
    """What was said of its next turn."""
    strip: str | None = None
    """Where its own chunks lie, as somebody has seen it since they last changed: see ``engine.strips``."""
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device page of each chunk while running, int32 [chunks]; grown by replacing it, so earlier slices stay true."""

    @property
    def own_chunks(self) -> list[Chunk]:
        """Chunks that nobody else owns."""
        return self.chunks[self.shared :] if self.shared else self.chunks

    @property
    def first_index(self) -> int:
        """Index of its first own chunk."""
        return self.shared

    @property
    def copying(self) -> bool:
        """Whether some chunk is being saved or loaded."""
        return any(chunk.saving or chunk.loading for chunk in self.chunks)

    @property
    def has_cached_chunks(self) -> bool:
        """Whether any chunk is in a tier, or about to be for a running session that shares it."""
        return any(chunk.cached or chunk.pins for chunk in reversed(self.chunks))

    def shared_runs(self) -> Iterator[SharedRun]:
        """The runs that its shared chunks form, in order."""
        at = 0
        while at < self.shared:
            run = self.chunks[at].holder
            assert isinstance(run, SharedRun)
            yield run
            at += len(run.own_chunks)

    def matching_tokens(self, tokens: TokenArray) -> int:
        """How many leading ``tokens`` are those of the session's chunks."""
        return common_prefix(self.tokens, tokens)

    def residency(self) -> TierTokens:
        device = sum(chunk.filled for chunk in self.chunks if chunk.device != NOWHERE)
        host = sum(chunk.filled for chunk in self.chunks if chunk.place is Place.HOST)
        return TierTokens(device, host)


@dataclass(frozen=True, slots=True)
class Restore:
    """What it takes to make a context present. Where input was found cached, that counts as cached too."""

    missing: tuple[Range, ...]
    """Ranges whose KV must be computed, ascending, not adjacent."""
    gpu_cached: int
    swapped_in: int
    recomputed: int
    """Of the history alone: what is missing behind it is new."""


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Valid KV-tokens of one session per tier; a chunk on both counts for the device."""

    device: int
    host: int


def tokens_in(ranges: Iterable[Range]) -> int:
    """Positions in all of the ranges together."""
    return sum(end - start for start, end in ranges)


def take_front(ranges: deque[Range], budget: int) -> list[Range]:
    """Remove the first ``budget`` positions, or as many as there are; returns the ranges that they form."""
    taken: list[Range] = []
    while budget > 0 and ranges:
        start, end = ranges.popleft()
        cut = min(end, start + budget)
        taken.append((start, cut))
        budget -= cut - start
        if cut < end:
            ranges.appendleft((cut, end))  # the budget is used up; the rest is first in line next time
    return taken


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
