"""Builds an engine from its options. Outside of the worker's packages, the only module here that needs torch."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from pensieve.config import CacheConfig, EngineOptions, SchedulerConfig, parse_cache_size
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostProfileError
from pensieve.engine.cost_profiles import load_or_measure_cost
from pensieve.engine.elastic import ElasticTier
from pensieve.engine.engine import Engine
from pensieve.engine.grammar import Prototypes, Structured
from pensieve.engine.messages import EngineReady
from pensieve.engine.ranks.leader import build_workers
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.engine.worker.hybrid_sizing import cache_groups
from pensieve.engine.worker.sizing import WorkerInfo, report
from pensieve.errors import InvalidArgument
from pensieve.machine import memory, usable_cores
from pensieve.model.arch import Arch, ModelError

if TYPE_CHECKING:
    from llguidance import LLTokenizer

log = logging.getLogger(__name__)

MOST_MASK_THREADS: Final = 8
"""64 masks take 2 to 15 ms of one thread, while the step that they are for takes 10."""


def build_engine(options: EngineOptions) -> Engine:
    """Build an engine. Raises InvalidArgument, with what to change, when the options cannot be followed."""
    try:
        worker = build_workers(options)
        cost = load_or_measure_cost(options, worker)
    except (ModelError, CostProfileError, ValueError) as error:
        raise InvalidArgument(str(error)) from error
    info = worker.info
    cache = CacheManager(cache_config(options, info), cost, model=f"{options.model} {stored_as(info)}")
    config = scheduler_config(options, worker.arch, info)
    least = info.chunk_tokens + config.max_running
    if cache.has_states and config.max_batch_tokens < least:
        # A step must be able to take a request from one chunk boundary to the next, where states are kept.
        raise InvalidArgument(
            f"max batch tokens {config.max_batch_tokens}: a model with recurrent layers needs {least} at least, "
            f"a chunk of {info.chunk_tokens} tokens and one for each of {config.max_running} generations"
        )
    elastic = None
    if cache.resizer is not None:
        elastic = ElasticTier(
            cache,
            ranks=info.ranks,
            slack_bytes=parse_cache_size(options.device_slack, 1),
            idle_release_s=options.idle_release_s,
            free_memory=partial(_free_memory, info.device),
        )
    scheduler = Scheduler(config, cache, elastic)
    if scheduler.context_limit < 2:
        raise InvalidArgument(
            f"device cache {options.device_cache}: it holds no context of this model; give more, for example "
            f"--device-cache {info.context_limit}tokens"
        )
    device_floor = info.device_tier.num_bytes if info.device_floor is None else info.device_floor
    ready = EngineReady(
        context_limit=scheduler.context_limit,
        model_context_limit=info.context_limit,
        vocab_size=worker.arch.vocab_size,
        device=info.device,
        dtype=info.dtype,
        device_capacity_tokens=info.device_chunks * info.chunk_tokens,
        host_capacity_tokens=info.host_chunks * info.chunk_tokens,
        chunk_tokens=info.chunk_tokens,
        uses_hints=uses_hints(options),
        speculates=scheduler.drafting.most > 0,
        device_bytes=info.device_tier.num_bytes * info.ranks if len(info.groups) > 1 else 0,
        host_bytes=info.host_tier.num_bytes * info.ranks if len(info.groups) > 1 else 0,
        device_floor=device_floor * info.ranks,
        device_ceiling=info.device_tier.num_bytes * info.ranks,
        numerics=numerics(info),
        weights="fp8" if info.fp8 else info.dtype,
        kv=info.dtype if info.kv_dtype == "auto" else info.kv_dtype,
        elastic_refusal=info.elastic_refusal,
    )
    log.info("%s", report(worker.arch, info))
    tokenizer = partial(_grammar_tokenizer, Path(options.model), config.eos_token_ids)
    structured = Structured(
        Prototypes(tokenizer, worker.arch.vocab_size),
        threads=min(MOST_MASK_THREADS, max(1, usable_cores() // 2)),
    )
    return Engine(
        scheduler,
        worker,
        ready,
        overlapped=options.overlapped and info.device == "cuda",
        structured=structured,
    )


def _grammar_tokenizer(model: Path, eos_token_ids: tuple[int, ...]) -> LLTokenizer:
    from pensieve.tokenizer.matching import (
        read_grammar_tokenizer,  # late: an engine without grammars does without
    )

    return read_grammar_tokenizer(model, eos_token_ids)


def _free_memory(device: str) -> int:
    """Return the bytes that other programs leave free on this rank's device."""
    return int(torch.cuda.mem_get_info()[0]) if device == "cuda" else memory().available


def numerics(info: WorkerInfo) -> str:
    """Name what computes the answers. Invariant answers of two servers with the same name, model and number of ranks
    are equal to the bit."""
    device = torch.cuda.get_device_name() if info.device == "cuda" else info.device
    ranks = f" x {info.ranks}" if info.ranks > 1 else ""
    return f"{'invariant ' if info.is_invariant else ''}{stored_as(info)} {device}{ranks}"


def stored_as(info: WorkerInfo) -> str:
    """Name the dtype of the model, whether its weights have 8 bits, and the codec of its keys and values."""
    keys = "" if info.kv_dtype == "auto" else f" kv-{info.kv_dtype}"
    return info.dtype + " with fp8 weights" * info.fp8 + keys


def uses_hints(options: EngineOptions) -> bool:
    """Whether eviction considers how likely a session is to return, which hints describe."""
    return options.policy in ("gittins", "retention") and not options.stateless


def cache_config(options: EngineOptions, info: WorkerInfo) -> CacheConfig:
    """The cache's part of the options, sizes in chunks."""
    elastic = info.device_floor is not None
    in_bytes = elastic or len(info.groups) > 1
    return CacheConfig(
        device_chunks=info.device_chunks,
        host_chunks=info.host_chunks,
        chunk_tokens=info.chunk_tokens,
        policy=options.policy,
        swap_watermark=options.swap_watermark,
        decode_reserve=options.decode_reserve,
        prefix_sharing=options.prefix_sharing and not options.stateless,
        groups=cache_groups(info.groups, info.device_tier, elastic=elastic),
        device_bytes=info.device_tier.num_bytes if in_bytes else None,
        host_bytes=info.host_tier.num_bytes if in_bytes else None,
        check_recomputed=options.verify_swap and info.is_invariant,
        device_floor_bytes=info.device_floor,
    )


def scheduler_config(options: EngineOptions, arch: Arch, info: WorkerInfo) -> SchedulerConfig:
    """The scheduler's part of the options."""
    return SchedulerConfig(
        context_limit=info.context_limit,
        eos_token_ids=arch.eos_token_ids if options.eos_token_ids is None else options.eos_token_ids,
        max_batch_tokens=info.max_batch_tokens,
        max_running=info.max_running,
        max_queued=options.max_queued,
        stateless=options.stateless,
        unified_batch=options.unified_batch,
        swap_in_first=options.swap_in_first,
        max_drafts=info.max_drafts,
    )
