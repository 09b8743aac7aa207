"""Sizes and options of a worker."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from pensieve.config import EngineOptions, parse_cache_size
from pensieve.engine.worker.sizing import worker_info
from pensieve.engine.worker.torch_worker import build_worker
from pensieve.model.folder import load_arch
from pensieve.model.groups import kv_groups


@pytest.mark.parametrize(
    ("size", "tokens"),
    [
        ("40GiB", 40 * 2**30 // 100),
        ("512MiB", 512 * 2**20 // 100),
        ("1.5 KiB", 15),
        ("4096tokens", 4096),
        ("1token", 1),
        ("0", 0),
        ("0tokens", 0),
        ("99B", 0),
    ],
)
def test_sizes(size: str, tokens: int) -> None:
    assert parse_cache_size(size, 100) == tokens


@pytest.mark.parametrize("size", ["", "40", "40GB", "-1GiB", "tokens", "many"])
def test_sizes_that_are_none(size: str) -> None:
    with pytest.raises(ValueError, match="40GiB, 512MiB or 4096tokens"):
        parse_cache_size(size, 100)


def options(folder: Path, **values: Any) -> EngineOptions:
    return EngineOptions(**({"model": str(folder), "device": "cpu", "host_cache": "0"} | values))


def test_pools_are_whole_chunks_of_the_size_asked_for(llama: Path) -> None:
    worker = build_worker(options(llama, device_cache="100tokens", host_cache="1MiB"))
    arch = worker.arch
    per_chunk = kv_groups(arch, 32, "float32")[0].page_bytes
    assert (worker.info.device_chunks, worker.info.host_chunks) == (3, 2**20 // per_chunk)
    assert (worker.info.device, worker.info.dtype) == ("cpu", "float32")
    assert worker.info.context_limit == arch.context_limit == 512
    pools = worker.pools
    assert pools.chunk_bytes == per_chunk == pools.host[0].nbytes == pools.device[:, 0].nbytes
    assert pools.device.shape == (3, 3 + 1, 2, 2, 32, 8)
    assert pools.host.shape == (worker.info.host_chunks, 3, 2, 2, 32, 8)


def test_bfloat16_on_request(llama: Path) -> None:
    worker = build_worker(options(llama, dtype="bfloat16", device_cache="64tokens"))
    assert worker.pools.device.dtype == torch.bfloat16
    assert worker.info.dtype == "bfloat16"


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"device_cache": "31tokens"}, "less than one chunk"),
        ({"device_cache": "0"}, "less than one chunk"),
        ({"device_cache": "lots"}, "cache size 'lots'"),
        ({"context_limit": 513}, "at most 512"),
        ({"chunk_tokens": 0}, "at least 1"),
        ({"device_cache": "9000000GiB"}, "do not fit .* give at most"),
    ],
)
def test_options_that_cannot_be_followed(llama: Path, values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_worker(options(llama, **values))


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device here")
def test_no_cuda_here(llama: Path) -> None:
    with pytest.raises(ValueError, match="no CUDA device"):
        worker_info(options(llama, device="cuda"), load_arch(llama))
    assert worker_info(options(llama, device="auto"), load_arch(llama)).device == "cpu"
