"""Assembles a decoder's weights from checkpoint tensors: fuses projections, and rejects missing or unused tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Final, Literal, Protocol

import torch

from pensieve.model import files
from pensieve.model.arch import Arch, ModelError
from pensieve.model.checkpoint import Checkpoint
from pensieve.model.dummy import DummySource
from pensieve.model.shard import WHOLE_MODEL, Shard
from pensieve.model.tensor_slice import NO_ROWS, WHOLE_TENSOR, TensorSlice

LoadFormat = Literal["auto", "safetensors", "dummy"]
_HEAD: Final = "lm_head.weight"

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer with an optional bias."""

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    """[out]"""


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of an RMS norm or, with a bias, of a LayerNorm."""

    weight: torch.Tensor
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; projections of the same input are fused."""

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
    """All tensors of a decoder."""

    embedding: torch.Tensor
    """[vocab, hidden]"""
    positions: torch.Tensor | None
    """Learned positions [offset + context, hidden]."""
    layers: tuple[LayerWeights, ...]
    final_norm: NormWeights
    head: Linear
    """In a shard: the rows of its part of the vocabulary."""


@dataclass(frozen=True, slots=True)
class _Names:
    """Tensor names of a family's checkpoints, without the prefix in which base and causal models differ."""

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
_TABLES = {
    "opt": _OPT,
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "seed_oss": _LLAMA,
}
"""Tensor names of each ``Arch.family``."""


class TensorSource(Protocol):
    """A source of weights: a ``Checkpoint``, a ``GgufCheckpoint`` or a ``DummySource``."""

    @property
    def name(self) -> str:
        """Name of the source in error messages."""
        ...

    def __contains__(self, name: str) -> bool: ...

    def same(self, one: str, other: str) -> bool:
        """Return whether two tensors have one shape, and equal values in the dtype in which they are loaded."""
        ...

    def get(
        self, names: Sequence[str], shape: tuple[int, ...], tensor_slice: TensorSlice = WHOLE_TENSOR
    ) -> torch.Tensor:
        """Return the ``tensor_slice`` part of the named tensors, concatenated along the first axis; whole,
        they have ``shape`` together. Raises ModelError."""
        ...


def load_weights(
    folder: Path,
    arch: Arch,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    shard: Shard = WHOLE_MODEL,
) -> Weights:
    """Load the weights of the model in ``folder`` (which may be a GGUF file), as ``dtype`` on ``device``.

    ``load_format`` ``dummy``: random weights, no file is read. ``arch`` is that of the whole model; only the
    part of ``shard`` is read. Raises ModelError when files or tensors are missing, unused, unreadable or of
    the wrong shape, or when memory does not suffice.
    """
    device = torch.device(device)
    if str(device) == "cuda":
        # The threads that fill tensors have a current device of their own.
        device = torch.device("cuda", torch.cuda.current_device())
    try:
        if load_format == "dummy":
            return _Assembler(arch, DummySource(dtype, device), shard).weights()
        if folder.is_file() and load_format == "safetensors":
            raise ModelError(f"{folder}: is a GGUF file, and --load-format says safetensors")
        if folder.is_file():
            return _from_gguf(folder, arch, dtype, device, shard)
        checkpoint = Checkpoint(folder, dtype, device)
        if shard.rank == 0 and checkpoint.stale_index:
            log.warning("%s is not read: the folder has %s", files.INDEX, files.SINGLE)
        assembler = _Assembler(arch, checkpoint, shard)
        weights = assembler.weights()
        checkpoint.require_all_used(but=assembler.duplicates)
        checkpoint.load()
    except torch.OutOfMemoryError as error:
        needed = shard.arch(arch).num_parameters * dtype.itemsize
        free, total = torch.cuda.mem_get_info(device)
        raise ModelError(
            f"{folder}: the weights, about {needed / 2**30:.1f} GiB in {dtype}, do not fit: now {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB are free on the GPU; use a smaller dtype or model, or free memory there"
        ) from error
    return weights


def _from_gguf(path: Path, arch: Arch, dtype: torch.dtype, device: torch.device, shard: Shard) -> Weights:
    # Imported here: it needs the package ``gguf``, which may not be installed.
    from pensieve.model.gguf_checkpoint import GgufCheckpoint

    checkpoint = GgufCheckpoint(path, arch, dtype, device)
    weights = _Assembler(arch, checkpoint, shard).weights()
    checkpoint.require_all_used()
    checkpoint.load()
    return weights


def weight_bytes(weights: Weights) -> int:
    """Return the memory of all weights; shared storage counts once."""
    memory = (tensor.untyped_storage() for tensor in tensors_of(weights))
    return sum({storage.data_ptr(): storage.nbytes() for storage in memory}.values())


