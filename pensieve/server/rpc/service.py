"""The gRPC services: convert messages to values and back, and have no rules of their own.

``ConversationService`` is for clients: every method validates and converts before its first await. ``AdminService`` is
for operators; ``server/ports.py`` says on which ports.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from typing import Any, Final, TypeVar

from google.protobuf.message import Message

from pensieve.config import device_range, is_tokens, parse_cache_size
from pensieve.core import Role
from pensieve.engine.messages import EngineReady, Memory
from pensieve.errors import (
    DeadlineExceeded,
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    ResourceExhausted,
)
from pensieve.server import ids
from pensieve.server.clock import now_ms
from pensieve.server.conversations import Conversations
from pensieve.server.keys import GRAMMARS
from pensieve.server.links.engine_link import EngineLink
from pensieve.server.rpc import convert
from pensieve.server.rpc.auth import ANONYMOUS
from pensieve.server.rpc.interceptor import current_caller
from pensieve.server.rpc.validation import Bounds, seconds, validate
from pensieve.server.sessions.exports import ImportReader, chunks
from pensieve.server.sessions.lookup import RequestClaim
from pensieve.server.sessions.subjects import SessionReceipt
from pensieve.server.turns.stream import StreamOptions, StreamPacer, events
from pensieve.server.values import NewTurn, OnDisconnect
from pensieve.store import Key
from pensieve.store.records import SessionRow
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc

Request = TypeVar("Request", bound=Message)
MAX_IMPORTS: Final = 8
"""Imports at once: each keeps a whole session in memory until its last line has come."""
MAX_TENANT_IMPORTS: Final = 2
IMPORT_TIMEOUT_S: Final = 300.0


def key_of(name: str) -> Key:
    """Return the caller's session with this validated name. The tenant comes from the credential only."""
    return Key(current_caller().tenant, ids.session_id(name))


