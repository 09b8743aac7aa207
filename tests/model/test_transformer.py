"""Rotary frequencies against transformers' own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.models.llama import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

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
    ],
)
def test_frequencies(parameters: dict[str, Any]) -> None:
    config = LlamaConfig(
        hidden_size=256, num_attention_heads=2, max_position_embeddings=65536, rope_parameters=parameters
    )
    (rope,) = READERS["llama"](config.to_dict(), {}).ropes
    want = LlamaRotaryEmbedding(config).inv_freq
    torch.testing.assert_close(inverse_frequency(rope, 128, torch.device("cpu")), want, rtol=1e-6, atol=0)
