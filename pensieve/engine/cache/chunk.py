"""A chunk: the unit of caching, eviction and swap; and a session's list of them."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from pensieve.core import SessionKey, TokenArray

NOWHERE = -1


class Place(enum.Enum):
    """Where a chunk's KV-tokens are."""

    DEVICE = "device"
    BOTH = "both"
    """On the device, with a clean host copy: its device slot can be taken at once."""
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
    """Device slot, or NOWHERE."""
    host: int = NOWHERE
    pins: int = 0
    """Running requests that use it. Pinned chunks keep their device slot."""
    saving: bool = False
    """A copy to ``host`` is planned and not yet committed."""
    loading: bool = False
    """A copy from ``host`` is planned and not yet committed: ``host`` must stay."""
    owners: list[CachedSession] = field(default_factory=list)
    """Sessions that have it in their list; more than one: shared, never written."""

    @property
    def place(self) -> Place:
        """A copy in flight does not count until it is committed."""
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
    """Of its latest turn."""
    kind: int = 0
    """What its policy calls it since its latest turn ended: see ``Policy.left``."""
    cached: int = 0
    """Chunks that are in a tier; a session with none is forgotten."""
    table: npt.NDArray[np.int32] = field(default_factory=lambda: np.empty(0, dtype=np.int32))
    """Device slot per chunk while running; grown in place, so earlier slices of it stay true."""


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the longest common prefix of two token arrays."""
    n = min(len(a), len(b))
    different = np.flatnonzero(a[:n] != b[:n])
    return int(different[0]) if len(different) else n
