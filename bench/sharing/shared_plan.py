"""Plans by hand for decodes of sessions that share a prefix: its keys are read once for all of them.

The attention kernels take any work list. Here one span of all sessions' queries attends to the prefix, in wide items,
and each query to its own suffix, in narrow ones; every item is a piece, and the launch that merges pieces adds them up.
No kernel knows of it. Sessions have equal lengths, and rows of the query in the order of the page tables' rows, each of
which begins with the pages of the prefix.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import torch

from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.kinds import Geometry, StepKind
from pensieve.kernels.attention.plan import HEADER, AttentionPlan, Scratch, plan_key
from pensieve.kernels.attention.tiles import Tile, TileSet
from pensieve.kernels.attention.work_lists import ITEM, MERGE
from pensieve.kernels.ragged_paged_attention import ragged_paged_attention
from pensieve.kernels.span_table import Ints, SpanTable


@dataclass(frozen=True, slots=True)
class SharedStep:
    """Decodes of ``sessions`` contexts of ``prefix`` and ``suffix`` tokens; the prefix is one for all."""

    sessions: int
    prefix: int
    suffix: int

    @property
    def context(self) -> int:
        return self.prefix + self.suffix


@dataclass(frozen=True, slots=True)
class Cut:
    """How the work is dealt out."""

    prefix_pieces: int
    """For each block of queries."""
    suffix_pieces: int
    """For each session."""
    beside: int
    """Multiprocessors that the prefix gets while suffixes run on the others; 0: prefix first, then suffixes."""


def cuts(step: SharedStep, geometry: Geometry) -> list[Cut]:
    """Those that are worth a try: the fastest is found by measuring."""
    tiles = geometry.tiles
    longest = step.prefix // max(tiles.wide.keys, tiles.narrow.keys)
    pieces = [n for n in (1, 2, 3, 4, 6, 8, 13) if n <= longest]
    halves = [1, 2] if step.suffix >= 4 * tiles.narrow.keys else [1]
    shares = [0, *(geometry.multiprocessors * part // 8 for part in (2, 3, 4, 5, 6))]
    return [Cut(n, half, share) for n in pieces for half in halves for share in shares]


def planned(
    step: SharedStep,
    cut: Cut,
    q: torch.Tensor,
    pools: list[torch.Tensor],
    tables: torch.Tensor,
    spans: SpanTable,
    out: torch.Tensor,
    geometry: Geometry,
    tiles: TileSet | None = None,
) -> Callable[[int], object]:
    """The attention of a step on pool number ``index``, written to ``out``. ``spans``: the decodes of the step."""
    tiles = tiles or geometry.tiles
    if step.prefix % tiles.wide.keys or step.prefix % tiles.narrow.keys:
        raise ValueError(f"a prefix of {step.prefix} tokens is not made of whole key tiles")
    pieces = cut.prefix_pieces + cut.suffix_pieces
    scratch = Scratch(pieces * step.sessions * geometry.groups, geometry, q.device)
    wide = _prefix_items(step, cut, geometry, tiles.wide)
    kinds = [StepKind.MIXED] if cut.beside else [StepKind.WIDE, StepKind.NARROW]
    tables_of_plans = []
    for kind in kinds:
        narrow, merges = np.empty((0, ITEM), np.int64), np.empty((0, MERGE), np.int64)
        if kind.has_narrow:
            narrow = _suffix_items(step, cut, geometry, kind.narrow_tile(tiles))
            merges = _merges(step, pieces, geometry, kind)
        plan = _plan(
            len(q), narrow, wide if kind.has_wide else wide[:0], merges, cut.beside or geometry.multiprocessors,
            geometry, kind, tiles, scratch,
        )  # fmt: skip
        tables_of_plans.append(replace(spans, plans={plan_key(q, pools[0]): plan}))

    def call(index: int) -> object:
        for table in tables_of_plans:
            ragged_paged_attention(q, pools[index], table, tables, scale=q.shape[2] ** -0.5, out=out)
        return out

    return call


def prefix_alone(
    step: SharedStep, cut: Cut, q: torch.Tensor, pool: torch.Tensor, spans: SpanTable, geometry: Geometry
) -> SpanTable:
    """A span table whose plan attends all queries to the whole prefix and nothing else; results may be asked for with
    the log of their denominators. The plan is the only thing in it that counts."""
    tiles = geometry.tiles
    wide = _prefix_items(step, cut, geometry, tiles.wide)
    merges = np.empty((0, MERGE), np.int64)
    scratch = Scratch(cut.prefix_pieces * step.sessions * geometry.groups, geometry, q.device)
    if cut.prefix_pieces == 1:
        wide[:, 7] = -1
    else:
        merges = _merges(step, cut.prefix_pieces, geometry, StepKind.WIDE)
    plan = _plan(
        len(q), wide[:0], wide, merges, geometry.multiprocessors, geometry, StepKind.WIDE, tiles, scratch
    )
    return replace(spans, plans={plan_key(q, pool): plan})


def _prefix_items(step: SharedStep, cut: Cut, geometry: Geometry, tile: Tile) -> Ints:
    """One span of all queries, each of which sees the whole prefix: as if it stood behind it."""
    rows = step.sessions * geometry.groups
    steps, made = step.prefix // tile.keys, []
    for piece in range(cut.prefix_pieces):
        first, end = (n * steps // cut.prefix_pieces * tile.keys for n in (piece, piece + 1))
        for block in range(0, rows, tile.rows):
            made.append((0, rows, step.prefix - 1, 0, block, first, end, piece * rows + block))
    return np.array(made, np.int64)


def _suffix_items(step: SharedStep, cut: Cut, geometry: Geometry, tile: Tile) -> Ints:
    rows = step.sessions * geometry.groups
    steps, made = -(-step.suffix // tile.keys), []
    for session in range(step.sessions):
        for piece in range(cut.suffix_pieces):
            first, end = (
                step.prefix + n * steps // cut.suffix_pieces * tile.keys for n in (piece, piece + 1)
            )
            scratch = (cut.prefix_pieces + piece) * rows + session * geometry.groups
            position = step.context - 1
            end = min(end, step.context)
            made.append((session, geometry.groups, position, session, 0, first, end, scratch))
    return np.array(made, np.int64)


def _merges(step: SharedStep, pieces: int, geometry: Geometry, kind: StepKind) -> Ints:
    groups, at_once = geometry.groups, kind.merged_rows
    return np.array(
        [
            (session, row, min(row + at_once, groups), session * groups + row, pieces, step.sessions * groups)
            for session in range(step.sessions)
            for row in range(0, groups, at_once)
        ],
        np.int64,
    )


def _plan(
    num_rows: int,
    narrow: Ints,
    wide: Ints,
    merges: Ints,
    programs: int,
    geometry: Geometry,
    kind: StepKind,
    tiles: TileSet,
    scratch: Scratch,
) -> AttentionPlan:
    """A plan of just this work, laid out in memory as ``AttentionPlan.pack`` does."""
    narrow_at = HEADER + wide.size
    header = [len(narrow), len(wide), len(merges), narrow_at, HEADER, narrow_at + narrow.size, programs, 0]
    words = np.concatenate([np.array(header), wide.reshape(-1), narrow.reshape(-1), merges.reshape(-1)])
    capacity = Capacity(len(narrow), len(wide), len(merges), scratch.rows)
    device = scratch.partial.device
    return AttentionPlan(
        num_rows, geometry, device, kind=kind, capacity=capacity, tiles=tiles, scratch=scratch,
        words=torch.from_numpy(words.astype(np.int32)).to(device),
    )  # fmt: skip
