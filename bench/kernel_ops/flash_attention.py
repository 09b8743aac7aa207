"""FlashAttention-3 as a peer of the attention kernel: its forward pass, called as a server would call it."""

from __future__ import annotations

import importlib.util
import lzma
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from pensieve.kernels.spans import POSITION, Q_LEN, Spans

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
"""A query, keys and values [P, N, Hkv, D] of one layer."""


@dataclass(frozen=True, slots=True)
class Peer:
    """Where FlashAttention-3 comes from."""

    library: Any
    """The operations of vLLM's extension, or the module ``flash_attn_interface``."""
    is_extension: bool

    def prepare(self, spans: Spans, tables: torch.Tensor, out: torch.Tensor, scale: float) -> Call:
        """Everything that does not depend on the layer."""
        lengths = torch.from_numpy(spans[:, Q_LEN]).int().to(out.device)
        starts = torch.cat([lengths.new_zeros(1), lengths.cumsum(0, dtype=torch.int32)])
        seen = lengths + torch.from_numpy(spans[:, POSITION]).int().to(out.device)
        longest = int(lengths.max()), int(seen.max())

        def interface(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> object:
            return self.library.flash_attn_with_kvcache(
                q, keys, values, page_table=tables, cache_seqlens=seen, cu_seqlens_q=starts, max_seqlen_q=longest[0],
                softmax_scale=scale, causal=True,
            )  # fmt: skip

        def extension(q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor) -> object:
            return self._forward(
                q=q, k=keys, v=values, out=out, cu_seqlens_q=starts, seqused_k=seen, max_seqlen_q=longest[0],
                max_seqlen_k=longest[1], page_table=tables, softmax_scale=scale,
            )  # fmt: skip

        return extension if self.is_extension else interface

    def _forward(self, **named: Any) -> object:
        """The extension's causal pass, in as many splits as it finds best."""
        fixed = {
            "is_causal": True, "window_size_left": -1, "window_size_right": -1, "softcap": 0.0,
            "is_rotary_interleaved": True, "num_splits": 0, "sm_margin": 0, "cp_world_size": 1, "cp_rank": 0,
        }  # fmt: skip
        return self.library.fwd(*_in_order(self.library.fwd, fixed | named))


def find(path: Path | None) -> Peer | None:
    """The extension in ``path`` (``.so``, or one packed as ``.so.xz``), or an installed package; None without any."""
    if path is not None:
        with tempfile.TemporaryDirectory() as folder:
            if path.suffix == ".xz":
                packed, path = path, Path(folder) / "fa3.so"
                path.write_bytes(lzma.decompress(packed.read_bytes()))
            torch.ops.load_library(str(path))
        return Peer(torch.ops._vllm_fa3_C, True)
    if importlib.util.find_spec("flash_attn_interface"):
        return Peer(importlib.import_module("flash_attn_interface"), False)
    if importlib.util.find_spec("vllm"):
        importlib.import_module("vllm.vllm_flash_attn")
        return Peer(torch.ops._vllm_fa3_C, True)
    return None


def _in_order(operation: Any, named: dict[str, Any]) -> list[Any]:
    """Arguments by the operation's own schema; those that are not named are None."""
    names = [argument.name for argument in operation.default._schema.arguments]
    unknown = set(named) - set(names)
    if unknown:
        raise ValueError(f"this FlashAttention-3 takes no {', '.join(sorted(unknown))}")
    return [named.get(name) for name in names]
