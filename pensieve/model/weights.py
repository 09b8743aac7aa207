"""Checkpoint tensors under our names: fused projections, one table per family, nothing missing, nothing left over."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import torch

from pensieve.model.arch import Arch, ModelError
from pensieve.model.checkpoint import Checkpoint


@dataclass(frozen=True, slots=True)
class Linear:
    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    """[out]"""


@dataclass(frozen=True, slots=True)
class Norm:
    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    attention_norm: Norm
    qkv: Linear
    """Rows: queries [Hq * D], keys [Hkv * D], values [Hkv * D]."""
    output: Linear
    mlp_norm: Norm
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
    final_norm: Norm
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


def load_weights(
    folder: Path, arch: Arch, *, dtype: torch.dtype, device: torch.device | str = "cpu"
) -> Weights:
    """All weights of the model in ``folder``, as ``dtype`` on ``device``.

    Raises ModelError when files or tensors are missing, left over, unreadable or of the wrong shape.
    """
    with ExitStack() as stack:
        checkpoint = Checkpoint(folder, stack, dtype, torch.device(device))
        weights = _Assembler(arch, checkpoint).weights()
        checkpoint.require_all_used(arch.tied_embeddings)
    return weights


class _Assembler:
    """Fills ``Weights`` from a checkpoint."""

    def __init__(self, arch: Arch, checkpoint: Checkpoint) -> None:
        self.arch, self.checkpoint, self.names = arch, checkpoint, _TABLES[arch.family]
        embedding = f"{self.names.embedding}.weight"
        found = [prefix for prefix in self.names.prefixes if prefix + embedding in checkpoint.where]
        if not found:
            raise ModelError(f"{checkpoint.folder}: no tensor {embedding}; not a checkpoint of {arch.family}")
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
        head = embedding if arch.tied_embeddings else self.checkpoint.get(["lm_head.weight"], shape)
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
        weight = self.checkpoint.get([f"{self.prefix}{name}.weight" for name in names], (out, width))
        if not bias:
            return Linear(weight, None)
        return Linear(weight, self.checkpoint.get([f"{self.prefix}{name}.bias" for name in names], (out,)))

    def _norm(self, name: str) -> Norm:
        shape = (self.arch.hidden_size,)
        bias = [f"{self.prefix}{name}.bias"]
        return Norm(
            self._tensor(name, shape),
            self.checkpoint.get(bias, shape) if self.arch.norm == "layer" else None,
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.checkpoint.get([f"{self.prefix}{name}.weight"], shape)
