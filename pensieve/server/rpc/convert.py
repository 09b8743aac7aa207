"""Messages to values: a message that ``validation`` has let through becomes the type that the service works with."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from pensieve.core import CandidateChoice, Role, SamplingDefaults, pack_tokens
from pensieve.server.rpc.checks import UPDATABLE, seconds
from pensieve.server.sessions.records import NewSession, SessionChange
from pensieve.server.values import (
    CallBounds,
    InputEntry,
    NewTurn,
    OnDisconnect,
    OutputChoice,
    RawEntry,
    SpokenEntry,
    TurnFrame,
    TurnHints,
)
from pensieve.speech import FunctionCall
from pensieve.store.records import Overflow, PrefixSharing, SessionConfig
from pensieve.v1 import pensieve_pb2 as pb

_MADE: dict[str, Callable[[Any], Any]] = {
    "stop": tuple,
    "stop_token_ids": tuple,
    "logit_bias": dict,
    "candidate_choice": CandidateChoice,
}
"""How the sampling parameters that are no scalars become values."""


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
    return SpokenEntry(role, item.text, calls=calls, call_id=item.call_id)


def sampling(params: pb.SamplingParams) -> SamplingDefaults:
    """The values that the message sets; one it leaves out stays unset, because 0 may be meant."""
    values = {}
    for field, value in params.ListFields():
        made = _MADE.get(field.name)
        values[field.name] = value if made is None else made(value)
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


def session_change(request: pb.UpdateSessionRequest) -> SessionChange:
    """The change of the fields that the mask names; without a mask, of those that the given session sets."""
    paths = set(request.update_mask.paths) or _populated(request.session)
    if "config" in paths:
        paths |= {path for path in UPDATABLE if path.startswith("config.")}
    new = config(request.session.config)
    return SessionChange(
        labels=dict(request.session.labels) if "labels" in paths else None,
        system_prompt=new.system_prompt if "config.system_prompt" in paths else None,
        sampling=new.sampling if "config.default_sampling" in paths else None,
        ttl_s=new.ttl_s if "config.ttl" in paths else None,
        overflow=new.overflow if "config.overflow_policy" in paths else None,
        prefix_sharing=new.prefix_sharing if "config.prefix_sharing" in paths else None,
        tools=new.tools if "config.tools_json" in paths else None,
        rebind=request.rebind,
    )


def _populated(session: pb.Session) -> set[str]:
    new = session.config
    given = {
        "labels": bool(session.labels),
        "config.system_prompt": bool(new.system_prompt),
        "config.default_sampling": new.HasField("default_sampling"),
        "config.ttl": new.HasField("ttl"),
        "config.overflow_policy": bool(new.overflow_policy),
        "config.prefix_sharing": bool(new.prefix_sharing),
        "config.tools_json": bool(new.tools_json),
    }
    return {path for path, is_set in given.items() if is_set}


def turn_spec(turn: pb.TurnSpec) -> NewTurn:
    out = turn.output
    return NewTurn(
        request_id=turn.request_id,
        input=entries(turn.input),
        expected_revision=optional(turn, "expected_revision"),
        replace_after_item=optional(turn, "replace_after_item"),
        sampling=sampling(turn.sampling),
        output=OutputChoice(
            token_ids=out.token_ids,
            top_logprobs=optional(out, "top_logprobs"),
            max_chunk_tokens=optional(out, "max_chunk_tokens"),
            max_chunk_delay_s=seconds(out.max_chunk_delay) or 0.0,
            pad_chunks=out.pad_chunks,
        ),
        max_duration_s=seconds(turn.max_duration) if turn.HasField("max_duration") else None,
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
    )


def call_bounds(message: pb.CallBounds) -> CallBounds:
    return CallBounds(message.begin_with if message.HasField("begin_with") else None, message.one)


def hints(message: pb.TurnHints) -> TurnHints:
    return TurnHints(
        next_turn_s=seconds(message.next_turn_in) if message.HasField("next_turn_in") else None,
        importance=message.importance if message.HasField("importance") else None,
        finished=message.session_finished,
    )


def on_disconnect(policy: int) -> OnDisconnect:
    return OnDisconnect(policy or OnDisconnect.CANCEL)


def label_selector(text: str) -> dict[str, str]:
    """``k=v,k2=v2``; white space around keys and values does not count."""
    pairs = (part.split("=", 1) for part in text.split(",") if part)
    return {key.strip(): value.strip() for key, value in pairs}


def optional(message: Any, field: str) -> int | None:
    """The number in a field with presence; None when unset."""
    return int(getattr(message, field)) if message.HasField(field) else None
