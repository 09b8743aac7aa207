"""Conversion of validated messages to values, and of values to response messages."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable
from functools import cache
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from pensieve.core import (
    CandidateChoice,
    HintReceipt,
    Role,
    SamplingDefaults,
    TokenLogprob,
    Usage,
    pack_tokens,
    packed_length,
    unpack_tokens,
)
from pensieve.engine.messages import ResidentTokens
from pensieve.errors import InvalidArgument
from pensieve.server import ids
from pensieve.server.conversations import ServerFacts
from pensieve.server.operations.usage import TenantUse
from pensieve.server.rpc.validation import UPDATABLE, seconds
from pensieve.server.sessions.compaction import CompactionAnswer, CompactionRequest
from pensieve.server.sessions.exports import ImportedSession
from pensieve.server.sessions.records import NewFork, NewSession, SessionChange
from pensieve.server.sessions.subjects import SessionReceipt, SubjectReceipt
from pensieve.server.sessions.warming import WarmAnswer
from pensieve.server.settings import TurnSettings
from pensieve.server.values import (
    Accepted,
    CallBounds,
    CallRules,
    Delta,
    InputEntry,
    NewTurn,
    OnDisconnect,
    OutputOptions,
    ProgressView,
    RawEntry,
    StreamEvent,
    ToolEntry,
    TurnFrame,
    TurnHints,
    TurnView,
)
from pensieve.speech import AnswerFormat, FormatKind, FunctionCall
from pensieve.store.records import (
    CandidateAnswer,
    Item,
    Overflow,
    PrefixSharing,
    SessionConfig,
    SessionRow,
    State,
)
from pensieve.v1 import pensieve_pb2 as pb

PAD_BYTES = 128
Sent = TypeVar("Sent", bound=Message)

_STATES = {
    State.ACTIVE: pb.Session.STATE_ACTIVE,
    State.DAMAGED: pb.Session.STATE_DAMAGED,
    State.DELETED: pb.Session.STATE_DELETED,
}
_CONSTRUCTORS: dict[str, Callable[[Any], Any]] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "candidate_choice": CandidateChoice,
}
"""Constructors for the sampling parameters that are not scalars."""


# ---- messages to values


def entries(items: Iterable[pb.InputItem]) -> tuple[InputEntry, ...]:
    return tuple(map(_entry, items))


def _entry(item: pb.InputItem) -> InputEntry:
    role = Role(item.role)
    match item.WhichOneof("content"):
        case "tokens":
            return InputEntry(role, tokens=pack_tokens(item.tokens.ids))
        case "raw_text":
            return RawEntry(role, item.raw_text)
    if not (item.function_calls or item.call_id):
        return InputEntry(role, item.text)
    calls = tuple(FunctionCall(one.name, one.arguments_json, one.id) for one in item.function_calls)
    return ToolEntry(role, item.text, calls=calls, call_id=item.call_id)


def sampling(params: pb.SamplingParams) -> SamplingDefaults:
    """Return only the values that the message sets: an explicit 0 differs from an unset field."""
    values = {}
    for field, value in params.ListFields():
        construct = _CONSTRUCTORS.get(field.name)
        values[field.name] = value if construct is None else construct(value)
    return SamplingDefaults(**values)


def config(message: pb.SessionConfig) -> SessionConfig:
    return SessionConfig(
        model=message.model,
        system_prompt=message.system_prompt,
        sampling=sampling(message.default_sampling),
        ttl_s=seconds(message.ttl) or 0.0,
        overflow=Overflow(message.overflow_policy or Overflow.REJECT),
        prefix_sharing=PrefixSharing(message.prefix_sharing or PrefixSharing.TENANT),
        tools=message.tools_json,
        subject=message.subject,
        summary=message.summary,
        compact_at=message.compact_at,
        keep_turns=message.keep_turns if message.HasField("keep_turns") else SessionConfig().keep_turns,
    )


def new_session(request: pb.CreateSessionRequest) -> NewSession:
    return NewSession(
        request_id=request.request_id,
        session_id=request.session_id,
        config=config(request.config),
        labels=tuple(sorted(request.labels.items())),
        items=entries(request.initial_items),
        followed_by=tuple(map(Role, request.followed_by)),
    )


def new_fork(request: pb.ForkSessionRequest) -> NewFork:
    return NewFork(
        item=optional(request, "item"),
        request_id=request.request_id,
        session_id=request.session_id,
        expected_revision=optional(request, "expected_revision"),
        candidate=optional(request, "candidate"),
        ttl_s=optional_seconds(request, "ttl"),
    )


def imported_session(imported: ImportedSession, session_id: str) -> pb.CreateSessionRequest:
    """The request that would create the session without its items, to validate what a client may have made up."""
    history = imported.history
    try:
        return pb.CreateSessionRequest(
            session_id=session_id, config=session_config(history.config), labels=dict(history.labels)
        )
    except (ValueError, TypeError, OverflowError) as error:
        raise InvalidArgument.field("data", "has a configuration or labels outside all limits") from error


def session_change(request: pb.UpdateSessionRequest) -> SessionChange:
    """The fields that the mask names change; without a mask, those that the given session sets."""
    session = request.session
    paths = set(request.update_mask.paths)
    if not paths:
        paths = {f"config.{field.name}" for field, _ in session.config.ListFields()}
        paths |= {"labels"} if session.labels else set()
    if "config" in paths:
        # A client older than the field sets no subject: its mask must not make a session unknown to an erasure.
        paths |= set(UPDATABLE) - ({"config.subject"} if not session.config.subject else set())
    new = config(session.config)
    return SessionChange(
        labels=dict(session.labels) if "labels" in paths else None,
        config={field: getattr(new, field) for path, field in UPDATABLE.items() if path in paths},
        rebind=request.rebind,
    )


def turn_spec(turn: pb.TurnSpec) -> NewTurn:
    out = turn.output
    return NewTurn(
        request_id=turn.request_id,
        input=entries(turn.input),
        expected_revision=optional(turn, "expected_revision"),
        replace_after_item=optional(turn, "replace_after_item"),
        sampling=sampling(turn.sampling),
        output=OutputOptions(
            token_ids=out.token_ids,
            top_logprobs=optional(out, "top_logprobs"),
            max_chunk_tokens=optional(out, "max_chunk_tokens"),
            max_chunk_delay_s=seconds(out.max_chunk_delay) or 0.0,
            pad_chunks=out.pad_chunks,
        ),
        max_duration_s=optional_seconds(turn, "max_duration"),
        priority=turn.priority,
        hints=hints(turn.hints),
        known_revision=optional(turn, "known_revision"),
        annotations=dict(turn.annotations),
        mark=turn.mark,
        calls=call_bounds(turn.calls),
        frame=TurnFrame(
            turn.system_prompt if turn.HasField("system_prompt") else None,
            turn.tools_json if turn.HasField("tools_json") else None,
        ),
        rules=CallRules(tuple(turn.calls.allowed), tuple(turn.calls.strict), turn.calls.none),
        format=answer_format(turn.format),
        prediction=turn.prediction,
    )


def answer_format(message: pb.AnswerFormat) -> AnswerFormat | None:
    name = message.WhichOneof("form")
    if name is None:
        return None
    kind, value = FormatKind(name), getattr(message, name)
    return AnswerFormat(
        kind,
        text=value if isinstance(value, str) else "",
        choices=tuple(value.texts) if kind is FormatKind.CHOICE else (),
    )


def call_bounds(message: pb.CallBounds) -> CallBounds:
    return CallBounds(message.begin_with if message.HasField("begin_with") else None, message.one)


def hints(message: pb.TurnHints) -> TurnHints:
    return TurnHints(
        next_turn_s=optional_seconds(message, "next_turn_in"),
        importance=message.importance if message.HasField("importance") else None,
        finished=message.session_finished,
    )


def on_disconnect(policy: int) -> OnDisconnect:
    return OnDisconnect(policy or OnDisconnect.CANCEL)


def label_selector(text: str) -> dict[str, str]:
    """Parse ``k=v,k2=v2``; white space around keys and values is ignored."""
    pairs = (part.split("=", 1) for part in text.split(",") if part)
    return {key.strip(): value.strip() for key, value in pairs}


def optional(message: Any, field: str) -> int | None:
    """Return the number in a field with presence, or None when it is unset."""
    return int(getattr(message, field)) if message.HasField(field) else None


def optional_seconds(message: Any, field: str) -> float | None:
    """Return the duration in a field in seconds, or None when it is unset."""
    return seconds(getattr(message, field)) if message.HasField(field) else None


# ---- values to messages


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(max(0, round(seconds * 1e9)))
    return message


def timestamp(ms: int) -> Timestamp:
    message = Timestamp()
    message.FromMilliseconds(ms)
    return message


def _number(value: enum.IntEnum | None) -> Any:
    """Return the wire number of an enum value, or 0 (unspecified) for None. Both enums use the same numbers."""
    return 0 if value is None else value.value


@cache
def _shared_names(kind: Any, value: Any) -> tuple[str, ...]:
    return tuple(kind.DESCRIPTOR.fields_by_name.keys() & value.__annotations__.keys())


def _same(kind: Callable[..., Sent], value: Any, **converted: Any) -> Sent:
    """Make a message from the value's fields of the same name, and from those that were ``converted``."""
    for name in _shared_names(kind, value.__class__):
        if name not in converted:
            converted[name] = getattr(value, name)
    return kind(**converted)


