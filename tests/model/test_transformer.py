"""Rotary frequencies against transformers' own, and the order in which values of heads are rotated."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from pensieve.model.arch import Rope
from pensieve.model.families import READERS
from pensieve.model.transformer import inverse_frequency


@pytest.mark.parametrize(
    "parameters",
    [
        {"rope_type": "default", "rope_theta": 10000.0},
        {"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0},
        {
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 40.0,
            "original_max_position_embeddings": 4096,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "truncate": False,
            "mscale": 0.7,
            "mscale_all_dim": 1.0,
            "beta_fast": 16,
            "beta_slow": 2,
        },
        {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "original_max_position_embeddings": 4096,
            "attention_factor": 1.25,
        },
    ],
)
def test_frequencies(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=65536, rope_parameters=parameters
    )
    (rope,) = READERS["llama"](config.to_dict(), {}).ropes
    want = LlamaRotaryEmbedding(config)
    found = inverse_frequency(rope, 128, torch.device("cpu"))
    torch.testing.assert_close(found, want.inv_freq, rtol=1e-6, atol=0)
    assert rope.magnitude == pytest.approx(want.attention_scaling, rel=1e-12)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotated", [None, 2, 8, 10])
def test_heads_in_order_rotate_as_the_checkpoint_says(rotated: int | None, interleaved: bool) -> None:
    """Scores of reordered heads, rotated by halves, are those of the checkpoint's heads, rotated by its pairs."""
    head_dim, rope = 10, Rope(100.0, rotated=rotated, interleaved=interleaved)
    whole = head_dim if rotated is None else rotated
    q, k = torch.randn(2, 7, 3, head_dim, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    positions = torch.arange(7)[:, None].double()
    angles = positions / 100.0 ** (torch.arange(0, whole, 2).double() / whole)  # [T, pairs]

    def by_pairs(x: torch.Tensor) -> torch.Tensor:
        x = x.clone()
        for pair in range(whole // 2):
            one, other = (2 * pair, 2 * pair + 1) if interleaved else (pair, pair + whole // 2)
            cos, sin = angles[:, None, pair].cos(), angles[:, None, pair].sin()
            x[..., one], x[..., other] = (
                x[..., one] * cos - x[..., other] * sin, x[..., other] * cos + x[..., one] * sin
            )  # fmt: skip
        return x

    def by_halves(x: torch.Tensor) -> torch.Tensor:
        order = rope.head_order(head_dim)
        assert order is None or sorted(order) == list(range(head_dim))
        left, right = (x if order is None else x[..., list(order)]).chunk(2, -1)
        turns = positions * inverse_frequency(rope, head_dim, torch.device("cpu")).double()
        cos, sin = turns[:, None].cos(), turns[:, None].sin()
        return torch.cat((left * cos - right * sin, right * cos + left * sin), -1)

    scores = [torch.einsum("thd,shd->hts", turn(q), turn(k)) for turn in (by_pairs, by_halves)]
    torch.testing.assert_close(scores[0], scores[1], rtol=1e-5, atol=1e-5)
