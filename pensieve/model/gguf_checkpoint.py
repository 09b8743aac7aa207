"""The tensors of a GGUF file by their Hugging Face names, dequantised directly into device memory."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
from gguf import GGMLQuantizationType, dequantize

from pensieve.gguf import GgufError, TensorInfo, read_gguf
from pensieve.kernels.fp8_reference import code_dtype, encode
from pensieve.machine import usable_cores
from pensieve.model.arch import Arch, ModelError
from pensieve.model.checkpoint import progress_bar
from pensieve.model.gguf import ROPE_FREQUENCIES
from pensieve.model.tensor_source import WHOLE_TENSOR, TensorSlice

PIECE_VALUES: Final = 1 << 20
"""Values that one thread dequantises at a time: 4 MiB of float32."""
MOST_THREADS: Final = 8
_OUTSIDE: Final = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
_IN_A_LAYER: Final = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """Return the GGUF name of a tensor of a Hugging Face checkpoint; "" if it has none."""
    module, _, kind = name.rpartition(".")
    if module in _OUTSIDE:
        return f"{_OUTSIDE[module]}.{kind}"
    layer = re.fullmatch(r"model\.layers\.(\d+)\.(.+)", module)
    if layer is None or layer[2] not in _IN_A_LAYER:
        return ""
    return f"blk.{layer[1]}.{_IN_A_LAYER[layer[2]]}.{kind}"


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some rows of one tensor, and their target."""

    place: TensorInfo
    rows: slice
    columns: slice
    interleaved: int
    """Rows of a head whose halves are interleaved, as llama.cpp rotates them; 0: not interleaved."""
    target: torch.Tensor
    scales: torch.Tensor
    """Target of the scales of the rows, if the values become codes; otherwise empty."""


