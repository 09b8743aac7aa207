"""What a request may say, as a table: message type to fields to checks. Pure; runs before anything is looked up.

All problems of a request are collected (up to ``MAX_PROBLEMS``) and reported in one InvalidArgument, each with the path
of its field. Texts never repeat what the client sent.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from google.protobuf.message import Message

from pensieve.core import SAMPLING
from pensieve.errors import InvalidArgument
from pensieve.server.rpc import checks as c
from pensieve.server.rpc.checks import Bounds, Check, Problems
from pensieve.server.turns.sampling import NOT_WITH_BEAMS, is_neutral
from pensieve.v1 import pensieve_pb2 as pb

MAX_PROBLEMS = 20
MAX_CALLS = 128
"""Of one item."""


@dataclass(frozen=True, slots=True)
class Rule:
    """Checks of one field. ``optional``: only when it is set (not empty, for fields without presence)."""

    field: str
    checks: tuple[Check, ...]
    optional: bool = False


def _must(field: str, *checks: Check) -> Rule:
    return Rule(field, checks)


def _may(field: str, *checks: Check) -> Rule:
    return Rule(field, checks, optional=True)


def validate(message: Message, bounds: Bounds) -> None:
    """Raises InvalidArgument (FIELD_INVALID) with every problem of ``message``."""
    problems: Problems = []
    _check(message, bounds, "", problems)
    for path, problem in problems[:1]:
        raise InvalidArgument(f"{path}: {problem}", violations=problems[:MAX_PROBLEMS])


def _check(message: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    if len(problems) >= MAX_PROBLEMS:
        return
    for rule in RULES[type(message)]:
        if rule.optional and not _is_set(message, rule.field):
            continue
        where = f"{path}.{rule.field}" if path else rule.field
        for check in rule.checks:
            check(getattr(message, rule.field), bounds, where, problems)
    for cross in CROSS.get(type(message), ()):
        cross(message, bounds, path, problems)


def _is_set(message: Any, field: str) -> bool:
    descriptor = message.DESCRIPTOR.fields_by_name[field]
    return bool(message.HasField(field) if descriptor.has_presence else getattr(message, field))


def _nested(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    _check(value, bounds, path, problems)


def _required(message: Any, field: str, path: str, problems: Problems) -> bool:
    if message.HasField(field):
        return True
    problems.append((f"{path}.{field}" if path else field, "is required"))
    return False


def _has_turn(message: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    """The specification. For a mere attach its request id would do; what else it says has to be right all the same."""
    if not _required(message, "turn", path, problems):
        return
    _check(message.turn, bounds, "turn", problems)
    if not getattr(message, "attach_only", False):
        _turn_has_input(message.turn, bounds, "turn", problems)


def _entry_has_content(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if message.WhichOneof("content") is None:
        problems.append((path, "needs text or tokens"))


def _speaks_as_its_role(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    is_text = message.WhichOneof("content") == "text"
    if message.function_calls and not (is_text and message.role == pb.ROLE_ASSISTANT):
        problems.append((f"{path}.function_calls", "are of texts of the assistant"))
    if message.call_id and not (is_text and message.role == pb.ROLE_TOOL):
        problems.append((f"{path}.call_id", "is of texts of tools"))


def _turn_has_input(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not message.input and not message.HasField("replace_after_item"):
        problems.append((f"{path}.input", "is empty, and replace_after_item is not set"))


def _min_below_max(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    both = message.HasField("min_output_tokens") and message.HasField("max_output_tokens")
    if both and message.min_output_tokens > message.max_output_tokens:
        problems.append((f"{path}.min_output_tokens", "is larger than max_output_tokens"))


def _beams_alone(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    """What a message says beside beams. What they inherit is looked at when the turn's values are resolved."""
    for name in NOT_WITH_BEAMS if message.beam_width > 1 else ():
        if _is_set(message, name) and not is_neutral(name, getattr(message, name)):
            problems.append((f"{path}.{name}", "does not go with beam_width above 1"))


