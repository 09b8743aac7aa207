"""Weights as 8-bit codes: which matrices, with which codes and scales, from which folders, and what is refused."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from model.test_quantised import COMPRESSED, NAME, Tensors, compressed, edited, folders, fp8_blocks, fp8_whole
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from pensieve.config import EngineOptions, WeightsName
from pensieve.engine.build import numerics
from pensieve.engine.worker.sizing import DTYPES, report, resolve_device
from pensieve.kernels.fp8_reference import quantise_rows, scaled_linear
from pensieve.model.arch import DTYPE_BYTES, ModelError
from pensieve.model.folder import has_fp8_products, load_arch, model_fingerprint
from pensieve.model.shard import WHOLE_MODEL, Shard
from pensieve.model.weights import Linear, MlpWeights, Weights, load_weights, tensors_of, weight_bytes
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint
from support.engine.fp8_oracle import as_fp8, rounded_rows
from support.engine.worker_driver import EVERYTHING, logprobs, make_worker, random_tokens, span, step
from support.gguf_files import write_gguf
from support.model import recurrent_models

BY_TOKEN = {"num_bits": 8, "type": "float", "strategy": "token", "dynamic": True, "symmetric": True}


def load(
    folder: Path, weights: WeightsName, dtype: torch.dtype = torch.float32, shard: Shard = WHOLE_MODEL
) -> Weights:
    return load_weights(folder, load_arch(folder), dtype=dtype, shard=shard, weights=weights)


def linears(weights: Weights) -> Iterator[Linear]:
    """The projections of attention and of dense MLPs."""
    for layer in weights.layers:
        if layer.attention is not None:
            yield from (layer.attention.qkv, layer.attention.output)
        if isinstance(layer.mlp, MlpWeights):
            yield from (layer.mlp.up, layer.mlp.down)


def values(linear: Linear) -> torch.Tensor:
    """What a weight stands for, float64."""
    assert linear.scales is not None and linear.scales.dtype == torch.float32
    return linear.weight.double() * linear.scales.double()[:, None]


@pytest.mark.parametrize("family", [*FAMILIES, "cohere", "glm", "phi3"])
def test_weights_of_a_family_are_rounded_by_row(family: Family, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    full, fp8 = load(folder, "full"), load(folder, "fp8")
    for ours, theirs in zip(linears(fp8), linears(full), strict=True):
        assert theirs.scales is None
        assert torch.equal(values(ours), rounded_rows(theirs.weight.double()))
        assert (ours.bias is None) == (theirs.bias is None)
        assert ours.bias is None or theirs.bias is None or torch.equal(ours.bias, theirs.bias)
    assert fp8.head.scales is None and torch.equal(full.head.weight, fp8.head.weight)
    assert torch.equal(full.embedding, fp8.embedding)


def test_factors_of_projections_go_into_scales(tmp_path: Path) -> None:
    recurrent_models.make_model("falcon_h1", tmp_path / "model")
    full, fp8 = load(tmp_path / "model", "full"), load(tmp_path / "model", "fp8")
    for ours, theirs in zip(linears(fp8), linears(full), strict=True):
        most = theirs.weight.abs().amax(1, keepdim=True).double()
        assert bool(((values(ours) - theirs.weight.double()).abs() <= most * 2**-4).all())
    for one, other in zip(full.layers, fp8.layers, strict=True):
        assert all(map(torch.equal, tensors_of(one.recurrent), tensors_of(other.recurrent)))


@pytest.mark.parametrize("seed", range(4))
def test_a_row_is_rounded_by_itself(seed: int) -> None:
    """Rows whose sizes differ so much that a scale in common would leave nothing of the small ones."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(12, 64, generator=generator, dtype=torch.float64)
    x *= torch.exp2(torch.randint(-40, 40, (12, 1), generator=generator).double())
    x *= torch.exp2(torch.randint(-12, 3, (12, 64), generator=generator).double())
    x[3], x[4, 5] = 0.0, torch.nan
    codes, scales = quantise_rows(x)
    finite = torch.arange(12) != 4
    assert torch.equal((codes.double() * scales.double()[:, None])[finite], rounded_rows(x[finite]))
    assert codes[4].float().isnan().all() and scales[4].isnan()
    weight, weight_scales = quantise_rows(torch.randn(16, 64, generator=generator))
    whole = scaled_linear(x, weight, weight_scales, None)
    assert whole[4].isnan().all()
    for row in range(12):
        alone = scaled_linear(x[row : row + 1], weight, weight_scales, None)
        torch.testing.assert_close(whole[row : row + 1], alone, rtol=1e-13, atol=0, equal_nan=True)


def test_experts_and_their_router_stay_as_they_are(tmp_path: Path) -> None:
    folder = tiny_checkpoint("mixtral", tmp_path)
    full, fp8 = load(folder, "full").layers[0], load(folder, "fp8").layers[0]
    assert all(map(torch.equal, tensors_of(full.mlp), tensors_of(fp8.mlp)))
    assert fp8.attention is not None and fp8.attention.qkv.scales is not None


