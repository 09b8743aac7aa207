"""Unpacks quantised weights while they are loaded. ``quantisation`` says what each form stores.

The values are those of the library that defines the form, in the dtype in which it computes them: compressed-tensors
and GPTQ multiply in the dtype of the scales, transformers' FP8 in float32, MXFP4 in bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final, TypeVar

import torch

from pensieve.kernels.fp8_reference import CODES
from pensieve.model.arch import ModelError
from pensieve.model.quantisation import Quantisation

_T = TypeVar("_T")
Read = Callable[[str], torch.Tensor]
"""Returns a stored tensor, of which nothing is read from the file yet."""

UNUSED: Final = ("input_scale", "input_zero_point", "output_scale", "activation_scale", "k_scale", "v_scale")
"""Scales of activations and of KV, by the last part of a name: the model computes in its own dtype."""
_FP8: Final = (torch.float8_e4m3fn, torch.float8_e5m2)
_AWQ_ORDER: Final = (0, 4, 1, 5, 2, 6, 3, 7)
"""Which nibble of a word holds each of eight outputs."""
_FP4: Final = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
_STORED: Final = {
    "scaled": "weight",
    "packed": "weight_packed",
    "awq": "qweight",
    "gptq": "qweight",
    "mxfp4": "_blocks",
}
_BESIDE: Final = {
    "scaled": ("weight_scale", "weight_scale_inv", "weight_zero_point"),
    "packed": ("weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "awq": ("scales", "qzeros"),
    "gptq": ("scales", "qzeros", "g_idx"),
    "mxfp4": ("_scales",),
}

_NEEDED: Final = {"packed": ("weight_shape",), "awq": ("qzeros",), "gptq": ("qzeros",)}
"""A module needs these besides its words and scales, and zero points if it is asymmetric."""


@dataclass(frozen=True, slots=True)
class PackedTensor:
    """A tensor that is stored as several."""

    kind: Quantisation
    parts: Mapping[str, str]
    """Stored names by their last part."""
    shape: tuple[int, ...]

    @property
    def stored(self) -> Collection[str]:
        return self.parts.values()

    @property
    def main(self) -> str:
        return self.parts[_STORED[self.kind.method]]

    def has_codes(self, read: Read) -> bool:
        """Return whether its stored values are codes with a scale per row, or one for all."""
        return self.kind.codes and read(self.main).dtype == CODES

    def codes(self, read: Read, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
        """Return its codes, e4m3 [out, in], and the scales of its rows, float32 [out]. Raises ModelError."""
        return self._made_by(_codes, read, device)

    def unpack(self, read: Read, device: torch.device) -> torch.Tensor:
        """Return the values, contiguous, on ``device``. Raises ModelError, which names the tensor."""
        return self._made_by(partial(_UNPACK[self.kind.method], self.kind, self.shape), read, device)

    def _made_by(
        self, make: Callable[[Mapping[str, torch.Tensor]], _T], read: Read, device: torch.device
    ) -> _T:
        parts = {last: read(name).to(device) for last, name in self.parts.items()}
        try:
            return make(parts)
        except torch.OutOfMemoryError:
            raise
        except (ModelError, RuntimeError, IndexError) as error:  # torch's, of parts whose shapes do not fit
            said = str(error).splitlines()[0]
            raise ModelError(f"{self.main}: {said}") from error


def packed_tensors(kind: Quantisation, names: Collection[str], read: Read) -> dict[str, PackedTensor]:
    """Return the tensors that are stored in this form, by the name that they would have in the model's own dtype.
    Raises ModelError when a part is missing or does not fit."""
    end = _STORED[kind.method]
    dot = "" if end.startswith("_") else "."
    found = {}
    for name in names:
        if not name.endswith(dot + end) or (
            kind.method == "scaled" and read(name).dtype not in (*_FP8, torch.int8)
        ):
            continue
        module = name.removesuffix(dot + end)
        beside = {last: f"{module}{dot}{last}" for last in _BESIDE[kind.method]}
        parts = {end: name} | {last: one for last, one in beside.items() if one in names}
        if not any("scale" in last for last in parts):
            raise ModelError(f"{name} has no scales: no tensor {next(iter(beside.values()))}")
        needed = _NEEDED.get(kind.method, ()) + (() if kind.symmetric else ("weight_zero_point",))
        if missing := [beside[last] for last in needed if last not in parts]:
            raise ModelError(f"{name} is incomplete: no tensor {missing[0]}")
        own = module if kind.method == "mxfp4" else f"{module}.weight"
        try:
            found[own] = PackedTensor(kind, parts, _shape(kind, parts, read))
        except ModelError as error:
            raise ModelError(f"{name}: {error}") from error
    return found


def _shape(kind: Quantisation, parts: Mapping[str, str], read: Read) -> tuple[int, ...]:
    """Return the shape of the unpacked tensor; check that the parts have shapes that go with it."""
    main = read(parts[_STORED[kind.method]])
    stored, dtype = tuple(main.shape), main.dtype
    match kind.method:
        case "scaled":
            return stored
        case "packed":
            scale = read(parts["weight_scale"]).shape
            _require(
                dtype == torch.int32 and len(stored) == 2,
                f"is {dtype} {list(stored)}, not int32 [out, words]",
            )
            out, inputs = map(int, read(parts["weight_shape"]).tolist())
            fits = (out, -(-inputs * kind.bits // 32)) == stored
            _require(fits, f"is {list(stored)}, but weight_shape is {[out, inputs]}")
            fits = not kind.group or scale[-1] == -(-inputs // kind.group)
            _require(fits, f"scales {list(scale)} do not fit groups of {kind.group} in {[out, inputs]}")
            return out, inputs
        case "mxfp4":
            _require(
                len(stored) == 4 and stored[-1] == 16, f"is {list(stored)}, not [experts, out, groups, 16]"
            )
            _require(read(parts["_scales"]).shape == stored[:-1], "its scales have another shape")
            return stored[0], stored[2] * 32, stored[1]
    _require(dtype == torch.int32 and len(stored) == 2, f"is {dtype} {list(stored)}, not int32 with two axes")
    scales, per_word = tuple(read(parts["scales"]).shape), 32 // kind.bits
    inputs, outputs = (
        (stored[0], stored[1] * per_word) if kind.method == "awq" else (stored[0] * per_word, stored[1])
    )
    groups = -(-inputs // kind.group) if kind.group else 1
    _require(
        scales == (groups, outputs),
        f"scales are {list(scales)}, a group size of {kind.group or inputs} wants {[groups, outputs]}",
    )
    return outputs, inputs


def _require(condition: bool, problem: str) -> None:
    if not condition:
        raise ModelError(problem)


def _checked(scales: torch.Tensor, name: str) -> torch.Tensor:
    """Raises ModelError unless all scales are finite and above zero."""
    wrong = ~(torch.isfinite(scales.float()) & (scales.float() > 0))
    if bool(wrong.any()):
        value = float(scales.float()[wrong].flatten()[0])
        raise ModelError(
            f"{name} has {int(wrong.sum())} scales that are not above zero and finite, such as {value}"
        )
    return scales


def _bits(words: torch.Tensor, bits: int, axis: int) -> torch.Tensor:
    """Unpack int32 words into their unsigned parts, the lowest first, along ``axis``; int32."""
    shifts = torch.arange(0, 32, bits, device=words.device, dtype=torch.int32)
    parts = torch.bitwise_right_shift(
        words.unsqueeze(axis + 1), shifts.view(-1, *(1,) * (words.ndim - axis - 1))
    )
    return (parts & ((1 << bits) - 1)).flatten(axis, axis + 1)


def _by_column(values: torch.Tensor, groups: torch.Tensor) -> torch.Tensor:
    """Return the values of each column's group: [rows, groups] to [rows, columns]."""
    return values.index_select(1, groups)


