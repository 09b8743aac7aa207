"""Device, dtype, limits, and the sizes of both cache tiers.

A model with two KV groups shares the bytes of a tier between them as the load demands. So the size of such a tier in
tokens is that of contexts with all that their layers keep: see ``hybrid_sizing``.

A device tier may have a range of sizes (``--device-cache FLOOR..CEILING``). Both sides are sizes as without a range:
in bytes, or in tokens of contexts. The tier has units with one KV group too, and the floor decides how large they are,
so that the tier can be cut finely enough where it is smallest. ``num_bytes`` are totals over all ranks, layouts those
of one rank.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Final

import msgspec
import torch

from pensieve.config import (
    BATCH_LIMITS,
    EngineOptions,
    KvDtypeName,
    SchedulerConfig,
    batch_limits,
    device_range,
    is_tokens,
    parse_cache_size,
)
from pensieve.engine.cache.pages import PageSize, unit_pages_for
from pensieve.engine.kv.grid import TierLayout
from pensieve.engine.kv.pools import HybridPools, KvFormat, KvPools, KvTiers
from pensieve.engine.kv.virtual import driver, plain
from pensieve.engine.sampling.sampler import workspace_bytes as sampler_bytes
from pensieve.engine.worker.hybrid_sizing import (
    NO_TIER,
    ChunkSizes,
    ContextSizes,
    explicit_bytes,
    sizes_for,
    unit_bytes,
)
from pensieve.kernels.attention.capacity import COPIED_BYTES
from pensieve.machine import memory
from pensieve.model.arch import DTYPE_BYTES, Arch, StateShape
from pensieve.model.collective import SINGLE_RANK, Collective
from pensieve.model.folder import has_fp8_products
from pensieve.model.groups import ALIGNMENT, KvGroup, context_bytes, context_pages, kv_groups

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class DeviceRange:
    """A device tier that grows and shrinks."""

    floor: int
    """Bytes over all ranks; likewise the ceiling."""
    ceiling: int
    layout: TierLayout
    """One rank's tier at the ceiling."""


def refusal(device: str) -> str:
    """Return why this machine cannot have an elastic tier, in one clause; "": it can. On a GPU: of the current one."""
    if device != "cuda":
        return plain.refusal()
    return driver.refusal(torch.device("cuda", torch.cuda.current_device()))


def elastic_tier(
    size: str,
    sides: tuple[str, str],
    groups: Sequence[KvGroup],
    sizes: ChunkSizes | ContextSizes,
    *,
    on_gpu: bool,
) -> DeviceRange | None:
    """Return the tier of a range, written as ``size``; None when both sides come to the same size. Raises ValueError
    when a side is no size, or the floor is above the ceiling or less than a unit of each group."""
    for group in groups:
        if group.layers and group.layer_page_bytes % ALIGNMENT:
            raise ValueError(
                f"device cache {size}: a page of a {group.kind} layer is {group.layer_page_bytes} bytes; a range needs "
                f"a multiple of {ALIGNMENT}: give more chunk tokens"
            )
    least = explicit_bytes("device", sides[0], sizes, sizes.device_bytes) // sizes.ranks
    pages = tuple(
        PageSize(
            len(group.layers),
            group.layer_page_bytes,
            unit_pages_for(len(group.layers), group.layer_page_bytes, least, on_gpu=on_gpu),
        )
        for group in groups
    )
    one = sum(page.unit_bytes for page in pages)
    floor, ceiling = (_share(side, groups, pages, sizes) for side in sides)
    if floor < one:
        raise ValueError(
            f"device cache {size}: the floor is less than one chunk, which is {sizes.chunk_tokens} tokens or "
            f"{one * sizes.ranks} bytes"
        )
    if floor > ceiling:
        raise ValueError(f"device cache {size}: the floor {sides[0]} is above the ceiling {sides[1]}")
    if floor == ceiling:
        return None
    return DeviceRange(floor * sizes.ranks, ceiling * sizes.ranks, TierLayout(ceiling, pages))