class ConversationService(pensieve_pb2_grpc.ConversationServiceServicer):
    """Handlers of the conversation service. Registered behind ``Interceptor``, which authenticates and maps errors."""

    def __init__(self, conversations: Conversations) -> None:
        self._conversations = conversations
        self._sessions = conversations.sessions
        self._turns = conversations.turns
        self._pace = StreamPacer(conversations.settings.messages_per_s)
        self._imports: Counter[str] = Counter()
        """Running imports by tenant."""
        self._bounds = Bounds(conversations.settings.limits, lambda: conversations.vocab_size)

    # ---- sessions

    async def CreateSession(
        self, request: pb.CreateSessionRequest, _context: Any
    ) -> pb.CreateSessionResponse:
        new = convert.new_session(self._valid(request))
        row = await self._sessions.create(current_caller().tenant, new)
        return pb.CreateSessionResponse(session=self._session(row))

    async def GetSession(self, request: pb.GetSessionRequest, _context: Any) -> pb.GetSessionResponse:
        key = key_of(self._valid(request).name)
        message = self._session(row := await self._sessions.get(key))
        if request.view == pb.SESSION_VIEW_FULL:
            resident = await self._conversations.residency(key)
            if resident is not None:
                replica = self._conversations.settings.replica
                message.residency.CopyFrom(convert.residency(resident, row, replica, now_ms()))
        return pb.GetSessionResponse(session=message)

    async def ListSessions(self, request: pb.ListSessionsRequest, _context: Any) -> pb.ListSessionsResponse:
        page = await self._sessions.list(
            current_caller().tenant,
            page_size=self._valid(request).page_size,
            page_token=request.page_token,
            labels=convert.label_selector(request.label_selector),
        )
        return pb.ListSessionsResponse(
            sessions=[self._session(row) for row in page.rows], next_page_token=page.next_token
        )

    async def UpdateSession(
        self, request: pb.UpdateSessionRequest, _context: Any
    ) -> pb.UpdateSessionResponse:
        change = convert.session_change(self._valid(request))
        expected = convert.optional(request, "expected_revision")
        row = await self._sessions.update(key_of(request.name), change, expected)
        return pb.UpdateSessionResponse(session=self._session(row))

    async def DeleteSession(
        self, request: pb.DeleteSessionRequest, _context: Any
    ) -> pb.DeleteSessionResponse:
        await self._sessions.delete(
            key_of(self._valid(request).name),
            expected_revision=convert.optional(request, "expected_revision"),
            allow_missing=request.allow_missing,
            unused_only=request.unused_only,
            keep_cached=request.keep_cached,
        )
        return pb.DeleteSessionResponse()

    async def ForkSession(self, request: pb.ForkSessionRequest, _context: Any) -> pb.ForkSessionResponse:
        row = await self._sessions.fork(key_of(self._valid(request).name), convert.new_fork(request))
        return pb.ForkSessionResponse(session=self._session(row))

    async def RewindSession(
        self, request: pb.RewindSessionRequest, _context: Any
    ) -> pb.RewindSessionResponse:
        expected = convert.optional(self._valid(request), "expected_revision")
        row = await self._sessions.rewind(
            key_of(request.name), request.item, request.request_id, expected, erase=request.erase
        )
        return pb.RewindSessionResponse(session=self._session(row))

    async def AppendItems(self, request: pb.AppendItemsRequest, _context: Any) -> pb.AppendItemsResponse:
        entries = convert.entries(self._valid(request).items)
        expected = convert.optional(request, "expected_revision")
        row, items = await self._sessions.append(
            key_of(request.name),
            entries,
            request.request_id,
            expected,
            tuple(map(Role, request.followed_by)),
        )
        return pb.AppendItemsResponse(
            session=self._session(row), items=[convert.item(one, tokens=False) for one in items]
        )

    async def ListItems(self, request: pb.ListItemsRequest, _context: Any) -> pb.ListItemsResponse:
        page = await self._sessions.items(
            key_of(self._valid(request).name),
            page_size=request.page_size,
            page_token=request.page_token,
            after_item=request.after_item,
        )
        return pb.ListItemsResponse(
            items=[convert.item(item, tokens=request.include_tokens) for item in page.items],
            next_page_token=page.next_token,
            revision=page.revision,
        )

    async def CompactSession(
        self, request: pb.CompactSessionRequest, _context: Any
    ) -> pb.CompactSessionResponse:
        key, wanted = key_of(self._valid(request).name), convert.compaction_request(request)
        await self._conversations.quotas.check_turn(key, request.request_id)
        done = await self._conversations.compactor.compact(key, wanted)
        return convert.compact_session_response(done, self._session(done.row))

    # ---- personal data

    async def EraseSubject(self, request: pb.EraseSubjectRequest, context: Any) -> None:
        erasure = self._conversations.subjects.erase(current_caller().tenant, self._valid(request).subject)
        async with aclosing(erasure) as events:
            async for event in events:
                if isinstance(event, SessionReceipt):
                    message = pb.EraseSubjectResponse(session=convert.erased_session(event))
                else:
                    done = convert.subject_erased(event, self._conversations.settings.replica)
                    message = pb.EraseSubjectResponse(completed=done)
                await context.write(message)

    async def ExportSession(self, request: pb.ExportSessionRequest, context: Any) -> None:
        row = await self._sessions.get(key_of(self._valid(request).name))
        await self._export(
            self._conversations.subjects.export_session(row), pb.ExportSessionResponse, context
        )

    async def ExportSubject(self, request: pb.ExportSubjectRequest, context: Any) -> None:
        lines = self._conversations.subjects.export(current_caller().tenant, self._valid(request).subject)
        await self._export(lines, pb.ExportSubjectResponse, context)

    async def _export(
        self, lines: AsyncGenerator[bytes, None], response: type[Message], context: Any
    ) -> None:
        async with aclosing(lines), aclosing(chunks(lines)) as pieces:
            async for piece in pieces:
                await context.write(response(data=piece))

    async def ImportSession(
        self, requests: AsyncIterator[pb.ImportSessionRequest], _context: Any
    ) -> pb.ImportSessionResponse:
        reader = ImportReader()
        first: pb.ImportSessionRequest | None = None
        tenant = current_caller().tenant
        if self._imports[tenant] >= MAX_TENANT_IMPORTS or self._imports.total() >= MAX_IMPORTS:
            raise ResourceExhausted("too many imports at once", retry_after_s=1.0)
        self._imports[tenant] += 1
        try:
            async with asyncio.timeout(IMPORT_TIMEOUT_S):
                async for request in requests:
                    first = first or self._valid(request)
                    reader.feed(request.data)
                imported = reader.finish()
        except TimeoutError as error:
            raise DeadlineExceeded("the import took too long to arrive", reason="REQUEST_TOO_SLOW") from error
        finally:
            self._imports -= Counter({tenant: 1})  # drops tenants without any
        assert first is not None, "an import without a message has no whole lines"
        session_id = "" if first.new_id else first.session_id or imported.session_id
        self._valid(convert.imported_session(imported, session_id))
        row = await self._sessions.import_session(tenant, imported, session_id=session_id)
        return pb.ImportSessionResponse(session=self._session(row))

    async def WarmSession(self, request: pb.WarmSessionRequest, _context: Any) -> pb.WarmSessionResponse:
        answer = await self._conversations.warmer.warm(key_of(self._valid(request).session))
        return convert.warm_session_response(answer, self._conversations.settings.replica, now_ms())

    # ---- turns

    async def StreamTurn(self, request: pb.StreamTurnRequest, context: Any) -> None:
        spec = self._turn_spec(request)
        settings = self._conversations.settings
        key, attach_only = key_of(request.session), request.attach_only
        attach = self._turns.attach(
            key,
            spec,
            policy=convert.on_disconnect(request.on_disconnect),
            attach_only=attach_only,
            deadline_s=context.time_remaining(),
            stream_id=request.stream_id,
        )
        offsets = (request.resume_token_offset, *request.resume_candidate_offsets)
        resume = (request.resume_attempt, offsets)
        del request  # may be large, and the stream may be long
        if not attach_only:
            await self._check_quota(key, spec.request_id)
        async with attach as (buffer, joined):
            options = StreamOptions(spec.output, settings.heartbeat_s, *resume, joined)
            async with aclosing(events(buffer, options, self._pace)) as stream:
                async for event in stream:
                    await context.write(convert.stream_event(event, spec.output, settings.heartbeat_s))

    async def RunTurn(self, request: pb.RunTurnRequest, context: Any) -> pb.RunTurnResponse:
        spec = self._turn_spec(request)
        key = key_of(request.session)
        attach = self._turns.attach(
            key,
            spec,
            policy=OnDisconnect.CANCEL,
            attach_only=False,
            deadline_s=context.time_remaining(),
        )
        del request
        await self._check_quota(key, spec.request_id)
        async with attach as (buffer, _):
            view = await buffer.outcome()
        return pb.RunTurnResponse(turn=convert.turn(view, tokens=spec.output.token_ids))

    async def GetTurn(self, request: pb.GetTurnRequest, _context: Any) -> pb.GetTurnResponse:
        view = await self._turns.get(key_of(self._valid(request).session), request.request_id)
        return pb.GetTurnResponse(turn=convert.turn(view))

    async def FindTurn(self, request: pb.FindTurnRequest, _context: Any) -> pb.FindTurnResponse:
        mark = self._valid(request).mark
        answer = request.answer if request.HasField("answer") else None
        match = await self._conversations.find_turn(current_caller().tenant, mark, answer, request.request_id)
        return pb.FindTurnResponse(turn=convert.turn(match.view), candidate=match.candidate)

    async def ClaimRequestId(
        self, request: pb.ClaimRequestIdRequest, _context: Any
    ) -> pb.ClaimRequestIdResponse:
        tenant, claims = current_caller().tenant, self._conversations.claims
        session_id = ids.session_id(self._valid(request).session)
        claim = RequestClaim(session_id, request.fingerprint, request.plan)
        if request.refused:
            await claims.record_refusal(tenant, request.request_id, session_id)
        else:
            claim = await claims.claim(tenant, request.request_id, claim)
        return pb.ClaimRequestIdResponse(session=ids.session_name(claim.session_id), plan=claim.plan)

    async def CancelTurn(self, request: pb.CancelTurnRequest, _context: Any) -> pb.CancelTurnResponse:
        view = await self._turns.cancel(
            key_of(self._valid(request).session),
            request.request_id,
            keep=request.keep != pb.CancelTurnRequest.KEEP_NOTHING,
            keep_tokens=convert.optional(request, "keep_output_tokens"),
            stream_id=request.stream_id,
        )
        return pb.CancelTurnResponse(turn=convert.turn(view))

    async def ChooseCandidate(
        self, request: pb.ChooseCandidateRequest, _context: Any
    ) -> pb.ChooseCandidateResponse:
        view = await self._sessions.choose(
            key_of(self._valid(request).session),
            request.request_id,
            request.candidate,
            convert.optional(request, "expected_revision"),
        )
        return pb.ChooseCandidateResponse(turn=convert.turn(view))

    async def CountTokens(self, request: pb.CountTokensRequest, _context: Any) -> pb.CountTokensResponse:
        entries = convert.entries(self._valid(request).input)
        key = key_of(request.session) if request.session else None
        count = await self._conversations.count_tokens(current_caller().tenant, key, entries)
        return pb.CountTokensResponse(
            input_tokens=count.input_tokens,
            context_tokens=count.context_tokens,
            context_limit=count.context_limit,
        )

    async def GetServerInfo(
        self, request: pb.GetServerInfoRequest, _context: Any
    ) -> pb.GetServerInfoResponse:
        self._valid(request)
        answer = convert.server_info(await self._conversations.facts(), self._conversations.settings)
        if current_caller() is ANONYMOUS:
            answer.features.append("keyless")  # a proxy between callers and this server needs to know
        return answer

    async def GetUsage(self, request: pb.GetUsageRequest, _context: Any) -> pb.GetUsageResponse:
        self._valid(request)
        use = await self._conversations.usage.for_tenant(current_caller().tenant)
        return pb.GetUsageResponse(
            usage=convert.tenant_usage(use), replica=self._conversations.settings.replica
        )

    # ---- parts

    def _valid(self, request: Request) -> Request:
        validate(request, self._bounds)
        return request

    def _turn_spec(self, request: pb.StreamTurnRequest | pb.RunTurnRequest) -> NewTurn:
        """Return the validated turn. Raises PermissionDenied for a grammar of the caller's own without the scope."""
        spec = convert.turn_spec(self._valid(request).turn)
        if spec.format is not None and spec.format.costly and GRAMMARS not in current_caller().scopes:
            raise PermissionDenied(
                f"turn.format.{spec.format.kind}: this credential lacks the scope {GRAMMARS}",
                metadata={"scope": GRAMMARS},
            )
        return spec

    async def _check_quota(self, key: Key, request_id: str) -> None:
        """Raise ResourceExhausted if the tenant stores too much for a new turn. Joining a running turn is allowed."""
        if not self._turns.has_running_turn(key):
            await self._conversations.quotas.check_turn(key, request_id)

    def _session(self, row: SessionRow) -> pb.Session:
        return convert.session(row, self._conversations.context_limit)


DRAIN_S = 30.0
"""Time for running turns when a drain request has no deadline."""


class AdminService(pensieve_pb2_grpc.AdminServiceServicer):
    """Handlers of the admin service, for operators: see the module docstring."""

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