def _groups_of(columns: int, size: int, given: torch.Tensor | None, device: torch.device) -> torch.Tensor:
    if given is not None:
        return given.to(device=device, dtype=torch.int64)
    return torch.arange(columns, device=device) // (size or columns)


def _scales_of(parts: Mapping[str, torch.Tensor]) -> tuple[str, torch.Tensor]:
    """Return name and values of the scales of ``scaled``. Raises ModelError."""
    name = "weight_scale_inv" if "weight_scale_inv" in parts else "weight_scale"
    scale = parts[name]
    if scale.dtype == torch.uint8:  # exponents
        scale = (scale.float() - 127).exp2()
    elif scale.element_size() == 1:
        scale = scale.float()
    return name, _checked(scale, name)


def _codes(parts: Mapping[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    codes, (name, scales) = parts["weight"], _scales_of(parts)
    scales = scales.float().reshape(-1)
    _require(len(scales) in (1, len(codes)), f"{name} {list(scales.shape)} does not fit {list(codes.shape)}")
    _require(not bool(((codes.view(torch.uint8) & 127) == 127).any()), "has values that are not numbers")
    return codes, scales.expand(len(codes))


def _scaled(kind: Quantisation, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    name, scale = _scales_of(parts)
    # transformers multiplies blocks in float32, compressed-tensors everything in the scale's dtype.
    values = parts["weight"].to(torch.float32 if name == "weight_scale_inv" else scale.dtype)
    spread = _spread(scale.to(values.dtype), shape, kind.block)
    zero = parts.get("weight_zero_point")
    if zero is not None and not kind.symmetric:
        values -= _spread(zero.to(values.dtype), shape, kind.block)
    return values.mul_(spread)


def _spread(scale: torch.Tensor, shape: tuple[int, ...], block: tuple[int, int]) -> torch.Tensor:
    """Return scales that broadcast over [out, in]."""
    out, inputs = shape
    if scale.numel() == 1:
        return scale.reshape(1, 1)
    if scale.ndim == 1:
        scale = scale[:, None]
    for axis, (length, size) in enumerate(zip((out, inputs), block, strict=True)):
        count = scale.shape[axis]
        if count not in (1, length):
            if not size or count != -(-length // size):
                raise ModelError(
                    f"scales {list(scale.shape)} do not fit {list(shape)} in blocks of {list(block)}"
                )
            scale = scale.repeat_interleave(size, axis).narrow(axis, 0, length)
    return scale


def _packed(kind: Quantisation, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    out, inputs = shape
    scale, half = _checked(parts["weight_scale"], "weight_scale"), 1 << (kind.bits - 1)
    # Signed values are stored with an offset of half their range.
    values = (_bits(parts["weight_packed"], kind.bits, 1)[:, :inputs] - half).to(scale.dtype)
    groups = _groups_of(inputs, kind.group, parts.get("weight_g_idx"), values.device)
    if scale.numel() == 1 or scale.shape[-1] == 1:
        groups = torch.zeros_like(groups)
    scale = scale.reshape(-1, scale.shape[-1] if scale.ndim > 1 else 1).expand(out, -1)
    if not kind.symmetric and "weight_zero_point" in parts:
        zero = _bits(parts["weight_zero_point"], kind.bits, 0)[:out] - half
        values -= _by_column(zero.to(scale.dtype), groups)
    return values.mul_(_by_column(scale, groups))


def _awq(kind: Quantisation, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    def ordered(words: torch.Tensor) -> torch.Tensor:
        order = torch.tensor(_AWQ_ORDER, device=words.device)
        return torch.unflatten(_bits(words, kind.bits, 1), 1, (-1, 8)).index_select(2, order).flatten(1)

    scales = _checked(parts["scales"], "scales")
    groups = _groups_of(shape[1], kind.group, None, scales.device)
    zeros = ordered(parts["qzeros"]).index_select(0, groups)
    values = (ordered(parts["qweight"]) - zeros).to(scales.dtype)
    return values.mul_(scales.index_select(0, groups)).t().contiguous()


def _gptq(kind: Quantisation, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    scales = _checked(parts["scales"], "scales")
    groups = _groups_of(shape[1], kind.group, parts.get("g_idx"), scales.device)
    if int(groups.min()) < 0 or int(groups.max()) >= len(scales):
        raise ModelError(f"g_idx has groups from {int(groups.min())} to {int(groups.max())} of {len(scales)}")
    zeros = (_bits(parts["qzeros"], kind.bits, 1)[:, : shape[0]] + kind.zeros_less_one) & (
        (1 << kind.bits) - 1
    )
    values = (_bits(parts["qweight"], kind.bits, 0) - zeros.index_select(0, groups)).to(scales.dtype)
    return values.mul_(scales.index_select(0, groups)).t().contiguous()


def _mxfp4(kind: Quantisation, shape: tuple[int, ...], parts: Mapping[str, torch.Tensor]) -> torch.Tensor:
    blocks, exponents = parts["_blocks"], parts["_scales"].to(torch.int32) - 127
    values = torch.tensor(_FP4, dtype=torch.bfloat16, device=blocks.device)
    found = torch.empty(shape, dtype=torch.bfloat16, device=blocks.device)
    for expert, (some, scales) in enumerate(zip(blocks, exponents, strict=True)):
        pair = torch.stack((values[(some & 15).long()], values[(some >> 4).long()]), dim=-1).flatten(-2)
        found[expert] = torch.ldexp(pair, scales[..., None]).flatten(1).t()
    return found


_UNPACK: Final = {"scaled": _scaled, "packed": _packed, "awq": _awq, "gptq": _gptq, "mxfp4": _mxfp4}
