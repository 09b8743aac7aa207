"""Configuration: frozen values with a default and a reason each. Options, files and ``--print-config`` share it.

Each default is written once. ``CacheConfig`` and ``SchedulerConfig`` have no slots, so that a server's
options can take their defaults by name: ``CacheConfig.chunk_tokens``.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

PolicyName = Literal["gittins", "retention", "lru", "trailing-half", "whole-session"]
DeviceName = Literal["auto", "cpu", "cuda"]
DtypeName = Literal["auto", "float32", "bfloat16", "float16"]
WeightsName = Literal["auto", "full", "fp8"]
KvDtypeName = Literal["auto", "fp8", "int8"]
LoadFormat = Literal["auto", "safetensors", "dummy"]
AllReduce = Literal["auto", "nccl"]
SwapMechanism = Literal["auto", "batch", "kernel"]

BATCH_LIMITS = {"cpu": (512, 64), "cuda": (2048, 256)}
"""Tokens and generations per step: a CPU step must stay short, a GPU step must fill the device."""
LEASE_S = 10.0
HEARTBEAT_S = 10.0
DISCONNECT_GRACE_S = 15.0
MAX_WAIT_S = 2.0
"""Times of the service; ``options.table`` has the reasons."""
MAX_QUEUED_TOKENS = 1_000_000
"""Input tokens that may wait."""


@dataclass(frozen=True)
class CacheGroup:
    """A KV group (``model.groups``) as the cache sees it. By default: that of a model whose layers are all full, with
    pages counted as bytes."""

    kind: Literal["full", "window", "state"] = "full"
    window: int = 0
    """Widest window of its layers, in tokens."""
    layers: int = 1
    layer_page_bytes: int = 1
    device_unit: int = 0
    """Pages of a unit of the device tier; 0: the whole tier is one unit."""

    @property
    def page_bytes(self) -> int:
        return self.layers * self.layer_page_bytes


@dataclass(frozen=True)
class CacheConfig:
    """Sizes and rules of the two-tier chunk cache."""

    device_chunks: int
    """Pages of the device tier, one chunk each."""
    host_chunks: int
    """Pages of the host tier; 0 switches the tier off."""
    chunk_tokens: int = 32
    """Tokens per chunk and KV page (EuroSys §4.3.1 found 32 to work well)."""
    policy: PolicyName = "gittins"
    swap_watermark: float = 0.25
    """Swap out ahead of time while less than this fraction of device pages is free or reclaimable; 0 = on demand."""
    decode_reserve: float = 0.10
    """A new request joins only while more than this fraction stays free or reclaimable (EuroSys §4.3.5)."""
    prefix_sharing: bool = True
    """Off: no session uses the KV of another."""
    groups: tuple[CacheGroup, ...] = (CacheGroup(),)
    """The full group, then that of windows or states if the model has one."""
    device_bytes: int | None = None
    """With two groups: bytes of the device tier; None: ``device_chunks`` chunks, with all groups kept whole."""
    host_bytes: int | None = None
    """Likewise for ``host_chunks``."""
    check_recomputed: bool = False
    """On: plans name computed chunks, so that workers compare those that are computed again."""
    device_floor_bytes: int | None = None
    """Bytes of an elastic device tier that memory backs at least; ``device_bytes`` is then its ceiling, and all groups
    have a ``device_unit``, also a single one. None: the tier has one size."""


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits of batch formation, and switches for ablations."""

    context_limit: int
    """Longest context, in tokens, that the model takes."""
    eos_token_ids: tuple[int, ...] = ()
    max_batch_tokens: int = BATCH_LIMITS["cpu"][0]
    max_running: int = BATCH_LIMITS["cpu"][1]
    max_queued: int = 1024
    stateless: bool = False
    """On: drop a session's KV when its turn ends."""
    unified_batch: bool = True
    """Off: a step holds either decode tokens or restore and prefill spans, never both."""
    swap_in_first: bool = True
    """No ahead-of-time swap-out in a step that swaps in (EuroSys §5)."""
    max_drafts: int = 0
    """Drafts per step (``scheduling.drafts``); 0: none."""


