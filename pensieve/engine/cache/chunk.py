"""A chunk, which is the unit of caching, eviction and swap; a session's list of them; what there is to say about it."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pensieve.core import SessionKey, TokenArray

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
    """``chunk_tokens`` consecutive positions of a session. Only ``CacheManager`` changes it.

    ``filled`` leading positions hold valid KV; the rest is missing and must be computed before use. So a dropped
    chunk, a half-recomputed one and a tail with room are the same thing with another number.
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
    """A copy from ``host`` is planned, and its plan not yet launched: ``host`` must stay."""
    owners: list[CachedSession] = field(default_factory=list)
    """Sessions that have it in their list. With more than one it is shared, and never written."""

    @property
    def place(self) -> Place:
        """Where its KV is. While the device has it, a host copy counts only when its plan is launched."""
        if self.device != NOWHERE:
            clean = self.host != NOWHERE and not self.saving
            return Place.BOTH if clean else Place.DEVICE
        return Place.HOST if self.host != NOWHERE else Place.DROPPED

    @property
    def shared(self) -> bool:
        return len(self.owners) > 1


@dataclass(slots=True, eq=False)
class CachedSession:
    """What the cache knows of one session: its token ids and its chunks. Only ``CacheManager`` changes it."""

    key: SessionKey
    row: int
    """Index of this session in the eviction index."""
    tokens: TokenArray = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Token ids that the chunks stand for, int32 [n]."""
    chunks: list[Chunk] = field(default_factory=list)
    last_active: float = 0.0
    running: bool = False
    new_tokens: int = 0
    """How many tokens of its latest turn were input."""
    kind: int = 0
    """How its policy classed it when its latest turn ended: see ``Policy.left``."""
    cached: int = 0
    """Chunks that are in a tier; a session with none is forgotten."""
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device page of each chunk while running, int32 [chunks]; grown by replacing it, so earlier slices stay true."""

    @property
    def copying(self) -> bool:
        """Whether some chunk is being saved or loaded."""
        return any(chunk.saving or chunk.loading for chunk in self.chunks)

    def known(self, tokens: TokenArray, num_new: int) -> int:
        """How many leading ``tokens`` are those of the session's chunks, the last ``num_new`` aside."""
        return min(common_prefix(self.tokens, tokens), len(tokens) - num_new)

    def residency(self) -> TierTokens:
        device = sum(chunk.filled for chunk in self.chunks if chunk.device != NOWHERE)
        host = sum(chunk.filled for chunk in self.chunks if chunk.place is Place.HOST)
        return TierTokens(device, host)


@dataclass(frozen=True, slots=True)
class Restore:
    """What it took to make a context present: ``gpu_cached + swapped_in + recomputed`` = its history tokens."""

    missing: tuple[Range, ...]
    """Ranges whose KV must be computed, ascending, not adjacent."""
    gpu_cached: int
    swapped_in: int
    recomputed: int


@dataclass(frozen=True, slots=True)
class TierTokens:
    """Valid KV-tokens of one session per tier; a chunk on both counts for the device."""

    device: int
    host: int


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
