"""Kinds of steps, and the rates by which their attention is split.

A captured graph fixes launches, tiles and memory. The *kind* of a step is that choice. One graph per kind and
bucket of tokens serves every step, with a capacity (``capacity``) that no step of the bucket exceeds.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.tiles import Tile, TileSet, choose_tiles
from pensieve.kernels.spans import POSITION, Q_LEN, Spans

SHORT_CONTEXT = 1536
"""Up to this mean context, it pays to start all programs at once although they read more slowly."""
WIDE_STEP, UNSHARED_STEP, NARROW_STEP = 1.75, 1.8, 1.03
"""Microseconds per tile, measured on an H200 with heads of 128. WIDE_STEP: 128 rows and 128 keys on one
multiprocessor. UNSHARED_STEP: extra wait for keys that no other block has brought into the L2 cache, while
narrow items use the full memory bandwidth. NARROW_STEP: 64 keys of a narrow item at its multiprocessor's
share of that bandwidth."""
ENOUGH_TO_READ = 0.6
"""Share of the multiprocessors that reads as fast as all of them."""
MORE_KEYS = 0.2
"""A step is narrow if its longer spans, in blocks of the narrow tile, add at most this share to the keys that are read:
blocks of a span read the same keys at the same time, mostly from the L2 cache. Measured on an H200: 16 to 233 decodes
over 1,024 keys, with 2 to 23 spans of 3 to 17 tokens among them, take 0.99 to 1.11 times as long as decodes alone, and
0.97 to 1.67 times in another kind. (FEW is faster of 8 decodes with more, and of 16 and 32 with 32/8 heads.)"""
LONGEST_NARROW = 4
"""No span of a narrow step has more rows than this times ``TileSet.few``."""
LEAST_SPANS = 4
"""Fewest spans in a prefix group (``prefixes``). A tile of queries takes as long over the prefix as three or four
decodes do, ``WIDE_STEP + UNSHARED_STEP`` against two times ``NARROW_STEP`` each, however few rows are used."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """The heads of a layer, its window and its device: all that the planning rules depend on."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    multiprocessors: int
    hopper: bool = False
    """Wide items use the kernel for Hopper devices."""
    piece: int = 0
    """Keys of the first fixed pieces, a multiple of every tile's keys: the bits of a row then do not depend on how its
    keys are divided over programs (``cuts``). 0: pieces of any length. Never with ``hopper``."""
    coded: bool = False
    """The pool holds codes (``kv_codec``). With ``hopper``, wide items read copies, since bulk copies feed the products
    directly."""
    copied_page: int = 0
    """Tokens of a page of a coded pool whose wide items read plain copies (``copies``); 0: they read codes."""
    window: int | None = None
    """The query at position ``p`` sees only positions ``[p - window + 1, p]``; None: it sees ``[0, p]``."""
    own_tiles: TileSet | None = None
    """Overrides the tiles that fit the heads; for tests."""

    @property
    def tiles(self) -> TileSet:
        return self.own_tiles or choose_tiles(
            self.head_dim,
            self.element_bytes,
            hopper=self.hopper,
            fixed=self.piece > 0,
            coded=self.coded,
            copied=self.copied_page > 0,
        )

    @property
    def without_copies(self) -> Geometry:
        """The same, for steps whose wide items see more pages than there is room for copies."""
        return replace(self, copied_page=0, hopper=self.hopper and not self.coded)

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


PIECE_KEYS = 512
"""``Geometry.piece`` where it is not 0. With 256 a prefill adds up too often, with 1,024 a context has few items."""


class StepKind(Enum):
    """Launches and tiles of a step's attention. All kinds but MIXED take one launch."""

    NARROW = "narrow"
    """Few spans or none have more rows than the narrow tile."""
    SHORT = "short"
    """No span has more than 32 rows, and only a tile of 32 lets all items start at once."""
    FEW = "few"
    """No span has more than 64 rows."""
    WIDE = "wide"
    """No span is narrow, and some have more than 64 rows."""
    MIXED = "mixed"
    """Narrow and wider spans."""

    @property
    def has_wide(self) -> bool:
        """Whether there is a list of wide items, for a launch with the large tile."""
        return self in (StepKind.WIDE, StepKind.MIXED)

    @property
    def has_narrow(self) -> bool:
        return self is not StepKind.WIDE

    @property
    def is_mixed(self) -> bool:
        return self is StepKind.MIXED

    @property
    def merged_rows(self) -> int:
        """Rows of a split item that are merged together: one where few items are split and every microsecond counts."""
        return 1 if self is StepKind.NARROW else 4

    def narrow_tile(self, tiles: TileSet) -> Tile:
        of = {StepKind.SHORT: tiles.short, StepKind.FEW: tiles.few, StepKind.MIXED: tiles.narrow_concurrent}
        return of.get(self, tiles.narrow)


def is_wide(spans: Spans, geometry: Geometry, narrow: Tile) -> npt.NDArray[np.bool_]:
    wide: npt.NDArray[np.bool_] = spans[:, Q_LEN] > narrow.rows // geometry.groups
    return wide


def classify(spans: Spans, geometry: Geometry, *, narrow: bool = True) -> StepKind:
    """Return the kind of a step with these spans; empty spans do not count. ``narrow`` off: another than NARROW."""
    tiles = geometry.tiles
    lengths = spans[:, Q_LEN]
    most = int(lengths.max(initial=0)) * geometry.groups
    if narrow and (most <= tiles.narrow.rows or _is_narrow(spans, geometry, tiles)):
        return StepKind.NARROW
    if most <= tiles.few.rows:
        return (
            StepKind.SHORT if most <= tiles.short.rows and _is_short(spans, geometry, tiles) else StepKind.FEW
        )
    large = is_wide(spans, geometry, tiles.narrow)
    if (lengths[~large] > 0).any():
        return StepKind.MIXED
    if not tiles.wide.hopper:  # smaller tiles while the device can start all of the large ones at once
        blocks = int((-(-lengths[large] * geometry.groups // tiles.wide.rows)).sum())
        if blocks <= programs_per_head(tiles.wide, geometry):
            return StepKind.FEW
    return StepKind.WIDE


def _is_narrow(spans: Spans, geometry: Geometry, tiles: TileSet) -> bool:
    """Whether spans with more rows than the narrow tile are few enough to be split: see ``MORE_KEYS``."""
    rows = spans[:, Q_LEN] * geometry.groups
    if int(rows.max()) > LONGEST_NARROW * tiles.few.rows:
        return False
    keys = np.where(rows > 0, spans[:, POSITION] + spans[:, Q_LEN], 0)
    more = np.maximum(-(-rows // tiles.narrow.rows) - 1, 0)
    return int(more @ keys) <= MORE_KEYS * int(keys.sum())


def _is_short(spans: Spans, geometry: Geometry, tiles: TileSet) -> bool:
    """Whether all items start at once with the short tile only. The next larger one reads faster in long contexts."""
    lengths = spans[:, Q_LEN]
    count = int((lengths > 0).sum())
    if not programs_per_head(tiles.few, geometry) < count <= programs_per_head(tiles.short, geometry):
        return False
    return int(spans[:, POSITION].sum() + lengths.sum()) <= SHORT_CONTEXT * count


def programs_per_head(tile: Tile, geometry: Geometry) -> float:
    return tile.resident * geometry.multiprocessors / geometry.kv_heads
