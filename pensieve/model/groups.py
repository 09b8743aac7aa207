"""KV groups: the layers of a model by how long what they cache of a context is needed. No torch.

A full layer needs the keys and values of the whole context, a layer with a window those of the last tokens, and a
recurrent layer its state at one position. Each chunk of a context has one *slice* per group, and a slice takes one
*page*: one *layer page* for each of the group's layers.

======  ============================================  =================================================
kind    a layer page holds                            dtype
======  ============================================  =================================================
full    keys and values of a chunk, [2, Hkv, N, D]    the model's, or 8 bits with exponents [2, Hkv, N]
window  likewise                                      the model's
state   the last inputs of the convolution, [C, W-1]  the model's
..      then the recurrent state, [H, K, V]           float32
======  ============================================  =================================================

Keys and values in 8 bits (``kernels.kv_codec``) are padded to ``CODED_ALIGNMENT`` bytes per layer page.
Both parts of a state begin at multiples of ``ALIGNMENT`` bytes. Layers with windows of several widths share one group,
which keeps the widest; each layer masks its own. A layer with attention and a state is in two groups.

The cache counts positions by the chunks of the first group, which is always the full one. A model without full layers
has a full group without layers, whose pages take no memory.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from pensieve.config import KvDtypeName
from pensieve.model.arch import DTYPE_BYTES, Arch, ModelError, StateShape

GroupKind = Literal["full", "window", "state"]
ALIGNMENT: Final = 16
"""Copies move 16 bytes at a time."""
CODED_ALIGNMENT: Final = 128
"""A line of a GPU's cache: the codes of a page begin at one."""
MAX_GROUPS: Final = 2
LEAST_SPAN: Final = 256
"""A step computes at least this number of tokens of a context at once, if there are as many. It needs pages for them
beside those of the window before them."""
STATES_OF_A_CONTEXT: Final = 4
"""State pages of a running request: those that two ranges of its context go on from, the live one, and the boundary
that it passes. Decoding, it needs half of them."""


@dataclass(frozen=True, slots=True)
class KvGroup:
    """Layers whose cached data is needed equally long."""

    kind: GroupKind
    layers: tuple[int, ...]
    """Layers of the model, ascending. Layer ``layers[i]`` is number i of the group."""
    layer_page_bytes: int
    """Bytes of a page in one layer."""
    window: int | None = None
    """Widest window of the group's layers, in tokens, the token itself included; None unless it is a window group."""

    @property
    def page_bytes(self) -> int:
        """Bytes of a page: of one slice, in all of the group's layers."""
        return len(self.layers) * self.layer_page_bytes


def kv_groups(
    arch: Arch, chunk_tokens: int, dtype: str, kv_dtype: KvDtypeName = "auto"
) -> tuple[KvGroup, ...]:
    """Return the KV groups of a model: the full group, then that of its windows or states if it has any.

    ``arch``: of the whole model, or of one rank's shard. ``dtype``: a key of ``DTYPE_BYTES``. ``kv_dtype``: the
    codec of keys and values. Raises ModelError for models with windows and states, or whose recurrent layers differ in
    the shape of their state.
    """
    attending = [(index, layer.window) for index, layer in enumerate(arch.layers) if layer.attends]
    full = tuple(index for index, window in attending if window is None)
    windowed = tuple(index for index, window in attending if window is not None)
    recurrent = tuple(index for index, layer in enumerate(arch.layers) if layer.state is not None)
    slots = layer_page_bytes(arch, chunk_tokens, dtype, kv_dtype)
    groups = [KvGroup("full", full, slots if full else 0)]
    if windowed:
        widest = max(window for _, window in attending if window is not None)
        groups.append(KvGroup("window", windowed, slots, widest))
    if recurrent:
        groups.append(KvGroup("state", recurrent, state_bytes(state_shape(arch), dtype)))
    if len(groups) > MAX_GROUPS:
        raise ModelError(
            "layer_types: a model with both sliding windows and recurrent layers is not supported"
        )
    return tuple(groups)


def layer_page_bytes(arch: Arch, chunk_tokens: int, dtype: str, kv_dtype: KvDtypeName) -> int:
    """Return the bytes of the keys and values of a chunk in one layer, with their padding."""
    vectors = 2 * arch.num_kv_heads * chunk_tokens
    if kv_dtype == "auto":
        return vectors * arch.head_dim * DTYPE_BYTES[dtype]
    return -(-vectors * (arch.head_dim + 1) // CODED_ALIGNMENT) * CODED_ALIGNMENT


def context_pages(groups: tuple[KvGroup, ...], chunk_tokens: int, tokens: int) -> tuple[int, ...]:
    """Return how many pages of each group one context of ``tokens`` tokens needs at most, to be computed and kept."""
    chunks = -(-tokens // chunk_tokens)
    pages = []
    for group in groups:
        if group.kind == "state":
            pages.append(STATES_OF_A_CONTEXT)
        elif group.window is not None:
            pages.append(min(chunks, -(-(group.window - 1 + LEAST_SPAN) // chunk_tokens) + 1))
        else:
            pages.append(chunks)
    return tuple(pages)


def context_bytes(groups: tuple[KvGroup, ...], chunk_tokens: int, tokens: int) -> int:
    """Return the bytes of those pages."""
    pages = context_pages(groups, chunk_tokens, tokens)
    return sum(count * group.page_bytes for count, group in zip(pages, groups, strict=True))


def conv_bytes(shape: StateShape, dtype: str) -> int:
    """Return the bytes of the convolution's part of a state, which are also the offset of the recurrent part."""
    return aligned(shape.conv_channels * (shape.conv_width - 1) * DTYPE_BYTES[dtype])


def state_bytes(shape: StateShape, dtype: str) -> int:
    """Return the bytes of one layer's state."""
    recurrent = math.prod((shape.heads, shape.key_dim, shape.value_dim)) * DTYPE_BYTES["float32"]
    return conv_bytes(shape, dtype) + aligned(recurrent)


def state_shape(arch: Arch) -> StateShape:
    """Return the shape that all recurrent layers share. Raises ModelError when they differ."""
    shapes = {layer.state for layer in arch.layers if layer.state is not None}
    if len(shapes) > 1:
        raise ModelError("layer_types: recurrent layers with states of several shapes are not supported")
    return shapes.pop()


def aligned(num_bytes: int) -> int:
    """Round bytes up to ``ALIGNMENT``: a buffer of that size can be viewed as words."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT
