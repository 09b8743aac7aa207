"""Checkpoint tensors under our names: fused projections, one table per family, nothing missing, nothing left over."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Literal, Protocol

import torch

from pensieve.model.arch import Arch, ModelError
from pensieve.model.checkpoint import Checkpoint
from pensieve.model.dummy import DummySource

LoadFormat = Literal["auto", "safetensors", "dummy"]


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    """[out]"""


@dataclass(frozen=True, slots=True)
class NormWeights:
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: NormWeights
    qkv: Linear
    """Rows: queries [Hq * D], keys [Hkv * D], values [Hkv * D]."""
    output: Linear
    mlp_norm: NormWeights
    up: Linear
    """Gated: rows of the gate [I], then of the projection [I]."""
    down: Linear
    query_norm: torch.Tensor | None
    key_norm: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class Weights:
    embedding: torch.Tensor
    """[vocab, hidden]"""
    positions: torch.Tensor | None
    """Learned positions [offset + context, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head: Linear


@dataclass(frozen=True, slots=True)
class _Names:
    """A family's checkpoint names, without the prefix that base and causal models differ in."""

    prefixes: tuple[str, ...]
    layers: str
    final_norm: str
    attention_norm: str
    mlp_norm: str
    output: str
    up: tuple[str, ...]
    down: str
    positions: str = ""
    embedding: str = "embed_tokens"
    qkv: tuple[str, ...] = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")


_LLAMA = _Names(
    prefixes=("model.", ""),
    layers="layers",
    final_norm="norm",
    attention_norm="input_layernorm",
    mlp_norm="post_attention_layernorm",
    output="self_attn.o_proj",
    up=("mlp.gate_proj", "mlp.up_proj"),
    down="mlp.down_proj",
)
_OPT = _Names(
    prefixes=("model.decoder.", "decoder.", ""),
    layers="layers",
    final_norm="final_layer_norm",
    attention_norm="self_attn_layer_norm",
    mlp_norm="final_layer_norm",
    output="self_attn.out_proj",
    up=("fc1",),
    down="fc2",
    positions="embed_positions",
)
_TABLES: dict[str, _Names] = {
    "opt": _OPT,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
}


class TensorSource(Protocol):
    """Where weights come from: a checkpoint, or thin air."""

    @property
    def name(self) -> str:
        """For error messages."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def get(self, names: Sequence[str], shape: tuple[int, ...]) -> torch.Tensor:
        """The named tensors one after another along the first axis, together of ``shape``. Raises ModelError."""
        ...


def load_weights(
    folder: Path,
    arch: Arch,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
) -> Weights:
    """All weights of the model in ``folder``, as ``dtype`` on ``device``; ``dummy``: random ones, no file is read.

    Raises ModelError when files or tensors are missing, left over, unreadable or of the wrong shape, or do not fit.
    """
    device = torch.device(device)
    try:
        if load_format == "dummy":
            return _Assembler(arch, DummySource(dtype, device)).weights()
        checkpoint = Checkpoint(folder, dtype, device)
        weights = _Assembler(arch, checkpoint).weights()
        checkpoint.require_all_used(arch.tied_embeddings)
        checkpoint.load()
    except torch.OutOfMemoryError as error:
        needed = arch.num_parameters * dtype.itemsize
        free, total = torch.cuda.mem_get_info(device)
        raise ModelError(
            f"{folder}: the weights, about {needed / 2**30:.1f} GiB in {dtype}, do not fit: now {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB are free on the GPU; use a smaller dtype or model, or free memory there"
        ) from error
    return weights


def weight_bytes(weights: Weights) -> int:
    """Memory of all weights; a tensor in two places counts once."""
    return sum({tensor.data_ptr(): tensor.nbytes for tensor in tensors_of(weights)}.values())


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Every tensor of ``Weights`` or of a part of it, in the order of the fields."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


class _Assembler:
    """Fills ``Weights`` from a source."""

    def __init__(self, arch: Arch, source: TensorSource) -> None:
        self.arch, self.source, self.names = arch, source, _TABLES[arch.family]
        embedding = f"{self.names.embedding}.weight"
        found = [prefix for prefix in self.names.prefixes if prefix + embedding in source]
        if not found:
            raise ModelError(f"{source.name}: no tensor {embedding}; not a checkpoint of {arch.family}")
        self.prefix = found[0]

    def weights(self) -> Weights:
        arch, hidden = self.arch, self.arch.hidden_size
        embedding = self._tensor(self.names.embedding, (arch.vocab_size, hidden))
        positions = None
        if arch.rope is None:
            shape = (arch.position_offset + arch.context_limit, hidden)
            positions = self._tensor(self.names.positions, shape)
        layers = tuple(self._layer(f"{self.names.layers}.{index}.") for index in range(arch.num_layers))
        final_norm = self._norm(self.names.final_norm)
        shape = (arch.vocab_size, hidden)
        head = embedding if arch.tied_embeddings else self.source.get(["lm_head.weight"], shape)
        return Weights(embedding, positions, layers, final_norm, Linear(head, None))

    def _layer(self, at: str) -> LayerWeights:
        arch, names = self.arch, self.names
        hidden, inner = arch.hidden_size, arch.intermediate_size * len(names.up)
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = [at + name for name in names.qkv]
        head_norm = (arch.head_dim,)
        return LayerWeights(
            attention_norm=self._norm(at + names.attention_norm),
            qkv=self._linear(qkv, queries + 2 * keys, hidden, arch.qkv_bias),
            output=self._linear([at + names.output], hidden, queries, arch.output_bias),
            mlp_norm=self._norm(at + names.mlp_norm),
            up=self._linear([at + name for name in names.up], inner, hidden, arch.mlp_bias),
            down=self._linear([at + names.down], hidden, arch.intermediate_size, arch.mlp_bias),
            query_norm=self._tensor(at + "self_attn.q_norm", head_norm) if arch.qk_norm else None,
            key_norm=self._tensor(at + "self_attn.k_norm", head_norm) if arch.qk_norm else None,
        )

    def _linear(self, names: list[str], out: int, width: int, bias: bool) -> Linear:
        weight = self.source.get([f"{self.prefix}{name}.weight" for name in names], (out, width))
        if not bias:
            return Linear(weight, None)
        return Linear(weight, self.source.get([f"{self.prefix}{name}.bias" for name in names], (out,)))

    def _norm(self, name: str) -> NormWeights:
        shape = (self.arch.hidden_size,)
        bias = [f"{self.prefix}{name}.bias"]
        return NormWeights(
            self._tensor(name, shape),
            self.source.get(bias, shape) if self.arch.norm == "layer" else None,
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.source.get([f"{self.prefix}{name}.weight"], shape)