class EngineTuning(msgspec.Struct, frozen=True, kw_only=True):
    """Options that the server passes on to its engine: names, types and defaults in one place."""

    device: DeviceName = "auto"
    dtype: DtypeName = "auto"
    weights: WeightsName = "auto"
    """``fp8``: projections of attention and of dense MLPs are stored and multiplied as codes of 8 bits. ``auto``: if
    the folder has them so. ``full``: in ``dtype``."""
    kv_dtype: KvDtypeName = "auto"
    """Codec of cached keys and values (``kernels.kv_codec``); ``auto``: none, they have the dtype of the model."""
    load_format: LoadFormat = "auto"
    """``dummy``: random weights made on the device; the folder then needs no weight files."""
    tensor_parallel: int = 1
    """Number of GPUs, or of processes on a CPU, that the model is divided over."""
    all_reduce: AllReduce = "auto"
    """How sums over ranks are computed on GPUs; ``nccl``: without symmetric memory."""
    device_cache: str = "auto"
    """``40GiB``, ``512MiB``, ``4096tokens`` or ``auto``: see ``pensieve.engine.worker.sizing``. A range such as
    ``8GiB..60GiB`` gives floor and ceiling: see ``device_range``."""
    device_slack: str = "0"
    """With a range: memory of the GPU that the tier leaves free, as a size in bytes; ``0``: do not look."""
    idle_release_s: float = 0
    """With a range: seconds without a turn after which the tier shrinks to its floor; 0: never."""
    host_cache: str = "auto"
    chunk_tokens: int = CacheConfig.chunk_tokens
    policy: PolicyName = CacheConfig.policy
    swap_watermark: float = CacheConfig.swap_watermark
    decode_reserve: float = CacheConfig.decode_reserve
    max_batch_tokens: int = 0
    """0: by device, see ``batch_limits``."""
    max_running: int = 0
    """0: by device, see ``batch_limits``."""
    max_queued: int = SchedulerConfig.max_queued
    context_limit: int = 0
    """0: the model's own limit."""
    stateless: bool = SchedulerConfig.stateless
    unified_batch: bool = SchedulerConfig.unified_batch
    swap_in_first: bool = SchedulerConfig.swap_in_first
    prefix_sharing: bool = CacheConfig.prefix_sharing
    """Off: no session uses the KV of another."""
    pipelined_swap_in: bool = True
    """Off: copy all layers of a step's swap-in before its first layer runs."""
    overlapped: bool = True
    """Schedule the next step while this one runs. GPU only: on a CPU there is nothing to overlap."""
    cuda_graphs: bool = True
    """Replay whole steps as CUDA graphs. GPU only."""
    shared_prefix_attention: bool = True
    """Read KV that several decodes of a step share once for all of them. GPU only."""
    swap_mechanism: SwapMechanism = "auto"
    """How chunks cross the bus. GPU only; ``auto`` measures both mechanisms at start-up."""
    invariant: bool | None = None
    """On: the bits of a token's logits depend only on the tokens before it, never on the rest of a step. None: off."""
    speculation: bool | None = None
    """Draft tokens from the conversation itself. None: on a CPU, in float32 or with ``invariant``."""
    verify_swap: bool = False
    """Check every chunk that returns from the host against a checksum taken when it left, on GPUs. With ``invariant``
    check also every chunk that is computed again. Costs time."""
    cost_profile: str = "auto"
    """``auto``, ``estimate`` (from the architecture alone) or a JSON file written by ``pensieve profile``."""


