"""The two pools of a model with two KV groups: one buffer per tier, in which pages of both groups lie.

The pools of an elastic device tier are of this kind with one KV group too: its pages lie in units there. In the host
tier they lie as in ``pools.KvPools``.

``grid`` says where. A layer's view of its group's pages begins where the layer does in the first unit, and its page
stride is one layer page, so kernels use page numbers as with one group. All views of a tier overlap: the cache manager
hands each byte to one page at a time.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from pensieve.config import KvDtypeName
from pensieve.engine.kv.grid import Grid, TierLayout
from pensieve.engine.kv.pools import GroupPages, KvTiers, PinnedMemory, untouched_zeros
from pensieve.engine.kv.virtual.backing import Backing
from pensieve.engine.kv.virtual.driver import DriverBackend
from pensieve.engine.kv.virtual.plain import PlainBackend
from pensieve.engine.kv.virtual.region import Backend, RegionSizes, handle_bytes, reserve
from pensieve.kernels import kv_codec
from pensieve.model.arch import Arch
from pensieve.model.groups import ALIGNMENT, KvGroup, conv_bytes, state_shape

WORD = torch.int64
"""Copies move pages as words of this type."""
ONE_STEP: Final = 256 << 20
"""Bytes of device memory that are mapped ahead at most, and that are kept for reuse: some units, as many as one plan
moves."""


class HybridPools(KvTiers):
    """The memory of both tiers of a model with two KV groups, or with an elastic device tier."""

    def __init__(
        self,
        arch: Arch,
        groups: tuple[KvGroup, ...],
        tiers: tuple[TierLayout, TierLayout],
        *,
        chunk_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
        floor: int | None = None,
        kv_dtype: KvDtypeName = "auto",
    ) -> None:
        """Allocate both pools, zeroed, as large as ``tiers`` (device, host) say: layer pages are multiples of 16
        bytes. Raises RuntimeError or MemoryError when memory runs out.

        ``floor``: bytes of the device tier that are backed at least. The tier is then elastic: ``backing`` says how
        much of it is, and new memory may hold anything. None: all of it is. ``kv_dtype``: the codec of keys and values.

        In plain memory, the operating system provides and zeroes each page when a slice first writes to it.
        """
        self.kv_groups, self.tiers = groups, tiers
        on_gpu = device.type == "cuda"
        pinned: PinnedMemory | None = None
        device_bytes, host_bytes = (_aligned(tier.num_bytes) for tier in tiers)
        backing: Backing | None = None
        if floor is not None:
            backing = back_tier(tiers[0], floor, device)
            self.device = backing.region.tensor
        elif on_gpu:
            self.device = torch.zeros(device_bytes, dtype=torch.uint8, device=device)
        else:
            self.device = untouched_zeros((device_bytes,), torch.uint8)
        if on_gpu:
            # A copy must not straddle two registrations. So they begin where a layer page of either group does, if
            # both grids begin at byte 0, and else there is only one.
            unit = math.lcm(*(group.layer_page_bytes for group in groups if group.layers))
            if tiers[1].grids[1].offset:
                unit = host_bytes
            pinned = PinnedMemory(host_bytes, unit=unit)
            self.host = pinned.tensor
        else:
            self.host = untouched_zeros((host_bytes,), torch.uint8)
        grids = [tier.grids for tier in tiers]
        kv_shape = (2, arch.num_kv_heads, chunk_tokens, arch.head_dim)
        code = kv_codec.CODES.get(kv_dtype)
        used = 0 if code is None or not groups[0].layers else kv_codec.used_bytes(*kv_shape[1:])
        pages = tuple(
            GroupPages(
                group.layers, group.page_bytes, _runs(self.device, grids[0][number]),
                _runs(self.host, grids[1][number]), max(1, grids[1][number].stride), grids[1][number].first, used,
            )
            if len(groups) > 1
            else GroupPages(
                group.layers, group.page_bytes, _runs(self.device, grids[0][0]), _chunks(self.host, group),
                used_bytes=used,
            )
            for number, group in enumerate(groups)
        )  # fmt: skip
        super().__init__(
            pages,
            num_layers=arch.num_layers,
            chunk_tokens=chunk_tokens,
            padding_page=0,
            pinned=pinned,
        )
        self.backing = backing
        self._attention: dict[int, torch.Tensor] = {}
        self._states: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        for number, group in enumerate(groups):
            for index, layer in enumerate(group.layers):
                grid = grids[0][number]
                if group.kind != "state":
                    self._attention[layer] = _view(self.device, grid, index, kv_shape, code or dtype)
                else:
                    self._states[layer] = self._state_views(arch, grid, index, dtype)

    def _state_views(
        self, arch: Arch, grid: Grid, index: int, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        shape = state_shape(arch)
        conv = _view(self.device, grid, index, (shape.conv_channels, shape.conv_width - 1), dtype)
        skipped = conv_bytes(shape, str(dtype).removeprefix("torch."))
        recurrent = (shape.heads, shape.key_dim, shape.value_dim)
        return conv, _view(self.device, grid, index, recurrent, torch.float32, skipped)

    def attention(self, layer: int) -> torch.Tensor:
        """See ``KvTiers.attention``."""
        return self._attention[layer]

    def in_window_group(self, layer: int) -> bool:
        """See ``KvTiers.in_window_group``."""
        return any(group.kind == "window" and layer in group.layers for group in self.kv_groups[1:])

    def state(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``KvTiers.state``."""
        return self._states[layer]


