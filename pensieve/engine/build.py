"""Puts an engine together from its options. The one module of the engine, beside the worker's own, that needs torch."""

from __future__ import annotations

import logging
from pathlib import Path

from pensieve.config import CacheConfig, EngineOptions, SchedulerConfig
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel, CostProfileError
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Ready
from pensieve.engine.scheduler import Scheduler
from pensieve.engine.worker import WorkerInfo, build_worker
from pensieve.errors import InvalidArgument
from pensieve.model.arch import Arch, ModelError

log = logging.getLogger(__name__)


def build_engine(options: EngineOptions) -> Engine:
    """An engine ready to step. Raises InvalidArgument, with what to change, when the options cannot be followed."""
    try:
        worker = build_worker(options)
        cost = cost_model(options, worker.arch)
    except (ModelError, CostProfileError, ValueError) as error:
        raise InvalidArgument(str(error)) from error
    info = worker.info
    scheduler = Scheduler(
        scheduler_config(options, worker.arch, info), CacheManager(cache_config(options, info), cost)
    )
    ready = Ready(
        context_limit=scheduler.context_limit,
        vocab_size=worker.arch.vocab_size,
        device=info.device,
        dtype=info.dtype,
        device_capacity_tokens=info.device_chunks * info.chunk_tokens,
        host_capacity_tokens=info.host_chunks * info.chunk_tokens,
        chunk_tokens=info.chunk_tokens,
    )
    log.info(
        "%s on %s in %s: contexts up to %d tokens; tiers hold %d and %d tokens (%d bytes each)",
        worker.arch.family,
        info.device,
        info.dtype,
        ready.context_limit,
        ready.device_capacity_tokens,
        ready.host_capacity_tokens,
        worker.arch.kv_bytes_per_token(info.dtype),
    )
    return Engine(scheduler, worker, ready)


def cost_model(options: EngineOptions, arch: Arch) -> CostModel:
    """The profile that the options name, else an estimate. Raises CostProfileError."""
    if not options.cost_profile:
        return CostModel.estimate(
            layers=arch.num_layers,
            query_heads=arch.num_heads,
            head_dim=arch.head_dim,
            parameters=arch.num_parameters,
            chunk_tokens=options.chunk_tokens,
            context_limit=arch.context_limit,
        )
    cost = CostModel.from_json(Path(options.cost_profile))
    if cost.chunk_tokens != options.chunk_tokens:
        raise CostProfileError(
            f"{options.cost_profile} was measured with chunks of {cost.chunk_tokens} tokens, not"
            f" {options.chunk_tokens}: profile again with --chunk-tokens {options.chunk_tokens}"
        )
    return cost


def cache_config(options: EngineOptions, info: WorkerInfo) -> CacheConfig:
    """The cache's share of the options, sizes in chunks."""
    return CacheConfig(
        device_chunks=info.device_chunks,
        host_chunks=info.host_chunks,
        chunk_tokens=info.chunk_tokens,
        policy=options.policy,
        swap_watermark=options.swap_watermark,
        decode_reserve=options.decode_reserve,
    )


def scheduler_config(options: EngineOptions, arch: Arch, info: WorkerInfo) -> SchedulerConfig:
    """The scheduler's share of the options."""
    return SchedulerConfig(
        context_limit=info.context_limit,
        eos_token_ids=arch.eos_token_ids,
        max_batch_tokens=options.max_batch_tokens,
        max_running=options.max_running,
        max_queued=options.max_queued,
        stateless=options.stateless,
        unified_batch=options.unified_batch,
        swap_in_first=options.swap_in_first,
    )
