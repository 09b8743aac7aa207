"""Begins the turn of a response: after a previous response, in a conversation, or in a new session."""

from __future__ import annotations

import uuid
from dataclasses import dataclass, replace
from typing import Any, Final, cast

import msgspec

from pensieve.client import (
    AsyncClient,
    AsyncSession,
    AsyncTurnStream,
    Role,
    ServerInfo,
    SessionChanges,
    Turn,
    TurnOptions,
    TurnState,
)
from pensieve.errors import NotFound
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import (
    Ahead,
    Call,
    CallPlan,
    adding_items,
    append_items,
    begin_turn,
    check_subject,
    execute_plan,
    find_own_session,
    is_free,
    new_session_id,
    set_on_branch,
    split_new,
)
from pensieve.http.common.contents import HashedHistory, make_history, overflow_policy
from pensieve.http.common.failures import HttpFailure, invalid_field
from pensieve.http.common.heads import HeadCache, TurnStarter
from pensieve.http.common.requests import seed_for
from pensieve.http.responses.ids import (
    ResponseId,
    conversation_id,
    instructions_digest,
    parse_item_id,
    session_of_conversation,
)
from pensieve.http.responses.objects import KeptResponse, Response, input_message
from pensieve.http.responses.requests import (
    REFERENCE,
    InputItem,
    ResponseRequest,
    ValidatedResponse,
    with_instructions,
    without_instructions,
)
from pensieve.http.tools import ToolUse
from pensieve.speech import SpeechForm


@dataclass(frozen=True, slots=True)
class StartedResponse:
    session: AsyncSession
    stream: AsyncTurnStream
    id: ResponseId
    form: SpeechForm
    transcript: HashedHistory | None = None
    """The whole conversation, when the client sent all of it."""

    def record(self, heads: HeadCache, turn: Turn) -> None:
        """Let the conversation be found when the client resends it with this turn's answer."""
        if self.transcript is not None:
            heads.record_turn(self.transcript, self.session.id, turn)


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a turn continues: in a session, or in a branch of it."""

    session: AsyncSession
    plan: CallPlan
    changes: SessionChanges
    """Settings that differ from the session's. After a response, the system prompt among them is the instructions:
    the system messages of the conversation, which stay, are read from the branch."""
    head: ResponseId | None = None
    """The response that it follows; None: the end of a conversation."""
    ttl_s: float | None = None
    """Idle lifetime of a branch; None: the session's."""


