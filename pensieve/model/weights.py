"""Assembles a decoder's weights from checkpoint tensors: fuses projections, and rejects missing or unused tensors."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import dataclass, fields, is_dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from pensieve.config import WeightsName
from pensieve.core import Ints
from pensieve.kernels.fp8_reference import CODES
from pensieve.model.arch import Arch, Experts, Layer, ModelError, Multipliers, StateShape
from pensieve.model.checkpoint import Checkpoint
from pensieve.model.folder import INDEX, SINGLE, has_fp8_products
from pensieve.model.shard import WHOLE_MODEL, Shard
from pensieve.model.tensor_names import ExpertNames, gated_query_order, key_head_order, tensor_names
from pensieve.model.tensor_source import NO_ROWS, WHOLE_TENSOR, DummySource, TensorSlice, TensorSource

LoadFormat = Literal["auto", "safetensors", "dummy"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Linear:
    """A linear layer with an optional bias."""

    weight: torch.Tensor
    """[out, in]"""
    bias: torch.Tensor | None
    """[out]"""
    scales: torch.Tensor | None = None
    """float32 [out]: of the rows of ``weight``, which then holds codes (``kernels.fp8_reference``)."""

    @property
    def factors(self) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The weight, or its scales, and the bias: a factor of the result goes into these."""
        return (self.weight if self.scales is None else self.scales), self.bias


@dataclass(frozen=True, slots=True)
class NormWeights:
    """Weights of an RMS norm or, with a bias, of a LayerNorm."""

    weight: torch.Tensor
    """In the model's dtype; float32 with ``Arch.unit_offset``."""
    bias: torch.Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionWeights:
    """The attention of one layer. Values of query and key heads are in ``Rope.head_order``."""

    qkv: Linear
    """Rows: queries [Hq * D], keys [Hkv * D], values [Hkv * D]."""
    output: Linear
    query_norm: torch.Tensor | None = None
    """[D] or, with ``Arch.qk_norm`` "projection", [Hq * D]."""
    key_norm: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    """[Hq]"""


@dataclass(frozen=True, slots=True)
class RecurrentWeights:
    """The recurrent mixer of one layer; H value heads of V values each."""

    project: Linear
    """Rows of ``ssd``: gate [H * V], convolution [C], step size [H]. Of ``gated_delta``: convolution [C], gate [H * V],
    write strength [H], step size [H]."""
    conv: Linear
    """Weight [C, W], the oldest input's first; bias [C]."""
    decay: torch.Tensor
    """[H]: logarithm of the decay's rate (the checkpoint's ``A_log``)."""
    step_bias: torch.Tensor
    """[H]"""
    skip: torch.Tensor | None
    """[H], ``ssd`` only."""
    norm: torch.Tensor | None
    """[V] or [H * V], as ``RecurrentMixer`` says."""
    output: Linear


@dataclass(frozen=True, slots=True)
class MlpWeights:
    """The dense MLP of one layer."""

    up: Linear
    """Gated: rows of the gate [I], then of the projection [I]."""
    down: Linear


@dataclass(frozen=True, slots=True)
class GroupedLinear:
    """A linear layer of each of E experts, with an optional bias."""

    weight: torch.Tensor
    """[E, in, out], of any strides: as the checkpoint has it."""
    bias: torch.Tensor | None
    """[E, out]"""


@dataclass(frozen=True, slots=True)
class ExpertWeights:
    """The mixture of experts of one layer."""

    router: Linear
    """[E, hidden]"""
    up: GroupedLinear
    """Columns of the gates and of the projections; see ``Experts.clamped``."""
    down: GroupedLinear
    shared: MlpWeights | None = None
    """An expert that takes part in every token."""
    shared_gate: Linear | None = None
    """[1, hidden]: the shared expert's result is multiplied by the sigmoid of this product."""


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer; projections of the same input are fused."""

    mixer_norm: NormWeights | None
    """Norm of the input of attention and of a recurrent mixer."""
    attention: AttentionWeights | None
    mlp_norm: NormWeights | None
    mlp: MlpWeights | ExpertWeights | None
    post_mixer_norm: NormWeights | None = None
    """Norm of the mixer's output, before it is added."""
    post_mlp_norm: NormWeights | None = None
    recurrent: RecurrentWeights | None = None


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


