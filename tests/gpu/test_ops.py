"""The decoder's elementwise kernels on a GPU, at the shapes of real models, and a whole decoder in a CUDA graph."""

from __future__ import annotations

import pytest
import torch

from pensieve.kernels import reference
from pensieve.kernels.activation import activate
from pensieve.kernels.arguments import Activation, HeadPrep
from pensieve.kernels.kv_write import kv_write
from pensieve.kernels.norm import add_norm
from pensieve.model.ops import triton_ops
from pensieve.model.transformer import Transformer
from support.kernels.decoder_cases import check_activation, check_heads, check_norm, check_product, head_case
from support.kernels.decoder_models import SHAPES, Shape, heads_only, random_weights, small_arch

pytestmark = pytest.mark.gpu
DTYPES = [torch.float16, torch.bfloat16, torch.float32]
TOKENS = [1, 7, 64, 1025]
FLAGS = [(False, True), (True, True), (True, False), (False, False)]
"""Norms of heads, rotation."""


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("dim", [64, 80, 96, 128, 256])
def test_head_sizes(dim: int, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        for normed, turn in FLAGS:
            slots = torch.int32 if tokens % 2 else torch.int64
            check_heads(
                head_case(
                    tokens, heads=8, kv_heads=2, dim=dim, page=32, dtype=dtype, norm=normed, turn=turn,
                    slot_type=slots, device="cuda",
                )
            )  # fmt: skip


@pytest.mark.parametrize("dtype", DTYPES[:2], ids=str)
@pytest.mark.parametrize("size", [(5120, 7680), (13824, 5120), (4096, 128_256), (576, 1536), (1000, 50_256)])
def test_the_product_of_one_row(size: tuple[int, int], dtype: torch.dtype) -> None:
    for bias in (False, True):
        check_product(1, *size, bias=bias, dtype=dtype, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_norm_weights_in_float32(dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        for dim in (128, 256):
            check_heads(
                head_case(tokens, dim=dim, dtype=dtype, norm=True, norm_type=torch.float32, device="cuda")
            )
        for add in (False, True):
            check_norm(tokens, 3840, dtype=dtype, add=add, weight_type=torch.float32, device="cuda")


@pytest.mark.parametrize("heads", [(40, 40), (40, 10), (32, 8), (14, 2), (28, 4), (64, 8), (40, 1), (7, 7)])
def test_heads_of_models(heads: tuple[int, int]) -> None:
    for tokens in (1, 33, 8192):
        case = head_case(
            tokens, heads=heads[0], kv_heads=heads[1], dim=128, page=32, dtype=torch.bfloat16, device="cuda"
        )
        check_heads(case)


@pytest.mark.parametrize("page", [1, 8, 16, 64, 256])
def test_pages(page: int) -> None:
    check_heads(head_case(200, page=page, dim=128, norm=True, dtype=torch.bfloat16, device="cuda"))


@pytest.mark.whole_device
def test_pool_beyond_2_to_the_31_elements() -> None:
    pages = 30_000
    pool = torch.zeros(pages, 2, 10, 32, 128, dtype=torch.bfloat16, device="cuda")
    assert pool.numel() > 2**31
    qkv = torch.randn(2, 60, 128, device="cuda").to(torch.bfloat16)
    slots = torch.tensor([pages * 32 - 1, pages * 32 - 40], device="cuda", dtype=torch.int32)
    kv_write(pool, qkv, slots, HeadPrep())
    assert torch.equal(pool[pages - 1, 0, :, 31], qkv[0, 40:50])
    assert torch.equal(pool[pages - 2, 1, :, 24], qkv[1, 50:])
    assert int(pool[: pages - 2].count_nonzero()) == 0


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("layer", [False, True])
@pytest.mark.parametrize("width", [48, 768, 896, 2048, 3584, 4096, 5120, 8192, 16384])
def test_norms(width: int, layer: bool, dtype: torch.dtype) -> None:
    for tokens in TOKENS:
        check_norm(tokens, width, dtype=dtype, layer=layer, device="cuda")
    check_norm(3, width, dtype=dtype, layer=layer, add=False, device="cuda")


def test_layer_norm_far_from_zero() -> None:
    check_norm(64, 5120, dtype=torch.float16, layer=True, offset=300.0, device="cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("kind", ["silu", "relu", "relu2", "gelu", "gelu_tanh"])
def test_activations(kind: Activation, gated: bool, dtype: torch.dtype) -> None:
    for tokens, inner in ((1, 13824), (64, 11008), (7, 4864), (1025, 13824), (3, 35), (5, 1001)):
        check_activation(tokens, inner, gated, kind, dtype=dtype, device="cuda")


@pytest.mark.whole_device
def test_steps_beyond_2_to_the_31_elements() -> None:
    up = torch.zeros(80_000, 27648, dtype=torch.bfloat16, device="cuda")
    up[-2:] = torch.randn(2, 27648, device="cuda")
    got = activate(up, True, "silu")
    assert (
        torch.equal(got[-2:], activate(up[-2:].clone(), True, "silu")) and int(got[:-2].count_nonzero()) == 0
    )
    x, weight = up.view(-1, 13824), torch.ones(13824, device="cuda", dtype=torch.bfloat16)
    want, tail = x[-4:].clone(), x[-4:].clone()
    total, normed = add_norm(x, x, weight, None, 1e-5)
    assert torch.equal(total[-4:], want * 2)
    assert torch.equal(normed[-4:], add_norm(tail, want, weight, None, 1e-5)[1])


@pytest.mark.parametrize("shape", SHAPES)
def test_a_decoder_in_a_graph(shape: Shape) -> None:
    """Captured once with padding, replayed with other values; the reference runs on the CPU."""
    torch.backends.cuda.matmul.allow_tf32 = False
    arch = small_arch(shape)
    plain = Transformer(arch, random_weights(arch))
    model = Transformer(arch, random_weights(arch, "cuda"), triton_ops())
    tokens, positions, slots, rows = (
        torch.zeros(size, dtype=dtype, device="cuda")
        for size, dtype in ((8, torch.int32), (8, torch.int32), (8, torch.int64), (3, torch.int32))
    )
    attend = heads_only(arch, slots, kv_write)

    def step() -> torch.Tensor:
        return model.forward(tokens, positions, attend, rows)

    with torch.inference_mode():
        slots.fill_(-1)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = step()
        generator = torch.Generator().manual_seed(0)
        attend.pools.zero_()
        want_pools = torch.zeros_like(attend.pools, device="cpu")
        for used in (8, 5, 1):
            token = torch.randint(97, (used,), generator=generator)
            position = torch.randint(64, (used,), generator=generator)
            slot = torch.randperm(40, generator=generator)[:used]
            row = torch.randint(used, (3,), generator=generator)
            slots.fill_(-1)
            for target, values in ((tokens, token), (positions, position), (slots, slot), (rows, row)):
                target[: len(values)] = values.to(target)
            graph.replay()
            expected = heads_only(arch, slot, reference.kv_write)
            expected.pools.copy_(want_pools)
            want = plain.forward(token, position, expected, row)
            torch.testing.assert_close(logits.cpu(), want, rtol=1e-3, atol=1e-3)
            want_pools.copy_(expected.pools)
            torch.testing.assert_close(attend.pools.cpu(), want_pools, rtol=1e-3, atol=1e-3)
