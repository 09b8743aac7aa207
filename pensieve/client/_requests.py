"""Build wire messages from keyword arguments. Pure; wrong names and types fail here, before any call."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message

from pensieve.client._values import CallingMessage, Item, Role, ToolResult, Turn
from pensieve.client.arguments import SAMPLING_KEYS, TURN_KEYS, check_names
from pensieve.client.arguments import request_id as make_id
from pensieve.errors import InvalidArgument
from pensieve.v1 import pensieve_pb2 as pb

_MAX_ID_CHARS = 256
Content = str | Sequence[int]
"""Text passes through the model's chat template, unless it is a ``RawText``. Token ids are appended verbatim."""
InputLike = tuple[Role | str, Content] | Item | ToolResult | CallingMessage
"""``("user", "Hi")``, ``(Role.TOOL, [1, 2, 3])``, another session's item, a tool's result or a message with
calls."""


class RawText(str):
    """Text that bypasses the chat template. The model's own tokenizer encodes it, control tokens included.

    >>> session.stream(items=[("user", RawText("Once upon a time"))])  # doctest: +SKIP
    """

    __slots__ = ()


UPDATE_PATHS = {
    "labels": "labels",
    "system_prompt": "config.system_prompt",
    "default_sampling": "config.default_sampling",
    "ttl": "config.ttl",
    "overflow": "config.overflow_policy",
    "share_prefixes": "config.prefix_sharing",
    "tools": "config.tools_json",
    "subject": "config.subject",
    "compact_at": "config.compact_at",
    "keep_turns": "config.keep_turns",
    "rebind": "",
}
"""Keyword of ``SessionChanges`` → path in an update mask; "": not a field of a session."""
DISCONNECT = {"cancel": "DISCONNECT_POLICY_CANCEL", "finish": "DISCONNECT_POLICY_FINISH"}
OVERFLOW = {
    "reject": "OVERFLOW_POLICY_REJECT",
    "drop_oldest_turns": "OVERFLOW_POLICY_DROP_OLDEST_TURNS",
    "drop_oldest": "OVERFLOW_POLICY_DROP_OLDEST_TURNS",
}
SHARING = {
    None: pb.PREFIX_SHARING_UNSPECIFIED,
    True: pb.PREFIX_SHARING_TENANT,
    False: pb.PREFIX_SHARING_NONE,
}
KEEP = {"partial": "KEEP_PARTIAL", "nothing": "KEEP_NOTHING"}
CANDIDATE_CHOICES = {"first": "CANDIDATE_CHOICE_FIRST", "best_logprob": "CANDIDATE_CHOICE_BEST_LOGPROB"}


