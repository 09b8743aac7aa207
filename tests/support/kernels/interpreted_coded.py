"""Writing and reading coded pools by the Triton kernels, against the reference and the float64 oracle.

A pytest file that is not collected by itself: Triton's interpreter is chosen when triton is imported, so
``tests/ops/test_interpreted.py`` runs it in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton.language as tl
import triton.runtime.interpreter

from pensieve.kernels.attention import copies
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.kv_codec import CODES, exponents_of
from pensieve.kernels.ragged_paged_attention import attend
from support.kernels.attention_cases import make_case
from support.kernels.coded_cases import CodedCase, check_coded_attention, check_coded_write, code_case
from support.kernels.decoder_cases import head_case
from support.kernels.interpreted_attention import MIX, TINY
from support.lengths import some

PIECE = 32
codes = pytest.mark.parametrize("code", CODES.values(), ids=str)

_convert = triton.runtime.interpreter._convert_float


@pytest.fixture(autouse=True)
def conversions_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter rounds FP8 half up, and loses a carry; a GPU rounds to even, as torch does."""

    def convert(values: Any, source: Any, target: Any, rounding: Any) -> Any:
        if target == tl.float8e4nv:
            assert rounding == triton.runtime.interpreter._ir.ROUNDING_MODE.RTNE
            codes = torch.from_numpy(values.copy()).to(torch.float8_e4m3fn)
            return codes.view(torch.uint8).numpy().reshape(values.shape)
        if source == tl.float8e4nv:
            wide = torch.from_numpy(values.copy()).view(torch.float8_e4m3fn)
            wide = wide.to(torch.float16 if target == tl.float16 else torch.float32)
            return wide.numpy().reshape(values.shape)
        return _convert(values, source, target, rounding)

    monkeypatch.setattr(triton.runtime.interpreter, "_convert_float", convert)


def plan_of(case: CodedCase, *, piece: int = 0, processors: int = 4, copied: bool = False) -> AttentionPlan:
    geometry = geometry_of(case.plain.q, case.pool)
    page = case.pool.shape[3] if copied else 0
    geometry = replace(
        geometry,
        multiprocessors=processors,
        own_tiles=TINY,
        piece=piece,
        copied_page=page,
        window=case.plain.window,
    )
    return AttentionPlan.from_spans(case.plain.spans, len(case.plain.q), geometry, case.pool.device)


@codes
@pytest.mark.parametrize(
    ("norm", "dtype"),
    some(list(itertools.product((False, True), (torch.float32, torch.float16))), 2),
    ids=str,
)
def test_writes_equal_the_reference(code: torch.dtype, norm: bool, dtype: torch.dtype) -> None:
    for dim, page in ((16, 8), (80, 3), (2, 1)):
        check_coded_write(head_case(4, dim=dim, page=page, kv_heads=2, dtype=dtype, norm=norm), code)


@codes
def test_odd_vectors_are_written_as_by_the_reference(code: torch.dtype) -> None:
    case = head_case(16, dim=16, page=4, padding=0.0, turn=False)
    odd = [
        0.0,
        torch.nan,
        torch.inf,
        -torch.inf,
        2.0**79,
        2.0**85,
        2.0**86,
        2.0**87,
        2.0**126,
        2.0**-33,
        2.0**-45,
    ]
    for token, value in enumerate(odd):
        case.qkv[token, 4:, 3] = value
    case.qkv[11, 4:] = 0.0
    case.qkv[12, 4:] *= 2.0**-36
    case.qkv[13, 4:] = torch.arange(16) + 0.5  # ties
    check_coded_write(case, code)


@codes
@pytest.mark.parametrize(
    ("piece", "dtype"), some([(0, torch.float16), (0, torch.float32), (PIECE, torch.float32)], 2), ids=str
)
def test_attention_over_codes(code: torch.dtype, piece: int, dtype: torch.dtype) -> None:
    case = code_case(make_case(MIX, dtype=dtype), code)
    check_coded_attention(case, plan_of(case, piece=piece))


@codes
@pytest.mark.parametrize("feature", ["window", "softcap", "sinks"])
@pytest.mark.parametrize("piece", some([PIECE, 0], 1))
def test_layers_of_other_kinds(code: torch.dtype, feature: str, piece: int) -> None:
    plain = make_case(
        MIX, heads=2, kv_heads=1, window=21 if feature == "window" else None, sinks=feature == "sinks",
        softcap=3.0 if feature == "softcap" else None,
    )  # fmt: skip
    case = code_case(plain, code)
    check_coded_attention(case, plan_of(case, piece=piece))


@codes
@pytest.mark.parametrize("feature", ["none", "window", "sinks"])
def test_wide_items_read_copies(code: torch.dtype, feature: str) -> None:
    plain = make_case(
        MIX, heads=2, kv_heads=1, window=21 if feature == "window" else None, sinks=feature == "sinks"
    )
    case = code_case(plain, code)
    plan = plan_of(case, copied=True)
    assert plan.capacity.wide and plan.capacity.narrow and plan.capacity.copies
    check_coded_attention(case, plan)
    plan.scratch.copies.zero_()
    with pytest.MonkeyPatch.context() as patch, pytest.raises(AssertionError):
        patch.setattr(copies, "_decode", defaultdict(lambda: lambda *_, **__: None))
        check_coded_attention(case, plan)


@pytest.mark.parametrize("dim", some([24, 64, 128], 2))
def test_head_sizes_and_cuts(dim: int) -> None:
    case = code_case(make_case([(0, 150, 1), (1, 3, 20)], heads=2, kv_heads=1, dim=dim), torch.int8)
    plan = plan_of(case, processors=16)
    assert plan.capacity.merges > 0
    check_coded_attention(case, plan)


@codes
@pytest.mark.parametrize("dtype", some([torch.float16, torch.float32], 1), ids=str)
def test_tokens_of_very_different_sizes(code: torch.dtype, dtype: torch.dtype) -> None:
    """Exponents far apart between neighbours, a token whose value is zero, and large queries."""
    plain = make_case(MIX, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-12, 6, plain.pool.shape[:-1], generator=generator).float())
    sizes[:, 0] = sizes[:, 0].clamp(max=2.0)
    sizes[:, 1, :, 2] = 0.0
    plain = replace(plain, pool=plain.pool * sizes[..., None], q=(plain.q * 4).to(dtype))
    case = code_case(plain, code)
    check_coded_attention(case, plan_of(case))


def test_a_vector_that_is_not_finite_poisons_those_that_see_it() -> None:
    case = code_case(make_case([(0, 20, 1), (1, 20, 1)], kv_heads=1, heads=2), torch.int8)
    for which in range(2):
        page = int(case.plain.page_tables[0, 0])
        before = exponents_of(case.pool)[page, which, 0, 3].item()
        exponents_of(case.pool)[page, which, 0, 3] = -128
        out = attend(case.plain.q, case.pool, plan_of(case), case.plain.page_tables, case.plain.logits)
        assert out[0].isnan().all() and out[1].isfinite().all()
        exponents_of(case.pool)[page, which, 0, 3] = before


def test_a_plan_for_another_pool_is_refused() -> None:
    case = code_case(make_case(MIX), torch.int8)
    with pytest.raises(ValueError, match="coded pool"):
        attend(case.plain.q, case.plain.pool, plan_of(case), case.plain.page_tables, case.plain.logits)