def tensors_of(value: object) -> Iterator[torch.Tensor]:
    """Yield every tensor of ``Weights`` or of a part of it, in field order."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, tuple):
        for item in value:
            yield from tensors_of(item)
    elif is_dataclass(value):
        for field in fields(value):
            yield from tensors_of(getattr(value, field.name))


class _Assembler:
    """Assembles a shard's ``Weights`` from a source."""

    def __init__(self, arch: Arch, source: TensorSource, shard: Shard) -> None:
        """``arch``: of the whole model. Raises ModelError."""
        self.arch, self.source, self.names = arch, source, _TABLES[arch.family]
        self.shard = shard
        shard.arch(arch)  # raises if the model cannot be divided
        self.duplicates: tuple[str, ...] = ()
        """Tensors of the source that need not be read: they equal another one."""
        # The embedding may be missing if the head is saved instead; a norm always exists.
        signs = (f"{self.names.embedding}.weight", f"{self.names.final_norm}.weight")
        found = [prefix for prefix in self.names.prefixes if any(prefix + sign in source for sign in signs)]
        if not found:
            raise ModelError(f"{source.name}: no tensor {signs[0]}; not a checkpoint of {arch.family}")
        self.prefix = found[0]

    def weights(self) -> Weights:
        arch = self.arch
        embedding = self._embedding()
        positions = None
        if arch.rope is None:
            shape = (arch.position_offset + arch.context_limit, arch.hidden_size)
            positions = self._tensor(self.names.positions, shape)
        layers = tuple(self._layer(f"{self.names.layers}.{index}.") for index in range(arch.num_layers))
        final_norm = self._norm(self.names.final_norm)
        return Weights(embedding, positions, layers, final_norm, Linear(self._head(embedding), None))

    def _embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        name = f"{self.prefix}{self.names.embedding}.weight"
        if self.arch.tied_embeddings and name not in self.source and _HEAD in self.source:
            name = _HEAD
        return self.source.get([name], (self.arch.vocab_size, self.arch.hidden_size))

    def _head(self, embedding: torch.Tensor) -> torch.Tensor:
        """Return the shard's rows of the head: the embedding's if the two are tied, unless a head with other
        values is saved. transformers reads such a folder the same way."""
        arch, source = self.arch, self.source
        shape, tokens = (arch.vocab_size, arch.hidden_size), self.shard.vocabulary(arch.vocab_size)
        name = f"{self.prefix}{self.names.embedding}.weight"
        if arch.tied_embeddings:
            both = _HEAD in source and name in source
            if not both or source.same(_HEAD, name):
                self.duplicates = (_HEAD,)
                return embedding if self.shard.ranks == 1 else embedding[tokens]
            log.warning(
                "config.json says tie_word_embeddings, but %s differs from %s: the head is used as it is",
                _HEAD,
                name,
            )
        elif _HEAD not in source:
            raise ModelError(
                f"{source.name}: no tensor {_HEAD}, and config.json: tie_word_embeddings is false"
            )
        return source.get([_HEAD], shape, TensorSlice((tokens,)))

    def _layer(self, at: str) -> LayerWeights:
        arch, names, shard = self.arch, self.names, self.shard
        hidden, inner = arch.hidden_size, arch.intermediate_size
        queries, keys = arch.num_heads * arch.head_dim, arch.num_kv_heads * arch.head_dim
        qkv = [at + name for name in names.qkv]
        up = [at + name for name in names.up]
        kv_heads = shard.kv_heads(arch.num_kv_heads)
        own_keys = slice(kv_heads.start * arch.head_dim, kv_heads.stop * arch.head_dim)
        qkv_slice = TensorSlice((shard.even(queries), own_keys, own_keys), lengths=(queries, keys, keys))
        up_slice = TensorSlice((shard.even(inner),) * len(up), lengths=(inner,) * len(up))
        head_norm = (arch.head_dim,)
        return LayerWeights(
            attention_norm=self._norm(at + names.attention_norm),
            qkv=self._column_parallel(qkv, (queries + 2 * keys, hidden), qkv_slice, arch.qkv_bias),
            output=self._row_parallel(at + names.output, (hidden, queries), arch.output_bias),
            mlp_norm=self._norm(at + names.mlp_norm),
            up=self._column_parallel(up, (inner * len(up), hidden), up_slice, arch.mlp_bias),
            down=self._row_parallel(at + names.down, (hidden, inner), arch.mlp_bias),
            query_norm=self._tensor(at + "self_attn.q_norm", head_norm) if arch.qk_norm else None,
            key_norm=self._tensor(at + "self_attn.k_norm", head_norm) if arch.qk_norm else None,
        )

    def _column_parallel(
        self, names: list[str], shape: tuple[int, int], tensor_slice: TensorSlice, bias: bool
    ) -> Linear:
        """A projection into a block, divided by rows."""
        weight = self.source.get([f"{self.prefix}{name}.weight" for name in names], shape, tensor_slice)
        if not bias:
            return Linear(weight, None)
        return Linear(
            weight, self.source.get([f"{self.prefix}{name}.bias" for name in names], shape[:1], tensor_slice)
        )

    def _row_parallel(self, name: str, shape: tuple[int, int], bias: bool) -> Linear:
        """A projection out of a block, divided by columns; the ranks' results are summed, so rank 0 adds the bias."""
        weight = self.source.get(
            [f"{self.prefix}{name}.weight"], shape, TensorSlice((slice(None),), self.shard.even(shape[1]))
        )
        if not bias:
            return Linear(weight, None)
        leads = self.shard.rank == 0
        values = self.source.get([f"{self.prefix}{name}.bias"], shape[:1], WHOLE_TENSOR if leads else NO_ROWS)
        return Linear(weight, values if leads else None)

    def _norm(self, name: str) -> NormWeights:
        shape = (self.arch.hidden_size,)
        bias = [f"{self.prefix}{name}.bias"]
        return NormWeights(
            self._tensor(name, shape),
            self.source.get(bias, shape) if self.arch.norm == "layer" else None,
        )

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.source.get([f"{self.prefix}{name}.weight"], shape)