class EngineOptions(EngineTuning, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Options of an engine process, with sizes as written."""

    model: str
    """Local folder with config.json, safetensors and tokenizer, or a GGUF file; never ``demo`` or a hub id."""
    torch_threads: int = 0
    """CPU threads of the worker; 0: all cores."""
    eos_token_ids: tuple[int, ...] | None = None
    """Tokens that end a turn; None: those in config.json and generation_config.json."""


@dataclass(frozen=True, slots=True)
class DoorSettings:
    """The operator's settings of the HTTP door. Times are in seconds. Bounds hold before a body is parsed."""

    target: str
    """HOST:PORT of the conversation service, or any gRPC target."""
    tls: bool = False
    """Use TLS towards ``target``, with the system's root certificates."""
    tls_identity: str = ""
    """PEM file with a certificate and its private key to show to ``target``; implies ``tls``. "": none. A string,
    since settings travel as JSON."""
    patience_s: float = 20.0
    """Total time spent retrying an unreachable or busy service before the caller gets the error."""
    max_body_bytes: int = 4 * 1024 * 1024
    chat_ttl_s: float = 24 * 3600.0
    """Idle lifetime of a session made by a chat completion: its client keeps the history anyway."""
    completion_ttl_s: float = 600.0
    """Idle lifetime of a session made by a completion: until then the same prompt finds its state cached."""
    unstored_ttl_s: float = 600.0
    """Idle lifetime of a session that is deleted with its answer, in case the deletion fails."""
    max_heads: int = 100_000
    max_callers: int = 256
    """SDK clients that are kept: one per credential, more while it has many requests."""
    cors_origins: tuple[str, ...] = ()
    shows_metrics: bool = True
    """Serve ``/metrics``. False where a server's admin port serves them."""
    vouches: bool = False
    """The service trusts the certificate names and addresses that the door passes on, as on a server's private
    socket."""
    proxies: tuple[str, ...] = ()
    """Addresses and networks of proxies whose X-Forwarded-For is trusted."""
    on_loopback: bool = False
    """The door is reachable from this machine only. While it needs no key, it answers only to names of this
    machine and ``hosts``, so that another site's page cannot reach it under its own name (DNS rebinding)."""
    hosts: tuple[str, ...] = ()
    wants_keys: bool = False
    """Refuse calls while the service accepts callers without a key: the door is open to a network."""
    heartbeat_s: float = 10.0
    """Longest silence on a stream."""

    @property
    def identity(self) -> Path | None:
        """The file of ``tls_identity``."""
        return Path(self.tls_identity) if self.tls_identity else None


def batch_limits(options: EngineTuning, device: str) -> tuple[int, int]:
    """Return the most (tokens, generations) of one step: as given, or what suits ``device`` (``cpu`` or ``cuda``)."""
    tokens, running = BATCH_LIMITS[device]
    return options.max_batch_tokens or tokens, options.max_running or running


_SIZE = re.compile(r"\s*(\d{1,18}(?:\.\d{1,18})?)\s*(B|KiB|MiB|GiB|TiB|tokens?)\s*", re.IGNORECASE)
_UNITS = {"b": 1, "kib": 1 << 10, "mib": 1 << 20, "gib": 1 << 30, "tib": 1 << 40}


def device_range(size: str) -> tuple[str, str] | None:
    """Split ``FLOOR..CEILING`` into its two sizes, as written; None: ``size`` is one size. Neither side is checked."""
    floor, dots, ceiling = size.partition("..")
    return (floor.strip(), ceiling.strip()) if dots else None


def is_tokens(size: str) -> bool:
    """Whether a cache size that ``parse_cache_size`` takes is given in tokens, not in bytes."""
    return "token" in size.lower()


def parse_cache_size(size: str, bytes_per_token: int) -> int:
    """Return how many tokens fit a cache of ``size`` (``40GiB``, ``512MiB``, ``4096tokens``, ``0``), rounded down.

    Raises ValueError with the accepted forms on anything else.
    """
    if size.strip() == "0":
        return 0
    match = _SIZE.fullmatch(size)
    if match is None:
        raise ValueError(f"cache size {size!r}: write it as 40GiB, 512MiB or 4096tokens")
    number, unit = float(match[1]), match[2].lower()
    return int(number) if unit.startswith("token") else int(number * _UNITS[unit]) // bytes_per_token