def _share(
    size: str, groups: Sequence[KvGroup], pages: tuple[PageSize, ...], sizes: ChunkSizes | ContextSizes
) -> int:
    """Return one rank's bytes of a size: for tokens enough whole units; bytes are rounded down."""
    number = parse_cache_size(size, 1)
    if is_tokens(size):
        wanted = context_pages(tuple(groups), sizes.chunk_tokens, number) if number else (0,) * len(groups)
        return unit_bytes(wanted, pages)
    share = sizes.whole(number) // sizes.ranks
    return share if len(pages) > 1 else share - share % pages[0].unit_bytes


_HALF: Final = ("bfloat16", "float16")
DTYPES: Final = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
GIB: Final = 1 << 30
AUTO: Final = "auto"
CPU_TIER_BYTES: Final = GIB
"""Size of a tier for ``auto`` on a CPU: it fits a laptop beside other programs."""
DEVICE_SHARE: Final = 0.92
"""Share of the memory left by weights and workspace; the rest is for the allocator and other programs."""
HOST_SHARE: Final = 0.5
"""Share of the available host memory: the system cannot reclaim pinned memory under pressure."""
HOST_PER_DEVICE: Final = 4
"""Largest host tier for ``auto``, in device tiers: beyond that, pinning time grows faster than the hit rate."""
CONTEXT_BYTES: Final = GIB // 2
"""Memory that CUDA keeps for itself in this process."""
GRAPHS_BYTES: Final = 3 * GIB // 2
ATTENTION_BYTES: Final = GIB // 2
"""For partial results of split attention, step metadata and copy staging."""
FP8_CAPABILITY: Final = (8, 9)
"""Least compute capability with conversions from and to FP8."""
LEAST_DRAFTS: Final = 64
"""Drafts that a step holds however few requests may run: as many as one request uses (``drafts.MOST_PREDICTED``)."""
SESSION_TOKENS: Final = 2048
"""The start-up report counts sessions of this length."""


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and limits, known before the weights are loaded."""

    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """A key of ``DTYPES``."""
    context_limit: int
    max_batch_tokens: int
    max_running: int
    max_drafts: int = SchedulerConfig.max_drafts
    """See ``WorkerInfo``."""


@dataclass(frozen=True, slots=True)
class WorkerInfo:
    """The sizes and limits of a worker, as chosen for its device and model."""

    device: str
    dtype: str
    device_chunks: int
    """Pages of the tier. With two KV groups: chunks that it holds in contexts as long as possible."""
    host_chunks: int
    chunk_tokens: int
    context_limit: int
    max_batch_tokens: int = BATCH_LIMITS["cpu"][0]
    max_running: int = BATCH_LIMITS["cpu"][1]
    device_source: str = ""
    """Origin of the device tier's size, in words."""
    host_source: str = ""
    weight_bytes: int = 0
    """Bytes of one rank's weights."""
    ranks: int = 1
    """Ranks of the model. They number chunks alike, and each stores its share of every chunk."""
    groups: tuple[KvGroup, ...] = ()
    """The model's KV groups, with the bytes of one rank's pages."""
    device_tier: TierLayout = NO_TIER
    """Bytes and pages of one rank's tier, by group."""
    host_tier: TierLayout = NO_TIER
    device_floor: int | None = None
    """Bytes of one rank's device tier that memory backs at least; ``device_tier`` is then its largest size. None: the
    tier has one size."""
    elastic_refusal: str = ""
    """Why the device tier has one size although the options give a range."""
    fp8: bool = False
    """Whether weights are codes of 8 bits (``--weights``)."""
    kv_dtype: KvDtypeName = AUTO
    """Codec of keys and values."""
    is_invariant: bool = False
    """Whether a token's bits depend only on the tokens before it (``invariance``)."""
    max_drafts: int = SchedulerConfig.max_drafts
    """Drafts of a step, after each of which a token is chosen; 0: speculation is off."""


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes that one rank can still allocate. On a CPU both tiers come out of ``host``, which all ranks share."""

    device: int
    host: int
    device_most: int = 0
    """``device``, if no other program used the GPU, where that is more."""


@dataclass(frozen=True, slots=True)
class TierSizes:
    device_chunks: int
    host_chunks: int
    device_source: str
    host_source: str
    device_floor: int | None
    """See ``WorkerInfo``."""
    device_tier: TierLayout = field(default=NO_TIER, compare=False)
    """Bytes and pages of one rank's tier."""
    host_tier: TierLayout = field(default=NO_TIER, compare=False)


