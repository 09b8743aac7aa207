"""Kinds of steps, and the rates by which their attention is cut.

A captured graph fixes launches, tiles and memory. The *kind* of a step is that choice: one graph per kind and bucket of
tokens serves every step, with a capacity (``capacity``) that no step of the bucket exceeds.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

import numpy as np
import numpy.typing as npt

from pensieve.kernels.attention.tiles import Tile, TileSet, choose_tiles
from pensieve.kernels.spans import POSITION, Q_LEN, Spans

SHORT_CONTEXT = 1536
"""Up to this mean context, programs that all start at once are worth their slower reading."""
WIDE_STEP, UNSHARED_STEP, NARROW_STEP = 1.75, 1.8, 1.03
"""Measured on an H200, heads of 128: microseconds that 128 rows and 128 keys take a multiprocessor; that it waits in
addition for keys which no other block has brought into the L2 cache, while narrow items use all of the memory's rate;
and that 64 keys would take a narrow item's multiprocessor at its share of that rate."""
ENOUGH_TO_READ = 0.6
"""This share of the multiprocessors reads as fast as all of them."""
LEAST_SPANS = 4
"""So many spans at least read a beginning together (``prefixes``). A tile of queries takes as long over it as three or
four decodes do, ``WIDE_STEP + UNSHARED_STEP`` against two times ``NARROW_STEP`` each, however few rows are used."""


@dataclass(frozen=True, slots=True)
class Geometry:
    """Heads, their width, and the device: all that the rules know of a model and a machine."""

    heads: int
    kv_heads: int
    head_dim: int
    element_bytes: int
    multiprocessors: int
    hopper: bool = False
    """Wide items go to the kernel for Hopper devices."""
    own_tiles: TileSet | None = None
    """In place of the tiles that fit the heads; for tests."""

    @property
    def tiles(self) -> TileSet:
        return self.own_tiles or choose_tiles(self.head_dim, self.element_bytes, hopper=self.hopper)

    @property
    def groups(self) -> int:
        """Query heads per KV head."""
        return self.heads // self.kv_heads


class StepKind(Enum):
    """Which launches the attention of a step takes, and with which tiles. All but MIXED take one launch."""

    NARROW = "narrow"
    """No span has more rows than the narrow tile."""
    SHORT = "short"
    """No span has more than 32 rows, and all start at once only with a tile of 32."""
    FEW = "few"
    """No span has more than 64 rows."""
    WIDE = "wide"
    """No span is narrow, and some have more than 64 rows."""
    MIXED = "mixed"
    """Narrow spans, and beside them wider ones."""

    @property
    def has_wide(self) -> bool:
        """Whether there is a list of wide items: for a launch with the large tile."""
        return self in (StepKind.WIDE, StepKind.MIXED)

    @property
    def has_narrow(self) -> bool:
        """Whether there is a list of narrow items: all that are not wide."""
        return self is not StepKind.WIDE

    @property
    def is_mixed(self) -> bool:
        """Whether there are both launches, side by side."""
        return self is StepKind.MIXED

    @property
    def merged_rows(self) -> int:
        """Rows of a cut item that are merged together: one where few items are cut and every microsecond counts."""
        return 1 if self is StepKind.NARROW else 4

    def narrow_tile(self, tiles: TileSet) -> Tile:
        of = {StepKind.SHORT: tiles.short, StepKind.FEW: tiles.few, StepKind.MIXED: tiles.narrow_concurrent}
        return of.get(self, tiles.narrow)


def is_wide(spans: Spans, geometry: Geometry, narrow: Tile) -> npt.NDArray[np.bool_]:
    """Which spans have more rows than the narrow tile."""
    wide: npt.NDArray[np.bool_] = spans[:, Q_LEN] > narrow.rows // geometry.groups
    return wide


def classify(spans: Spans, geometry: Geometry) -> StepKind:
    """The kind of a step with these spans; spans of no tokens do not count."""
    tiles = geometry.tiles
    lengths = spans[:, Q_LEN]
    most = int(lengths.max(initial=0)) * geometry.groups
    if most <= tiles.narrow.rows:
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


def _is_short(spans: Spans, geometry: Geometry, tiles: TileSet) -> bool:
    """Whether all items start at once with the short tile, but not with the next larger one. That one reads faster, and
    wins when contexts are long."""
    lengths = spans[:, Q_LEN]
    count = int((lengths > 0).sum())
    if not programs_per_head(tiles.few, geometry) < count <= programs_per_head(tiles.short, geometry):
        return False
    return int(spans[:, POSITION].sum() + lengths.sum()) <= SHORT_CONTEXT * count


def programs_per_head(tile: Tile, geometry: Geometry) -> float:
    """How many resident programs one KV head can count on."""
    return tile.resident * geometry.multiprocessors / geometry.kv_heads
