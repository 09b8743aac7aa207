"""Choosing a copy mechanism, and the addresses that the driver is given, without a GPU."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest
import torch

from pensieve.engine.kv import mechanisms
from pensieve.engine.kv.mechanisms import BatchCopy, Trial, choose, make_copy
from pensieve.kernels.chunk_copy import runs_of


class CopyingDriver:
    """Moves plain memory at once."""

    def copy(self, dst: np.ndarray, src: np.ndarray, sizes: np.ndarray, stream: object) -> None:
        sizes = sizes[: len(dst)]
        assert dst.dtype == src.dtype == sizes.dtype == np.uint64
        assert dst.flags.c_contiguous and src.flags.c_contiguous and len(dst) == len(src) == len(sizes)
        for target, source, size in zip(dst.tolist(), src.tolist(), sizes.tolist(), strict=True):
            ctypes.memmove(target, source, size)


@pytest.fixture
def batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mechanisms, "_Driver", CopyingDriver)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: None)


@pytest.mark.usefixtures("batch")
@pytest.mark.parametrize("layers", [range(5), range(0, 1), range(2, 4), range(4, 5)], ids=str)
def test_batch_copies_what_it_is_told(layers: range) -> None:
    device = runs_of(torch.randn(5, 9, 2, 1, 4, 8))
    host = runs_of(torch.randn(7, 5, 2, 1, 4, 8), chunk_first=True)
    pairs = torch.tensor([[7, 1], [0, 6], [3, 2]], dtype=torch.int32)
    copy, back = BatchCopy(host, device), BatchCopy(device, host)
    runs = len(pairs) * len(layers)
    for first, count in ((0, runs), (0, 1), (1, runs - 1), (runs // 2, runs - runs // 2)):
        want = host.clone()
        for run in range(first, first + count):
            source, target = pairs[run // len(layers)].tolist()
            layer = layers[run % len(layers)]
            want[layer, target] = device[layer, source]
        copy(pairs, first=first, count=count, layers=layers)
        assert torch.equal(host, want)
        device += 1
    other = pairs.flip(1).contiguous()
    want = device.clone()
    want[layers.start : layers.stop, [7, 0, 3]] = host[layers.start : layers.stop, [1, 6, 2]]
    back(other, first=0, count=runs, layers=layers)
    assert torch.equal(device, want)


def test_copy_engines_are_taken_unless_clearly_slower() -> None:
    kernel = Trial(51.0, 0.1)
    assert choose({"kernel": kernel, "batch": Trial(55.0, 0.5)}).mechanism == "batch"
    assert choose({"kernel": kernel, "batch": Trial(39.0, 0.5)}).mechanism == "batch"
    assert choose({"kernel": kernel, "batch": Trial(37.0, 0.5)}).mechanism == "kernel"
    assert choose({"kernel": kernel}).mechanism == "kernel"


def test_what_cannot_be_had_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def too_old() -> None:
        raise OSError("this driver is too old")

    monkeypatch.setattr(mechanisms, "_Driver", too_old)
    runs = runs_of(torch.zeros(2, 3, 2, 1, 4, 8))
    with pytest.raises(ValueError, match="'batch': this driver is too old"):
        make_copy("batch", runs, runs)
    with pytest.raises(ValueError, match="'dma': give one of auto, batch, kernel"):
        make_copy("dma", runs, runs)
