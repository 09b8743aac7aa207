"""The real engine on hashed KV: real scheduler and cache, exact answers to check against, up in a second.

``BUILDER`` names it for a host process. Its answers are token ids below 97 (some are control tokens of the test
tokenizers, so compare ids, not text).
"""

from __future__ import annotations

from collections.abc import Sequence

from pensieve.config import CacheConfig, EngineOptions, SchedulerConfig, batch_limits, parse_cache_size
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.messages import EngineReady
from pensieve.engine.scheduling.scheduler import Scheduler
from support.engine.hash_worker import HashWorker, oracle_tokens

BUILDER = "support.engine.hash_engine:build"
CONTEXT_LIMIT = 2048
VOCABULARY = 512


def build(options: EngineOptions) -> Engine:
    """An engine whose tiers are given in tokens."""
    size = options.chunk_tokens
    batch_tokens, running = batch_limits(options, "cpu")
    cache = CacheConfig(
        device_chunks=parse_cache_size(options.device_cache, 64) // size,
        host_chunks=parse_cache_size(options.host_cache, 64) // size,
        chunk_tokens=size,
        policy=options.policy,
        swap_watermark=options.swap_watermark,
        decode_reserve=options.decode_reserve,
    )
    scheduler = Scheduler(
        SchedulerConfig(
            context_limit=options.context_limit or CONTEXT_LIMIT,
            max_batch_tokens=batch_tokens,
            max_running=running,
            max_queued=options.max_queued,
            stateless=options.stateless,
        ),
        CacheManager(cache, CostModel(((0, 0.0), (1024, 1.0)), 0.2, size)),
    )
    ready = EngineReady(
        context_limit=scheduler.context_limit,
        vocab_size=VOCABULARY,
        device="hash",
        dtype="uint64",
        device_capacity_tokens=cache.device_chunks * size,
        host_capacity_tokens=cache.host_chunks * size,
        chunk_tokens=size,
    )
    return Engine(scheduler, HashWorker(cache.device_chunks, cache.host_chunks, size), ready)


def expected_output(context: Sequence[int], count: int) -> list[int]:
    """What a stateless run over these token ids answers."""
    return oracle_tokens(context, count)
