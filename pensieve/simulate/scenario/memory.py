"""The cache of a simulated machine, from sizes as ``pensieve serve`` takes them."""

from __future__ import annotations

from typing import Any

from pensieve.config import CacheConfig
from pensieve.engine.worker.hybrid_sizing import cache_groups, explicit_bytes, sizes_for
from pensieve.simulate.scenario.machine import Machine


def cache_config(
    machine: Machine, device: str, host: str, *, chunk_tokens: int, context_limit: int, **rules: Any
) -> CacheConfig:
    """Return the configuration of both tiers; ``rules``: its other fields. Raises ValueError, with what to change, for
    sizes that cannot be read and for a device tier that does not hold one chunk."""
    groups = machine.kv_groups(chunk_tokens)
    sizes = sizes_for(groups, chunk_tokens, context_limit, ranks=1, on_gpu=machine.overlapped)
    layout = sizes.device_layout(explicit_bytes("device", device, sizes, sizes.device_bytes))
    host_bytes = explicit_bytes("host", host, sizes, sizes.host_bytes)
    shared = len(groups) > 1
    if layout.num_bytes < sizes.device_bytes(chunk_tokens):
        raise ValueError(f"--device-cache {device} does not hold one chunk")
    return CacheConfig(
        device_chunks=sizes.chunks(layout),
        host_chunks=sizes.chunks(sizes.host_layout(host_bytes)),
        chunk_tokens=chunk_tokens,
        groups=cache_groups(groups, layout),
        device_bytes=layout.num_bytes if shared else None,
        host_bytes=host_bytes if shared else None,
        **rules,
    )
