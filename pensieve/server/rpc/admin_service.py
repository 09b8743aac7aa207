"""``pensieve.v1.AdminService``, for operators. ``server/ports.py`` says on which ports."""

from __future__ import annotations

from typing import Any

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
    def __init__(self, link: EngineLink, conversations: Conversations) -> None:
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