def session(row: SessionRow, context_limit: int) -> pb.Session:
    message = _same(
        pb.Session,
        row,
        name=ids.session_name(row.session_id),
        state=_STATES[row.state],
        context_limit=context_limit,
        config=session_config(row.config),
        create_time=timestamp(row.create_ms),
        update_time=timestamp(row.update_ms),
    )
    if row.expire_ms:
        message.expire_time.CopyFrom(timestamp(row.expire_ms))
    if row.running is not None:
        message.active_turn.request_id = row.running.request_id
        message.active_turn.start_time.CopyFrom(timestamp(row.running.start_ms))
    return message


def residency(resident: ResidentTokens, row: SessionRow, replica: str, now_ms: int) -> pb.CacheResidency:
    """Tokens of the context by tier. Those in neither tier must be recomputed."""
    gpu = min(resident.device_tokens, row.context_tokens)
    host = min(resident.host_tokens, row.context_tokens - gpu)
    return pb.CacheResidency(
        replica=replica,
        as_of_revision=row.revision,
        gpu_tokens=gpu,
        host_tokens=host,
        dropped_tokens=row.context_tokens - gpu - host,
        as_of_time=timestamp(now_ms),
    )


def warm_session_response(answer: WarmAnswer, replica: str, now_ms: int) -> pb.WarmSessionResponse:
    return pb.WarmSessionResponse(
        accepted=not answer.refusal,
        refused=answer.refusal,
        residency=residency(answer.resident, answer.row, replica, now_ms),
    )