@dataclass(frozen=True, slots=True)
class ResponseStarter:
    """One request on the way to its session."""

    caller: Caller
    asked: ValidatedResponse
    call: Call
    annotations: dict[str, str]
    use: ToolUse
    info: ServerInfo
    transcript: HashedHistory | None
    """The conversation, if it begins with this request or the client sent all of it."""
    keeps_settings: bool = False
    """Go on with the settings of the session, whatever this request says."""

    async def begin(self, heads: HeadCache, unstored_ttl_s: float) -> StartedResponse:
        """Begin the turn. A refusal leaves no session behind. Raises HttpFailure and PensieveError."""
        if self.transcript is not None:
            return await self._in_new_session(heads, self.transcript, unstored_ttl_s)
        own = new_session_id("resp-")
        place = await self._find_place(own, is_checked=self.call.is_retryable)
        head = place.head
        if head is None:
            return await self._in_conversation(place)
        if not self.body.stored:  # in a branch, which is deleted
            place = replace(place, plan=CallPlan(own), ttl_s=unstored_ttl_s)
        return await self._after_response(place, head)

    async def look_ahead(self, heads: HeadCache, ttl_s: float, own: str) -> Ahead:
        """Return where the turn would begin, without beginning it. A session that has to be made gets the id
        ``own`` and this idle lifetime. The call must not be retryable."""
        if self.transcript is not None:
            found = heads if self.body.stored else None
            return await TurnStarter(self.caller, found, self.transcript, self.call, {}, ttl_s).look_ahead(
                own
            )
        early, last = split_new(self.asked.messages)
        place = await self._find_place(own, is_checked=True)
        if place.plan.session and not (place.changes or early):
            return place.session, last
        return await self._branch(replace(place, ttl_s=ttl_s), CallPlan(own)), last

    async def _find_place(self, own: str, *, is_checked: bool) -> _Place:
        """Return where a turn begins that continues a response or a conversation. ``own``: id of a branch. If
        ``is_checked``, the service is asked whether the session has moved on, or is about to."""
        client, previous = self.caller.client, self.body.previous_response_id
        if previous is None:
            session = await find_conversation(client, self.body.conversation_id or "", "conversation")
            await check_subject(session, self.body.subject)
            return _Place(session, CallPlan(session=session.id), self._frame(session))
        head = ResponseId.parse(previous)
        if head is None:
            raise _unknown_response(previous)
        session, plan = client.session(head.session_id), CallPlan(own)
        changes: SessionChanges = {} if self.keeps_settings else self._changes(head)
        going_on = msgspec.structs.replace(plan, session=head.session_id, revision=head.revision)
        try:
            await check_subject(session, self.body.subject)
            if not changes and not split_new(self.asked.messages)[0]:
                is_free_now = not is_checked or await is_free(session, head.revision, self.call.id)
                plan = going_on if is_free_now else plan
        except NotFound:
            raise _unknown_response(previous) from None
        return _Place(session, plan, changes, head)

    async def _in_new_session(
        self, heads: HeadCache, transcript: HashedHistory, unstored_ttl_s: float
    ) -> StartedResponse:
        try:
            beginning = TurnStarter(
                self.caller,
                # An unstored response cannot be found, and finds no session.
                heads if self.body.stored else None,
                transcript,
                self.call,
                self._options,
                None if self.body.stored else unstored_ttl_s,
            )
            session, stream = await beginning.begin("resp-")
        except NotFound as error:
            raise self._refusal(error) from None
        return StartedResponse(
            session, stream, self._id(session, stream, self.use), self.use.form, transcript
        )

    async def _after_response(self, place: _Place, head: ResponseId) -> StartedResponse:
        client, previous = self.caller.client, str(self.body.previous_response_id)
        use = self.use.with_session_tools(self.info, head.calls and not self._changes(head))
        plan = await self.call.claim_plan(client, place.plan)

        async def make(own: str) -> AsyncSession:
            return await self._branch(place, plan)

        async def turn(session: AsyncSession, more: TurnOptions) -> AsyncTurnStream:
            try:
                return await self._turn(session, more)
            except NotFound as error:
                if error.reason == "CONTENT_ERASED":  # this response was made, and erased since
                    raise
                raise (
                    self._refusal(error) if session.id == plan.own else _unknown_response(previous)
                ) from None

        async with self.call.undo_on_refusal(client, plan):
            try:
                found, stream = await execute_plan(client, self.call, plan, make, turn)
            except NotFound as error:
                raise self._refusal(error) from None
        return StartedResponse(found, stream, self._id(found, stream, use), use.form)

    async def _branch(self, place: _Place, plan: CallPlan) -> AsyncSession:
        branch = await find_own_session(self.caller.client, self.call, plan)
        if branch is None:
            branch = await self._fork(place, plan.own)
        assert branch.info is not None
        if branch.info.revision == 1:
            await set_on_branch(branch, await self._branch_settings(place, branch.info.system_prompt))
        early, last = split_new(self.asked.messages)
        return await append_items(branch, early, self.call, follow=last)

    async def _fork(self, place: _Place, own: str) -> AsyncSession:
        source, head, request_id = place.session, place.head, str(uuid.uuid5(self.call.id, "fork"))
        if head is None:
            return await source.fork(session_id=own, request_id=request_id, ttl=place.ttl_s)
        previous = str(self.body.previous_response_id)
        try:
            turn = await source.get_turn(head.turn_id)
            if turn.state is TurnState.RUNNING:
                raise HttpFailure(
                    409,
                    "previous_response_id: that response is still being generated",
                    param="previous_response_id",
                    code="response_in_progress",
                )
            item = await answer_item(source, turn)
            if item is None:
                raise _unknown_response(previous)
            return await source.fork(item, session_id=own, request_id=request_id, ttl=place.ttl_s)
        except NotFound:
            raise _unknown_response(previous) from None

    async def _in_conversation(self, place: _Place) -> StartedResponse:
        client, session = self.caller.client, place.session
        assert session.info is not None
        tools = bool(session.info.tools)
        # They apply to this response only: the conversation keeps its own.
        frame = cast(TurnOptions, {f"turn_{name}": value for name, value in place.changes.items()})
        plan = await self.call.claim_plan(client, place.plan)

        async def make(own: str) -> AsyncSession:
            raise AssertionError("the conversation exists")

        async def turn(session: AsyncSession, more: TurnOptions) -> AsyncTurnStream:
            early, last = split_new(self.asked.messages)
            async with adding_items(session, early, self.call, last):
                return await self._turn(session, {**frame, **more})

        async with self.call.undo_on_refusal(client, plan):
            _, stream = await execute_plan(client, self.call, plan, make, turn)
        use = self.use.with_session_tools(self.info, tools)
        return StartedResponse(session, stream, self._id(session, stream, use), use.form)

    async def _turn(self, session: AsyncSession, more: TurnOptions) -> AsyncTurnStream:
        options: TurnOptions = {**self._options, "request_id": str(self.call.id), **more}
        return await begin_turn(session, split_new(self.asked.messages)[1], options)

    @property
    def _options(self) -> TurnOptions:
        options: TurnOptions = {**self.asked.options, "annotations": self.annotations}
        options.setdefault("seed", seed_for(self.call.id))
        return options

    def _refusal(self, error: NotFound) -> Exception:
        """The error for a new session that does not exist: an earlier try had made and deleted it."""
        if self.body.stored or error.reason != "SESSION_DELETED":
            return error
        return HttpFailure(
            409,
            "the response of this Idempotency-Key was not stored, and is gone; use another key for a new one",
            param="Idempotency-Key",
            code="response_not_stored",
        )

    @property
    def body(self) -> ResponseRequest:
        return self.asked.body

    def _changes(self, head: ResponseId) -> SessionChanges:
        """Return the session settings that differ between the previous turn and this one."""
        changes: SessionChanges = {}
        # A conversation's own settings are without those of its responses.
        kept = b"" if conversation_id(head.session_id) else head.instructions
        if instructions_digest(self.body.instructions, self.use.text, len(kept) or 16) != kept:
            changes["system_prompt"] = self.body.instructions or ""
            changes["tools"] = self.use.text
        if self.body.drops_oldest is not head.drops_oldest:
            changes["overflow"] = overflow_policy(drops_oldest=self.body.drops_oldest)
        return changes

    async def _branch_settings(self, place: _Place, prompt: str) -> SessionChanges:
        """Return the settings that a new branch is given. ``prompt``: the system prompt that it was made with.

        A chain of responses has the settings that its requests ask for, but over gRPC its session may have been given
        others since. They are set also where this request asks for the same as the one before.
        """
        head, changes = place.head, place.changes
        if head is None:
            return changes
        is_chain = not conversation_id(head.session_id)
        if is_chain:
            overflow = overflow_policy(drops_oldest=head.drops_oldest)
            changes = {"overflow": overflow, "default_sampling": {}, **changes}
        if "system_prompt" in place.changes:
            before = await self.prompt_instructions(head, prompt)
        elif is_chain and not self.keeps_settings:
            changes["tools"], before = self.use.text, self.body.instructions
        else:
            return changes
        system = without_instructions(prompt, before)
        return {**changes, "system_prompt": with_instructions(system, self.body.instructions)}

    async def prompt_instructions(self, head: ResponseId, prompt: str) -> str | None:
        """Return the instructions with which ``prompt`` begins, the system prompt of this response's session. They
        hold for one response. What follows them are system messages, which belong to the conversation. Raises
        HttpFailure for a response that is gone."""
        if conversation_id(head.session_id):
            return None
        try:
            turn = await self.caller.client.session(head.session_id).get_turn(head.turn_id)
        except NotFound:
            raise _unknown_response(str(self.body.previous_response_id)) from None
        kept = KeptResponse.from_turn(turn)
        if kept is None:  # of an older release: its instructions are not told from system messages
            return prompt if head.instructions else None
        return kept.asked.instructions

    def _frame(self, session: AsyncSession) -> SessionChanges:
        """Return the settings of a conversation that this response replaces."""
        assert session.info is not None
        frame: SessionChanges = {}
        if self.body.instructions is not None:
            frame["system_prompt"] = with_instructions(session.info.system_prompt, self.body.instructions)
        if self.use.text:
            frame["tools"] = self.use.text
        return frame

    def _id(self, session: AsyncSession, stream: AsyncTurnStream, use: ToolUse) -> ResponseId:
        assert stream.base_revision is not None, "not accepted"
        return ResponseId(
            session.id,
            stream.request_id,
            stream.base_revision + 1,
            instructions_digest(self.body.instructions, self.use.text),
            self.body.drops_oldest,
            bool(self.body.background),
            use.form.calls is not None,
        )