def resolve_device(options: EngineOptions, arch: Arch) -> Placement:
    """Return device, dtype and limits. Raises ValueError when this machine cannot satisfy the options."""
    device = _choose_device(options)
    dtype: str = options.dtype
    if dtype == AUTO:
        dtype = "float32" if device == "cpu" else arch.dtype if arch.dtype in _HALF else "bfloat16"
    if device == "cuda" and dtype in _HALF and arch.recurrent is not None and not find_spec("fla"):
        raise ValueError(
            "recurrent layers on a GPU need the package fla-core: pip install 'pensieve[server]'"
        )
    _require_codec(options, arch, device)
    if options.chunk_tokens < 1:
        raise ValueError(f"chunk tokens {options.chunk_tokens}: at least 1")
    sides = device_range(options.device_cache)
    sizes = [size for size in (options.device_cache, options.host_cache) if size != AUTO]
    for size in (*sides, *sizes[1:]) if sides is not None else sizes:
        parse_cache_size(size, 1)  # refuse an invalid size before the weights are read
    limit = options.context_limit or arch.context_limit
    if limit > arch.context_limit:
        raise ValueError(f"context limit {limit}: this model takes at most {arch.context_limit} tokens")
    fp8 = has_fp8_products(Path(options.model), options.weights)
    if fp8 and device == "cuda" and (found := torch.cuda.get_device_capability()) < FP8_CAPABILITY:
        raise ValueError(
            f"weights fp8: this GPU has compute capability {found[0]}.{found[1]}, and its products take 8-bit floats "
            f"from {FP8_CAPABILITY[0]}.{FP8_CAPABILITY[1]} on; start with --weights full"
        )
    tokens, running = batch_limits(options, device)
    has_codes = fp8 or options.kv_dtype != "auto"
    speculates = _speculates(options, device, "8 bits" if has_codes else dtype)
    drafts = max(running, LEAST_DRAFTS) if speculates else 0
    return Placement(device, dtype, limit, tokens, running, drafts)


def _choose_device(options: EngineOptions) -> str:
    has_gpu = torch.cuda.is_available()
    if options.device == AUTO:
        return "cuda" if has_gpu else "cpu"
    if options.device == "cuda" and not has_gpu:
        raise ValueError("device cuda: torch sees no CUDA device here (try `pensieve doctor`)")
    return options.device


def _speculates(options: EngineOptions, device: str, dtype: str) -> bool:
    """Whether steps have drafts. By default only where the rounding of larger steps does not change answers: in 16 bits
    near ties are frequent, and codes of 8 bits enlarge differences."""
    if options.speculation is not None:
        return options.speculation
    return device == "cpu" and (dtype == "float32" or bool(options.invariant))


def _require_codec(options: EngineOptions, arch: Arch, device: str) -> None:
    """Raise ValueError when this model or device cannot have keys and values in 8 bits as asked for."""
    name = options.kv_dtype
    if name == "auto":
        return
    if not arch.attention_layers:
        raise ValueError(f"kv dtype {name}: {arch.family} has no keys and values; start without --kv-dtype")
    if device == "cuda" and name == "fp8" and torch.cuda.get_device_capability() < FP8_CAPABILITY:
        found = ".".join(map(str, torch.cuda.get_device_capability()))
        raise ValueError(
            f"kv dtype fp8: this GPU (compute capability {found}) has no FP8: give --kv-dtype int8"
        )


