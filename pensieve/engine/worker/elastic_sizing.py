"""Floor and ceiling of an elastic device tier (``--device-cache FLOOR..CEILING``), and how its pages lie.

Both sides are sizes as without a range: in bytes, or in tokens of contexts. The tier has units with one KV group too,
and the floor decides how large they are, so that the tier can be cut finely enough where it is smallest.

``num_bytes`` are totals over all ranks, layouts those of one rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from pensieve.config import is_tokens, parse_cache_size
from pensieve.engine.cache.pages import PageSize, unit_pages_for
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.kv.virtual import driver, plain
from pensieve.engine.worker.hybrid_sizing import ChunkSizes, ContextSizes, explicit_bytes, unit_bytes
from pensieve.model.groups import ALIGNMENT, KvGroup, context_pages


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """A device tier that grows and shrinks."""

    floor: int
    """Bytes over all ranks; likewise the ceiling."""
    ceiling: int
    layout: TierLayout
    """One rank's tier at the ceiling."""


def refusal(device: str) -> str:
    """Return why this machine cannot have an elastic tier, in one clause; "": it can. On a GPU: of the current one."""
    if device != "cuda":
        return plain.refusal()
    return driver.refusal(torch.device("cuda", torch.cuda.current_device()))


def elastic_tier(
    size: str,
    sides: tuple[str, str],
    groups: Sequence[KvGroup],
    sizes: ChunkSizes | ContextSizes,
    *,
    on_gpu: bool,
) -> DeviceRange | None:
    """Return the tier of a range, written as ``size``; None when both sides come to the same size. Raises ValueError
    when a side is no size, or the floor is above the ceiling or less than a unit of each group."""
    for group in groups:
        if group.layers and group.layer_page_bytes % ALIGNMENT:
            raise ValueError(
                f"device cache {size}: a page of a {group.kind} layer is {group.layer_page_bytes} bytes; a range needs "
                f"a multiple of {ALIGNMENT}: give more chunk tokens"
            )
    least = explicit_bytes("device", sides[0], sizes, sizes.device_bytes) // sizes.ranks
    pages = tuple(
        PageSize(
            len(group.layers),
            group.layer_page_bytes,
            unit_pages_for(len(group.layers), group.layer_page_bytes, least, on_gpu=on_gpu),
        )
        for group in groups
    )
    one = sum(page.unit_bytes for page in pages)
    floor, ceiling = (_share(side, groups, pages, sizes) for side in sides)
    if floor < one:
        raise ValueError(
            f"device cache {size}: the floor is less than one chunk, which is {sizes.chunk_tokens} tokens or "
            f"{one * sizes.ranks} bytes"
        )
    if floor > ceiling:
        raise ValueError(f"device cache {size}: the floor {sides[0]} is above the ceiling {sides[1]}")
    if floor == ceiling:
        return None
    return DeviceRange(floor * sizes.ranks, ceiling * sizes.ranks, TierLayout(ceiling, pages))


def _share(
    size: str, groups: Sequence[KvGroup], pages: tuple[PageSize, ...], sizes: ChunkSizes | ContextSizes
) -> int:
    """Return one rank's bytes of a size: for tokens enough whole units; bytes are rounded down."""
    number = parse_cache_size(size, 1)
    if is_tokens(size):
        wanted = context_pages(tuple(groups), sizes.chunk_tokens, number) if number else (0,) * len(groups)
        return unit_bytes(wanted, pages)
    share = sizes.whole(number) // sizes.ranks
    return share if len(pages) > 1 else share - share % pages[0].unit_bytes