def load_weights(
    folder: Path,
    arch: Arch,
    *,
    dtype: torch.dtype,
    device: torch.device | str = "cpu",
    load_format: LoadFormat = "auto",
    shard: Shard = WHOLE_MODEL,
    weights: WeightsName = "full",
) -> Weights:
    """Load the weights of the model in ``folder`` (which may be a GGUF file), as ``dtype`` on ``device``. ``weights``
    says whether projections of attention and of dense MLPs become codes.
    ``load_format`` ``dummy``: random weights, no file is read. ``arch`` is that of the whole model; only the
    part of ``shard`` is read. Raises ModelError when files or tensors are missing, unused, unreadable or of
    the wrong shape, or when memory does not suffice.
    """
    device = torch.device(device)
    if str(device) == "cuda":
        # The threads that fill tensors have a current device of their own.
        device = torch.device("cuda", torch.cuda.current_device())
    form: WeightsName = weights if has_fp8_products(folder, weights) else "full"
    try:
        if load_format == "dummy":
            return _Assembler(arch, DummySource(dtype, device), shard, form).weights()
        if folder.is_file() and load_format == "safetensors":
            raise ModelError(f"{folder}: is a GGUF file, and --load-format says safetensors")
        if folder.is_file():
            return _from_gguf(folder, arch, dtype, device, shard, form)
        checkpoint = Checkpoint(folder, dtype, device)
        if shard.rank == 0 and checkpoint.stale_index:
            log.warning("%s is not read: the folder has %s", INDEX, SINGLE)
        assembler = _Assembler(arch, checkpoint, shard, form)
        made = assembler.weights()
        checkpoint.require_all_used(but=assembler.duplicates, ignored=assembler.names.ignored)
        checkpoint.load()
        finish(made, arch)
    except torch.OutOfMemoryError as error:
        needed = shard.arch(arch).num_parameters * dtype.itemsize
        free, total = torch.cuda.mem_get_info(device)
        raise ModelError(
            f"{folder}: the weights, about {needed / 2**30:.1f} GiB in {dtype}, do not fit: now {free / 2**30:.1f} of "
            f"{total / 2**30:.1f} GiB are free on the GPU; use a smaller dtype or model, or free memory there"
        ) from error
    return made


def _from_gguf(
    path: Path, arch: Arch, dtype: torch.dtype, device: torch.device, shard: Shard, form: WeightsName
) -> Weights:
    # Imported here: it needs the package ``gguf``, which may not be installed.
    from pensieve.model.gguf_checkpoint import GgufCheckpoint

    checkpoint = GgufCheckpoint(path, arch, dtype, device)
    weights = _Assembler(arch, checkpoint, shard, form).weights()
    checkpoint.require_all_used()
    checkpoint.load()
    finish(weights, arch)
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