def worker_info(
    options: EngineOptions, arch: Arch, *, weight_bytes: int = 0, collective: Collective = SINGLE_RANK
) -> WorkerInfo:
    """Resolve ``options`` on this machine, now; on a GPU, call it with the weights loaded. ``arch``: of a
    rank's shard. All ranks get the same result, limited by the rank with the least memory. Raises ValueError
    with numbers and advice."""
    placement = resolve_device(options, arch)
    here = free_memory(placement.device)
    sides = device_range(options.device_cache)
    why = refusal(placement.device) if sides is not None else ""
    *found, follows = collective.all_reduce_min([here.device, here.host, here.device_most, int(not why)])
    if sides is not None and not follows:
        why = why or "another rank's device cannot follow a range"
        log.warning("device cache %s: one size, %s, because %s", options.device_cache, sides[1], why)
        options = msgspec.structs.replace(options, device_cache=sides[1])
    tiers = tier_sizes(options, arch, placement, FreeMemory(*found), collective.ranks)
    return WorkerInfo(
        device=placement.device,
        dtype=placement.dtype,
        device_chunks=tiers.device_chunks,
        host_chunks=tiers.host_chunks,
        chunk_tokens=options.chunk_tokens,
        context_limit=placement.context_limit,
        max_batch_tokens=placement.max_batch_tokens,
        max_running=placement.max_running,
        device_source=tiers.device_source,
        host_source=tiers.host_source,
        weight_bytes=weight_bytes,
        ranks=collective.ranks,
        groups=kv_groups(arch, options.chunk_tokens, placement.dtype, options.kv_dtype),
        kv_dtype=options.kv_dtype,
        device_tier=tiers.device_tier,
        host_tier=tiers.host_tier,
        device_floor=tiers.device_floor,
        elastic_refusal=why,
        fp8=has_fp8_products(Path(options.model), options.weights),
        is_invariant=bool(options.invariant),
        max_drafts=placement.max_drafts,
    )


def free_memory(device: str) -> FreeMemory:
    """Return the free memory. On a GPU, memory that torch caches without using it counts as free."""
    host = memory().available
    if device != "cuda":
        return FreeMemory(host, host)
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    return FreeMemory(free, host, total - torch.cuda.memory_reserved() - CONTEXT_BYTES)


def workspace_bytes(arch: Arch, placement: Placement, *, cuda_graphs: bool, coded: bool = False) -> int:
    """Return an upper estimate of one step's memory on a GPU beside weights and KV. ``coded``: KV has 8 bits."""
    size = DTYPE_BYTES[placement.dtype]
    # Queries, keys and values; attention's output.
    heads = 2 * arch.head_dim * (arch.num_heads + arch.num_kv_heads)
    mlp = arch.intermediate_size * (3 if arch.gated_mlp else 2)
    if arch.experts is not None:
        # For each expert that a token is in: gate and projection, their product, the result.
        row = 3 * arch.experts.width + arch.hidden_size
        mlp = max(mlp, arch.experts.per_token * row + arch.experts.count + 3 * arch.experts.shared_width)
    # The residual stream, its normalised copy and one block's output are alive together with the widest of
    # the rest.
    widest = max(heads, mlp, *(_recurrent_width(layer.state) for layer in arch.layers if layer.state))
    activations = placement.max_batch_tokens * (4 * arch.hidden_size + widest) * size
    # The head's output in the model's dtype, in float32, and without NaN; the last is kept from step to step.
    rows = placement.max_running + placement.max_drafts
    logits = rows * arch.vocab_size * (size + 4 + 2 * 4)
    logits += sampler_bytes(rows, arch.vocab_size)
    # Wide items read plain copies of coded pages.
    copies = COPIED_BYTES if coded and placement.dtype == "bfloat16" else 0
    return activations + logits + ATTENTION_BYTES + copies + (GRAPHS_BYTES if cuda_graphs else 0)


def _recurrent_width(state: StateShape) -> int:
    """Return the values per token of a recurrent layer: inputs, what the convolution makes of them, outputs, gates, and
    the states between the blocks of a long chain."""
    inner = state.heads * state.value_dim
    return 3 * (state.conv_channels + inner) + state.key_dim * inner // 32


