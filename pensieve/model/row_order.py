"""Orders of the rows of projections that a checkpoint stores head by head. No torch."""

from __future__ import annotations

import numpy as np

from pensieve.core import Ints
from pensieve.model.arch import StateShape


def gated_query_order(heads: int, head_dim: int, rows: int) -> Ints:
    """Return the order [rows] that brings a query projection with gates to queries, keys, values, gates. In the
    checkpoint, each head's query is followed by its gate; keys and values follow the last gate."""
    each = np.arange(2 * heads * head_dim).reshape(heads, 2, head_dim)
    rest = np.arange(2 * heads * head_dim, rows)
    return np.concatenate((each[:, 0].reshape(-1), rest, each[:, 1].reshape(-1)))


def key_head_order(state: StateShape, key_heads: int) -> Ints:
    """Return the order that brings the projections of a gated delta rule to queries, keys, values, gates, write
    strengths, step sizes. In the checkpoint, they come key head by key head: first queries, keys, values, gates of
    each; then write strengths and step sizes of each."""
    shared = state.heads // key_heads
    inner = shared * state.value_dim
    wide = np.arange(key_heads * 2 * (state.key_dim + inner)).reshape(key_heads, -1)
    ends = np.cumsum((state.key_dim, state.key_dim, inner))
    narrow = wide.size + np.arange(2 * state.heads).reshape(key_heads, 2, shared)
    parts = [*np.split(wide, ends, axis=1), narrow[:, 0], narrow[:, 1]]
    return np.concatenate([part.reshape(-1) for part in parts])
