"""Quantised checkpoints: unpacked as the libraries that define them do it, or refused in one line."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from pensieve.model.arch import ModelError
from pensieve.model.folder import load_arch
from pensieve.model.shard import WHOLE_MODEL, Shard
from pensieve.model.weights import load_weights, tensors_of
from support.engine.checkpoints import tiny_checkpoint
from support.engine.worker_driver import (
    CHUNK,
    EVERYTHING,
    logprobs,
    make_worker,
    random_tokens,
    reference_logprobs,
    span,
    step,
)

Tensors = dict[str, torch.Tensor]
Pack = Callable[[torch.Tensor], tuple[Tensors, torch.Tensor]]
"""Return the stored tensors of a matrix by the last part of their names, and what they unpack to."""


def folders(
    family: str, tmp_path: Path, config: Mapping[str, Any], pack: Pack, *, dtype: torch.dtype = torch.bfloat16
) -> tuple[Path, Path]:
    """A tiny checkpoint whose projections are packed, and the same unpacked."""
    plain = tiny_checkpoint(family, tmp_path)  # type: ignore[arg-type]
    packed = tmp_path / "packed"
    shutil.copytree(plain, packed)
    stored, values = dict[str, torch.Tensor](), dict[str, torch.Tensor]()
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith("_proj.weight"):
            parts, unpacked = pack(tensor.to(dtype))
            stored |= {
                f"{name.removesuffix('weight')}{last}": one.contiguous() for last, one in parts.items()
            }
            values[name] = unpacked.contiguous()
        else:
            stored[name] = values[name] = tensor
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    path = packed / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": dict(config)}))
    return packed, plain


def assert_same(packed: Path, plain: Path, shard: Shard = WHOLE_MODEL) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        ours, theirs = (
            list(tensors_of(load_weights(folder, load_arch(folder), dtype=dtype, shard=shard)))
            for folder in (packed, plain)
        )
        assert len(ours) == len(theirs) and all(map(torch.equal, ours, theirs))


def compressed(form: str, **values: Any) -> tuple[dict[str, Any], Pack]:
    """The config of a compressed-tensors folder, and what packs a matrix."""
    args = QuantizationArgs(**values)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    library = BaseCompressor.get_value_from_registry(form)

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        out, inputs = weight.shape
        rows, columns = {
            "tensor": (out, inputs), "channel": (1, inputs), "group": (1, args.group_size or inputs),
            "block": tuple(args.block_structure or (0, 0)),
        }[str(args.strategy)]  # fmt: skip
        down, across = -(-out // rows), -(-inputs // columns)
        padded = torch.zeros(down * rows, across * columns)
        padded[:out, :inputs] = weight
        tiles = padded.unflatten(0, (down, rows)).unflatten(2, (across, columns))
        low, high = tiles.amin((1, 3)).clamp(max=0), tiles.amax((1, 3)).clamp(min=1e-6)
        most = 448.0 if args.type == "float" else 2.0 ** (args.num_bits - 1) - 1
        given = {"weight": weight}
        if args.symmetric:
            given["weight_scale"] = (torch.maximum(-low, high) / most).to(weight.dtype)
        else:
            scale = ((high - low) / (2 * most + 1)).to(weight.dtype)
            zero = (-most - 1 - low / scale.float()).round().clamp(-most - 1, most)
            given |= {"weight_scale": scale, "weight_zero_point": zero.to(torch.int8)}
        if args.strategy == "tensor":
            given["weight_scale"] = given["weight_scale"].flatten()
        stored = library.compress(given, scheme)
        return stored, library.decompress(stored, scheme)["weight"]

    weights = json.loads(args.model_dump_json())
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": form, "config_groups": groups}, pack


COMPRESSED = {
    "fp8 by tensor": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "tensor"}),
    "fp8 by row": ("float-quantized", {"num_bits": 8, "type": "float", "strategy": "channel"}),
    "fp8 by block": (
        "float-quantized",
        {"num_bits": 8, "type": "float", "strategy": "block", "block_structure": [16, 32]},
    ),
    "int8 by row": ("int-quantized", {"num_bits": 8, "type": "int", "strategy": "channel"}),
    "int8 by row, asymmetric": (
        "int-quantized",
        {"num_bits": 8, "type": "int", "strategy": "channel", "symmetric": False},
    ),
    "4 bits by group": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16},
    ),
    "4 bits by group, asymmetric": (
        "pack-quantized",
        {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 16, "symmetric": False},
    ),
    "4 bits by row": ("pack-quantized", {"num_bits": 4, "type": "int", "strategy": "channel"}),
    "8 bits by group": (
        "pack-quantized",
        {"num_bits": 8, "type": "int", "strategy": "group", "group_size": 16},
    ),
}


@pytest.mark.parametrize("name", COMPRESSED)
def test_compressed_tensors_as_its_library_unpacks_them(name: str, tmp_path: Path) -> None:
    form, values = COMPRESSED[name]
    config, pack = compressed(form, **values)
    packed, plain = folders("llama", tmp_path, config, pack)
    assert_same(packed, plain)
    assert_same(packed, plain, Shard(1, 2))


def fp8_blocks(weight: torch.Tensor, scales_as: torch.dtype = torch.bfloat16) -> tuple[Tensors, torch.Tensor]:
    tiles = weight.float().unflatten(0, (-1, 16)).unflatten(2, (-1, 8))
    scale = tiles.abs().amax((1, 3), keepdim=True) / 448.0
    if scales_as is torch.uint8:  # exponents of two
        scale = scale.log2().ceil().exp2()
        scales = (scale.log2() + 127).to(torch.uint8)[:, 0, :, 0].contiguous()
    else:
        scale = scale.to(scales_as).float()
        scales = scale[:, 0, :, 0].to(scales_as).contiguous()
    stored = (tiles / scale).flatten(2, 3).flatten(0, 1).to(torch.float8_e4m3fn)
    library: Any = Fp8Dequantize
    values: torch.Tensor = library(None)._dequantize_one(stored, scales, torch.float32)
    return {"weight": stored, "weight_scale_inv": scales, "input_scale": torch.ones(1)}, values


def fp8_whole(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
    scale = (weight.float().abs().amax() / 448.0).reshape(1)
    stored = (weight.float() / scale).to(torch.float8_e4m3fn)
    return {"weight": stored, "weight_scale": scale}, stored.float() * scale


@pytest.mark.parametrize("scales_as", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_fp8_blocks_as_transformers_unpacks_them(scales_as: torch.dtype, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    assert_same(*folders("qwen3", tmp_path, config, lambda weight: fp8_blocks(weight, scales_as)))


def test_fp8_with_one_scale(tmp_path: Path) -> None:
    assert_same(*folders("qwen3", tmp_path, {"quant_method": "fp8"}, fp8_whole))


def words(values: torch.Tensor, bits: int, axis: int, order: tuple[int, ...] = ()) -> torch.Tensor:
    """Pack unsigned values into int32, the first of a word in its lowest bits, unless ``order`` names them."""
    per_word = 32 // bits
    parts = values.long().unflatten(axis, (-1, per_word))
    parts = parts.index_select(axis + 1, torch.tensor(order or range(per_word)))
    shifts = torch.arange(0, 32, bits).view(-1, *(1,) * (values.ndim - axis - 1))
    whole = (parts << shifts).sum(axis + 1)
    return torch.where(whole >= 1 << 31, whole - (1 << 32), whole).to(torch.int32)


def grouped(weight: torch.Tensor, bits: int, size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values [in, out] with zero points and scales [in / size, out], as AWQ and GPTQ have them."""
    tiles = weight.float().t().unflatten(0, (-1, size))
    low, high = tiles.amin(1).clamp(max=0), tiles.amax(1).clamp(min=1e-4)
    scale = ((high - low) / (2**bits - 1)).half()
    zero = (-low / scale.float()).round().clamp(1, 2**bits - 1)
    codes = (tiles / scale.float()[:, None] + zero[:, None]).round().clamp(0, 2**bits - 1)
    return codes.flatten(0, 1), zero, scale