def tier_sizes(
    options: EngineOptions, arch: Arch, placement: Placement, free: FreeMemory, ranks: int = 1
) -> TierSizes:
    """Return the chunks of both tiers, from the options or from free memory; totals over all ranks. ``arch``:
    of one rank's shard. ``free``: of the rank that has least. Raises ValueError."""
    groups = kv_groups(arch, options.chunk_tokens, placement.dtype, options.kv_dtype)
    on_gpu = placement.device == "cuda"
    sizes = sizes_for(groups, options.chunk_tokens, placement.context_limit, ranks=ranks, on_gpu=on_gpu)
    coded = options.kv_dtype != "auto" and not options.invariant
    workspace = workspace_bytes(arch, placement, cuda_graphs=options.cuda_graphs, coded=coded)
    kept = ranks * workspace if on_gpu else 0
    device_free = ranks * free.device if on_gpu else free.device
    sides, size = device_range(options.device_cache), options.device_cache
    tier: DeviceRange | None = None
    if sides is not None:
        tier, size = elastic_tier(size, sides, groups, sizes, on_gpu=on_gpu), sides[1]
    if tier is not None:
        most = ranks * max(free.device, free.device_most) if on_gpu else device_free
        _check_range(options.device_cache, tier, device_free - kept, most - kept)
        device_bytes, device = tier.ceiling, tier.layout
        device_source = f"--device-cache {options.device_cache}, {gib(tier.floor)} at least"
    else:
        device_bytes, device_source = _device_tier(size, sizes, on_gpu, device_free, kept)
        device = sizes.device_layout(device_bytes)
    host_free = free.host if on_gpu else free.host - device_bytes
    host_bytes, host_source = _host_tier(options, sizes, on_gpu, host_free, device_bytes)
    host, floor = sizes.host_layout(host_bytes), None if tier is None else tier.floor // ranks
    return TierSizes(
        sizes.chunks(device), sizes.chunks(host), device_source, host_source, floor, device, host
    )


def allocate_pools(arch: Arch, info: WorkerInfo) -> KvTiers:
    """Allocate both tiers as large as ``info`` says. Raises ValueError when memory does not suffice."""
    form = KvFormat(info.chunk_tokens, DTYPES[info.dtype], info.kv_dtype)
    try:
        if len(info.groups) > 1 or info.device_floor is not None:
            return HybridPools(
                arch,
                info.groups,
                (info.device_tier, info.host_tier),
                form=form,
                device=torch.device(info.device),
                floor=info.device_floor,
            )
        return KvPools(
            arch,
            device_chunks=info.device_chunks,
            host_chunks=info.host_chunks,
            form=form,
            device=torch.device(info.device),
        )
    except (RuntimeError, MemoryError) as error:  # torch has no narrower class on a CPU
        # Only a GPU's error adds information: which tier did not fit, and how much memory there was.
        detail = f" ({error})" if info.device == "cuda" else ""
        raise ValueError(
            f"no memory for {info.device_chunks} device and {info.host_chunks} host chunks of "
            f"{info.chunk_tokens} tokens: give smaller cache sizes{detail}"
        ) from error


def _check_range(size: str, tier: DeviceRange, room: int, most: int) -> None:
    """Raise ValueError unless the floor fits into ``room``, the memory that is free now, and the ceiling into ``most``,
    what the device has beside weights and workspace."""
    for name, num_bytes, limit in (("floor", tier.floor, room), ("ceiling", tier.ceiling, most)):
        if num_bytes > limit:
            raise ValueError(
                f"device cache {size}: a {name} of {gib(num_bytes)} does not fit into {gib(max(0, limit))}: give at "
                f"most {_as_size(limit)}"
            )


