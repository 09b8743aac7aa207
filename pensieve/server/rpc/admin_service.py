"""``pensieve.v1.AdminService``, for operators. ``server/ports.py`` says on which ports."""

from __future__ import annotations

from typing import Any

from pensieve.config import device_range, is_tokens, parse_cache_size
from pensieve.engine.messages import EngineReady, Memory
from pensieve.errors import FailedPrecondition, InvalidArgument
from pensieve.server.clock import now_ms
from pensieve.server.conversations import Conversations
from pensieve.server.links.engine_link import EngineLink
from pensieve.server.rpc import convert
from pensieve.server.rpc.service import key_of
from pensieve.server.rpc.validation import Bounds, seconds, validate
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc

DRAIN_S = 30.0
"""Time for running turns when a drain request has no deadline."""


class AdminService(pensieve_pb2_grpc.AdminServiceServicer):
    def __init__(self, link: EngineLink, conversations: Conversations, device_cache: str = "auto") -> None:
        """``device_cache``: the option as written."""
        self._device_cache = device_cache
        self._link = link
        self._conversations = conversations
        self._bounds = Bounds(conversations.settings.limits, lambda: conversations.vocab_size)
        self._steps = 0
        self._step_seen_ms = 0

    async def GetStats(self, request: pb.GetStatsRequest, _context: Any) -> pb.GetStatsResponse:
        validate(request, self._bounds)
        info, stats = self._link.info, self._link.stats
        if stats.steps_total != self._steps:
            self._steps, self._step_seen_ms = stats.steps_total, now_ms()
        message = pb.GetStatsResponse(
            replica=self._conversations.settings.replica,
            running_turns=stats.running,
            queued_turns=stats.queued,
            gpu_tokens_used=stats.device_used,
            gpu_tokens_capacity=info.device_capacity_tokens,
            host_tokens_used=stats.host_used,
            host_tokens_capacity=info.host_capacity_tokens,
            store_state=await self._conversations.store_state(),
            tenants=[convert.tenant_usage(use) for use in await self._conversations.usage.for_all_tenants()],
        )
        if self._step_seen_ms:
            # The engine reports how many steps it made, not when: this is when the front end first saw a new one.
            message.last_engine_step_time.CopyFrom(convert.timestamp(self._step_seen_ms))
        return message

    async def EvictCache(self, request: pb.EvictCacheRequest, _context: Any) -> pb.EvictCacheResponse:
        """Evict the named session of the caller's own tenant, or all idle sessions."""
        validate(request, self._bounds)
        key = key_of(request.session) if request.session else None
        return pb.EvictCacheResponse(tokens_evicted=await self._conversations.evict(key))

    async def Drain(self, request: pb.DrainRequest, _context: Any) -> pb.DrainResponse:
        """Drain, and return when no turn runs. ``turns_left`` counts the turns discarded at the deadline."""
        validate(request, self._bounds)
        deadline_s = (seconds(request.deadline) or 0.0) if request.HasField("deadline") else DRAIN_S
        return pb.DrainResponse(turns_left=await self._conversations.drain(deadline_s))

    async def GetMemory(self, request: pb.GetMemoryRequest, _context: Any) -> pb.GetMemoryResponse:
        validate(request, self._bounds)
        return pb.GetMemoryResponse(device=_device_memory(await self._link.memory()))

    async def SetMemory(self, request: pb.SetMemoryRequest, _context: Any) -> pb.SetMemoryResponse:
        """Set the wanted size of the device tier. Returns at once; the held size follows."""
        validate(request, self._bounds)
        answer = await self._link.memory(wanted_bytes(request.device, self._device_cache, self._link.info))
        if answer.refused:
            raise InvalidArgument.field("device", answer.refused)
        return pb.SetMemoryResponse(device=_device_memory(answer))


def wanted_bytes(size: str, device_cache: str, info: EngineReady) -> int:
    """Return the bytes of an elastic device tier that are meant by ``size``, which ``parse_cache_size`` takes.

    ``device_cache``: the range that the engine was started with. Its sides stand for floor and ceiling, which the
    engine may have rounded. Raises FailedPrecondition for a tier of one size, InvalidArgument for a size outside of the
    range or one that cannot be converted.
    """
    floor, ceiling = info.device_floor, info.device_ceiling
    if floor == ceiling:
        raise FailedPrecondition(
            info.elastic_refusal
            or "the device tier has one size: start the server with a range, such as --device-cache 8GiB..60GiB",
            reason="DEVICE_CACHE_FIXED",
        )
    number = parse_cache_size(size, 1)
    for side, num_bytes in zip(device_range(device_cache) or (), (floor, ceiling), strict=False):
        if is_tokens(side) == is_tokens(size) and parse_cache_size(side, 1) == number:
            return num_bytes
    if is_tokens(size):
        if info.device_bytes:
            raise InvalidArgument.field(
                "device", "must be in bytes, such as 40GiB: the kinds of KV of this model share the tier"
            )
        chunks = info.device_capacity_tokens // info.chunk_tokens
        number = number // info.chunk_tokens * ceiling // chunks
    if not floor <= number <= ceiling:
        raise InvalidArgument.field(
            "device", f"must be from {format_size(floor)} to {format_size(ceiling)}, as --device-cache allows"
        )
    return number


def format_size(num_bytes: int) -> str:
    """Format bytes exactly, in the largest unit that divides them: ``8GiB``, ``1536MiB``."""
    for shift, unit in ((30, "GiB"), (20, "MiB"), (10, "KiB")):
        if num_bytes and num_bytes % (1 << shift) == 0:
            return f"{num_bytes >> shift}{unit}"
    return f"{num_bytes}B"


def _device_memory(memory: Memory) -> pb.DeviceMemory:
    return pb.DeviceMemory(held=memory.held, wanted=memory.wanted, floor=memory.floor, ceiling=memory.ceiling)
