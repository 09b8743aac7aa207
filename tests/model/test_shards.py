"""A model divided over ranks: what each has of it, that nothing is lost or read twice, and what cannot be divided."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pensieve.model import checkpoint
from pensieve.model.arch import Arch, ModelError
from pensieve.model.checkpoint import TensorFill
from pensieve.model.folder import load_arch
from pensieve.model.shard import Shard
from pensieve.model.weights import LoadFormat, Weights, load_weights, tensors_of, weight_bytes
from support.engine.checkpoints import FAMILIES, LAYERED, Family, tiny_checkpoint

WIDE = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": 163}
"""More ranks than KV heads, and a vocabulary that no number of ranks divides."""


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.getbasetemp()


def shards(model: Path, ranks: int, load_format: LoadFormat = "auto") -> list[Weights]:
    arch = load_arch(model)
    return [
        load_weights(model, arch, dtype=torch.float32, load_format=load_format, shard=Shard(rank, ranks))
        for rank in range(ranks)
    ]


def joined(arch: Arch, parts: list[Weights]) -> list[torch.Tensor]:
    """The whole model's tensors, in the order of ``tensors_of``, put together from those of all ranks."""
    ranks, dim = len(parts), arch.head_dim
    copies = max(1, ranks // arch.num_kv_heads)
    queries, keys = arch.num_heads // ranks * dim, max(1, arch.num_kv_heads // ranks) * dim

    def qkv(tensors: list[torch.Tensor]) -> torch.Tensor:
        split = [tensor.split([queries, keys, keys]) for tensor in tensors]
        kinds = [[one[kind] for one in split] for kind in range(3)]
        return torch.cat([torch.cat(kinds[0]), *(torch.cat(kind[::copies]) for kind in kinds[1:])])

    def up(tensors: list[torch.Tensor]) -> torch.Tensor:
        split = [tensor.chunk(2 if arch.gated_mlp else 1) for tensor in tensors]
        return torch.cat([torch.cat(kind) for kind in zip(*split, strict=True)])

    found = [parts[0].embedding] + ([] if parts[0].positions is None else [parts[0].positions])
    for layers in zip(*(part.layers for part in parts), strict=True):
        first = layers[0]
        attention, mlp = [one.attention for one in layers], [one.mlp for one in layers]
        found += tensors_of(first.mixer_norm)
        found += [qkv(list(both)) for both in zip(*(tensors_of(one.qkv) for one in attention), strict=True)]
        found.append(torch.cat([one.output.weight for one in attention], 1))
        found += [] if attention[0].output.bias is None else [attention[0].output.bias]
        found += [one for one in (attention[0].query_norm, attention[0].key_norm) if one is not None]
        found += tensors_of(first.mlp_norm)
        found += [up(list(both)) for both in zip(*(tensors_of(one.up) for one in mlp), strict=True)]
        found.append(torch.cat([one.down.weight for one in mlp], 1))
        found += [] if mlp[0].down.bias is None else [mlp[0].down.bias]
        found += [*tensors_of(first.post_mixer_norm), *tensors_of(first.post_mlp_norm)]
        assert all(one.output.bias is None for one in attention[1:])
        assert all(one.down.bias is None for one in mlp[1:])
    found += tensors_of(parts[0].final_norm)
    return [*found, torch.cat([part.head.weight for part in parts])]


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("load_format", ["safetensors", "dummy"])
def test_the_ranks_together_have_the_whole_model(
    family: Family, ranks: int, load_format: LoadFormat, folder: Path
) -> None:
    shape = {"num_attention_heads": 8, "vocab_size": 163} if family == "opt" else WIDE
    model = tiny_checkpoint(family, folder, **shape)
    arch = load_arch(model)
    whole = load_weights(model, arch, dtype=torch.float32, load_format=load_format)
    together = joined(arch, shards(model, ranks, load_format))
    want = list(tensors_of(whole))
    assert len(together) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(together, want, strict=True))


@pytest.mark.parametrize("family", [family for family in LAYERED if not family.startswith("olmo")])
def test_the_ranks_together_have_the_whole_of_other_layers(family: Family, folder: Path) -> None:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 163}
    model = tiny_checkpoint(family, folder, **shape)
    arch = load_arch(model)
    whole = load_weights(model, arch, dtype=torch.float32)
    together, want = joined(arch, shards(model, 4)), list(tensors_of(whole))
    assert len(together) == len(want)
    assert all(torch.equal(one, other) for one, other in zip(together, want, strict=True))


def test_a_rank_reads_its_part_only(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fills: list[TensorFill] = []
    monkeypatch.setattr(checkpoint, "fill_all", lambda jobs, *rest: fills.extend(jobs))
    model = tiny_checkpoint("mistral", folder, vocab_size=256, intermediate_size=512)
    (whole,), (half, other) = shards(model, 1), shards(model, 2)
    # Divided is all but the embedding and the norms.
    divided = weight_bytes(whole) - whole.embedding.nbytes - 7 * whole.final_norm.weight.nbytes
    assert weight_bytes(whole) - weight_bytes(half) == divided // 2
    read = sum(fill.source.nbytes for fill in fills)
    assert read == weight_bytes(whole) + weight_bytes(half) + weight_bytes(other)


def test_a_tied_head_takes_no_memory_of_its_own(folder: Path) -> None:
    for part in shards(tiny_checkpoint("llama3", folder), 2):
        assert part.head.weight.untyped_storage().data_ptr() == part.embedding.untyped_storage().data_ptr()
        own = sum(tensor.nbytes for tensor in tensors_of(part.layers)) + part.final_norm.weight.nbytes
        assert weight_bytes(part) == own + part.embedding.nbytes


@pytest.mark.parametrize(
    ("change", "ranks", "said"),
    [
        ({}, 5, "6 attention heads do not divide over 5 ranks; this model can have 1, 2"),
        ({"num_kv_heads": 2}, 3, "2 KV heads do not divide over 3 ranks; this model can have 1, 2"),
        ({"intermediate_size": 65}, 2, "an MLP of 65 does not divide over 2 ranks; this model can have 1"),
    ],
)
def test_what_cannot_be_divided_is_refused(
    change: dict[str, int], ranks: int, said: str, folder: Path
) -> None:
    model = tiny_checkpoint("llama", folder)
    arch = replace(load_arch(model), **change)  # type: ignore[arg-type]
    with pytest.raises(ModelError, match=said):
        load_weights(model, arch, dtype=torch.float32, shard=Shard(0, ranks))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("size", [1, 8, 163, 32000, 50272])
def test_every_token_of_a_vocabulary_is_on_one_rank(size: int, ranks: int) -> None:
    found = [Shard(rank, ranks).vocabulary(size) for rank in range(ranks)]
    assert [token for part in found for token in range(size)[part]] == list(range(size))
    width = Shard(0, ranks).vocabulary_width(size)
    assert all(part.stop - part.start <= width for part in found)