def unpacked(
    codes: torch.Tensor, zero: torch.Tensor, scale: torch.Tensor, groups: torch.Tensor
) -> torch.Tensor:
    return ((codes - zero[groups]).half() * scale[groups]).t()


def test_awq(tmp_path: Path) -> None:
    """The layout of AutoAWQ's ``gemm`` version: eight outputs in a word, the even ones first."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zero, scale = grouped(weight, 4, 16)
        order = (0, 2, 4, 6, 1, 3, 5, 7)
        stored = {"qweight": words(codes, 4, 1, order), "qzeros": words(zero, 4, 1, order), "scales": scale}
        return stored, unpacked(codes, zero, scale, torch.arange(len(codes)) // 16)

    config = {"quant_method": "awq", "bits": 4, "group_size": 16, "zero_point": True, "version": "gemm"}
    packed, plain = folders("llama", tmp_path, config, pack)
    assert_same(packed, plain)
    assert_same(packed, plain, Shard(0, 2))


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
def test_gptq(bits: int, form: str, tmp_path: Path) -> None:
    """The layout of AutoGPTQ: inputs in a word, groups by ``g_idx``, zero points less 1 in the first version."""

    def pack(weight: torch.Tensor) -> tuple[Tensors, torch.Tensor]:
        codes, zero, scale = grouped(weight, bits, 16)
        groups = torch.arange(len(codes)) // 16
        mixed = torch.randperm(len(codes), generator=torch.Generator().manual_seed(len(codes)))
        codes, groups = codes[mixed], groups[mixed]
        stored = {
            "qweight": words(codes, bits, 0), "qzeros": words(zero - int(form == "gptq"), bits, 1), "scales": scale,
            "g_idx": groups.to(torch.int32),
        }  # fmt: skip
        return stored, unpacked(codes, zero, scale, groups)

    config = {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": form}
    assert_same(*folders("llama", tmp_path, config, pack))


def test_mxfp4_as_transformers_unpacks_it(tmp_path: Path) -> None:
    plain = tiny_checkpoint("gpt_oss", tmp_path, hidden_size=64, intermediate_size=32)
    packed = tmp_path / "packed"
    shutil.copytree(plain, packed)
    rng, stored, values = (
        torch.Generator().manual_seed(1),
        dict[str, torch.Tensor](),
        dict[str, torch.Tensor](),
    )
    for name, tensor in load_file(plain / "model.safetensors").items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, inputs, outputs = tensor.shape
            blocks = torch.randint(
                0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8, generator=rng
            )
            scales = torch.randint(
                118, 126, (experts, outputs, inputs // 32), dtype=torch.uint8, generator=rng
            )
            stored |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
            values[name] = convert_moe_packed_tensors(blocks, scales)
        else:
            stored[name] = values[name] = tensor
    save_file(stored, packed / "model.safetensors", {"format": "pt"})
    save_file(values, plain / "model.safetensors", {"format": "pt"})
    path = packed / "config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "mxfp4"}})
    )
    assert_same(packed, plain)
    assert_same(packed, plain, Shard(1, 2))


@pytest.mark.parametrize("name", ["fp8 by row", "4 bits by group"])
def test_log_probabilities_are_those_of_transformers(name: str, tmp_path: Path) -> None:
    """On the folder that the library unpacked, which transformers reads as any other."""
    config, pack = compressed(COMPRESSED[name][0], **COMPRESSED[name][1])
    packed, plain = folders("llama", tmp_path, config, pack)
    tokens = random_tokens(30)
    worker = make_worker(packed)
    for end in (8, 30):
        result = step(worker, [span(tokens, 0, end, sampling=EVERYTHING)], [range(-(-end // CHUNK))])
        torch.testing.assert_close(
            logprobs(result), reference_logprobs(plain, tokens)[end - 1], atol=1e-4, rtol=1e-4
        )
    worker.close()


CONFIGS = {
    "bitsandbytes": ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes' is not supported"),
    "no method": ({"bits": 4}, "quant_method None is not supported"),
    "nvfp4": (
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized",
         "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float", "strategy": "tensor_group"}}}},
        "weights.strategy 'tensor_group' is not supported",
    ),
    "three bits": ({"quant_method": "gptq", "bits": 3, "group_size": 128}, "bits 3 is not supported"),
    "gemv": ({"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemv"}, "version 'gemv'"),
    "no group size": ({"quant_method": "awq", "bits": 4}, r"quantization_config \(awq\) cannot be read"),
    "group size 0": ({"quant_method": "gptq", "bits": 4, "group_size": 0}, "group_size is 0"),
    "sparse": (
        {"quant_method": "compressed-tensors", "sparsity_config": {"format": "sparse-24-bitmask"}, "config_groups": {}},
        "sparsity_config .* is not supported",
    ),
    "rotated": (
        {"quant_method": "compressed-tensors", "transform_config": {"config_groups": {"a": {}}}, "config_groups": {}},
        "transform_config is not supported",
    ),
    "text": ("awq", "quantization_config is not an object"),
}  # fmt: skip


@pytest.mark.parametrize("name", CONFIGS)
def test_configs_that_are_refused(name: str, tmp_path: Path) -> None:
    given, said = CONFIGS[name]
    folder = tiny_checkpoint("llama", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": given}))
    with pytest.raises(ModelError, match=rf"config\.json: .*{said}"):
        load_arch(folder)


def edited(folder: Path, edit: Callable[[Tensors], None]) -> Path:
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


NAME = "model.layers.1.mlp.up_proj"


def without_scale(tensors: Tensors) -> None:
    del tensors[f"{NAME}.weight_scale_inv"]


def scale_of(value: float) -> Callable[[Tensors], None]:
    def edit(tensors: Tensors) -> None:
        tensors[f"{NAME}.weight_scale_inv"][0, 1] = value

    return edit


def other_blocks(tensors: Tensors) -> None:
    tensors[f"{NAME}.weight_scale_inv"] = tensors[f"{NAME}.weight_scale_inv"][:, :-1].contiguous()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without_scale, rf"{NAME}\.weight has no scales"),
        (
            scale_of(0.0),
            rf"{NAME}\.weight: weight_scale_inv has 1 scales that are not above zero and finite, such as 0",
        ),
        (scale_of(-1.0), "such as -1"),
        (scale_of(float("nan")), "such as nan"),
        (scale_of(float("inf")), "such as inf"),
        (other_blocks, rf"{NAME}\.weight: scales .* do not fit"),
    ],
)
def test_tensors_that_are_refused(edit: Callable[[Tensors], None], said: str, tmp_path: Path) -> None:
    config = {"quant_method": "fp8", "weight_block_size": [16, 8]}
    packed = edited(folders("llama", tmp_path, config, fp8_blocks)[0], edit)
    with pytest.raises(ModelError, match=rf"^{packed}: .*{said}"):
        load_weights(packed, load_arch(packed), dtype=torch.float32)


def test_a_group_size_that_does_not_fit(tmp_path: Path) -> None:
    form, values = COMPRESSED["4 bits by group"]
    config, pack = compressed(form, **values)
    packed, _ = folders("llama", tmp_path, config, pack)
    path = packed / "config.json"
    path.write_text(path.read_text().replace('"group_size": 16', '"group_size": 8'))
    with pytest.raises(ModelError, match=r"weight_packed: scales \[\d+, \d+\] do not fit groups of 8"):
        load_weights(packed, load_arch(packed), dtype=torch.float32)


def test_tensors_without_a_use_are_named(tmp_path: Path) -> None:
    def unknown(tensors: Tensors) -> None:
        tensors[f"{NAME}.weight_offset"] = torch.ones(1)

    packed, _ = folders("llama", tmp_path, {"quant_method": "fp8"}, fp8_whole)
    with pytest.raises(ModelError, match=rf"no use for: {NAME}\.weight_offset"):
        load_weights(edited(packed, unknown), load_arch(packed), dtype=torch.float32)


def cut_zeros(tensors: Tensors) -> None:
    tensors[f"{NAME}.weight_zero_point"] = tensors[f"{NAME}.weight_zero_point"][:1].contiguous()


def without(last: str) -> Callable[[Tensors], None]:
    return lambda tensors: tensors.__delitem__(f"{NAME}.{last}")


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (without("weight_shape"), r"is incomplete: no tensor .*weight_shape"),
        (without("weight_zero_point"), r"is incomplete: no tensor .*weight_zero_point"),
        (cut_zeros, r"weight_packed: "),
    ],
)
def test_packed_parts_that_are_refused(edit: Callable[[Tensors], None], said: str, tmp_path: Path) -> None:
    form, values = COMPRESSED["4 bits by group, asymmetric"]
    packed = edited(folders("llama", tmp_path, *compressed(form, **values))[0], edit)
    with pytest.raises(ModelError, match=rf"{NAME}\..*{said}") as caught:
        load_weights(packed, load_arch(packed), dtype=torch.float32)
    assert "\n" not in str(caught.value)
