"""Keys and values in 8 bits on a GPU: both kernels against the reference and the float64 oracle, and whole schedules
with graphs and swaps."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from pensieve.config import KvDtypeName
from pensieve.engine.cache import tails
from pensieve.kernels.attention.kinds import PIECE_KEYS
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.kv_codec import CODES
from support.engine.checkpoints import Family
from support.engine.exactness import EVERY_PATH, SPAN, Bench, paths_of, run_all
from support.kernels.attention_cases import make_case
from support.kernels.coded_cases import (
    CodedCase,
    check_coded_attention,
    check_coded_write,
    code_case,
    page_bytes,
)
from support.kernels.decoder_cases import HeadCase, head_case

pytestmark = pytest.mark.gpu
MIX = [(0, 40, 1), (1, 33, 1), (2, 3, 70), (3, 0, 1), (4, 200, 150), (5, 511, 8), (6, 700, 2)]
CUDA = torch.device("cuda")
NEAR_TIE = 0.5
"""By how much a token's logit may be below the largest, where logits spread by about 4: values that round the other way
than the oracle's move by a whole step of their code."""
codes = pytest.mark.parametrize("code", CODES.values(), ids=str)
KV_DTYPES: tuple[KvDtypeName, ...] = ("fp8", "int8")


def check(case: CodedCase, *, piece: int = 0) -> None:
    plain = case.plain
    pool = (
        page_bytes(case.pool).to(CUDA).view(case.pool.dtype).as_strided(case.pool.shape, case.pool.stride())
    )
    made = geometry_of(plain.q.to(CUDA), pool)
    assert made.coded and (made.copied_page > 0) == (plain.q.dtype == torch.bfloat16)
    if plain.softcap is not None:
        made = replace(made, hopper=False)
    ways = {made.without_copies} | (set() if piece else {made, replace(made, hopper=False)})
    for processors in (1, 132, 4000):
        for way in ways:
            geometry = replace(way, multiprocessors=processors, piece=piece, window=plain.window)
            plan = AttentionPlan.from_spans(plain.spans, len(plain.q), geometry, CUDA)
            check_coded_attention(CodedCase(plain, pool), plan)


@codes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("dim", [64, 80, 128, 256])
def test_attention(code: torch.dtype, dtype: torch.dtype, dim: int) -> None:
    check(code_case(make_case(MIX, dim=dim, page=32, dtype=dtype), code))


@codes
@pytest.mark.parametrize("heads", [(1, 1), (10, 2), (14, 2), (40, 10), (40, 1)])
def test_grouped_heads(code: torch.dtype, heads: tuple[int, int]) -> None:
    case = make_case(MIX, heads=heads[0], kv_heads=heads[1], dim=128, page=32, dtype=torch.bfloat16)
    check(code_case(case, code))


@codes
@pytest.mark.parametrize("piece", [0, PIECE_KEYS])
@pytest.mark.parametrize("feature", ["window", "softcap", "sinks", "none"])
def test_layers_of_other_kinds(code: torch.dtype, feature: str, piece: int) -> None:
    case = make_case(
        MIX, dim=64, page=32, dtype=torch.bfloat16, window=100 if feature == "window" else None,
        sinks=feature == "sinks", softcap=20.0 if feature == "softcap" else None,
    )  # fmt: skip
    check(code_case(case, code), piece=piece)


@codes
def test_tokens_of_very_different_sizes(code: torch.dtype) -> None:
    plain = make_case(MIX, dim=128, page=32)
    generator = torch.Generator().manual_seed(1)
    sizes = torch.exp2(torch.randint(-12, 6, plain.pool.shape[:-1], generator=generator).float())
    sizes[:, 0] = sizes[:, 0].clamp(max=2.0)
    sizes[:, 1, :, 2] = 0.0
    plain = replace(plain, pool=plain.pool * sizes[..., None], q=(plain.q * 4).bfloat16())
    check(code_case(plain, code))


@codes
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("norm", [False, True])
def test_writes_equal_the_reference(code: torch.dtype, dtype: torch.dtype, norm: bool) -> None:
    for tokens, dim in ((1, 128), (33, 64), (1025, 128), (64, 80), (17, 256)):
        case = head_case(tokens, heads=8, kv_heads=2, dim=dim, page=32, dtype=dtype, norm=norm, device="cuda")
        check_coded_write(case, code)
    # Large programs.
    check_coded_write(
        head_case(2048, heads=40, kv_heads=10, dim=128, page=32, dtype=dtype, device="cuda"), code
    )


@codes
def test_odd_vectors_are_written_as_by_the_reference(code: torch.dtype) -> None:
    case: HeadCase = head_case(
        16, dim=128, page=32, padding=0.0, turn=False, dtype=torch.bfloat16, device="cuda"
    )
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
    case.qkv[13, 4:] = torch.arange(128, device="cuda") + 0.5  # ties
    check_coded_write(case, code)


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
@pytest.mark.parametrize("family", ["llama3", "qwen3", "opt", "gemma2", "qwen2_moe"])
def test_answers_are_as_good_as_transformers(
    family: Family, kv_dtype: KvDtypeName, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Graphs, overlapped steps and swaps, in float32: near ties of the oracle, which computes in float64."""
    torch.backends.cuda.matmul.allow_tf32 = False
    monkeypatch.setattr(tails, "LEAST_SPAN", SPAN)
    bench = Bench(family, tmp_path, "cuda", kv_dtype=kv_dtype, near_tie=NEAR_TIE)
    paths = paths_of(bench, (*range(8), *EVERY_PATH))
    assert paths["device"] and paths["recomputed"] and (family == "gemma2" or paths["host"]), paths
    assert bench.oracle.near_ties <= bench.oracle.tokens / 50


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_bfloat16_with_the_heads_of_real_models(kv_dtype: KvDtypeName, tmp_path: Path) -> None:
    shape = {"num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 128}
    run_all(
        Bench("qwen3", tmp_path, "cuda", dtype="bfloat16", kv_dtype=kv_dtype, near_tie=1.5, **shape), range(8)
    )