def _beams_without_logprobs(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if message.sampling.beam_width > 1 and message.output.HasField("top_logprobs"):
        problems.append((f"{path}.output.top_logprobs", "does not go with beam_width above 1"))


def _beams_without_calls(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if message.sampling.beam_width > 1 and (message.calls.one or message.calls.HasField("begin_with")):
        problems.append((f"{path}.calls", "does not go with beam_width above 1"))


def _same_name(message: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not _required(message, "session", path, problems):
        return
    if message.session.name and message.session.name != message.name:
        problems.append(("session.name", "is another session than name"))


_SHAPED: dict[str, tuple[Check, ...]] = {
    "stop": (c.stops,),
    "stop_token_ids": (c.at_most(lambda b: b.limits.max_stop_token_ids), c.below_vocab),
    "logit_bias": (c.logit_bias,),
    "candidate_choice": (c.enum(pb.CandidateChoice),),
}
"""Sampling parameters that are no numbers."""


def _sampling_rules() -> Iterator[Rule]:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        row = SAMPLING[field.name]
        if field.name in _SHAPED:
            yield _may(field.name, *_SHAPED[field.name])
        elif row.low is not None and row.high is not None:
            limit = operator.attrgetter(f"limits.{row.limit}") if row.limit else None
            check = c.between(row.low, row.high, above=row.above, limit=limit, unless_zero=row.unless_zero)
            yield _may(field.name, check)


_SESSION_NAME = _must("name", c.session_name)
_SESSION = _must("session", c.session_name)
_REQUEST_ID = _may("request_id", c.request_id)
_PAGE = (_may("page_size", c.between(0, 1 << 31)), _may("page_token", c.text(4096)))
_FOLLOWED_BY = _may("followed_by", c.each(lambda _: 64, c.enum(pb.Role, unspecified=False)))
_NEW_ID = _may("session_id", c.session_id)

RULES: dict[type[Any], tuple[Rule, ...]] = {
    pb.CreateSessionRequest: (
        _REQUEST_ID,
        _NEW_ID,
        _may("config", _nested),
        _may("labels", c.labels),
        _may("initial_items", c.entries(lambda b: b.limits.max_initial_items, _nested)),
        _FOLLOWED_BY,
    ),
    pb.GetSessionRequest: (_SESSION_NAME, _may("view", c.enum(pb.SessionView))),
    pb.ListSessionsRequest: (*_PAGE, _may("label_selector", c.text(4096), c.label_selector)),
    pb.UpdateSessionRequest: (
        _SESSION_NAME,
        _must("update_mask", c.update_mask),
        _may("session", _nested),
    ),
    pb.Session: (_may("config", _nested), _may("labels", c.labels)),
    pb.DeleteSessionRequest: (_SESSION_NAME,),
    pb.ForkSessionRequest: (_SESSION_NAME, _REQUEST_ID, _NEW_ID, _may("item", c.item_number)),
    pb.RewindSessionRequest: (_SESSION_NAME, _REQUEST_ID, _must("item", c.item_number)),
    pb.AppendItemsRequest: (
        _SESSION_NAME,
        _REQUEST_ID,
        _must("items", c.entries(lambda b: b.limits.max_initial_items, _nested), c.not_empty),
        _FOLLOWED_BY,
    ),
    pb.ListItemsRequest: (_SESSION_NAME, *_PAGE, _may("after_item", c.item_number)),
    pb.StreamTurnRequest: (
        _SESSION,
        _may("on_disconnect", c.enum(pb.DisconnectPolicy)),
        _may("resume_attempt", c.text(64)),
        _may("stream_id", c.text(64)),
        _may("resume_candidate_offsets", c.at_most(lambda b: b.limits.max_candidates - 1)),
    ),
    pb.RunTurnRequest: (_SESSION,),
    pb.GetTurnRequest: (_SESSION, _must("request_id", c.request_id)),
    pb.FindTurnRequest: (
        _must("mark", c.not_empty, c.mark),
        _may("answer", c.prompt),
        _may("request_id", c.request_id),
    ),
    pb.ClaimRequestIdRequest: (
        _must("request_id", c.request_id),
        _must("session", c.session_name),
        _may("fingerprint", c.text(128)),
        _may("plan", c.text(1024)),
    ),
    pb.CancelTurnRequest: (
        _SESSION,
        _must("request_id", c.request_id),
        _may("keep", c.enum(pb.CancelTurnRequest.Keep)),
        _may("stream_id", c.text(64)),
    ),
    pb.ChooseCandidateRequest: (_SESSION, _must("request_id", c.request_id)),
    pb.WarmSessionRequest: (_SESSION,),
    pb.CountTokensRequest: (
        _may("session", c.session_name),
        _may("input", c.entries(lambda b: b.limits.max_input_items, _nested)),
    ),
    pb.GetServerInfoRequest: (),
    pb.GetUsageRequest: (),
    pb.GetStatsRequest: (),
    pb.EvictCacheRequest: (_may("session", c.session_name),),
    pb.DrainRequest: (_may("deadline", c.duration(0.0, lambda _: 24 * 3600.0)),),
    pb.SessionConfig: (
        _may("model", c.text(256)),
        _may("system_prompt", c.prompt),
        _may("default_sampling", _nested),
        _may("ttl", c.ttl),
        _may("overflow_policy", c.enum(pb.OverflowPolicy)),
        _may("prefix_sharing", c.enum(pb.PrefixSharing)),
        _may("tools_json", c.prompt),
    ),
    pb.InputItem: (
        _must("role", c.enum(pb.Role, unspecified=False)),
        _may("tokens", c.token_ids),
        _may("function_calls", c.each(lambda _: MAX_CALLS, _nested)),
        _may("call_id", c.text(256)),
    ),
    pb.FunctionCall: (
        _must("name", c.function_name),
        _must("arguments_json", c.json_object),
        _may("id", c.text(256)),
    ),
    pb.TurnSpec: (
        _must("request_id", c.request_id),
        _may("input", c.entries(lambda b: b.limits.max_input_items, _nested)),
        _may("replace_after_item", c.item_number),
        _may("sampling", _nested),
        _may("output", _nested),
        _may("max_duration", c.duration(0.001, lambda b: b.limits.max_turn_s)),
        _may("priority", c.between(-10, 10)),
        _may("hints", _nested),
        _may("annotations", c.turn_annotations),
        _may("mark", c.mark),
        _may("calls", _nested),
        _may("system_prompt", c.prompt),
        _may("tools_json", c.prompt),
    ),
    pb.CallBounds: (_may("begin_with", c.text(64)),),
    pb.TurnHints: (
        _may("next_turn_in", c.duration(0.0, lambda _: c.LONGEST_DURATION_S)),
        _may("importance", c.positive),
    ),
    pb.SamplingParams: tuple(_sampling_rules()),
    pb.OutputOptions: (
        _may("top_logprobs", c.between(0, 20, limit=lambda b: b.limits.max_top_logprobs)),
        _may("max_chunk_tokens", c.between(1, (1 << 31) - 1)),
        _may("max_chunk_delay", c.duration(0.0, lambda _: 10.0)),
    ),
}

CROSS: dict[type[Any], tuple[Callable[[Any, Bounds, str, Problems], None], ...]] = {
    pb.StreamTurnRequest: (_has_turn,),
    pb.RunTurnRequest: (_has_turn,),
    pb.InputItem: (_entry_has_content, _speaks_as_its_role),
    pb.TurnSpec: (_beams_without_logprobs, _beams_without_calls),
    pb.SamplingParams: (_min_below_max, _beams_alone),
    pb.UpdateSessionRequest: (_same_name,),
}
