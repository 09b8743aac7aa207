"""Mixtures of experts against transformers' modules in float32."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.model.arch import Experts, ModelError
from pensieve.model.experts import mixture
from pensieve.model.ops import TORCH_OPS
from support.kernels.expert_cases import KINDS, Kind, cast, description, expected, module_of, random_experts


@settings(max_examples=60)
@given(
    kind=st.sampled_from(KINDS), tokens=st.integers(0, 40), count=st.integers(1, 12), picked=st.integers(1, 12),
    width=st.integers(1, 24), hidden=st.integers(1, 24), seed=st.integers(0, 999),
)  # fmt: skip
def test_mixtures_equal_transformers(
    kind: Kind, tokens: int, count: int, picked: int, width: int, hidden: int, seed: int
) -> None:
    experts = description(kind, count, min(picked, count), width)
    weights = random_experts(experts, hidden, seed=seed)
    x = torch.randn(tokens, hidden, generator=torch.Generator().manual_seed(seed))
    want = expected(module_of(kind, experts, hidden, weights), x)
    got = mixture(x, weights, experts, "silu", TORCH_OPS)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_half_precision_rounds_as_transformers_does(kind: Kind) -> None:
    """The same experts with the same weights to the bit, and results that differ by the order of a sum at most."""
    experts = description(kind, 8, 3, 32)
    weights = cast(random_experts(experts, 64), torch.bfloat16)
    x = torch.randn(50, 64, generator=torch.Generator().manual_seed(1)).bfloat16()
    module: Any = module_of(kind, experts, 64, weights)
    with torch.no_grad():
        logits, want_shares, want_picked = (module.router if kind == "gpt_oss" else module.gate)(x)
    shares, picked = TORCH_OPS.experts.pick_experts(
        logits,
        experts.per_token,
        softmax_first=experts.softmax == "all",
        renormalised=experts.renormalised,
        rounded=experts.weights_rounded,
    )
    assert torch.equal(picked, want_picked.int())
    assert shares.dtype == want_shares.dtype and torch.equal(shares, want_shares)
    got, want = mixture(x, weights, experts, "silu", TORCH_OPS), expected(module, x)
    assert got.dtype == torch.bfloat16
    assert float((got.double() - want.double()).norm() / want.double().norm()) <= 6e-3


@pytest.mark.parametrize("kind", KINDS)
def test_the_rows_of_a_step_do_not_matter_to_each_other(kind: Kind) -> None:
    experts = description(kind, 6, 2, 8)
    weights = random_experts(experts, 16)
    x = torch.randn(9, 16, generator=torch.Generator().manual_seed(2))
    want = torch.cat([mixture(row[None], weights, experts, "silu", TORCH_OPS) for row in x])
    torch.testing.assert_close(mixture(x, weights, experts, "silu", TORCH_OPS), want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("picked", [0, 5])
def test_more_experts_than_there_are_cannot_be_picked(picked: int) -> None:
    with pytest.raises(ModelError, match=f"num_experts_per_tok is {picked}, not within 1 to 4 experts"):
        Experts(count=4, per_token=picked, width=8, softmax="all")


def test_weights_are_counted_all_or_those_of_one_token() -> None:
    experts = description("qwen3_next", 8, 2, 10)
    weights = random_experts(experts, 6)
    assert weights.shared is not None and weights.shared_gate is not None
    parts = (weights.shared.up, weights.shared.down, weights.shared_gate, weights.router)
    always = sum(part.weight.numel() for part in parts)
    each = (weights.up.weight.numel() + weights.down.weight.numel()) // 8
    assert experts.num_parameters(6, active=False) == always + 8 * each
    assert experts.num_parameters(6, active=True) == always + 2 * each
