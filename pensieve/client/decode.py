"""Convert wire messages to the SDK's values. Pure."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import cache
from typing import Any, TypeVar

from google.protobuf.duration_pb2 import Duration
from google.protobuf.timestamp_pb2 import Timestamp

from pensieve.client._requests import CANDIDATE_CHOICES
from pensieve.client._values import (
    Candidate,
    Compaction,
    ErasedSession,
    ErasureReceipt,
    FinishReason,
    Item,
    Limits,
    Phase,
    Piece,
    Progress,
    Residency,
    Role,
    ServerInfo,
    SessionInfo,
    SessionState,
    TenantTotals,
    TokenCount,
    Turn,
    TurnState,
    Warming,
    enum_from_number,
)
from pensieve.core import HintReceipt, TokenLogprob, TokenText, Usage
from pensieve.v1 import pensieve_pb2 as pb

Value = TypeVar("Value")
SESSION_STATES = {
    pb.Session.STATE_ACTIVE: SessionState.ACTIVE,
    pb.Session.STATE_DAMAGED: SessionState.DAMAGED,
    pb.Session.STATE_DELETED: SessionState.DELETED,
}
TURN_STATES = {
    pb.Turn.STATE_RUNNING: TurnState.RUNNING,
    pb.Turn.STATE_COMMITTED: TurnState.COMMITTED,
    pb.Turn.STATE_DISCARDED: TurnState.DISCARDED,
}


def seconds(duration: Duration) -> float:
    return duration.seconds + duration.nanos / 1e9


def time_of(message: Timestamp) -> datetime:
    return message.ToDatetime(tzinfo=UTC)


def finish_reason(number: int) -> FinishReason | int | None:
    return enum_from_number(FinishReason, number) if number else None


@cache
def _shared_names(kind: Any, message: Any) -> tuple[str, ...]:
    return tuple(kind.__annotations__.keys() & message.DESCRIPTOR.fields_by_name.keys())


def _same(kind: Callable[..., Value], message: Any, **converted: Any) -> Value:
    """Make a value from the message's fields of the same name, and from those that were ``converted``."""
    for name in _shared_names(kind, message.__class__):
        if name not in converted:
            converted[name] = getattr(message, name)
    return kind(**converted)


def item(message: pb.Item) -> Item:
    return _same(
        Item,
        message,
        role=enum_from_number(Role, message.role),
        token_ids=tuple(message.tokens.ids),
        finish_reason=finish_reason(message.finish_reason),
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
    )


def usage(message: pb.Usage) -> Usage:
    return _same(
        Usage,
        message,
        queue_s=seconds(message.queue_time),
        restore_s=seconds(message.restore_time),
        prefill_s=seconds(message.prefill_time),
        decode_s=seconds(message.decode_time),
    )


def turn(message: pb.Turn) -> Turn:
    return _same(
        Turn,
        message,
        state=TURN_STATES.get(message.state, TurnState.UNSPECIFIED),
        text=message.output.text,
        finish_reason=finish_reason(message.finish_reason),
        usage=usage(message.usage),
        input=tuple(item(part) for part in message.input),
        output=item(message.output) if message.HasField("output") else None,
        candidates=tuple(candidate(part) for part in message.candidates),
        chosen=message.chosen_candidate,
        hints=hints(message.hints) if message.HasField("hints") else None,
        annotations=dict(message.annotations),
    )


def candidate(message: pb.Candidate) -> Candidate:
    return _same(
        Candidate,
        message,
        finish_reason=finish_reason(message.finish_reason),
        mean_logprob=message.mean_logprob if message.HasField("mean_logprob") else None,
        token_ids=tuple(message.tokens.ids),
    )


def hints(message: pb.HintReceipt) -> HintReceipt:
    return HintReceipt(
        next_turn_s=seconds(message.next_turn_in) if message.HasField("next_turn_in") else None,
        importance=message.importance if message.HasField("importance") else None,
        finished=message.session_finished,
        ignored=tuple(message.ignored),
    )


