"""How many idle sessions of a hybrid model a tier holds, against a tier that keeps all layers whole."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import pytest

from pensieve.config import CacheConfig, CacheGroup
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cache.pages import unit_pages_for
from pensieve.engine.cost import CostModel
from support.lengths import at_length

SIZE = 32
COST = CostModel(((0, 0.0), (4096, 1.0)), 0.2, SIZE)
KV_16x128 = 2 * 16 * 128 * 2 * SIZE
"""Bytes of a layer page of 16 KV heads of 128 values in two bytes each."""
KV_2x256 = 2 * 2 * 256 * 2 * SIZE
STATE = 32 * 128 * 128 * 4 + 8192 * 3 * 2
"""Bytes of a layer's state: 32 heads of 128 by 128 values, and three inputs of a convolution with 8,192 channels."""


class Shape(NamedTuple):
    """A model's two groups, the length of its sessions, and by how many times more of them fit, as computed."""

    full: CacheGroup
    second: CacheGroup
    length: int
    kept_whole: int
    """Slices of the second group with which it is compared: all of them, or a state every 512 tokens."""
    gain: float

    @property
    def whole_bytes(self) -> int:
        """Bytes of a session of the comparison."""
        return self.length // SIZE * self.full.page_bytes + self.kept_whole * self.second.page_bytes


def windows(full: int, layers: int, width: int, length: int, gain: float) -> Shape:
    full_group = CacheGroup("full", 0, full, KV_16x128)
    return Shape(full_group, CacheGroup("window", width, layers, KV_16x128), length, length // SIZE, gain)


SHAPES = {
    "Gemma-2-27B, 8k": windows(23, 23, 4096, 8192, 1.33),
    "Gemma-3-27B, 8k": windows(10, 52, 1024, 8192, 3.71),
    "Qwen3-Next, 8k": Shape(
        CacheGroup("full", 0, 12, KV_2x256), CacheGroup("state", 0, 36, STATE), 8192, 8192 // 512, 5.16
    ),
    "Gemma-3-27B, 32k": windows(10, 52, 1024, 32768, 5.31),
}
NAMES = list(SHAPES)[: at_length(3, 4)]
WHOLE = 12
"""Sessions that fill the tier when they are kept whole."""


def cache_of(shape: Shape) -> CacheManager:
    num_bytes = WHOLE * shape.whole_bytes
    groups = []
    for group in (shape.full, shape.second):
        unit = unit_pages_for(group.layers, group.layer_page_bytes, num_bytes, on_gpu=True)
        groups.append(replace(group, device_unit=unit))
    config = CacheConfig(
        1, 0, SIZE, swap_watermark=0.0, groups=tuple(groups), device_bytes=num_bytes, host_bytes=0
    )
    return CacheManager(config, COST)


def turn(cache: CacheManager, key: SessionKey, context: TokenArray, num_new: int, now: float) -> int:
    """Serve one turn in steps of up to 2,048 tokens; return how many tokens of the history it computed again."""
    restore = cache.admit(key, context, num_new, now)
    for start, end in restore.missing:
        while start < end:
            count = cache.reach(key, min(end - start, 2048))
            cache.computed(key, start, start + count, now)
            cache.take_copies()
            cache.complete_copies()
            start += count
    cache.release(key, now)
    return restore.recomputed


def all_hit(shape: Shape, count: int) -> bool:
    """Whether ``count`` idle sessions fit the tier: the next turn of each computes less than a chunk again."""
    cache = cache_of(shape)
    texts = [np.arange(shape.length, dtype=np.int32) + 1_000_000 * number for number in range(count)]
    for number, text in enumerate(texts):
        turn(cache, SessionKey(f"s{number}"), text[:-1], shape.length - 1, float(number))
    return all(
        turn(cache, SessionKey(f"s{number}"), text, 1, 1000.0 + number) < SIZE
        for number, text in enumerate(texts)
    )


@pytest.mark.parametrize("name", NAMES)
def test_idle_sessions_that_hit(name: str) -> None:
    shape = SHAPES[name]
    assert all_hit(shape, math.ceil(0.93 * shape.gain * WHOLE))
    assert not all_hit(shape, math.ceil(1.05 * shape.gain * WHOLE)), "more than there is room for"