def compaction_request(request: pb.CompactSessionRequest) -> CompactionRequest:
    return CompactionRequest(
        request.request_id,
        request.keep_turns,
        request.instruction,
        optional(request, "max_summary_tokens"),
        optional(request, "expected_revision"),
    )


def compact_session_response(done: CompactionAnswer, session: pb.Session) -> pb.CompactSessionResponse:
    return pb.CompactSessionResponse(
        session=session,
        branch=ids.session_name(done.branch_id),
        summary=done.summary,
        usage=None if done.usage is None else _usage(done.usage),
    )


def erased_session(erased: SessionReceipt) -> pb.ErasedSession:
    return _same(pb.ErasedSession, erased, name=ids.session_name(erased.session_id))


def subject_erased(done: SubjectReceipt, replica: str) -> pb.SubjectErased:
    return pb.SubjectErased(
        sessions=len(done.sessions),
        forks=sum(bool(one.forked_from) for one in done.sessions),
        turns=sum(one.turns for one in done.sessions),
        items=sum(one.items for one in done.sessions),
        tokens=sum(one.tokens for one in done.sessions),
        replica=replica,
        undecided=map(ids.session_name, done.undecided),
        remnants=done.remnants,
    )


def session_config(config: SessionConfig) -> pb.SessionConfig:
    message = _same(
        pb.SessionConfig,
        config,
        overflow_policy=_number(config.overflow),
        prefix_sharing=_number(config.prefix_sharing),
        tools_json=config.tools,
    )
    if config.sampling != SamplingDefaults():
        message.default_sampling.CopyFrom(_sampling(config.sampling))
    if config.ttl_s:
        message.ttl.CopyFrom(duration(config.ttl_s))
    return message


def _sampling(values: SamplingDefaults) -> pb.SamplingParams:
    scalars: dict[str, Any] = {
        name: value
        for name in values.__struct_fields__
        if (value := getattr(values, name)) is not None and not isinstance(value, tuple | dict)
    }
    return pb.SamplingParams(
        **scalars, stop=values.stop, stop_token_ids=values.stop_token_ids, logit_bias=values.logit_bias
    )


def item(value: Item, *, tokens: bool) -> pb.Item:
    message = _same(
        pb.Item,
        value,
        item=value.number,
        role=_number(value.role),
        tokens=None,
        finish_reason=_number(value.finish_reason),
        create_time=timestamp(value.create_ms),
    )
    if tokens:
        message.tokens.ids.extend(unpack_tokens(value.tokens).tolist())
    return message


