"""The two KV pools of a worker and the copies between them.

Device pool ``[L, P, 2, Hkv, N, D]``: layer first, so that attention of one layer reads one slab and a layer can be
waited for alone. Host pool ``[C, L, 2, Hkv, N, D]``: chunk first, so that an evicted chunk is one contiguous object.
In both, keys and values of one page of one layer are one contiguous run: the unit that is copied. Beside a GPU the host
pool is pinned, and ``pensieve.engine.kv.swap`` does the copies. The copies in this module are for plain memory, where a
copy is done when its call returns.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from pensieve.engine.kv.pinned import PinnedMemory
from pensieve.engine.plan import Copy
from pensieve.kernels import reference
from pensieve.model.arch import Arch


class KvPools:
    """The memory of both tiers. What of it is valid is the cache manager's knowledge alone."""

    def __init__(
        self,
        arch: Arch,
        *,
        device_chunks: int,
        host_chunks: int,
        chunk_tokens: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        """Allocates both pools, zeroed. Raises RuntimeError when there is not that much memory."""
        page = (2, arch.num_kv_heads, chunk_tokens, arch.head_dim)
        self.padding_page = device_chunks
        """The page behind those that chunks get: the unused end of a page table points to it."""
        self.device = torch.zeros((arch.num_layers, device_chunks + 1, *page), dtype=dtype, device=device)
        self.chunk_bytes = arch.num_layers * self.device[0, 0].nbytes
        self._pinned: PinnedMemory | None = None
        shape = (host_chunks, arch.num_layers, *page)
        if device.type == "cuda":
            self._pinned = PinnedMemory(host_chunks * self.chunk_bytes, unit=self.chunk_bytes)
            self.host = self._pinned.tensor.view(dtype).view(shape)
        else:
            self.host = torch.zeros(shape, dtype=dtype)

    def close(self) -> None:
        """Unpin the host pool. No copy may be under way, and none may begin afterwards."""
        if self._pinned is not None:
            self._pinned.close()

    @property
    def num_layers(self) -> int:
        return self.device.shape[0]

    def swap_out(self, copies: Sequence[Copy]) -> None:
        """Copy device pages to host pages, all layers."""
        if copies:
            src, dst = _numbers(copies)
            for layer in range(self.num_layers):
                reference.chunk_copy(self.host[:, layer], self.device[layer], dst, src)

    def copy_on_device(self, copies: Sequence[Copy]) -> None:
        """Copy device pages to device pages, all layers; every page is read before any is written."""
        if copies:
            src, dst = _numbers(copies)
            for layer in range(self.num_layers):
                reference.chunk_copy(self.device[layer], self.device[layer], dst, src)

    def swap_in(self, copies: Sequence[Copy], *, pipelined: bool = True) -> LayerTransfers:
        """Begin to copy host pages to device pages; ``wait`` for each layer before using it."""
        transfers = LayerTransfers(self, copies)
        if not pipelined:
            transfers.finish()
        return transfers

    def copy_in(self, layer: int, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Copy one layer of host pages ``src`` to device pages ``dst``."""
        reference.chunk_copy(self.device[layer], self.host[:, layer], dst, src)


class LayerTransfers:
    """One step's swap-in, layer by layer.

    In plain memory a copy *is* the wait: each layer is copied when it is first needed. Layers are needed in their
    order.
    """

    def __init__(self, pools: KvPools, copies: Sequence[Copy]) -> None:
        self.seconds = 0.0
        self._pools = pools
        self._arrived = 0 if copies else pools.num_layers
        self._src, self._dst = _numbers(copies)

    def wait(self, layer: int) -> None:
        """Return when ``layer`` (and all before it) has arrived. Must precede the step's KV writes to that layer."""
        if layer < self._arrived:
            return
        started = time.perf_counter()
        for index in range(self._arrived, layer + 1):
            self._pools.copy_in(index, self._dst, self._src)
        self._arrived = layer + 1
        self.seconds += time.perf_counter() - started

    def finish(self) -> None:
        """Return when all layers have arrived. A plan that swaps in but computes nothing needs this, too."""
        self.wait(self._pools.num_layers - 1)


def _numbers(copies: Sequence[Copy]) -> tuple[torch.Tensor, torch.Tensor]:
    """Source and target pages, int64 [n] each."""
    pairs = torch.tensor([(copy.src, copy.dst) for copy in copies], dtype=torch.int64).view(-1, 2)
    return pairs[:, 0].contiguous(), pairs[:, 1].contiguous()