@torch.no_grad()
def finish(weights: Weights, arch: Arch) -> None:
    """Turn a checkpoint's values into those that are computed with, in place: bring rows and the values of heads in
    order, multiply factors in, and add 1 to norm weights that are stored without it. ``arch``: of the whole model, or
    of the shard."""
    interleaved = tensor_names(arch.family).interleaved
    for layer, described in zip(weights.layers, arch.layers, strict=True):
        if layer.recurrent is not None and interleaved:
            assert described.state is not None and arch.recurrent is not None
            heads, all_heads = len(layer.recurrent.decay), described.state.heads
            own = replace(described.state, heads=heads)
            key_heads = arch.recurrent.key_heads * heads // all_heads
            _take_rows(layer.recurrent.project, key_head_order(own, key_heads))
        if layer.attention is not None and arch.attention_gate:
            queries, rows = layer.attention.output.weight.shape[1], layer.attention.qkv.weight.shape[0]
            _take_rows(layer.attention.qkv, gated_query_order(queries // arch.head_dim, arch.head_dim, rows))
        order = described.rope.head_order(arch.head_dim) if described.rope else None
        if layer.attention is not None and order is not None:
            _reorder(
                layer.attention, torch.tensor(order, device=weights.embedding.device), arch.attention_gate
            )
        if arch.multipliers is not None:
            _multiply(layer, arch, arch.multipliers)
    if arch.unit_offset:
        norms = [part for layer in weights.layers for part in _norms(layer)]
        for weight in [*norms, weights.final_norm.weight]:
            weight.add_(1.0)


def _by_row(linear: Linear) -> Iterator[torch.Tensor]:
    """Yield the tensors of a layer, [out, ...]; codes as integers, which every device can reorder."""
    for part in tensors_of(linear):
        yield part.view(torch.uint8) if part.dtype == CODES else part


def _take_rows(linear: Linear, order: Ints) -> None:
    for part in _by_row(linear):
        part.copy_(part[torch.from_numpy(order).to(part.device)])


def _multiply(layer: LayerWeights, arch: Arch, by: Multipliers) -> None:
    """Multiply the factors of projections into their rows; inputs' factors leave biases as they are."""
    if layer.attention is not None:
        queries, keys = _query_and_key_rows(layer.attention, arch.attention_gate)
        layer.attention.qkv.factors[0].mul_(by.attention_input)
        for part in tensors_of(layer.attention.qkv.factors):
            part[queries : queries + keys].mul_(by.key)
        for part in tensors_of(layer.attention.output.factors):
            part.mul_(by.attention_output)
    if layer.recurrent is not None:
        project, keys = layer.recurrent.project, layer.recurrent.conv.weight.shape[0]
        inner = layer.recurrent.output.weight.shape[1]
        sizes = (inner, inner, (keys - inner) // 2, (keys - inner) // 2, len(layer.recurrent.decay))
        project.weight.mul_(by.recurrent_input)
        for part in tensors_of(project):
            for rows, factor in zip(part.split(sizes), by.recurrent_parts, strict=True):
                rows.mul_(factor)
        for part in tensors_of(layer.recurrent.output):
            part.mul_(by.recurrent_output)
    if isinstance(layer.mlp, MlpWeights):
        for part in tensors_of(layer.mlp.up.factors):
            part[: len(part) // 2].mul_(by.mlp_gate)
        for part in tensors_of(layer.mlp.down.factors):
            part.mul_(by.mlp_output)


def _reorder(attention: AttentionWeights, order: torch.Tensor, gated: bool) -> None:
    """Reorder the values of every query and key head."""
    head_dim = len(order)
    rows = sum(_query_and_key_rows(attention, gated))
    for part in _by_row(attention.qkv):
        heads = part[:rows].unflatten(0, (-1, head_dim))
        heads.copy_(heads[:, order])
    for norm in (attention.query_norm, attention.key_norm):
        if norm is not None:
            heads = norm.unflatten(0, (-1, head_dim))  # one, or all with ``Arch.qk_norm`` "projection"
            heads.copy_(heads[:, order])


def _query_and_key_rows(attention: AttentionWeights, gated: bool) -> tuple[int, int]:
    """Return the rows of ``qkv`` that are queries, and those that are keys; in a shard, too."""
    queries = attention.output.weight.shape[1]
    return queries, (attention.qkv.weight.shape[0] - queries * (1 + gated)) // 2


def _norms(layer: LayerWeights) -> Iterator[torch.Tensor]:
    """Yield the weights of a layer's norms."""
    for norm in (layer.mixer_norm, layer.post_mixer_norm, layer.mlp_norm, layer.post_mlp_norm):
        if norm is not None:
            yield norm.weight
    if layer.attention is not None:
        for weight in (layer.attention.query_norm, layer.attention.key_norm):
            if weight is not None:
                yield weight


def _grouped(stored: torch.Tensor) -> GroupedLinear:
    """Return the layer whose weights are stored as [E, out, in]."""
    return GroupedLinear(stored.transpose(1, 2), None)


class _Assembler:
    """Assembles a shard's ``Weights`` from a source."""

    def __init__(self, arch: Arch, source: TensorSource, shard: Shard, form: WeightsName) -> None:
        """``arch``: of the whole model. ``form``: ``auto`` keeps codes that are stored. Raises ModelError."""
        self.arch, self.source, self.names = arch, source, tensor_names(arch.family)
        self.shard, self.form = shard, form
        shard.arch(arch)  # raises if the model cannot be divided
        self.duplicates: tuple[str, ...] = ()
        """Tensors of the source that need not be read: they equal another one."""
        # The embedding may be missing if the head is saved instead; a norm always exists.
        signs = (f"{self.names.embedding}.weight", f"{self.names.final_norm}.weight")
        found = [prefix for prefix in self.names.prefixes if any(prefix + sign in source for sign in signs)]
        if not found:
            raise ModelError(f"{source.name}: no tensor {signs[0]}; not a checkpoint of {arch.family}")
        self.prefix = found[0]
        heads = [name for name in self.names.heads if name in source]
        self.head = heads[0] if heads else self.names.heads[0]

    def weights(self) -> Weights:
        arch = self.arch
        embedding = self._embedding()
        positions = None
        if arch.learned_positions:
            shape = (arch.position_offset + arch.context_limit, arch.hidden_size)
            positions = self._tensor(self.names.positions, shape)
        layers = tuple(
            self._layer(f"{self.names.layers}.{index}.", layer) for index, layer in enumerate(arch.layers)
        )
        final_norm = self._norm(self.names.final_norm)
        return Weights(embedding, positions, layers, final_norm, Linear(self._head(embedding), None))

    def _embedding(self) -> torch.Tensor:
        """[vocab, hidden]"""
        name = f"{self.prefix}{self.names.embedding}.weight"
        if self.arch.tied_embeddings and name not in self.source and self.head in self.source:
            name = self.head
        return self.source.get([name], (self.arch.vocab_size, self.arch.hidden_size))

    def _head(self, embedding: torch.Tensor) -> torch.Tensor:
        """Return the shard's rows of the head: the embedding's if the two are tied, unless a head with other
        values is saved. transformers reads such a folder the same way."""
        arch, source = self.arch, self.source
        shape, tokens = (arch.vocab_size, arch.hidden_size), self.shard.vocabulary(arch.vocab_size)
        name = f"{self.prefix}{self.names.embedding}.weight"
        if arch.tied_embeddings:
            both = self.head in source and name in source
            if not both or source.same(self.head, name):
                self.duplicates = (self.head,)
                return embedding if self.shard.ranks == 1 else embedding[tokens]
            log.warning(
                "config.json says tie_word_embeddings, but %s differs from %s: the head is used as it is",
                self.head,
                name,
            )
        elif self.head not in source:
            raise ModelError(
                f"{source.name}: no tensor {self.head}, and config.json: tie_word_embeddings is false"
            )
        return source.get([self.head], shape, TensorSlice((tokens,)))

    def _layer(self, at: str, layer: Layer) -> LayerWeights:
        arch, names = self.arch, self.names
        before, after = arch.norms != "after", arch.norms != "before"
        has_mlp = layer.mlp != "none"
        return LayerWeights(
            mixer_norm=self._norm(at + names.mixer_norm) if before else None,
            attention=self._attention(at) if layer.attends else None,
            mlp_norm=self._norm(at + names.mlp_norm)
            if before and has_mlp and not arch.parallel_blocks
            else None,
            mlp=self._any_mlp(at, layer),
            post_mixer_norm=self._norm(at + names.post_mixer_norm) if after else None,
            post_mlp_norm=self._norm(at + names.post_mlp_norm) if after and has_mlp else None,
            recurrent=None if layer.state is None else self._recurrent(at + names.recurrent, layer.state),
        )

    def _attention(self, at: str) -> AttentionWeights:
        arch, names, shard, dim = self.arch, self.names, self.shard, self.arch.head_dim
        queries, keys = arch.num_heads * dim, arch.num_kv_heads * dim
        kv_heads = shard.kv_heads(arch.num_kv_heads)
        own_keys = slice(kv_heads.start * dim, kv_heads.stop * dim)
        qkv = [at + name for name in names.qkv]
        asked = queries * (1 + arch.attention_gate)
        qkv_slice = TensorSlice((shard.even(asked), own_keys, own_keys), lengths=(asked, keys, keys))
        query_norm = key_norm = sinks = None
        if arch.qk_norm is not None:
            of_head = arch.qk_norm == "head"
            query_norm = self._norm_weight(at + names.query_norm, dim if of_head else queries)
            key_norm = self._norm_weight(at + names.key_norm, dim if of_head else keys)
        if arch.sinks:
            heads = TensorSlice((shard.even(arch.num_heads),))
            sinks = self.source.get([f"{self.prefix}{at}{names.sinks}"], (arch.num_heads,), heads)
        return AttentionWeights(
            self._column_parallel(qkv, (asked + 2 * keys, arch.hidden_size), qkv_slice, arch.qkv_bias, True),
            self._row_parallel(at + names.output, (arch.hidden_size, queries), arch.output_bias, True),
            query_norm, key_norm, sinks,
        )  # fmt: skip

    def _recurrent(self, at: str, state: StateShape) -> RecurrentWeights:
        arch, shard, mixer = self.arch, self.shard, self.arch.recurrent
        assert mixer is not None
        inner, keys = state.heads * state.value_dim, mixer.key_heads * state.key_dim
        ssd = mixer.kind == "ssd"
        convolved = (inner, keys, keys) if ssd else (keys, keys, inner)
        projected: tuple[int, ...] = (*convolved, inner, state.heads, state.heads)
        if ssd:
            projected = (inner, *convolved, state.heads)
        if self.names.interleaved:
            projected = (sum(projected) - 2 * state.heads, 2 * state.heads)

        def part(name: str, lengths: tuple[int, ...], *rest: int) -> torch.Tensor:
            rows = TensorSlice(tuple(shard.even(length) for length in lengths), lengths=lengths)
            return self.source.get([f"{self.prefix}{at}{name}"], (sum(lengths), *rest), rows)

        heads = (state.heads,)
        rows = TensorSlice(tuple(shard.even(length) for length in projected), lengths=projected)
        shape, names = (sum(projected), arch.hidden_size), [at + name for name in self.names.projections]
        norm = None
        if mixer.gate != "no norm" and mixer.norm_per_head:
            norm = self._tensor(at + "norm", (state.value_dim,))
        elif mixer.gate != "no norm":
            norm = part("norm.weight", (inner,))
        return RecurrentWeights(
            self._column_parallel(names, shape, rows, mixer.input_bias),
            Linear(
                part("conv1d.weight", convolved, 1, state.conv_width).squeeze(1),
                part("conv1d.bias", convolved) if mixer.conv_bias else None,
            ),
            part("A_log", heads),
            part("dt_bias", heads),
            part("D", heads) if ssd else None,
            norm,
            self._row_parallel(at + "out_proj", (arch.hidden_size, inner), mixer.output_bias),
        )

    def _any_mlp(self, at: str, layer: Layer) -> MlpWeights | ExpertWeights | None:
        if layer.mlp != "dense":
            return self._experts(at) if layer.has_experts else None
        up = [at + name for name in self.names.up]
        return self._mlp(up, at + self.names.down, self.arch.intermediate_size, self.arch.mlp_bias, True)

    def _mlp(self, names: list[str], down: str, inner: int, bias: bool, codes: bool = False) -> MlpWeights:
        parts, hidden = 1 + self.arch.gated_mlp, self.arch.hidden_size
        up_slice = TensorSlice((self.shard.even(inner),) * parts, lengths=(inner,) * parts)
        return MlpWeights(
            self._column_parallel(names, (inner * parts, hidden), up_slice, bias, codes),
            self._row_parallel(down, (hidden, inner), bias, codes),
        )

    def _experts(self, at: str) -> ExpertWeights:
        experts, hidden = self.arch.experts, self.arch.hidden_size
        assert experts is not None
        ways = self.names.experts
        names = next((way for way in ways if f"{self.prefix}{at}{way.sign}" in self.source), ways[0])
        router = self._column_parallel(
            [at + names.router], (experts.count, hidden), WHOLE_TENSOR, experts.bias
        )
        up, down = (self._each_expert if names.joined is None else self._joined_experts)(at, names, experts)
        if not experts.shared_width:
            return ExpertWeights(router, up, down)
        gate, value, shared_down = (at + name for name in names.shared)
        shared = self._mlp([gate, value], shared_down, experts.shared_width, bias=False)
        shared_gate = self._column_parallel([at + names.shared_gate], (1, hidden), WHOLE_TENSOR, bias=False)
        return ExpertWeights(router, up, down, shared, shared_gate)

    def _each_expert(
        self, at: str, names: ExpertNames, experts: Experts
    ) -> tuple[GroupedLinear, GroupedLinear]:
        """Return the products of experts that the checkpoint has one by one."""
        count, width, hidden = experts.count, experts.width, self.arch.hidden_size
        own = self.shard.even(width)
        every = [
            [f"{self.prefix}{at}{name.format(number)}.weight" for name in names.each]
            for number in range(count)
        ]
        up = self.source.get(
            [name for gate, value, _ in every for name in (gate, value)],
            (2 * count * width, hidden),
            TensorSlice((own,) * (2 * count), lengths=(width,) * (2 * count)),
        )
        down = self.source.get(
            [down for _, _, down in every],
            (count * hidden, width),
            TensorSlice((slice(None),) * count, own, (hidden,) * count),
        )
        return _grouped(up.view(count, -1, hidden)), _grouped(down.view(count, hidden, -1))

    def _joined_experts(
        self, at: str, names: ExpertNames, experts: Experts
    ) -> tuple[GroupedLinear, GroupedLinear]:
        """Return the products of experts that the checkpoint has together."""
        assert names.joined is not None
        count, width, hidden = experts.count, experts.width, self.arch.hidden_size
        own = self.shard.even(width)
        up_name, down_name = (f"{self.prefix}{at}{name}" for name in names.joined)
        if not names.inputs_first:
            gates = TensorSlice(columns=own, view=(2 * count, width, hidden))
            up = self.source.get([up_name], (count, 2 * width, hidden), gates)
            down = self.source.get(
                [down_name], (count, hidden, width), TensorSlice(columns=own, view=(count * hidden, width))
            )
            return _grouped(up.view(count, -1, hidden)), _grouped(down.view(count, hidden, -1))
        pairs = slice(2 * own.start, 2 * own.stop)
        up = self.source.get(
            [up_name],
            (count, hidden, 2 * width),
            TensorSlice(columns=pairs, view=(count * hidden, 2 * width)),
        )
        down = self.source.get([down_name], (count, width, hidden), TensorSlice(columns=own))
        up_bias = down_bias = None
        if experts.bias:
            leads = self.shard.rank == 0
            up_bias = self.source.get([f"{up_name}_bias"], (count, 2 * width), TensorSlice(columns=pairs))
            down_bias = self.source.get(
                [f"{down_name}_bias"], (count, hidden), WHOLE_TENSOR if leads else NO_ROWS
            )
            down_bias = down_bias if leads else None
        return GroupedLinear(up.view(count, hidden, -1), up_bias), GroupedLinear(down, down_bias)

    def _column_parallel(
        self,
        names: list[str],
        shape: tuple[int, int],
        tensor_slice: TensorSlice,
        bias: bool,
        codes: bool = False,
    ) -> Linear:
        """A projection into a block, divided by rows. ``codes``: it may have its weights as codes."""
        weight, scales = self._weight(names, shape, tensor_slice, codes)
        biases = [f"{self.prefix}{name}.bias" for name in names]
        return Linear(weight, self.source.get(biases, shape[:1], tensor_slice) if bias else None, scales)

    def _row_parallel(self, name: str, shape: tuple[int, int], bias: bool, codes: bool = False) -> Linear:
        """A projection out of a block, divided by columns; the ranks' results are summed, so rank 0 adds the bias."""
        # A sum over ranks comes before scales of whole rows of inputs.
        codes, leads = codes and self.shard.ranks == 1, self.shard.rank == 0
        columns = TensorSlice((slice(None),), self.shard.even(shape[1]))
        weight, scales = self._weight([name], shape, columns, codes)
        own = WHOLE_TENSOR if leads else NO_ROWS
        values = self.source.get([f"{self.prefix}{name}.bias"], shape[:1], own) if bias else None
        return Linear(weight, values if leads else None, scales)

    def _weight(
        self, names: list[str], shape: tuple[int, int], tensor_slice: TensorSlice, codes: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return a weight without scales, or its codes and scales."""
        names = [f"{self.prefix}{name}.weight" for name in names]
        if codes and (self.form == "fp8" or (self.form == "auto" and self.source.has_codes(names))):
            return self.source.get_codes(names, shape, tensor_slice)
        return self.source.get(names, shape, tensor_slice), None

    def _norm(self, name: str) -> NormWeights:
        hidden = self.arch.hidden_size
        weight = self._norm_weight(name, hidden)
        if self.arch.norm == "rms":
            return NormWeights(weight, None)
        if not self.arch.norm_bias:
            return NormWeights(weight, torch.zeros_like(weight))
        return NormWeights(weight, self.source.get([f"{self.prefix}{name}.bias"], (hidden,)))

    def _norm_weight(self, name: str, width: int) -> torch.Tensor:
        dtype = torch.float32 if self.arch.unit_offset else None
        return self.source.get([f"{self.prefix}{name}.weight"], (width,), dtype=dtype)

    def _tensor(self, name: str, shape: tuple[int, ...]) -> torch.Tensor:
        return self.source.get([f"{self.prefix}{name}.weight"], shape)