def tools_json(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return function definitions as JSON; "" for none. Raises InvalidArgument if they cannot be encoded."""
    try:
        return json.dumps(list(tools), ensure_ascii=False, allow_nan=False) if tools else ""
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument.field("config.tools_json", str(error)) from error


def session_name(name_or_id: str) -> str:
    """Return ``sessions/{id}`` for an id or a name. Raises InvalidArgument if metadata cannot carry it."""
    session_id = name_or_id.removeprefix("sessions/")
    if not session_id:
        raise InvalidArgument.field("session", "must not be empty")
    # gRPC refuses other metadata as if the server had failed. The server does the full check of ids.
    if len(session_id) > _MAX_ID_CHARS or not (session_id.isascii() and session_id.isprintable()):
        raise InvalidArgument.field(
            "session", "must have 3 to 63 characters of a-z, 0-9 and -, and not begin with -"
        )
    return f"sessions/{session_id}"


def duration(seconds: float) -> Duration:
    message = Duration()
    message.FromNanoseconds(round(seconds * 1e9))
    return message


def sampling(options: Mapping[str, Any]) -> pb.SamplingParams:
    """Set only the parameters that are given. ``options`` may hold other keys; None means "not given".

    Raises InvalidArgument for a value that does not fit its field.
    """
    params = pb.SamplingParams()
    for key in sorted(SAMPLING_KEYS & options.keys()):
        value = options[key]
        if value is None:
            continue
        if key == "stop" and isinstance(value, str):
            value = [value]
        elif key == "candidate_choice":
            value = enum_name("sampling.candidate_choice", value, CANDIDATE_CHOICES)
        set_field(params, key, value, option=f"sampling.{key}")
    return params


def set_field(message: Message, field: str, value: object, *, option: str = "") -> None:
    """Set a field unless ``value`` is None. Raises InvalidArgument, which names ``option``, for a bad value."""
    if value is None:
        return
    try:
        if isinstance(getattr(message, field), Duration):
            value = duration(value)  # type: ignore[arg-type]
        message.MergeFrom(type(message)(**{field: value}))
    except (TypeError, ValueError, OverflowError) as error:
        raise InvalidArgument.field(option or field, str(error)) from error


def enum_name(field: str, value: object, names: Mapping[str, str]) -> str:
    """Return the contract's enum name for a word in any case. Raises InvalidArgument, which lists the words."""
    word = value.lower() if isinstance(value, str) else ""
    if word not in names:
        raise InvalidArgument.field(field, f"{value!r} is not one of {', '.join(names)}")
    return names[word]


def role_name(value: Role | int | str) -> str:
    """Return the contract's enum name for a role, its number or its word in any case. Raises InvalidArgument."""
    try:
        return f"ROLE_{Role(value).name}"
    except ValueError as error:
        raise InvalidArgument.field("input.role", str(error)) from error


def input_item(value: InputLike) -> pb.InputItem:
    """Build an input item. Raises InvalidArgument for an unknown role or a text with a lone surrogate."""
    try:
        return _input_item(value)
    except UnicodeEncodeError as error:
        problem = (
            f"has a lone surrogate at {error.start}: text.encode(errors='replace').decode() makes it a '?'"
        )
        raise InvalidArgument.field("input.text", problem) from None


def _input_item(value: InputLike) -> pb.InputItem:
    if isinstance(value, ToolResult):
        return pb.InputItem(role=pb.ROLE_TOOL, text=value.text, call_id=value.call_id)
    if isinstance(value, CallingMessage):
        calls = [
            pb.FunctionCall(name=one.name, arguments_json=one.arguments, id=one.id) for one in value.calls
        ]
        return pb.InputItem(role=pb.ROLE_ASSISTANT, text=value.text, function_calls=calls)
    if isinstance(value, Item):
        content: Content = value.token_ids or value.text
        return input_item((Role(value.role), content))
    given: object = value  # types exclude what callers without a type checker pass
    if isinstance(given, Mapping | str):
        kind = type(given).__name__
        raise TypeError(f'an item must be a role and its content, such as ("user", "Hi"), not a {kind}')
    speaker, content = value
    if isinstance(content, RawText):
        return pb.InputItem(role=role_name(speaker), raw_text=content)
    if isinstance(content, str):
        return pb.InputItem(role=role_name(speaker), text=content)
    if isinstance(content, bytes | bytearray):
        raise TypeError("content must be text or token ids, not bytes: decode them first")
    try:
        ids = pb.TokenIds(ids=content)
    except TypeError as error:
        raise TypeError("content must be text or token ids; pass several items as items=[...]") from error
    return pb.InputItem(role=role_name(speaker), tokens=ids)


def turn_input(
    text: str | None, tokens: Sequence[int] | None, items: Sequence[InputLike] | None
) -> list[pb.InputItem]:
    """Build a turn's input from at most one of the three arguments; none of them means no input (regenerate).

    Raises InvalidArgument if more than one is given.
    """
    if sum(value is not None for value in (text, tokens, items)) > 1:
        raise InvalidArgument.field("input", "pass only one of text, tokens and items")
    if text is not None:
        return [input_item((Role.USER, text))]
    if tokens is not None:
        return [input_item((Role.USER, tokens))]
    return [input_item(item) for item in items or ()]


def stream_turn(
    session: str, request_input: Sequence[pb.InputItem], options: Mapping[str, Any]
) -> pb.StreamTurnRequest:
    """Build the request of a whole turn. Raises TypeError for an unknown option, InvalidArgument for a bad value."""
    check_names(options, TURN_KEYS)
    spec = pb.TurnSpec(
        request_id=make_id(session, options.get("request_id")),
        input=request_input,
        sampling=sampling(options),
        hints=_hints(options),
        calls=_call_bounds(options),
        system_prompt=options.get("turn_system_prompt"),
    )
    wanted = answer_format(options)
    if wanted is not None:
        spec.format.CopyFrom(wanted)
    tools = options.get("turn_tools")
    if tools is not None:
        spec.tools_json = tools if isinstance(tools, str) else tools_json(tools)
    set_field(spec.output, "token_ids", options.get("token_ids", True))
    for key in ("top_logprobs", "max_chunk_tokens", "pad_chunks", "max_chunk_delay"):
        set_field(spec.output, key, options.get(key))
    for key in (
        "expected_revision", "replace_after_item", "priority", "annotations", "mark", "max_duration",
        "prediction",
    ):  # fmt: skip
        set_field(spec, key, options.get(key))
    return pb.StreamTurnRequest(
        session=session,
        turn=spec,
        on_disconnect=enum_name("on_disconnect", options.get("on_disconnect", "cancel"), DISCONNECT),
    )


def cancel_turn(
    session: str, turn: str, keep: str, keep_output_tokens: int | None, stream_id: str
) -> pb.CancelTurnRequest:
    """``turn``: its request id. ``stream_id``: the stream on which the caller reads it, or ""."""
    return pb.CancelTurnRequest(
        session=session,
        request_id=turn,
        keep=enum_name("keep", keep, KEEP),
        keep_output_tokens=keep_output_tokens,
        stream_id=stream_id,
    )


def choose_candidate(
    session: str, turn: Turn | str, candidate: int, expected_revision: int | None
) -> pb.ChooseCandidateRequest:
    """``turn``: the turn or its request id. Raises InvalidArgument for an impossible candidate number."""
    turn_id = turn.request_id if isinstance(turn, Turn) else make_id(session, turn)
    if not 0 <= candidate < 1 << 32:
        raise InvalidArgument.field("candidate", "must be the number of a candidate")
    return pb.ChooseCandidateRequest(
        session=session, request_id=turn_id, candidate=candidate, expected_revision=expected_revision
    )


def _call_bounds(options: Mapping[str, Any]) -> pb.CallBounds | None:
    bounds = pb.CallBounds()
    set_field(bounds, "begin_with", options.get("must_call"), option="must_call")
    set_field(bounds, "one", options.get("single_call"), option="single_call")
    set_field(bounds, "none", options.get("no_calls"), option="no_calls")
    for field in ("allowed", "strict"):
        names = options.get(f"{field}_calls")
        if isinstance(names, str):
            raise InvalidArgument.field(f"{field}_calls", "must be names of functions, not one text")
        set_field(bounds, field, names, option=f"{field}_calls")
    return bounds if bounds.ListFields() else None


def answer_format(options: Mapping[str, Any]) -> pb.AnswerFormat | None:
    """Return the form of the answer that the options ask for. Raises InvalidArgument for more than one."""
    given = [name for name in ("schema", "choice", "regex", "lark") if options.get(name) is not None]
    if not given:
        return None
    name, value = given[0], options[given[0]]
    if len(given) > 1:
        raise InvalidArgument.field(given[1], f"does not go with {name}: an answer has one form")
    form = pb.AnswerFormat()
    if name == "schema":
        set_field(form, "json_schema", _schema_text(value), option=name)
    elif name == "choice":
        if isinstance(value, str):
            raise InvalidArgument.field(name, "must be several texts, not one")
        set_field(form.choice, "texts", value, option=name)
        form.choice.SetInParent()
    else:
        set_field(form, name, value, option=name)
    return form


def _schema_text(value: Any) -> Any:
    """A schema as JSON text. The classes of pydantic models make theirs themselves."""
    if isinstance(value, str):
        return value
    if isinstance(value, type):
        if not hasattr(value, "model_json_schema"):
            raise InvalidArgument.field("schema", f"the class {value.__name__} is no pydantic model")
        value = value.model_json_schema()
    try:
        return json.dumps(value, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidArgument.field("schema", str(error)) from error


def _hints(options: Mapping[str, Any]) -> pb.TurnHints | None:
    hints = pb.TurnHints()
    for key in ("next_turn_in", "importance", "session_finished"):
        set_field(hints, key, options.get(key))
    return hints if hints.ListFields() else None


def session_config(given: Mapping[str, Any]) -> pb.SessionConfig:
    """``given``: options of ``SessionChanges``, ``model`` and ``summary``; None means "not given"."""
    defaults = given.get("default_sampling") or {}
    check_names(defaults, SAMPLING_KEYS)
    overflow, tools = given.get("overflow"), given.get("tools")
    config = pb.SessionConfig(
        model=given.get("model") or "",
        system_prompt=given.get("system_prompt") or "",
        overflow_policy=enum_name("overflow", overflow, OVERFLOW) if overflow else None,
        prefix_sharing=SHARING[given.get("share_prefixes")],
        tools_json=tools if isinstance(tools, str) else tools_json(tools or ()),
        subject=given.get("subject") or "",
        summary=given.get("summary") or "",
    )
    if defaults:
        config.default_sampling.CopyFrom(sampling(defaults))
    for name in ("ttl", "compact_at", "keep_turns"):
        set_field(config, name, given.get(name))
    return config


def new_session(
    config: pb.SessionConfig,
    *,
    session_id: str | None = None,
    labels: Mapping[str, str] | None = None,
    initial_items: Sequence[InputLike] = (),
    followed_by: Sequence[Role] = (),
    request_id: str | None = None,
) -> pb.CreateSessionRequest:
    return pb.CreateSessionRequest(
        request_id=make_id(f"sessions/{session_id}" if session_id else "", request_id),
        session_id=session_id or "",
        config=config,
        labels=labels or {},
        initial_items=[input_item(item) for item in initial_items],
        followed_by=[role_name(role) for role in followed_by],
    )