async def find_conversation(client: AsyncClient, name: str, param: str) -> AsyncSession:
    """Return the session of a conversation id, its info read. Raises HttpFailure (404) for ``param``."""
    missing = HttpFailure(404, f"no such conversation: {name}", param=param)
    session_id = session_of_conversation(name)
    if session_id is None:
        raise missing
    session = client.session(session_id)
    try:
        await session.refresh()
    except NotFound:
        raise missing from None
    return session


def first_history(
    asked: ValidatedResponse, use: ToolUse, scope: bytes, answered: bool = False
) -> HashedHistory | None:
    """Return the transcript of a request that begins a conversation; None if it continues one. ``answered``: it may
    end with an answer. Raises HttpFailure."""
    body = asked.body
    if body.previous_response_id is not None or body.conversation_id is not None:
        return None
    transcript = make_history(asked.messages, "input", answered=answered)
    transcript = replace(
        transcript,
        system=with_instructions(transcript.system, body.instructions),
        tools=use.text,
        form=use.form,
        drops_oldest=body.drops_oldest,
        subject=body.subject or "",
    )
    return HashedHistory(transcript, scope)


async def answer_item(session: AsyncSession, turn: Turn) -> int | None:
    """Return the number of a turn's answer in the current history; None if it is gone. The turn's own record is
    not enough: it outlives its items, and a change of the system prompt before them renumbers them."""
    if turn.output is None:
        return None
    found = await session.items(after_item=turn.output.item - 1, limit=1)
    if not (found and found[0].item == turn.output.item):
        found = await session.items()
    answers = (one for one in found if one.request_id == turn.request_id and one.role is Role.ASSISTANT)
    return next((one.item for one in answers), None)