class GgufCheckpoint:
    """``TensorSource`` over a GGUF file; records the tensors that were requested."""

    def __init__(self, path: Path, arch: Arch, dtype: torch.dtype, device: torch.device) -> None:
        """Read the header. Raises ModelError."""
        try:
            self._tensors = read_gguf(path).tensors
        except GgufError as error:
            raise ModelError(str(error)) from error
        self.name = str(path)
        self._path, self._dtype, self._device = path, dtype, device
        # llama.cpp rotates adjacent values in llama, and halves of a head in other families, as usual.
        self._interleaved = arch.head_dim if arch.family == "llama" else 0
        self._pieces: list[_Piece] = []
        self._used: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return gguf_name(name) in self._tensors

    def same(self, one: str, other: str) -> bool:
        """Tensors of two names count as different: a file ties the head to the embedding by omitting the head."""
        return one == other

    def get(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        tensor_slice: TensorSlice = WHOLE_TENSOR,
        dtype: torch.dtype | None = None,
    ) -> torch.Tensor:
        """See ``TensorSource.get``. The result is allocated but has no values before ``load``."""
        return self._get(names, shape, tensor_slice, dtype or self._dtype)[0]

    def has_codes(self, names: Sequence[str]) -> bool:
        return False

    def get_codes(
        self, names: Sequence[str], shape: tuple[int, ...], tensor_slice: TensorSlice
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """See ``TensorSource.get_codes``."""
        return self._get(names, shape, tensor_slice, code_dtype(self._device, self._dtype), coded=True)

    def _get(
        self,
        names: Sequence[str],
        shape: tuple[int, ...],
        tensor_slice: TensorSlice,
        dtype: torch.dtype,
        *,
        coded: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return a tensor and, if it is ``coded``, the scales of its rows, else none."""
        ours = [gguf_name(name) for name in names]
        missing = [name for name in ours if name not in self._tensors]
        if missing:
            raise ModelError(f"{self._path}: no tensor {missing[0]} among {len(self._tensors)}")
        places = [self._tensors[name] for name in ours]
        found = (sum(place.shape[0] for place in places), *places[0].shape[1:])
        if found != shape or any(place.shape[1:] != shape[1:] for place in places):
            raise ModelError(
                f"{self._path}: {' + '.join(ours)} has shape {list(found)}, the metadata says {list(shape)}"
            )
        rows = [
            slice(*kept.indices(place.shape[0])[:2])
            for kept, place in zip(tensor_slice.rows or (slice(None),) * len(places), places, strict=True)
        ]
        width = shape[-1] if len(shape) > 1 else 1
        columns = slice(*(tensor_slice.columns or slice(None)).indices(width)[:2])
        lengths = [kept.stop - kept.start for kept in rows]
        shape = (sum(lengths), columns.stop - columns.start) if len(shape) > 1 else (sum(lengths),)
        fused = torch.empty(shape, dtype=dtype, device=self._device)
        scales = torch.empty(shape[0] if coded else 0, dtype=torch.float32, device=self._device)
        targets = zip(
            fused.split(lengths), scales.split(lengths if coded else [0] * len(lengths)), strict=True
        )
        for name, place, kept, (target, own) in zip(ours, places, rows, targets, strict=True):
            rotated = self._interleaved if ".attn_q." in name or ".attn_k." in name else 0
            self._pieces += _pieces_of(place, kept, columns, rotated, target, own)
            self._used.add(name)
        return fused, scales

    def require_all_used(self) -> None:
        """Raises ModelError on unrequested tensors: they would silently have no effect."""
        left = sorted(self._tensors.keys() - self._used - {ROPE_FREQUENCIES})
        if left:
            raise ModelError(
                f"{self._path}: {len(left)} tensors that this architecture has no use for: {', '.join(left[:3])}"
            )

    def load(self) -> None:
        pieces = sorted(
            self._pieces, key=lambda piece: (piece.place.file, piece.place.start, piece.rows.start)
        )
        files = {file: np.memmap(file, np.uint8, "r") for file in {piece.place.file for piece in pieces}}
        with (
            progress_bar(sum(map(_nbytes, pieces))) as progress,
            ThreadPoolExecutor(min(MOST_THREADS, usable_cores()), thread_name_prefix="load") as pool,
        ):
            task = progress.add_task(f"loading {self._path.name}")
            # In threads: NumPy releases the interpreter lock while it computes.
            for piece, _ in zip(pieces, pool.map(lambda piece: _fill(piece, files), pieces), strict=True):
                progress.advance(task, _nbytes(piece))


def _pieces_of(
    place: TensorInfo,
    rows: slice,
    columns: slice,
    interleaved: int,
    target: torch.Tensor,
    scales: torch.Tensor,
) -> Iterator[_Piece]:
    """Yield the rows in pieces of whole heads of limited size."""
    if len(place.shape) == 1 and not interleaved:  # its blocks run along its only axis
        yield _Piece(place, rows, columns, 0, target, scales)
        return
    unit = interleaved or 1
    step = max(1, PIECE_VALUES // (place.shape[-1] * unit)) * unit if len(place.shape) > 1 else len(target)
    for start in range(rows.start, rows.stop, max(1, step)):
        some = slice(start, min(start + step, rows.stop))
        own = slice(start - rows.start, some.stop - rows.start)
        yield _Piece(place, some, columns, interleaved, target[own], scales[own])


def _nbytes(piece: _Piece) -> int:
    rows: int = piece.rows.stop - piece.rows.start
    return piece.place.nbytes * rows // max(1, piece.place.shape[0])


def _fill(piece: _Piece, files: dict[Path, Any]) -> None:
    place, rows = piece.place, piece.rows
    data, kind = files[place.file], GGMLQuantizationType[place.type_name]
    if len(place.shape) == 1:
        values = dequantize(data[place.start : place.start + place.nbytes], kind)[rows]
    else:
        start = place.start + rows.start * place.row_bytes
        end = place.start + rows.stop * place.row_bytes
        values = dequantize(data[start:end].reshape(-1, place.row_bytes), kind)
    if piece.interleaved:
        heads = values.reshape(-1, piece.interleaved // 2, 2, *values.shape[1:])
        values = heads.swapaxes(1, 2).reshape(values.shape)
    if len(place.shape) > 1:
        values = values[:, piece.columns]
    found = torch.from_numpy(np.require(values, np.float32, ["C", "W"]))
    if len(piece.scales):
        encode(found, piece.target, piece.scales)
    else:
        piece.target.copy_(found)
