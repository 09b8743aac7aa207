"""Shared by the roles of the Hopper attention kernel: sizes, aliases of Gluon names, and the distribution of work."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia import hopper

from pensieve.kernels import spans
from pensieve.kernels.attention import work_lists

jit: Callable[[Callable[..., Any]], Any] = gluon.jit

# Names that differ between the supported versions of Triton.
_tma: Any = hopper.tma
_gl: Any = gl
_block: Any = gl.shared_memory_descriptor
seen_as = getattr(_block, "reinterpret", None) or _block._reinterpret
bulk_load = getattr(_tma, "async_load", None) or _tma.async_copy_global_to_shared
group_barrier = getattr(_gl, "thread_barrier", None) or _gl.barrier

ROWS = gl.constexpr(64)
"""Query rows of a warp group."""
KEYS = gl.constexpr(128)
"""Keys of a tile."""
K_STAGES, V_STAGES, Q_SLOTS = gl.constexpr(2), gl.constexpr(3), gl.constexpr(2)
"""Tiles in each ring in shared memory. Values are released a whole softmax later than keys; queries are
loaded one item ahead. (A ring's slot is not a slot of a page.)"""
SLAB = gl.constexpr(64)
"""Columns of a bulk copy: 128 bytes, the widest swizzle."""
HEADER, ITEM = gl.constexpr(work_lists.HEADER), gl.constexpr(work_lists.ITEM)
WIDE, SHARE_AT = gl.constexpr(work_lists.WIDE), gl.constexpr(work_lists.SHARE_AT)
Q_START, POSITION, TABLE = (
    gl.constexpr(spans.Q_START),
    gl.constexpr(spans.POSITION),
    gl.constexpr(spans.TABLE),
)
SPAN_ROWS, FIRST_ROW = gl.constexpr(work_lists.ROWS), gl.constexpr(work_lists.FIRST_ROW)
FIRST_KEY, END_KEY = gl.constexpr(work_lists.FIRST_KEY), gl.constexpr(work_lists.END_KEY)
PARTIAL = gl.constexpr(work_lists.PARTIAL)
"""Columns of an item."""


@jit
def program_works(words, KV_HEADS: gl.constexpr, BESIDE: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the works (items times KV heads), the programs that share them, and this program's first work."""
    works = gl.load(words + WIDE) * KV_HEADS
    programs = gl.num_programs(0)
    if BESIDE:
        programs = gl.load(words + SHARE_AT)
    return works, programs, gl.where(gl.program_id(0) < programs, gl.program_id(0), works)


@jit
def next_work(turn, programs):  # type: ignore[no-untyped-def]
    """Return this program's work in round ``turn``; the order alternates, since works fall in length."""
    place = gl.program_id(0)
    return turn * programs + gl.where(turn % 2 == 0, place, programs - 1 - place)


@jit
def first_seen(item, window, GROUPS: gl.constexpr):  # type: ignore[no-untyped-def]
    """Return the first key that the first query of an item sees in its window."""
    return gl.maximum(gl.load(item + POSITION) + gl.load(item + FIRST_ROW) // GROUPS + 1 - window, 0)


@jit
def tile_range(item):  # type: ignore[no-untyped-def]
    """Return an item's first key tile, the one after its last, and the end of its keys. An item without keys
    gets one tile in which no row sees anything."""
    first = gl.load(item + FIRST_KEY) // KEYS
    end = gl.load(item + END_KEY)
    return first, gl.maximum((end + KEYS - 1) // KEYS, first + 1), end