def _unknown_response(previous: str) -> HttpFailure:
    return HttpFailure(
        400,
        f"previous_response_id: no such response: {previous}",
        param="previous_response_id",
        code="previous_response_not_found",
    )


_MAX_REFERENCES: Final = 1024
"""References in one request. Each may cost a read of a session."""


async def resolve_references(asked: ValidatedResponse, caller: Caller, info: ServerInfo) -> ValidatedResponse:
    """Return the request with item references replaced by the items. Raises HttpFailure (404) for an item that
    does not exist for this caller."""
    items = asked.body.input
    if not asked.refers or not isinstance(items, list):
        return asked
    if sum(one.type == REFERENCE for one in items) > _MAX_REFERENCES:
        raise invalid_field("input", f"has more than {_MAX_REFERENCES} items of the type {REFERENCE}")
    reader = _References(caller, info)
    found = [
        await reader.read(one.id or "", f"input[{number}]") if one.type == REFERENCE else one
        for number, one in enumerate(items)
    ]
    return msgspec.structs.replace(asked.body, input=found).validated()


class _References:
    def __init__(self, caller: Caller, info: ServerInfo) -> None:
        self._caller = caller
        self._info = info
        self._outputs: dict[tuple[str, str], list[dict[str, Any]]] = {}

    async def read(self, name: str, param: str) -> InputItem:
        try:
            document = await self._document(name)
        except NotFound:
            document = None
        if document is None:
            raise HttpFailure(
                404,
                f"{param}: no such item: {name[:200]}",
                param=param,
                code="item_not_found",
            )
        return msgspec.convert(document, InputItem)

    async def _document(self, name: str) -> dict[str, Any] | None:
        place = parse_item_id(name)
        if place is not None:
            session_id, number = place
            items = await self._caller.client.session(session_id).items(after_item=number - 1)
            here = items and items[0].item == number
            return input_message(session_id, items[0]) if here else None
        suffix = name.partition("_")[2].partition("-")[0]
        answer = ResponseId.parse(f"resp_{suffix}")
        if answer is None:
            return None
        key = answer.session_id, answer.turn_id
        if key not in self._outputs:
            session = self._caller.client.session(answer.session_id)
            turn: Turn = await session.get_turn(answer.turn_id)
            gone = turn.output is None or await answer_item(session, turn) is None
            output = Response.from_turn(answer, self._info, turn).finished(turn)["output"]
            self._outputs[key] = [] if gone else output
        return next((one for one in self._outputs[key] if one["id"] == name), None)
