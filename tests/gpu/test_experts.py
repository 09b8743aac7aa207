"""Mixtures of experts on a GPU: the kernel at the shapes of real models, and whole mixtures, also in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from pensieve.model.experts import mixture
from pensieve.model.ops import TORCH_OPS, triton_ops
from support.kernels.expert_cases import (
    KINDS,
    Kind,
    cast,
    check_glu,
    check_groups,
    check_picks,
    check_product,
    check_sums,
    description,
    product_case,
    random_experts,
)

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


@pytest.fixture(autouse=True)
def exact_products() -> None:
    torch.backends.cuda.matmul.allow_tf32 = False


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("transposed", [False, True])
def test_products(transposed: bool, dtype: torch.dtype) -> None:
    for counts in ([1], [0, 5, 0, 16, 17, 0], [3] * 33, [64, 0, 200, 1], [700, 0, 333, 129]):
        for inputs, columns in ((96, 64), (360, 2880), (100, 33)):
            flag = bool(len(counts) % 2)
            case = product_case(
                counts,
                inputs,
                columns,
                dtype=dtype,
                transposed=transposed,
                bias=flag,
                read=not flag,
                device="cuda",
            )
            check_product(case)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_clamped_units(dtype: torch.dtype) -> None:
    for rows, inner in ((1, 2880), (256, 2880), (1025, 360), (3, 35)):
        check_glu(rows, inner, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows(dtype: torch.dtype) -> None:
    for tokens, experts, per_token in ((1, 1, 1), (64, 32, 4), (333, 128, 8), (17, 512, 10), (5, 60, 3)):
        check_picks(tokens, experts, per_token, dtype=dtype, device="cuda")
        check_sums(tokens, per_token, 2880, dtype=dtype, exact_weights=bool(tokens % 2), device="cuda")
        check_groups(tokens, experts, per_token, device="cuda")
    check_groups(8192, 128, 8, device="cuda")
    check_groups(8192, 128, 8, used=11, device="cuda")


@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_in_a_graph(kind: Kind) -> None:
    """Captured once, replayed with other tokens, other experts among them; the loop runs on the CPU."""
    experts = description(kind, 16, 4, 48)
    weights = random_experts(experts, 80)
    on_gpu, ops = cast(weights, "cuda"), triton_ops()
    x = torch.zeros(24, 80, device="cuda")
    with torch.inference_mode():
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            mixture(x, on_gpu, experts, "silu", ops)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            got = mixture(x, on_gpu, experts, "silu", ops)
        for seed in range(5):
            given = torch.randn(24, 80, generator=torch.Generator().manual_seed(seed))
            x.copy_(given)
            graph.replay()
            want = mixture(given, weights, experts, "silu", TORCH_OPS)
            torch.testing.assert_close(got.cpu(), want, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_in_half_precision(kind: Kind, dtype: torch.dtype) -> None:
    """The loop on the CPU rounds alike. Every expert takes part: rounding may pick others, with other results."""
    experts = description(kind, 8, 8, 96)
    weights = cast(random_experts(experts, 256), dtype)
    x = torch.randn(300, 256, generator=torch.Generator().manual_seed(3)).to(dtype)
    got = mixture(x.cuda(), cast(weights, "cuda"), experts, "silu", triton_ops()).cpu().double()
    want = mixture(x, weights, experts, "silu", TORCH_OPS).double()
    assert float((got - want).norm() / want.norm()) <= {torch.float16: 1e-3, torch.bfloat16: 8e-3}[dtype]


@pytest.mark.parametrize("tokens", [0, 1, 7, 1000])
@pytest.mark.parametrize("kind", KINDS)
def test_mixtures_never_wait_for_the_device(kind: Kind, tokens: int) -> None:
    experts = description(kind, 32, 4, 64)
    weights = random_experts(experts, 128)
    x = torch.randn(tokens, 128, generator=torch.Generator().manual_seed(tokens))
    on_gpu, given, ops = cast(weights, "cuda"), x.cuda(), triton_ops()
    mixture(given, on_gpu, experts, "silu", ops)  # compiles
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = mixture(given, on_gpu, experts, "silu", ops)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.testing.assert_close(
        got.cpu(), mixture(x, weights, experts, "silu", TORCH_OPS), rtol=1e-4, atol=1e-5
    )
