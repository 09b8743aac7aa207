"""Sizes of a tier in tokens and in bytes, for models with one KV group and with two.

With one group a tier is a number of chunks. With two, both share its bytes as the load demands. The size of such a
tier in tokens is that of one context with all that its layers keep: ``4096tokens`` hold a context of 4,096 tokens, with
the slices of its window or its states.

``num_bytes`` are totals over all ranks, layouts those of one rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

from pensieve.config import CacheGroup, is_tokens, parse_cache_size
from pensieve.engine.cache.pages import PageSize, unit_pages_for
from pensieve.engine.kv.grid import TierLayout
from pensieve.model.groups import ALIGNMENT, KvGroup, context_pages

NO_TIER: Final = TierLayout(0, ())


@dataclass(frozen=True, slots=True)
class ChunkSizes:
    """Sizes of tiers for a model with one KV group."""

    group: KvGroup
    """With the bytes of one rank's pages."""
    chunk_tokens: int
    ranks: int

    def device_bytes(self, tokens: int) -> int:
        """Return the bytes of a tier of that many tokens, rounded down to whole chunks."""
        return tokens // self.chunk_tokens * self.group.page_bytes * self.ranks

    host_bytes = device_bytes

    def whole(self, num_bytes: int) -> int:
        """Round bytes down to what a tier can use."""
        return num_bytes - num_bytes % (self.group.page_bytes * self.ranks)

    def device_layout(self, num_bytes: int) -> TierLayout:
        """Return the layout of a tier of that many bytes: one unit."""
        share = num_bytes // self.ranks
        chunks = max(1, share // self.group.page_bytes)
        return TierLayout(share, (PageSize(len(self.group.layers), self.group.layer_page_bytes, chunks),))

    host_layout = device_layout

    def chunks(self, tier: TierLayout) -> int:
        """Return the pages of a tier."""
        return tier.num_bytes // self.group.page_bytes


@dataclass(frozen=True, slots=True)
class ContextSizes:
    """Sizes of tiers for a model with two KV groups."""

    groups: tuple[KvGroup, ...]
    """With the bytes of one rank's pages."""
    chunk_tokens: int
    context_limit: int
    ranks: int
    on_gpu: bool

    def __post_init__(self) -> None:
        """Raises ValueError for pages that cannot be copied."""
        for group in self.groups:
            if group.layer_page_bytes % ALIGNMENT:
                raise ValueError(
                    f"chunk tokens {self.chunk_tokens}: a page of a {group.kind} layer is {group.layer_page_bytes} "
                    f"bytes, which is no multiple of {ALIGNMENT}: give more"
                )

    def device_bytes(self, tokens: int) -> int:
        """Return the bytes of the smallest device tier that holds a context of that many tokens."""
        pages = self._pages(tokens)
        needed, num_bytes = self._page_bytes(pages), 0
        while needed > num_bytes:  # a larger tier may have larger units
            num_bytes = needed
            needed = unit_bytes(pages, self._sizes(num_bytes))
        return num_bytes * self.ranks

    def host_bytes(self, tokens: int) -> int:
        """Return the bytes of the smallest host tier that holds a context of that many tokens."""
        step = self._host_step
        return -(-self._page_bytes(self._pages(tokens)) // step) * step * self.ranks

    def whole(self, num_bytes: int) -> int:
        """Round bytes down to what a tier can use."""
        whole = num_bytes - num_bytes % (self._host_step * self.ranks)
        return whole if whole >= self._page_bytes((1, 1)) * self.ranks else 0

    def device_layout(self, num_bytes: int) -> TierLayout:
        """Return the layout of a device tier of that many bytes."""
        share = num_bytes // self.ranks
        return TierLayout(share, self._sizes(share))

    def host_layout(self, num_bytes: int) -> TierLayout:
        """Return the layout of a host tier of that many bytes: each page is a unit."""
        sizes = tuple(PageSize(len(group.layers), group.layer_page_bytes, 1) for group in self.groups)
        return TierLayout(num_bytes // self.ranks, sizes)

    def chunks(self, tier: TierLayout) -> int:
        """Return the chunks that a tier holds in contexts of the longest length, or in one context if the longest
        does not fit."""
        low, high = 0, -(-self.context_limit // self.chunk_tokens)
        if contexts := tier.num_bytes // self._context_bytes(high, tier):
            return high * contexts
        while high - low > 1:
            middle = (low + high) // 2
            low, high = (
                (middle, high) if self._context_bytes(middle, tier) <= tier.num_bytes else (low, middle)
            )
        return low

    @property
    def _host_step(self) -> int:
        """A tier is a multiple of this. The second group's grid then begins at byte 0, so host memory can be
        registered in pieces that cut no layer page."""
        return self.groups[1].layer_page_bytes

    def _pages(self, tokens: int) -> tuple[int, ...]:
        return context_pages(self.groups, self.chunk_tokens, tokens) if tokens else (0, 0)

    def _page_bytes(self, pages: tuple[int, ...]) -> int:
        return sum(count * group.page_bytes for count, group in zip(pages, self.groups, strict=True))

    def _context_bytes(self, chunks: int, tier: TierLayout) -> int:
        return unit_bytes(self._pages(chunks * self.chunk_tokens), tier.sizes)

    def _sizes(self, num_bytes: int) -> tuple[PageSize, ...]:
        """Return the pages of a device tier of that many bytes, of one rank."""
        sizes = []
        for group in self.groups:
            layers, layer_page = len(group.layers), group.layer_page_bytes
            unit = unit_pages_for(layers, layer_page, num_bytes, on_gpu=self.on_gpu) if layers else 1
            sizes.append(PageSize(layers, layer_page, unit))
        return tuple(sizes)


def sizes_for(
    groups: tuple[KvGroup, ...], chunk_tokens: int, context_limit: int, *, ranks: int, on_gpu: bool
) -> ChunkSizes | ContextSizes:
    """Return the sizes of a model's tiers. Raises ValueError for pages that cannot be copied."""
    if len(groups) == 1:
        return ChunkSizes(groups[0], chunk_tokens, ranks)
    return ContextSizes(groups, chunk_tokens, context_limit, ranks, on_gpu)


def explicit_bytes(
    tier: str, size: str, sizes: ChunkSizes | ContextSizes, bytes_for: Callable[[int], int]
) -> int:
    """Return the bytes of a tier of the given size (``40GiB``, ``4096tokens``). ``bytes_for``: of a tier for that many
    tokens. Raises ValueError with the accepted forms for anything else."""
    try:
        number = parse_cache_size(size, 1)
    except ValueError as error:
        raise ValueError(f"{tier} {error}") from error
    return bytes_for(number) if is_tokens(size) else sizes.whole(number)


def cache_groups(
    groups: Sequence[KvGroup], tier: TierLayout, *, elastic: bool = False
) -> tuple[CacheGroup, ...]:
    """Return a model's KV groups as the cache sees them; ``tier``: the device tier. With one group it counts pages,
    unless the tier is ``elastic``."""
    if len(groups) < 2 and not elastic:
        return (CacheGroup(),)
    return tuple(
        CacheGroup(group.kind, group.window or 0, len(group.layers), group.layer_page_bytes, size.unit_pages)
        for group, size in zip(groups, tier.sizes, strict=True)
    )


def unit_bytes(pages: tuple[int, ...], sizes: tuple[PageSize, ...]) -> int:
    """Return the bytes of the units that hold these numbers of pages."""
    return sum(
        -(-count // size.unit_pages) * size.unit_bytes for count, size in zip(pages, sizes, strict=True)
    )