def fp8_folders(
    tmp_path: Path, strategy: str = "fp8 by row", activations: Mapping[str, Any] | None = BY_TOKEN
) -> tuple[Path, Path]:
    """A folder for products of codes, and the same unpacked."""
    config, pack = compressed(COMPRESSED[strategy][0], **COMPRESSED[strategy][1])
    config["config_groups"]["group_0"]["input_activations"] = activations
    return folders("llama", tmp_path, config, pack)


@pytest.mark.parametrize("strategy", ["fp8 by row", "fp8 by tensor"])
def test_stored_codes_stay_as_they_are(strategy: str, tmp_path: Path) -> None:
    packed, _ = fp8_folders(tmp_path, strategy)
    stored = load_file(packed / "model.safetensors")
    layer = load(packed, "auto").layers[1]
    assert layer.attention is not None and isinstance(layer.mlp, MlpWeights)
    at = "model.layers.1."
    for linear, names in (
        (layer.attention.output, ["self_attn.o_proj"]),
        (layer.mlp.up, ["mlp.gate_proj", "mlp.up_proj"]),
        (layer.mlp.down, ["mlp.down_proj"]),
    ):
        wanted = [
            stored[f"{at}{name}.weight"].double() * stored[f"{at}{name}.weight_scale"].double()
            for name in names
        ]
        assert torch.equal(values(linear), torch.cat(wanted))


def test_shards_have_rows_of_codes_and_columns_of_values(tmp_path: Path) -> None:
    packed, plain = fp8_folders(tmp_path)
    whole = load(packed, "auto").layers[1]
    parts = [load(packed, "auto", shard=Shard(rank, 2)).layers[1] for rank in (0, 1)]
    plains = [load(plain, "full", shard=Shard(rank, 2)).layers[1] for rank in (0, 1)]
    ups = [part.mlp.up for part in parts if isinstance(part.mlp, MlpWeights)]
    assert isinstance(whole.mlp, MlpWeights)
    pieces = [half for side in (0, 1) for half in (values(up).chunk(2)[side] for up in ups)]
    assert torch.equal(torch.cat(pieces), values(whole.mlp.up))
    for part, its_plain in zip(parts, plains, strict=True):
        assert isinstance(part.mlp, MlpWeights) and isinstance(its_plain.mlp, MlpWeights)
        assert part.mlp.down.scales is None and torch.equal(part.mlp.down.weight, its_plain.mlp.down.weight)


def test_a_matrix_beside_one_that_is_not_stored_so_is_unpacked(tmp_path: Path) -> None:
    packed, plain = fp8_folders(tmp_path)

    def one_plain(tensors: Tensors) -> None:
        del tensors[f"{NAME}.weight_scale"]
        tensors[f"{NAME}.weight"] = load_file(plain / "model.safetensors")[f"{NAME}.weight"]

    layers = load(edited(packed, one_plain), "auto").layers
    ups = [layer.mlp.up.scales is None for layer in layers if isinstance(layer.mlp, MlpWeights)]
    assert ups == [index == 1 for index in range(len(layers))]
    assert all(one.scales is not None for one in linears(load(packed, "fp8")))


