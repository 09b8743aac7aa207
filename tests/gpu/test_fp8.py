"""Products of 8-bit codes on a GPU: codes, scales, products, whole models, memory, and bits beside other rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from gpu.test_start import CONFIG

from pensieve.config import EngineOptions
from pensieve.engine.worker import invariance, sizing
from pensieve.engine.worker.torch_worker import build_worker
from pensieve.kernels import fp8_product, fp8_reference
from pensieve.model.folder import load_arch
from pensieve.model.weights import load_weights, tensors_of
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.exactness import Bench, run_all
from support.engine.pieces import logprobs_of_pieces
from support.ranks.divided import SHAPES

pytestmark = pytest.mark.gpu
CUDA = torch.device("cuda")
CHANGED = {"float32": 0.15, "float16": 0.4, "bfloat16": 0.5}
"""Share of tokens that may differ from the oracle's. Rounding to codes amplifies noise: of these tiny random models 3
to 8 % did in float32 on an H100, whose products of codes keep fewer bits than float32, 7 to 18 % in float16, and 10 to
30 % in bfloat16, as on a CPU. A wrong scale changes nearly all."""


@pytest.fixture(autouse=True)
def fp8_products() -> None:
    if torch.cuda.get_device_capability() < sizing.FP8_CAPABILITY:
        pytest.skip("this GPU has no products of 8-bit floats")


def random_rows(rows: int, width: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator(CUDA).manual_seed(seed)
    x = torch.randn(rows, width, generator=generator, device=CUDA)
    return (x * torch.exp2(torch.randint(-9, 3, x.shape, generator=generator, device=CUDA).float())).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [16, 48, 5120, 13824, 28672, 53248])
def test_codes_are_those_of_the_reference(width: int, dtype: torch.dtype) -> None:
    x = random_rows(37, width, dtype)
    x[1], x[2, 3], x[3, 5] = 0, torch.nan, -torch.inf
    codes, scales = fp8_product.quantise_rows(x)
    want, rows = fp8_reference.quantise_rows(x.float())
    assert codes.shape == (48, width)
    torch.testing.assert_close(scales, rows, rtol=0, atol=0, equal_nan=True)
    torch.testing.assert_close(codes[:37].float(), want.float(), rtol=0, atol=0, equal_nan=True)


def test_every_code() -> None:
    """Rows with a largest value of 448, whose scale is 1, hold the codes themselves."""
    every = torch.arange(256, dtype=torch.uint8, device=CUDA).view(torch.float8_e4m3fn)
    x = every[every.float().isfinite()].float().expand(3, -1).contiguous()
    codes, scales = fp8_product.quantise_rows(x)
    assert (scales == 1).all() and torch.equal(codes[:3].float(), x)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize(
    ("dtype", "close"), [(torch.bfloat16, 8e-3), (torch.float16, 3e-3), (torch.float32, 3e-3)]
)
@pytest.mark.parametrize("shape", [(16, 16), (7680, 5120), (5120, 13824)], ids=str)
def test_products(shape: tuple[int, int], dtype: torch.dtype, close: float, biased: bool) -> None:
    out, inner = shape
    weight, scales = fp8_reference.quantise_rows(random_rows(out, inner, torch.float32, 1))
    scales = scales * 1.3  # as a folder may have it
    bias = torch.randn(out, device=CUDA).to(dtype) if biased else None
    for rows in (1, 7, 16, 64, 300):
        x = random_rows(rows, inner, dtype, rows)
        got = fp8_product.scaled_linear(x, weight, scales, bias).double()
        wide = None if bias is None else bias.double()
        codes, row_scales = fp8_reference.quantise_rows(x.float())
        want = (codes.double() @ weight.double().t()) * row_scales.double()[:, None] * scales.double()
        want = want if wide is None else want + wide
        assert float((got - want).norm() / want.norm()) < close
    assert fp8_product.scaled_linear(x[:0], weight, scales, bias).shape == (0, out)


def test_a_row_that_is_not_finite_spoils_no_other() -> None:
    weight, scales = fp8_reference.quantise_rows(random_rows(256, 128, torch.float32))
    x = random_rows(20, 128, torch.bfloat16)
    clean = fp8_product.scaled_linear(x, weight, scales, None)
    x[3, 7], x[8, 1] = torch.nan, torch.inf
    got = fp8_product.scaled_linear(x, weight, scales, None)
    spoilt = torch.tensor([3, 8], device=CUDA)
    assert got[spoilt].isnan().all()
    kept = torch.ones(20, dtype=torch.bool, device=CUDA).index_fill(0, spoilt, value=False)
    assert torch.equal(got[kept], clean[kept])


@pytest.mark.parametrize("shape", [(7680, 5120), (5120, 5120), (27648, 5120), (5120, 13824)], ids=str)
def test_bits_of_a_row_do_not_depend_on_others(shape: tuple[int, int]) -> None:
    out, inner = shape
    weight, scales = fp8_reference.quantise_rows(random_rows(out, inner, torch.float32, 1))
    x = random_rows(2048, inner, torch.bfloat16)
    whole = fp8_product.scaled_linear(x, weight, scales, None)
    for rows in (1, 2, 16, 17, 64, 200, 256, 512, 1000):
        assert torch.equal(fp8_product.scaled_linear(x[:rows], weight, scales, None), whole[:rows])
        assert torch.equal(fp8_product.scaled_linear(x[-rows:], weight, scales, None), whole[-rows:])


def test_widths_that_a_gpu_does_not_take() -> None:
    weight, scales = fp8_reference.quantise_rows(torch.randn(24, 40, device=CUDA))
    with pytest.raises(ValueError, match="a product of 40 to 24 values, and a GPU takes multiples of 16"):
        fp8_product.scaled_linear(torch.randn(2, 40, device=CUDA), weight, scales, None)


@pytest.mark.parametrize("family", ["opt", "qwen3", "gemma2", "cohere", "phi3"])
def test_the_same_codes_as_on_a_cpu(family: Family, tmp_path: Path) -> None:
    folder = tiny_checkpoint(family, tmp_path)
    arch = load_arch(folder)
    here, there = (
        load_weights(folder, arch, dtype=torch.bfloat16, device=device, weights="fp8")
        for device in ("cpu", CUDA)
    )
    kinds = set()
    for expected, got in zip(tensors_of(here), tensors_of(there), strict=True):
        kinds.add(got.dtype)
        assert torch.equal(got.cpu().float(), expected.float())
    assert torch.float8_e4m3fn in kinds


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("family", ["opt", "llama3", "qwen3"])
def test_answers_are_as_good_as_the_best(family: Family, dtype: str, tmp_path: Path) -> None:
    """Graphs, overlapped steps and swaps; the oracle rounds weights and rows in float64."""
    bench = Bench(family, tmp_path, "cuda", dtype=dtype, weights="fp8", near_tie=math.inf)
    run_all(bench, range(12))
    share = bench.oracle.near_ties / bench.oracle.tokens
    print(f"{family} {dtype}: {share:.4f} of the tokens differ, by {bench.oracle.largest_gap:.3f} at most")
    assert share < CHANGED[dtype]


def test_invariant_bits(tmp_path: Path) -> None:
    matmul = torch.backends.cuda.matmul
    before = matmul.allow_bf16_reduced_precision_reduction, torch.backends.cuda.preferred_blas_library()
    invariance.use_plain_products()
    try:
        bench = Bench(
            "llama3", tmp_path, "cuda", dtype="bfloat16", invariant=True, weights="fp8", **SHAPES["real"]
        )
        invariance.check(bench.model, 512)
        first, *others = logprobs_of_pieces(bench)
        assert all(torch.equal(one, first) for one in others)
    finally:
        matmul.allow_bf16_reduced_precision_reduction = before[0]
        torch.backends.cuda.preferred_blas_library(before[1])


def test_weights_take_half_the_memory(tmp_path: Path) -> None:
    """While they are loaded, too."""
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    arch, held, most = load_arch(tmp_path), {}, {}
    for weights in ("full", "fp8"):
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        made = load_weights(
            tmp_path,
            arch,
            dtype=torch.bfloat16,
            device=CUDA,
            load_format="dummy",
            weights=weights,  # type: ignore[arg-type]
        )
        held[weights] = torch.cuda.memory_allocated() - before
        most[weights] = torch.cuda.max_memory_allocated() - before
        del made
    projections = arch.num_parameters - 2 * arch.vocab_size * arch.hidden_size
    assert held["full"] - held["fp8"] > 0.99 * projections
    assert most["fp8"] < held["fp8"] + (1 << 30), "no second copy of the model"


def test_a_worker_says_so(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    options = EngineOptions(
        model=str(tmp_path), device="cuda", load_format="dummy", weights="fp8", device_cache="4096tokens",
        host_cache="0", max_running=8, max_batch_tokens=256,
    )  # fmt: skip
    worker = build_worker(options)
    assert worker.info.fp8 and ", fp8, " in sizing.report(worker.arch, worker.info)
    worker.close()


def test_a_gpu_without_such_products_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    options = EngineOptions(model=str(tmp_path), device="cuda", load_format="dummy", weights="fp8")
    with pytest.raises(
        ValueError, match=r"weights fp8: this GPU has compute capability 8\.0, .* --weights full"
    ):
        build_worker(options)
