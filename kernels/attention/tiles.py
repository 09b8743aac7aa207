"""Tile shapes of the ragged paged attention kernel, and the rule that picks one for a launch.

They were chosen by measurement on an H200 with heads of 128; the comments name the gain of each choice there.
The rules depend only on rows, items and the room on the device, not on a particular workload.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

WIDEST_HEAD = 256


@dataclass(frozen=True, slots=True)
class Tile:
    """The working set of one program, and its cost on the device."""

    rows: int
    """Query rows (tokens × query heads of a KV head) of an item; below 64 the tensor cores' older instruction runs."""
    keys: int
    """Keys per iteration of the loop over an item's keys."""
    warps: int
    stages: int
    """Key and value buffers in flight, plus one."""
    registers: int | None
    """Limit per thread, to reach ``resident``; None: the compiler's choice."""
    resident: int
    """Programs that fit on one multiprocessor."""
    least_keys: int
    """No item is split into pieces shorter than this."""
    split_mask: bool = False
    """Loop over fully visible tiles first, without a mask: faster, at the price of a second loop."""
    hopper: bool = False
    """Whether the tile belongs to the kernel for Hopper (``attention.hopper``)."""


@dataclass(frozen=True, slots=True)
class TileSet:
    """The tiles for the launches of one geometry."""

    narrow: Tile
    narrow_concurrent: Tile
    """For narrow items that run beside wide ones."""
    short: Tile
    """For steps of short spans on short contexts, see ``StepKind.SHORT``."""
    few: Tile
    """For steps in which no span has more rows than this tile."""
    wide: Tile


FIXED_WIDE = Tile(128, 64, 8, 3, None, 1, 512, split_mask=True)
"""For fixed pieces, which hold two sums at a time: a limit of registers would spill them. (A prefill of 8,192 tokens
takes 0.7 of the time of the tile that shares a multiprocessor.) Keys in 8 bits are decoded in registers: likewise."""
HOPPER = Tile(128, 128, 12, 2, None, 1, 512, split_mask=True, hopper=True)
"""It fills a multiprocessor: nothing is resident beside it."""


def width_of(head_dim: int) -> int:
    """Return the columns of a tile: the head size rounded up to a power of two. Raises ValueError beyond 256."""
    if not 0 < head_dim <= WIDEST_HEAD:
        raise ValueError(f"heads of {head_dim} values are not supported: 1 to {WIDEST_HEAD}")
    return int(max(16, 1 << (head_dim - 1).bit_length()))


@cache
def choose_tiles(
    head_dim: int,
    element_bytes: int,
    *,
    hopper: bool = False,
    fixed: bool = False,
    coded: bool = False,
    copied: bool = False,
) -> TileSet:
    """Return the tiles for heads of this size and element width. ``hopper``: wide items use the kernel for Hopper.
    ``fixed``: for fixed pieces; all tiles then have the same number of keys. ``coded``: for keys in 8 bits.
    ``copied``: wide items read plain copies of them."""
    if element_bytes > 2:  # for comparisons, not for speed
        small, large = Tile(16, 32, 4, 2, None, 1, 64), Tile(64, 32, 4, 2, None, 1, 256)
        return TileSet(small, small, replace(small, rows=32), large, large)
    if width_of(head_dim) > 128:
        # Measured with 16 query and 8 KV heads: three resident programs read 64 contexts of 4,096 tokens at the
        # memory's full rate (0.85 of the time of two). For a prefill of 2,048 tokens behind as many, the large tile
        # takes 0.62 of the time of blocks of 64 rows. Its limit of registers leaves room for one narrow program.
        small = Tile(16, 32, 4, 3, None, 3, 64)
        return TileSet(
            narrow=small,
            narrow_concurrent=small,
            short=replace(small, rows=32, resident=2),
            few=Tile(64, 32, 4, 3, None, 1, 256, split_mask=True),
            wide=Tile(128, 32, 8, 3, 192, 1, 256, split_mask=True),
        )
    narrow = Tile(16, 64, 4, 3, 168, 3, 64)
    return TileSet(
        narrow=narrow,
        # More programs with fewer loads in flight each. Beside the kernel for Hopper they have few
        # multiprocessors, whose speed then matters more than the memory's; beside the other kernel they fit
        # into the space it leaves.
        # Decoding takes more registers.
        narrow_concurrent=narrow
        if hopper and coded
        else Tile(16, 64, 4, 2, 96, 5, 64)
        if hopper
        else Tile(16, 64, 4, 2, 128, 2, 64),
        short=Tile(32, 64, 4, 2, 168, 3, 128),
        # A lone span of 16 tokens on 1,500 takes 0.72 of the time that it takes with 512 keys at least.
        few=Tile(64, 64, 4, 3, None, 2, 128, split_mask=True),
        # Two programs of 8 warps per multiprocessor: the softmax of one runs beside the products of the
        # other.
        wide=HOPPER
        if hopper
        else FIXED_WIDE
        if fixed or (coded and not copied)
        else Tile(128, 64, 8, 2, 128, 2, 512, split_mask=True),
    )
