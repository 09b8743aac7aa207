"""A small architecture with any layers, for tests that compute nothing."""

from __future__ import annotations

from pensieve.model.arch import Arch, Layer


def make_arch(*layers: Layer) -> Arch:
    """Return a model with 2 key and value heads of 8 values."""
    return Arch(
        family="llama",
        vocab_size=32,
        hidden_size=16,
        intermediate_size=16,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        context_limit=256,
        norm="rms",
        norm_eps=1e-5,
        activation="silu",
        gated_mlp=True,
        layers=layers,
    )