@pytest.fixture
def in_float64(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(DTYPES, "float64", torch.float64)
    monkeypatch.setitem(DTYPE_BYTES, "float64", 8)


@pytest.mark.parametrize("strategy", ["fp8 by row", "fp8 by tensor"])
def test_log_probabilities_are_those_of_transformers(strategy: str, tmp_path: Path, in_float64: None) -> None:
    packed, plain = fp8_folders(tmp_path, strategy)
    tokens = random_tokens(30)
    model = as_fp8(AutoModelForCausalLM.from_pretrained(plain, dtype=torch.float64), weights=False)
    stored = load_file(packed / "model.safetensors")
    for name, scale in stored.items():
        if name.endswith("weight_scale"):  # the library's unpacked values are rounded once more
            module = model.get_submodule(name.removesuffix(".weight_scale"))
            module.weight.data = stored[name.removesuffix("_scale")].double() * scale.double()
    with torch.inference_mode():
        wanted = torch.log_softmax(model(torch.tensor([tokens])).logits[0], dim=-1)
    worker = make_worker(packed, dtype="float64", weights="auto")
    for start, end in ((0, 8), (8, 9), (9, 30)):
        result = step(worker, [span(tokens, start, end, sampling=EVERYTHING)], [range(4)])
        torch.testing.assert_close(logprobs(result).double(), wanted[end - 1], atol=1e-5, rtol=1e-5)
    worker.close()


def test_packed_values_become_codes(tmp_path: Path) -> None:
    """4-bit values of a group, rounded to codes as those of any folder."""
    form, given = COMPRESSED["4 bits by group"]
    packed, plain = folders("llama", tmp_path, *compressed(form, **given))
    assert not has_fp8_products(packed, "auto")
    for ours, theirs in zip(linears(load(packed, "fp8")), linears(load(plain, "fp8")), strict=True):
        assert torch.equal(values(ours), values(theirs))


def test_what_a_folder_says(tmp_path: Path) -> None:
    """Codes stay only where the folder is made for products of codes."""
    rows, plain = fp8_folders(tmp_path / "rows")
    weights_only, _ = fp8_folders(tmp_path / "only", activations=None)
    blocks, _ = folders(
        "llama", tmp_path / "blocks", {"quant_method": "fp8", "weight_block_size": [16, 8]}, fp8_blocks
    )
    tensor, _ = folders("llama", tmp_path / "tensor", {"quant_method": "fp8"}, fp8_whole)
    for folder, kept in (
        (rows, True),
        (tensor, True),
        (plain, False),
        (weights_only, False),
        (blocks, False),
    ):
        assert has_fp8_products(folder, "auto") == kept
    assert has_fp8_products(plain, "fp8") and not has_fp8_products(rows, "full")
    assert all(map(torch.equal, tensors_of(load(rows, "full")), tensors_of(load(plain, "full"))))
    assert all(map(torch.equal, tensors_of(load(plain, "auto")), tensors_of(load(plain, "full"))))


def test_the_fingerprint_names_the_form(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    plain = model_fingerprint(folder)
    assert model_fingerprint(folder, form="fp8") != plain == model_fingerprint(folder, form="auto")


def scale_of(value: float) -> Any:
    return lambda tensors: tensors[f"{NAME}.weight_scale"].__setitem__((3, 0), value)


def not_a_number(tensors: Tensors) -> None:
    tensors[f"{NAME}.weight"].view(torch.uint8)[2, 5] = 0xFF


def one_scale_less(tensors: Tensors) -> None:
    tensors[f"{NAME}.weight_scale"] = tensors[f"{NAME}.weight_scale"][1:].contiguous()


@pytest.mark.parametrize(
    ("edit", "said"),
    [
        (lambda tensors: tensors.__delitem__(f"{NAME}.weight_scale"), "has no scales"),
        (scale_of(0.0), "weight_scale has 1 scales that are not above zero and finite, such as 0"),
        (scale_of(-2.0), "such as -2"),
        (scale_of(float("nan")), "such as nan"),
        (scale_of(float("inf")), "such as inf"),
        (one_scale_less, r"weight_scale \[\d+\] does not fit"),
        (not_a_number, "has values that are not numbers"),
    ],
)
def test_codes_that_are_refused(edit: Any, said: str, tmp_path: Path) -> None:
    packed = edited(fp8_folders(tmp_path)[0], edit)
    with pytest.raises(ModelError, match=rf"^{packed}: {re.escape(NAME)}\.weight:? .*{said}") as caught:
        load(packed, "auto")
    assert "\n" not in str(caught.value)


def test_dummy_weights(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    arch = load_arch(folder)
    full, fp8 = (
        load_weights(folder, arch, dtype=torch.float32, load_format="dummy", weights=weights)
        for weights in ("full", "fp8")
    )
    for ours, theirs in zip(linears(fp8), linears(full), strict=True):
        codes, scales = quantise_rows(theirs.weight)
        assert ours.scales is not None and torch.equal(ours.scales, scales)
        assert torch.equal(ours.weight, codes.float())
    assert weight_bytes(fp8) > weight_bytes(full)  # on a CPU; scales come to it


def test_a_gguf_file(tmp_path: Path) -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 2}
    path = write_gguf(tmp_path / "model.gguf", tiny_checkpoint("llama", tmp_path, **sizes))
    for ours, theirs in zip(linears(load(path, "fp8")), linears(load(path, "auto")), strict=True):
        assert theirs.scales is None and torch.equal(values(ours), rounded_rows(theirs.weight.double()))
    assert model_fingerprint(path, form="fp8") != model_fingerprint(path)


def test_codes_in_an_invariant_worker_that_says_so(tmp_path: Path) -> None:
    """Its self-test tries products of codes, too."""
    worker = make_worker(tiny_checkpoint("qwen3", tmp_path), weights="fp8", invariant=True)
    assert worker.info.fp8 and ", fp8, " in report(worker.arch, worker.info)
    assert numerics(worker.info) == "invariant float32 with fp8 weights cpu"
    worker.close()


def test_a_gpu_without_products_of_codes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_checkpoint("qwen3", tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (8, 0))
    said = r"weights fp8: this GPU has compute capability 8\.0, .* from 8\.9 on; start with --weights full"
    with pytest.raises(ValueError, match=said):
        resolve_device(EngineOptions(model=str(folder), weights="fp8"), load_arch(folder))
    assert resolve_device(EngineOptions(model=str(folder)), load_arch(folder)).device == "cuda"


def test_a_config_that_is_wrong_is_named(tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama", tmp_path)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": {"quant_method": "x"}}))
    with pytest.raises(ModelError, match=rf"^{folder}/config\.json: .*quant_method 'x' is not supported"):
        has_fp8_products(folder, "auto")