def _device_tier(
    size: str, sizes: ChunkSizes | ContextSizes, on_gpu: bool, free: int, kept: int
) -> tuple[int, str]:
    """Return the bytes of a device tier of one size over all ranks, and where that comes from."""
    room = max(0, free - kept)
    what = f"{gib(free)} free, {gib(kept)} of it kept for steps" if on_gpu else f"{gib(free)} available"
    least = sizes.device_bytes(sizes.chunk_tokens)
    if size != AUTO:
        num_bytes = explicit_bytes("device", size, sizes, sizes.device_bytes)
        if num_bytes < least:
            raise ValueError(
                f"device cache {size}: less than one chunk, which is {sizes.chunk_tokens} tokens "
                f"or {least} bytes"
            )
        if num_bytes > room:
            fewer = ", or lower --max-batch-tokens or --max-running" if on_gpu else ""
            raise ValueError(
                f"device cache {size}: {gib(num_bytes)} do not fit ({what}): "
                f"give at most {_as_size(room)}{fewer}"
            )
        return num_bytes, f"--device-cache {size}"
    if not on_gpu:
        return max(least, sizes.whole(min(CPU_TIER_BYTES, room))), "auto: 1 GiB on a CPU"
    num_bytes = sizes.whole(int(room * DEVICE_SHARE))
    if num_bytes < least:
        raise ValueError(
            f"device cache auto: no room for one chunk of {least} bytes ({what}): lower --max-batch-tokens or "
            "--max-running, free memory on the GPU, or take a smaller model or dtype"
        )
    return num_bytes, f"auto: {DEVICE_SHARE:.0%} of the rest of {what}"


def _host_tier(
    options: EngineOptions, sizes: ChunkSizes | ContextSizes, on_gpu: bool, free: int, device_bytes: int
) -> tuple[int, str]:
    """Return the bytes of the host tier over all ranks, and where that comes from."""
    if options.host_cache != AUTO:
        num_bytes = explicit_bytes("host", options.host_cache, sizes, sizes.host_bytes)
        if num_bytes > free:
            raise ValueError(
                f"host cache {options.host_cache}: {gib(num_bytes)} do not fit into {gib(max(0, free))} of "
                f"available memory: give at most {_as_size(free)}, or 0 to switch this tier off"
            )
        return num_bytes, f"--host-cache {options.host_cache}"
    if not on_gpu:
        return sizes.whole(max(0, min(CPU_TIER_BYTES, free))), "auto: 1 GiB on a CPU"
    half, most = sizes.whole(int(max(0, free) * HOST_SHARE)), HOST_PER_DEVICE * device_bytes
    of_free, of_device = f"{HOST_SHARE:.0%} of {gib(free)} available", f"{HOST_PER_DEVICE}x the device tier"
    why = of_free if half < most else of_device
    return min(half, most), f"auto: {why}"


def gib(count: int) -> str:
    return f"{count / GIB:.1f} GiB"


def _as_size(count: int) -> str:
    """Format bytes as a cache size option, rounded down."""
    return f"{max(0, count) >> 20}MiB"


def report(arch: Arch, info: WorkerInfo) -> str:
    """Return the start-up report for the log, in a few lines."""
    where = info.device
    if info.device == "cuda":
        where += f" ({torch.cuda.get_device_name()})"
    each, keys = "", "" if info.kv_dtype == "auto" else f" with KV in {info.kv_dtype}"
    if info.ranks > 1:
        where, each = f"{info.ranks} x {where}", " each"
    (full, *_) = kv_groups(arch, info.chunk_tokens, info.dtype, info.kv_dtype)
    per_chunk = full.page_bytes * info.ranks
    lines = [
        f"{arch.family}, {arch.num_layers} layers, in {info.dtype}{keys} on {where}: "
        f"weights {gib(info.weight_bytes)}{each}{', fp8' * info.fp8}, contexts up to {info.context_limit} tokens, "
        f"steps of up to {info.max_batch_tokens} tokens and {info.max_running} generations"
    ]
    tiers = (
        ("device", info.device_chunks, info.device_tier, info.device_source),
        ("host", info.host_chunks, info.host_tier, info.host_source),
    )
    for name, chunks, tier, source in tiers:
        tokens = chunks * info.chunk_tokens
        size, held = chunks * per_chunk, f"{tokens // SESSION_TOKENS} sessions of {SESSION_TOKENS}"
        if len(info.groups) > 1:
            sessions = tier.num_bytes // context_bytes(info.groups, info.chunk_tokens, SESSION_TOKENS)
            size, held = tier.num_bytes * info.ranks, f"{sessions} sessions of {SESSION_TOKENS}"
        lines.append(f"  {name} tier: {gib(size)}, {tokens} tokens, {held} ({source or 'as given'})")
    return "\n".join(lines)