def turn(view: TurnView, *, tokens: bool = False) -> pb.Turn:
    return _same(
        pb.Turn,
        view,
        session=ids.session_name(view.session_id),
        state=_number(view.state),
        input=[item(entry, tokens=tokens) for entry in view.input],
        output=None if view.output is None else item(view.output, tokens=tokens),
        finish_reason=_number(view.finish_reason),
        usage=None if view.usage is None else _usage(view.usage),
        chosen_candidate=view.chosen,
        candidates=[_candidate(number, one, tokens=tokens) for number, one in enumerate(view.candidates)],
        hints=None if view.hints is None else _hints(view.hints),
    )


def _candidate(number: int, answer: CandidateAnswer, *, tokens: bool) -> pb.Candidate:
    message = _same(
        pb.Candidate,
        answer,
        candidate=number,
        tokens=None,
        output_tokens=packed_length(answer.tokens),
        finish_reason=_number(answer.finish_reason),
    )
    if tokens:
        message.tokens.ids.extend(unpack_tokens(answer.tokens).tolist())
    return message


def _hints(receipt: HintReceipt) -> pb.HintReceipt:
    message = pb.HintReceipt(
        importance=receipt.importance, session_finished=receipt.finished, ignored=receipt.ignored
    )
    if receipt.next_turn_s is not None:
        message.next_turn_in.CopyFrom(duration(receipt.next_turn_s))
    return message


def _usage(usage: Usage) -> pb.Usage:
    return _same(
        pb.Usage,
        usage,
        queue_time=duration(usage.queue_s),
        restore_time=duration(usage.restore_s),
        prefill_time=duration(usage.prefill_s),
        decode_time=duration(usage.decode_s),
    )


def stream_event(event: StreamEvent, output: OutputOptions, heartbeat_s: float) -> pb.StreamTurnResponse:
    match event:
        case Accepted():
            accepted = _same(pb.TurnAccepted, event, heartbeat_interval=duration(heartbeat_s))
            return pb.StreamTurnResponse(accepted=accepted)
        case ProgressView():
            progress = _same(pb.TurnProgress, event, phase=_number(event.phase))
            return pb.StreamTurnResponse(progress=progress)
        case Delta():
            return pb.StreamTurnResponse(delta=_delta(event, output))
        case TurnView():
            return pb.StreamTurnResponse(completed=turn(event, tokens=output.token_ids))


def _delta(delta: Delta, output: OutputOptions) -> pb.TurnDelta:
    message = pb.TurnDelta(token_offset=delta.offset, token_count=len(delta.tokens), text=delta.text)
    if delta.candidate:
        message.candidate = delta.candidate
    if output.token_ids:
        message.tokens.ids.extend(delta.tokens)
    message.logprobs.extend(_logprob(one) for one in delta.logprobs)
    if output.pad_chunks:
        message.padding = os.urandom((-message.ByteSize() - 3) % PAD_BYTES)
        # The padding's key and length take 3 bytes, or 2 when it is short.
        message.padding += os.urandom(-message.ByteSize() % PAD_BYTES)
    return message


def _logprob(value: TokenLogprob) -> pb.TokenLogprob:
    return pb.TokenLogprob(
        token_id=value.token_id,
        logprob=value.logprob,
        top=[
            pb.TopToken(token_id=token, logprob=logprob, piece=text.piece, name=text.name)
            for (token, logprob), text in zip(value.top, value.top_tokens, strict=True)
        ],
        piece=value.token.piece,
        name=value.token.name,
    )


def tenant_usage(use: TenantUse) -> pb.TenantUsage:
    counts = use.counts
    message = _same(
        pb.TenantUsage,
        counts,
        tenant=use.tenant,
        refused_turns=counts.refused,
        device_tokens=use.device_tokens,
        host_tokens=use.host_tokens,
    )
    if use.stored is not None:
        message.sessions, message.stored_bytes = use.stored.sessions, use.stored.bytes
    return message


def server_info(facts: ServerFacts, settings: TurnSettings) -> pb.GetServerInfoResponse:
    limits = _same(
        pb.Limits,
        settings.limits,
        max_ttl=duration(settings.limits.max_ttl_s),
        # Request ids live as long as their session.
        request_id_retention=duration(settings.limits.max_ttl_s),
        disconnect_grace=duration(settings.disconnect_grace_s),
    )
    return _same(pb.GetServerInfoResponse, facts, chat_template_sha256=facts.template_sha256, limits=limits)