def piece(message: pb.TurnDelta) -> Piece:
    return Piece(
        text=message.text,
        token_ids=tuple(message.tokens.ids),
        logprobs=tuple(
            TokenLogprob(
                token_id=one.token_id,
                logprob=one.logprob,
                top=tuple((top.token_id, top.logprob) for top in one.top),
                token=TokenText(one.piece, one.name),
                top_tokens=tuple(TokenText(top.piece, top.name) for top in one.top),
            )
            for one in message.logprobs
        ),
        token_offset=message.token_offset,
        token_count=message.token_count,
        candidate=message.candidate,
    )


def progress(message: pb.TurnProgress) -> Progress:
    return _same(Progress, message, phase=enum_from_number(Phase, message.phase))


def sampling(message: pb.SamplingParams) -> dict[str, object]:
    """Return the fields that are set, as keyword arguments."""
    values: dict[str, object] = {}
    for descriptor, value in message.ListFields():
        if descriptor.name == "logit_bias":
            values["logit_bias"] = dict(value)
        elif descriptor.name in ("stop", "stop_token_ids"):
            values[descriptor.name] = tuple(value)
        elif descriptor.name == "candidate_choice":
            number = pb.CandidateChoice.Value
            names = {number(long): short for short, long in CANDIDATE_CHOICES.items()}
            values["candidate_choice"] = names.get(value, value)
        else:
            values[descriptor.name] = value
    return values


def session(message: pb.Session) -> SessionInfo:
    config = message.config
    drop = config.overflow_policy == pb.OVERFLOW_POLICY_DROP_OLDEST_TURNS
    return _same(
        SessionInfo,
        message,
        state=SESSION_STATES.get(message.state, SessionState.UNSPECIFIED),
        model=config.model,
        system_prompt=config.system_prompt,
        default_sampling=sampling(config.default_sampling),
        ttl_s=seconds(config.ttl),
        overflow="drop_oldest_turns" if drop else "reject",
        share_prefixes=config.prefix_sharing != pb.PREFIX_SHARING_NONE,
        tools=config.tools_json,
        subject=config.subject,
        summary=config.summary,
        compact_at=config.compact_at,
        keep_turns=config.keep_turns,
        labels=dict(message.labels),
        create_time=time_of(message.create_time) if message.HasField("create_time") else None,
        update_time=time_of(message.update_time) if message.HasField("update_time") else None,
        expire_time=time_of(message.expire_time) if message.HasField("expire_time") else None,
        active_request_id=message.active_turn.request_id,
        residency=residency(message.residency) if message.HasField("residency") else None,
    )


def compaction(message: pb.CompactSessionResponse) -> Compaction:
    used = usage(message.usage) if message.HasField("usage") else None
    return Compaction(session(message.session), message.summary, message.branch, used)


def erased_session(message: pb.ErasedSession) -> ErasedSession:
    return _same(ErasedSession, message)


def erasure(message: pb.SubjectErased, sessions: list[ErasedSession]) -> ErasureReceipt:
    return ErasureReceipt(tuple(sessions), message.replica, tuple(message.undecided), message.remnants)


def residency(message: pb.CacheResidency) -> Residency:
    return _same(Residency, message)


def warming(message: pb.WarmSessionResponse) -> Warming:
    return Warming(message.accepted, message.refused, residency(message.residency))


def token_count(message: pb.CountTokensResponse) -> TokenCount:
    return _same(TokenCount, message)


def usage_totals(message: pb.GetUsageResponse) -> TenantTotals:
    used = message.usage
    return _same(
        TenantTotals,
        used,
        replica=message.replica,
        sessions=used.sessions if used.HasField("sessions") else None,
        stored_bytes=used.stored_bytes if used.HasField("stored_bytes") else None,
    )


def server_info(message: pb.GetServerInfoResponse) -> ServerInfo:
    limits = _same(
        Limits,
        message.limits,
        max_ttl_s=seconds(message.limits.max_ttl),
        request_id_retention_s=seconds(message.limits.request_id_retention),
        disconnect_grace_s=seconds(message.limits.disconnect_grace),
    )
    return _same(ServerInfo, message, limits=limits, features=tuple(message.features))
