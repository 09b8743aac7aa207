"""How a checkpoint says that its weights are quantised: ``quantization_config`` of config.json. No torch.

| ``quant_method``                | stored for a matrix X [out, in]                                             |
|---------------------------------|-----------------------------------------------------------------------------|
| ``compressed-tensors``, format  |                                                                             |
| ``float-quantized``, ``int-``,  | X.weight in 8 bits, X.weight_scale (tensor, row, group or block),           |
| ``naive-quantized``             | X.weight_zero_point if asymmetric                                           |
| ``pack-quantized``              | X.weight_packed int32 [out, in x bits / 32], X.weight_scale [out, groups],  |
|                                 | X.weight_shape, X.weight_zero_point packed along out, X.weight_g_idx [in]   |
| ``fp8``                         | X.weight in 8 bits, X.weight_scale_inv by blocks, or X.weight_scale         |
| ``awq``                         | X.qweight int32 [in, out / 8], X.qzeros [groups, out / 8], X.scales         |
| ``gptq``                        | X.qweight int32 [in x bits / 32, out], X.qzeros, X.scales, X.g_idx [in]     |
| ``mxfp4``                       | X_blocks uint8 [E, out, in / 32, 16], X_scales uint8 [E, out, in / 32]      |

All are unpacked when they are loaded (``unpacking``): the model then computes in its own dtype. Only 8-bit floats with
a scale per row or tensor, made for activations of 8 bits, may stay as they are (``Quantisation.codes``). Stored scales
of activations and of KV have no effect.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final, Literal

from pensieve.model.arch import ModelError

Method = Literal["scaled", "packed", "awq", "gptq", "mxfp4"]

_SCALED: Final = ("float-quantized", "int-quantized", "naive-quantized")
METHODS: Final = "compressed-tensors (float-, int-, naive- and pack-quantized), fp8, awq, gptq, mxfp4"


@dataclass(frozen=True, slots=True)
class Quantisation:
    """How the matrices of a checkpoint are stored."""

    method: Method
    bits: int = 8
    group: int = 0
    """Inputs that share a scale; 0: all of them."""
    block: tuple[int, int] = (0, 0)
    """Rows and columns that share a scale; 0: all of them. Only with ``scaled`` and one scale per block."""
    symmetric: bool = True
    zeros_less_one: bool = False
    """``gptq``: zero points are stored less 1, as its first version did."""
    codes: bool = False
    """Whether products are made for 8-bit floats: weights with a scale per row or tensor, and activations."""


def quantisation_of(config: Mapping[str, Any]) -> Quantisation | None:
    """Return how the weights of a model with this config.json are quantised; None: they are not. Raises ModelError,
    which names the field."""
    name = next((key for key in ("quantization_config", "compression_config") if config.get(key)), None)
    if name is None:
        return None
    given = config[name]
    if not isinstance(given, dict):
        raise ModelError(f"{name} is not an object")
    method = given.get("quant_method")
    try:
        match method:
            case "compressed-tensors":
                return _compressed(given)
            case "fp8":
                block = given.get("weight_block_size") or (0, 0)
                block = (_count(block[0], "weight_block_size", 0), int(block[1]))
                return Quantisation("scaled", block=block, codes=block == (0, 0))
            case "awq":
                if given.get("version", "gemm") != "gemm":
                    raise ModelError(f"version {given['version']!r} is not supported: gemm")
                _one_of(given.get("zero_point", True), "zero_point", (True,))
                return Quantisation("awq", _one_of(given.get("bits"), "bits", (4,)), _group(given))
            case "gptq":
                form = _one_of(
                    given.get("checkpoint_format", "gptq"), "checkpoint_format", ("gptq", "gptq_v2")
                )
                bits = _one_of(given.get("bits"), "bits", (2, 4, 8))
                return Quantisation("gptq", bits, _group(given), zeros_less_one=form == "gptq")
            case "mxfp4":
                return Quantisation("mxfp4", 4)
    except ModelError as error:
        raise ModelError(f"{name} ({method}): {error}") from error
    except (TypeError, ValueError, IndexError, KeyError, AttributeError) as error:
        raise ModelError(f"{name} ({method}) cannot be read ({error})") from error
    raise ModelError(f"{name}: quant_method {method!r} is not supported (supported: {METHODS})")


def _compressed(given: Mapping[str, Any]) -> Quantisation:
    sparse = (given.get("sparsity_config") or {}).get("format") or "dense"
    if sparse != "dense":
        raise ModelError(f"sparsity_config with format {sparse!r} is not supported")
    if (given.get("transform_config") or {}).get("config_groups"):
        raise ModelError("transform_config is not supported: the model would need its rotations")
    groups = list(given["config_groups"].values())
    kinds = [_weights_of(group, given.get("format")) for group in groups]
    if len(set(kinds)) != 1:
        raise ModelError("config_groups: groups whose weights differ are not supported")
    return kinds[0]


def _weights_of(group: Mapping[str, Any], default: str | None) -> Quantisation:
    form, given = group.get("format") or default, group["weights"]
    kind, bits = given.get("type", "int"), int(given["num_bits"])
    strategy = given.get("strategy") or ("group" if given.get("group_size") else "tensor")
    size = _count(given.get("group_size") or 0, "group_size", 0) if strategy == "group" else 0
    if strategy not in ("tensor", "channel", "group", "block"):
        raise ModelError(f"weights.strategy {strategy!r} is not supported: tensor, channel, group, block")
    symmetric = bool(given.get("symmetric", True))
    if form == "pack-quantized" and kind == "int":
        _one_of(bits, "weights.num_bits", (2, 4, 8))
        return Quantisation("packed", bits, size, symmetric=symmetric)
    if form in _SCALED:
        _one_of(bits, "weights.num_bits", (8,))
        rows, columns = given["block_structure"] if strategy == "block" else (1, size)
        whole = strategy == "tensor"
        inputs = group.get("input_activations") or {}
        codes = kind == inputs.get("type") == "float" and inputs.get("num_bits") == 8 and symmetric
        return Quantisation(
            "scaled",
            block=(0 if whole else int(rows), int(columns)),
            symmetric=symmetric,
            codes=codes and strategy in ("tensor", "channel"),
        )
    raise ModelError(
        f"format {form!r} with {kind} weights is not supported: {', '.join(_SCALED)}, pack-quantized"
    )


def _group(given: Mapping[str, Any]) -> int:
    size = int(given["group_size"])
    return 0 if size == -1 else _count(size, "group_size", 1)


def _count(value: Any, name: str, least: int) -> int:
    if not isinstance(value, int) or value < least:
        raise ModelError(f"{name} is {value!r}: a number of at least {least}")
    return value


def _one_of(value: Any, name: str, allowed: tuple[Any, ...]) -> Any:
    if value not in allowed:
        raise ModelError(f"{name} {value!r} is not supported: {', '.join(map(str, allowed))}")
    return value
