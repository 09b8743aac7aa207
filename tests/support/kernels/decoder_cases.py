"""Inputs of the decoder's elementwise kernels and the checks of their results, on a GPU or under the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F

from pensieve.kernels import reference
from pensieve.kernels.activation import activate
from pensieve.kernels.arguments import Activation, HeadPrep
from pensieve.kernels.kv_write import kv_write
from pensieve.kernels.norm import add_norm, norm
from pensieve.kernels.row_product import linear
from pensieve.kernels.sum_norm import sum_add_norm
from support.kernels.attention_cases import relative_error

TOLERANCE = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 8e-3}
"""What a result may differ from float64 as a whole: the norm of its error over its norm."""
EACH = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 4e-2}
"""What each value of size 1 may differ."""


@dataclass(frozen=True, slots=True)
class HeadCase:
    """Arguments of ``kv_write``."""

    pool: torch.Tensor
    """NaN everywhere."""
    qkv: torch.Tensor
    slots: torch.Tensor
    prep: HeadPrep

    def run(self, *, fast: bool) -> tuple[torch.Tensor, torch.Tensor]:
        """Queries and pool by the kernel or by the reference, from copies."""
        pool, qkv = self.pool.clone(), self.qkv.clone()
        op = kv_write if fast else reference.kv_write
        return op(pool, qkv, self.slots, self.prep), pool

    def to(self, dtype: torch.dtype) -> HeadCase:
        prep = self.prep
        given = (prep.cos, prep.sin, prep.query_norm, prep.key_norm)
        cast = HeadPrep(*(None if tensor is None else tensor.to(dtype) for tensor in given), prep.eps)
        return replace(self, pool=self.pool.to(dtype), qkv=self.qkv.to(dtype), prep=cast)


def head_case(
    tokens: int,
    *,
    heads: int = 4,
    kv_heads: int = 2,
    dim: int = 16,
    page: int = 8,
    dtype: torch.dtype = torch.float32,
    norm: bool = False,
    turn: bool = True,
    padding: float = 0.2,
    norm_type: torch.dtype | None = None,
    slot_type: torch.dtype = torch.int64,
    device: str = "cpu",
    seed: int = 0,
) -> HeadCase:
    """Random heads, about a share ``padding`` of the tokens without a slot, the others in random places.
    ``norm_type``: dtype of norm weights; None: that of the heads."""
    generator = torch.Generator(device).manual_seed(seed)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    pages = -(-tokens // page) + 2
    slots = torch.randperm(pages * page, generator=generator, device=device)[:tokens]
    slots[torch.rand(tokens, generator=generator, device=device) < padding] = -1
    angles = torch.rand(tokens, dim // 2, generator=generator, device=device) * 6.3
    prep = HeadPrep(
        angles.cos().to(dtype) if turn else None,
        angles.sin().to(dtype) if turn else None,
        (1 + 0.3 * normal(dim)).to(norm_type or dtype) if norm else None,
        (1 + 0.3 * normal(dim)).to(norm_type or dtype) if norm else None,
        1e-6,
    )
    pool = torch.full((pages, 2, kv_heads, page, dim), torch.nan, dtype=dtype, device=device)
    return HeadCase(pool, normal(tokens, heads + 2 * kv_heads, dim), slots.to(slot_type), prep)


def check_heads(case: HeadCase) -> None:
    """Queries and stored pairs are right, and nothing but the slots is written.

    Without norms every bit agrees with the reference in the same dtype; with them, every value with one in float64.
    """
    got, pool = case.run(fast=True)
    exact = case.prep.query_norm is None
    want, want_pool = (case if exact else case.to(torch.float64)).run(fast=False)
    assert torch.equal(pool.isnan(), want_pool.isnan()), "something else was written than the slots"
    assert got.dtype == pool.dtype == case.qkv.dtype
    if exact:
        assert torch.equal(got, want)
        assert torch.equal(pool.nan_to_num(7.0), want_pool.nan_to_num(7.0))
    else:
        close(got, want)
        close(pool[:, 0].nan_to_num(7.0), want_pool[:, 0].nan_to_num(7.0))
        assert torch.equal(pool[:, 1].nan_to_num(7.0).double(), want_pool[:, 1].nan_to_num(7.0))


def check_product(
    rows: int, width: int, height: int, *, bias: bool, dtype: torch.dtype, device: str = "cpu"
) -> None:
    """Against float64, to one rounding; the matrix lies between rows of NaN."""
    generator = torch.Generator(device).manual_seed(width)
    x = torch.randn(rows, width, generator=generator, device=device).to(dtype)
    around = torch.full((height + 16, width), torch.nan, dtype=dtype, device=device)
    weight = around[8:-8]
    weight.copy_(torch.randn(height, width, generator=generator, device=device))
    added = torch.randn(height, generator=generator, device=device).to(dtype) if bias else None
    got = linear(x, weight, added)
    want = F.linear(x.double(), weight.double(), None if added is None else added.double())
    # Terms that cancel leave the rounding of larger ones.
    size = F.linear(x.double().abs(), weight.double().abs())
    limit = torch.finfo(dtype).eps * want.abs() + 1e-6 * size
    assert got.dtype == dtype and bool(((got.double() - want).abs() <= limit).all())


def check_norm(
    tokens: int,
    width: int,
    *,
    dtype: torch.dtype = torch.float32,
    layer: bool = False,
    add: bool = True,
    offset: float = 0.0,
    weight_type: torch.dtype | None = None,
    device: str = "cpu",
) -> None:
    """The sum to the bit, its norm against float64; on rows inside a wider tensor, whose rest stays as it is.
    ``weight_type``: dtype of the weight; None: that of the rows."""
    generator = torch.Generator(device).manual_seed(width)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device).to(dtype)

    around = normal(tokens, width + 32) + offset
    x, before = around[:, 16 : 16 + width], around.clone()
    delta = normal(tokens, width + 16)[:, :width]
    weight = torch.randn(width, generator=generator, device=device).to(weight_type or dtype)
    bias = normal(width) if layer else None
    total = x + delta if add else x.clone()
    if add:
        got_total, got = add_norm(x, delta, weight, bias, 1e-5)
        assert got_total is x, "the sum is made in place"
    else:
        got = norm(x, weight, bias, 1e-5)
    assert torch.equal(x, total)
    before[:, 16 : 16 + width] = total
    assert torch.equal(around, before), "something beside the rows was written"
    want = reference.norm(total.double(), weight.double(), None if bias is None else bias.double(), 1e-5)
    assert got.dtype == dtype
    close(got, want)


def check_sum_norm(
    tokens: int, width: int, ranks: int, *, dtype: torch.dtype = torch.float32, layer: bool = False
) -> None:
    """What ``sum_add_norm`` makes of parts that are all there, against a sum in float32 and the reference."""
    generator = torch.Generator().manual_seed(width)
    parts = [torch.randn(tokens, width, generator=generator).to(dtype) for _ in range(ranks)]
    around = torch.randn(tokens, width + 32, generator=generator).to(dtype)
    x, before = around[:, 16 : 16 + width], around.clone()
    weight = torch.randn(width, generator=generator).to(dtype)
    bias = torch.randn(width, generator=generator).to(dtype) if layer else None
    summed = parts[0].float()
    for part in parts[1:]:
        summed = summed + part.float()
    total = x + summed.to(dtype)
    arrived = [torch.zeros(tokens, ranks, dtype=torch.int32) for _ in range(ranks)]
    calls = torch.zeros(tokens, dtype=torch.int32)
    got = sum_add_norm(x, parts, arrived, calls, ranks - 1, weight, bias, 1e-5, sync=False)
    before[:, 16 : 16 + width] = total
    assert torch.equal(around, before), "the sum is made in place, and nothing beside it is written"
    close(got, reference.norm(total.double(), weight.double(), None if bias is None else bias.double(), 1e-5))


def check_activation(
    tokens: int,
    inner: int,
    gated: bool,
    activation: Activation,
    *,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
) -> None:
    """Against float64, with the activation rounded to ``dtype`` before the product; up to the far ends."""
    generator = torch.Generator(device).manual_seed(inner)
    width = inner * (1 + gated)
    up = (torch.randn(tokens, width + 16, generator=generator, device=device) * 3).to(dtype)[:, :width]
    far = 50.0 if activation == "relu2" else 1e3  # its square must be a half, too
    ends = torch.tensor([0.0, -0.0, far, -far, min(far, 88.0), -88.0, 1e-4, -1e-4], device=device)[:inner]
    up[0, : len(ends)] = ends.to(dtype)
    factor = up[:, inner:].double() if gated else 1.0
    rounded = reference.activate(up[:, :inner].double(), False, activation).to(dtype).double()
    got = activate(up, gated, activation)
    assert got.shape == (tokens, inner) and got.dtype == dtype
    want = rounded * factor
    close(got, want)
    if dtype != torch.float32 and got.numel() >= 64:
        # Errors of float32 seldom reach the bits of a half; a rounding left out often does.
        assert float((got == want.to(dtype)).float().mean()) >= 0.9


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    """``got`` is ``want``, which is float64, within the tolerance of its dtype: as a whole, and each value."""
    assert relative_error(got, want) <= TOLERANCE[got.dtype]
    each = EACH[got.dtype]
    torch.testing.assert_close(got.double(), want.double(), rtol=each, atol=each)
