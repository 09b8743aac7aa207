"""How host memory is cut into registrations, without a GPU."""

from __future__ import annotations

import itertools
import mmap

import numpy as np
import pytest

from pensieve.engine.kv import pools
from pensieve.engine.kv.pools import SEGMENT_BYTES, PinnedMemory, _segments, _touch


@pytest.mark.parametrize("unit", [1, 512, 4096, 163840, 6553600, 3 << 30])
@pytest.mark.parametrize("count", [1, 7, 1000])
def test_registrations_cut_no_unit(unit: int, count: int) -> None:
    segments = _segments(unit * count, unit)
    assert segments[0].start == 0 and segments[-1].stop == unit * count
    assert all(a.stop == b.start for a, b in itertools.pairwise(segments))
    assert all(part.start % unit == 0 and part.start % mmap.PAGESIZE == 0 for part in segments)
    assert all(len(part) <= max(SEGMENT_BYTES, unit * mmap.PAGESIZE) for part in segments)


def test_every_page_is_touched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pools, "TOUCH_BYTES", 3 * mmap.PAGESIZE)
    values = np.ones(10 * mmap.PAGESIZE - 1, np.uint8)
    for start in range(0, len(values), pools.TOUCH_BYTES):
        _touch(values, start, len(values))
    assert (np.flatnonzero(values == 0) == np.arange(10) * mmap.PAGESIZE).all()


def test_an_empty_host_tier_needs_no_gpu() -> None:
    memory = PinnedMemory(0)
    assert memory.tensor.numel() == 0
    memory.close()
