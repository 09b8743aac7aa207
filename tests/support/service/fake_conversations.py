"""A ConversationService without a model, in memory, whose streams break on command.

The answer to an input is a pure function of it, one token per code point, so that any resumed answer can be compared
with the uncut one. Faults are taken from ``script`` in the order of StreamTurn calls; a call without one runs clean.
"""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Any

import grpc
import grpc.aio

from pensieve.errors import AlreadyExists, NotFound, PensieveError, RevisionMismatch, TurnInProgress
from pensieve.rpc_status import to_grpc
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.faults.fake_faults import FakeSession, FakeTurn, Fault, answer_to, drawn_answer


class FakeConversations(pensieve_pb2_grpc.ConversationServiceServicer):
    """The service. ``tokens_per_message`` sets how the answer is cut into deltas."""

    def __init__(self) -> None:
        self.script: deque[Fault] = deque()
        self.unary_script: deque[PensieveError | grpc.StatusCode] = deque()
        self.sessions: dict[str, FakeSession] = {}
        self.stream_requests: list[pb.StreamTurnRequest] = []
        self.cancel_requests: list[pb.CancelTurnRequest] = []
        self.calls: list[str] = []
        self.metadata: list[dict[str, Any]] = []
        self.tokens_per_message = 3
        self.heartbeat_s = 10.0
        self.page_size = 500
        self.attempts = 0
        self.open_streams = 0

    # -- unary

    async def _enter(self, context: Any, method: str) -> None:
        self.calls.append(method)
        self.metadata.append(dict(context.invocation_metadata()))
        if self.unary_script:
            await self._fail(context, self.unary_script.popleft())

    async def _fail(self, context: Any, error: PensieveError | grpc.StatusCode) -> None:
        if isinstance(error, PensieveError):
            await context.abort_with_status(to_grpc(error))
        await context.abort(error, "broken on purpose")

    async def _find(self, context: Any, name: str) -> FakeSession:
        if name not in self.sessions:
            await self._fail(context, NotFound("no such session"))
        return self.sessions[name]

    def _bump(self, session: FakeSession) -> pb.Session:
        session.message.revision += 1
        session.message.item_count = len(session.items)
        return session.message

    def _append(self, session: FakeSession, role: pb.Role, text: str, request_id: str = "") -> pb.Item:
        item = pb.Item(item=session.next_item, role=role, text=text, request_id=request_id)
        item.tokens.ids.extend(ord(one) for one in text)
        session.next_item += 1
        session.items.append(item)
        return item

    async def CreateSession(self, request: pb.CreateSessionRequest, context: Any) -> pb.CreateSessionResponse:
        await self._enter(context, "CreateSession")
        for session in self.sessions.values():
            if session.message.labels.get("request") == request.request_id:
                return pb.CreateSessionResponse(session=session.message)
        name = f"sessions/{request.session_id or f's{len(self.sessions)}'}"
        if name in self.sessions:
            await self._fail(context, AlreadyExists("taken", reason="SESSION_EXISTS"))
        message = pb.Session(
            name=name, state=pb.Session.STATE_ACTIVE, config=request.config, labels=request.labels
        )
        session = self.sessions[name] = FakeSession(message)
        if request.config.system_prompt:
            self._append(session, pb.ROLE_SYSTEM, request.config.system_prompt, request.request_id)
        for item in request.initial_items:
            self._append(session, item.role, item.text or "".join(map(chr, item.tokens.ids)))
        return pb.CreateSessionResponse(session=self._bump(session))

    async def GetSession(self, request: pb.GetSessionRequest, context: Any) -> pb.GetSessionResponse:
        await self._enter(context, "GetSession")
        session = await self._find(context, request.name)
        session.message.active_turn.request_id = session.active
        return pb.GetSessionResponse(session=session.message)

    async def ListSessions(self, request: pb.ListSessionsRequest, context: Any) -> pb.ListSessionsResponse:
        await self._enter(context, "ListSessions")
        pairs = [one.split("=") for one in request.label_selector.split(",") if one]
        found = [
            one.message
            for one in self.sessions.values()
            if all(one.message.labels.get(key) == value for key, value in pairs)
        ]
        start = int(request.page_token or 0)
        end = start + min(request.page_size or self.page_size, self.page_size)
        return pb.ListSessionsResponse(
            sessions=found[start:end], next_page_token=str(end) if end < len(found) else ""
        )

    async def UpdateSession(self, request: pb.UpdateSessionRequest, context: Any) -> pb.UpdateSessionResponse:
        await self._enter(context, "UpdateSession")
        session = await self._find(context, request.name)
        if "labels" in request.update_mask.paths:
            session.message.ClearField("labels")  # MergeMessage unites maps.
        request.update_mask.MergeMessage(request.session, session.message, replace_message_field=True)
        return pb.UpdateSessionResponse(session=self._bump(session))

    async def DeleteSession(self, request: pb.DeleteSessionRequest, context: Any) -> pb.DeleteSessionResponse:
        if self.sessions.pop(request.name, None) is None and not request.allow_missing:
            self.calls.append("DeleteSession")
            reason = "SESSION_NOT_FOUND" if request.unused_only else "SESSION_DELETED"
            await self._fail(context, NotFound("deleted", reason=reason))
        await self._enter(context, "DeleteSession")
        return pb.DeleteSessionResponse()

    async def ForkSession(self, request: pb.ForkSessionRequest, context: Any) -> pb.ForkSessionResponse:
        await self._enter(context, "ForkSession")
        source = await self._find(context, request.name)
        message = pb.Session(name=f"sessions/{request.session_id or f's{len(self.sessions)}'}")
        message.state, message.forked_from = pb.Session.STATE_ACTIVE, request.name
        message.config.ttl.CopyFrom(request.ttl)
        last = request.item if request.HasField("item") else source.next_item
        fork = FakeSession(message, [one for one in source.items if one.item <= last])
        fork.next_item = source.next_item
        self.sessions[message.name] = fork
        return pb.ForkSessionResponse(session=self._bump(fork))

    async def RewindSession(self, request: pb.RewindSessionRequest, context: Any) -> pb.RewindSessionResponse:
        await self._enter(context, "RewindSession")
        session = await self._find(context, request.name)
        session.items = [one for one in session.items if one.item <= request.item]
        return pb.RewindSessionResponse(session=self._bump(session))

    async def ListItems(self, request: pb.ListItemsRequest, context: Any) -> pb.ListItemsResponse:
        await self._enter(context, "ListItems")
        session = await self._find(context, request.name)
        found = [one for one in session.items if one.item > request.after_item]
        start = int(request.page_token or 0)
        end = start + min(request.page_size or self.page_size, self.page_size)
        response = pb.ListItemsResponse(items=found[start:end], revision=session.message.revision)
        response.next_page_token = str(end) if end < len(found) else ""
        if not request.include_tokens:
            for item in response.items:
                item.ClearField("tokens")
        return response

    async def GetTurn(self, request: pb.GetTurnRequest, context: Any) -> pb.GetTurnResponse:
        await self._enter(context, "GetTurn")
        session = await self._find(context, request.session)
        known = session.turns.get(request.request_id)
        if known is None:
            await self._fail(context, NotFound("no such turn", reason="TURN_NOT_FOUND"))
            raise AssertionError
        running = pb.Turn(request_id=request.request_id, state=pb.Turn.STATE_RUNNING)
        return pb.GetTurnResponse(turn=known.turn or running)

    async def CancelTurn(self, request: pb.CancelTurnRequest, context: Any) -> pb.CancelTurnResponse:
        self.cancel_requests.append(request)
        await self._enter(context, "CancelTurn")
        session = await self._find(context, request.session)
        known = session.turns.get(request.request_id)
        if known is None:
            await self._fail(context, NotFound("no such turn", reason="TURN_NOT_FOUND"))
            raise AssertionError
        session.active = ""
        if request.keep == pb.CancelTurnRequest.KEEP_NOTHING:
            del session.turns[request.request_id]
            return pb.CancelTurnResponse(turn=pb.Turn(state=pb.Turn.STATE_DISCARDED))
        if known.turn is None:
            if request.HasField("keep_output_tokens"):
                known.answer = known.answer[: request.keep_output_tokens]
            known.others.clear()
            self._commit(session, known, pb.FINISH_REASON_CANCELLED)
        return pb.CancelTurnResponse(turn=known.turn)

    async def ChooseCandidate(
        self, request: pb.ChooseCandidateRequest, context: Any
    ) -> pb.ChooseCandidateResponse:
        await self._enter(context, "ChooseCandidate")
        session = await self._find(context, request.session)
        turn = session.turns[request.request_id].turn
        assert turn is not None
        if request.candidate >= len(turn.candidates):
            await self._fail(context, NotFound("no such candidate", reason="CANDIDATE_NOT_FOUND"))
        if request.candidate != turn.chosen_candidate:
            session.items.pop()
            text = turn.candidates[request.candidate].text
            turn.output.CopyFrom(self._append(session, pb.ROLE_ASSISTANT, text, request.request_id))
            turn.chosen_candidate = request.candidate
            turn.revision = self._bump(session).revision
        return pb.ChooseCandidateResponse(turn=turn)

    async def WarmSession(self, request: pb.WarmSessionRequest, context: Any) -> pb.WarmSessionResponse:
        await self._enter(context, "WarmSession")
        session = await self._find(context, request.session)
        residency = pb.CacheResidency(as_of_revision=session.message.revision, host_tokens=3)
        refused = "" if session.items else "nothing_to_do"
        return pb.WarmSessionResponse(accepted=not refused, refused=refused, residency=residency)

    async def CountTokens(self, request: pb.CountTokensRequest, context: Any) -> pb.CountTokensResponse:
        await self._enter(context, "CountTokens")
        count = sum(len(one.text) + len(one.tokens.ids) for one in request.input)
        return pb.CountTokensResponse(input_tokens=count, context_tokens=count, context_limit=4096)

    async def GetServerInfo(self, request: pb.GetServerInfoRequest, context: Any) -> pb.GetServerInfoResponse:
        await self._enter(context, "GetServerInfo")
        return pb.GetServerInfoResponse(version="0.1.0", model="fake", features=["fake"])

    # -- turns

    def _commit(self, session: FakeSession, known: FakeTurn, reason: pb.FinishReason) -> pb.Turn:
        spec = known.spec
        base = session.message.revision
        if spec.HasField("replace_after_item"):
            session.items = [one for one in session.items if one.item <= spec.replace_after_item]
        texts = [one.text or "".join(map(chr, one.tokens.ids)) for one in spec.input]
        inputs = [
            self._append(session, one.role, text, spec.request_id)
            for one, text in zip(spec.input, texts, strict=True)
        ]
        output = self._append(session, pb.ROLE_ASSISTANT, known.answer, spec.request_id)
        revision = self._bump(session).revision
        size = sum(len(one.text) for one in session.items)
        new = sum(len(one.text) for one in inputs)
        known.turn = pb.Turn(
            session=session.message.name,
            request_id=spec.request_id,
            state=pb.Turn.STATE_COMMITTED,
            base_revision=base,
            revision=revision,
            input=inputs,
            output=output,
            finish_reason=reason,
            seed=7,
            candidates=known.drawn(),
            usage=pb.Usage(
                context_tokens=size - len(known.answer),
                new_tokens=new,
                gpu_cached_tokens=size - len(known.answer) - new,
                output_tokens=len(known.answer),
            ),
            hints=_receipt(spec.hints) if spec.HasField("hints") else None,
        )
        session.active = ""
        return known.turn

    async def _begin(self, request: pb.StreamTurnRequest, context: Any) -> tuple[FakeSession, FakeTurn]:
        session = await self._find(context, request.session)
        spec = request.turn
        known = session.turns.get(spec.request_id)
        if known is None:
            if session.active:
                busy = {"active_request_id": session.active}
                await self._fail(context, TurnInProgress("busy", metadata=busy, retry_after_s=30.0))
            if spec.HasField("expected_revision") and spec.expected_revision != session.message.revision:
                current = {"current_revision": str(session.message.revision)}
                await self._fail(context, RevisionMismatch("moved on", metadata=current))
            source = spec.input[-1] if spec.input else self._last_user(session, spec.replace_after_item)
            text = source.text or "".join(map(chr, source.tokens.ids))
            self.attempts += 1
            others = [drawn_answer(text, number) for number in range(1, spec.sampling.candidates)]
            known = FakeTurn(spec, f"a{self.attempts}", answer_to(text), others)
            session.turns[spec.request_id] = known
        if known.turn is None:
            session.active = spec.request_id
        return session, known

    @staticmethod
    def _last_user(session: FakeSession, last: int) -> Any:
        return next(one for one in reversed(session.items) if one.role == pb.ROLE_USER and one.item <= last)

    async def StreamTurn(self, request: pb.StreamTurnRequest, context: Any) -> None:
        self.stream_requests.append(request)
        self.calls.append("StreamTurn")
        self.metadata.append(dict(context.invocation_metadata()))
        fault = self.script.popleft() if self.script else None
        if fault is not None and fault.error is not None and fault.after == 0:
            await self._fail(context, fault.error)
        session, known = await self._begin(request, context)
        self.open_streams += 1
        try:
            await self._stream(request, context, session, known, fault)
        finally:
            self.open_streams -= 1

    async def _stream(
        self,
        request: pb.StreamTurnRequest,
        context: Any,
        session: FakeSession,
        known: FakeTurn,
        fault: Fault | None,
    ) -> None:
        accepted = pb.TurnAccepted(
            request_id=request.turn.request_id, attempt=known.attempt, seed=7, replayed=known.turn is not None
        )
        accepted.heartbeat_interval.FromNanoseconds(round(self.heartbeat_s * 1e9))
        had = [request.resume_token_offset, *request.resume_candidate_offsets]
        same = request.resume_attempt == known.attempt
        deltas = known.deltas(had if same else [0], self.tokens_per_message)
        messages = [pb.StreamTurnResponse(accepted=accepted), *deltas]
        for sent, message in enumerate(messages):
            if (
                fault is not None
                and sent == fault.after
                and not await self._break(context, session, known, fault)
            ):
                return
            if fault is None or not fault.after <= sent < fault.after + fault.skip_messages:
                await context.write(message)
        if fault is not None and fault.after >= len(messages):
            await self._break(context, session, known, fault)
        turn = known.turn or self._commit(session, known, pb.FINISH_REASON_EOS)
        await context.write(pb.StreamTurnResponse(completed=turn))

    async def _break(self, context: Any, session: FakeSession, known: FakeTurn, fault: Fault) -> bool:
        """Perform the fault; True when the stream goes on."""
        if fault.commit:
            self._commit(session, known, pb.FINISH_REASON_EOS)
        if fault.lose_attempt:
            self.attempts += 1
            known.attempt = f"a{self.attempts}"
        if fault.silent:
            await asyncio.Event().wait()
        while fault.gate is not None and not fault.gate.is_set():
            await asyncio.sleep(0.005)
        if fault.trailers:
            context.set_trailing_metadata(fault.trailers)
        if fault.error is not None or fault.code is not None:
            await self._fail(context, fault.error or fault.code)
        return not fault.end


def _receipt(hints: pb.TurnHints) -> pb.HintReceipt:
    """Importance is unknown here, the rest is taken as it comes."""
    return pb.HintReceipt(
        next_turn_in=hints.next_turn_in if hints.HasField("next_turn_in") else None,
        session_finished=hints.session_finished,
        ignored=["importance"] if hints.HasField("importance") else [],
    )