def back_tier(tier: TierLayout, floor: int, device: torch.device) -> Backing:
    """Reserve the buffer of an elastic device tier, and back its permanent part. Raises MemoryError.

    Page 0 of each group is permanent, at whatever byte its layers lie: unused entries of page tables name it. With one
    group the floor is permanent too; with two, either end may need it.
    """
    on_gpu = device.type == "cuda"
    units = [size.unit_bytes for size in tier.sizes if size.unit_bytes]
    # The last layer of a page 0 lies within a unit of the start of its grid.
    first = max(grid.address(grid.size.unit_pages * grid.size.layers) for grid in tier.grids if grid.units)
    permanent = min(max(first, floor if len(tier.sizes) == 1 else 0), tier.num_bytes)
    sizes = RegionSizes(
        permanent,
        handle_bytes(min(units), tier.num_bytes),
        ahead=ONE_STEP if on_gpu else 0,
        kept=ONE_STEP if on_gpu else 0,
    )
    backend: Backend = DriverBackend(device) if on_gpu else PlainBackend()
    return Backing(reserve(tier.num_bytes, backend, sizes), threaded=on_gpu)


def _view(
    buffer: torch.Tensor, grid: Grid, layer: int, shape: tuple[int, ...], dtype: torch.dtype, skipped: int = 0
) -> torch.Tensor:
    """View the values of one layer's pages, [P, *shape], that begin ``skipped`` bytes into each layer page."""
    strides = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    stride, start = grid.size.layer_page_bytes, grid.address(0, layer) + skipped
    assert stride % dtype.itemsize == start % dtype.itemsize == 0
    values = buffer.view(dtype)
    return values.as_strided(
        (grid.end, *shape), (stride // dtype.itemsize, *strides), start // dtype.itemsize
    )


def _runs(buffer: torch.Tensor, grid: Grid) -> torch.Tensor:
    """View all layers' pages as words, [L, P, words]. The pages of one layer do not overlap."""
    words = grid.size.layer_page_bytes // WORD.itemsize
    shape = (grid.size.layers, grid.end, words)
    return buffer.view(WORD).as_strided(
        shape, (grid.size.unit_pages * words, words, 1), grid.address(0) // WORD.itemsize
    )


def _chunks(host: torch.Tensor, group: KvGroup) -> torch.Tensor:
    """View the host pages of a single group as words, [L, C, words]: a chunk is contiguous."""
    layers, words = len(group.layers), group.layer_page_bytes // WORD.itemsize
    chunks = host.nbytes // group.page_bytes
    return host.view(WORD)[: chunks * layers * words].view(chunks, layers, words).transpose(0, 1)


def _aligned(num_bytes: int) -> int:
    """Round bytes up so that the buffer can be viewed as words."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
