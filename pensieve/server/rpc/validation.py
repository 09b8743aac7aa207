"""Validation of requests, as a table from message type to fields to checks. Pure; runs before any lookup.

One InvalidArgument reports all problems of a request (up to ``MAX_PROBLEMS``) by field path, and repeats no input.
"""

from __future__ import annotations

import math
import operator
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any

from google.protobuf.message import Message

from pensieve.config import parse_cache_size
from pensieve.core import MAX_PREDICTION_CHARS, SAMPLING
from pensieve.errors import InvalidArgument
from pensieve.server import ids
from pensieve.server.grammars import checker as grammar_checker
from pensieve.server.settings import RequestLimits
from pensieve.server.turns.sampling import BEAM_CONFLICTS, is_neutral
from pensieve.speech import is_json_object
from pensieve.v1 import pensieve_pb2 as pb

MAX_PROBLEMS = 20
MAX_CALLS = 128
MAX_SUBJECT_BYTES = 256
LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}", re.ASCII)
LONGEST_DURATION_S = 315_576_000_000
"""The longest protobuf Duration, 10,000 years."""
UPDATABLE = {
    "config.system_prompt": "system_prompt",
    "config.default_sampling": "sampling",
    "config.ttl": "ttl_s",
    "config.overflow_policy": "overflow",
    "config.prefix_sharing": "prefix_sharing",
    "config.tools_json": "tools",
    "config.subject": "subject",
    "config.compact_at": "compact_at",
    "config.keep_turns": "keep_turns",
}
"""Path that an update mask may name, beside ``labels`` and ``config`` → field of ``SessionConfig``."""


@dataclass(frozen=True, slots=True)
class Bounds:
    limits: RequestLimits
    vocab: Callable[[], int]
    """Return the number of token ids. Called only for requests that hold some; may raise Unavailable (STARTING)."""


Problem = tuple[str, str]
"""Path below the checked value, "" for the value itself, and what is wrong."""
Check = Callable[[Any, Bounds], str | Iterator[Problem]]
"""Returns the problem of a value, "" if there is none; of a message or a list, those of its parts."""
FromBounds = Callable[[Bounds], float]


@dataclass(frozen=True, slots=True)
class Rule:
    """Checks of one field. An ``optional`` field is checked only if it is set; without presence: not empty."""

    field: str
    checks: tuple[Check, ...]
    optional: bool = False


def _must(field: str, *checks: Check) -> Rule:
    return Rule(field, checks)


def _may(field: str, *checks: Check) -> Rule:
    return Rule(field, checks, optional=True)


def validate(message: Message, bounds: Bounds) -> None:
    """Raise InvalidArgument (FIELD_INVALID) with every problem of ``message``."""
    problems = list(islice(_nested(message, bounds), MAX_PROBLEMS))
    for path, problem in problems[:1]:
        raise InvalidArgument(f"{path}: {problem}", violations=problems)


def _nested(message: Any, bounds: Bounds) -> Iterator[Problem]:
    given = {field.name for field, _ in message.ListFields()}
    for rule in RULES[type(message)]:
        if rule.optional and rule.field not in given:
            continue
        for check in rule.checks:
            yield from _at(rule.field, check(getattr(message, rule.field), bounds))
    for cross in CROSS.get(type(message), ()):
        yield from cross(message, bounds)


def _at(place: str, found: str | Iterator[Problem]) -> Iterator[Problem]:
    """The problems that a check found at a place, with paths that begin there."""
    if isinstance(found, str):
        if found:
            yield place, found
        return
    for path, problem in found:
        yield f"{place}{'' if path == '' or path.startswith('[') else '.'}{path}", problem


def _has_turn(message: Any, bounds: Bounds) -> Iterator[Problem]:
    """Check the turn. An attach needs only its request id, but the other fields must be valid too."""
    if not message.HasField("turn"):
        yield "turn", "is required"
        return
    yield from _at("turn", _nested(message.turn, bounds))
    is_attach = getattr(message, "attach_only", False)
    if not (is_attach or message.turn.input or message.turn.HasField("replace_after_item")):
        yield "turn.input", "is empty, and replace_after_item is not set"


def _entry_has_content(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    if message.WhichOneof("content") is None:
        yield "", "needs text or tokens"


def _tool_fields_fit_role(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    is_text = message.WhichOneof("content") == "text"
    if message.function_calls and not (is_text and message.role == pb.ROLE_ASSISTANT):
        yield "function_calls", "are allowed only with text of the role assistant"
    if message.call_id and not (is_text and message.role == pb.ROLE_TOOL):
        yield "call_id", "is allowed only with text of the role tool"


def _min_below_max(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    both = message.HasField("min_output_tokens") and message.HasField("max_output_tokens")
    if both and message.min_output_tokens > message.max_output_tokens:
        yield "min_output_tokens", "is larger than max_output_tokens"


def _beams_alone(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    """Check the message's own fields. Inherited values are checked when the turn's sampling is resolved."""
    if message.beam_width > 1:
        given = {field.name for field, _ in message.ListFields()}
        for name in BEAM_CONFLICTS:
            if name in given and not is_neutral(name, getattr(message, name)):
                yield name, "does not go with beam_width above 1"


def _beams_alone_in_turn(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    if message.sampling.beam_width > 1:
        given = {
            "output.top_logprobs": message.output.HasField("top_logprobs"),
            "calls": message.calls != pb.CallBounds(),
            "format": message.HasField("format"),
        }
        yield from ((name, "does not go with beam_width above 1") for name, is_set in given.items() if is_set)


def _format_is_given(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    if message.WhichOneof("form") is None:
        yield "", "needs a form"


def _calls_agree(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    if message.none and message.HasField("begin_with"):
        yield "none", "does not go with begin_with"
    if message.begin_with and message.allowed and message.begin_with not in message.allowed:
        yield "begin_with", "is not among those allowed"


def _same_name(message: Any, _bounds: Bounds) -> Iterator[Problem]:
    if not message.HasField("session"):
        yield "session", "is required"
    elif message.session.name and message.session.name != message.name:
        yield "session.name", "must be the same session as name"


# ---- checks: each tests one value and returns its problem


def _pattern(pattern: re.Pattern[str], problem: str) -> Check:
    return lambda value, _: "" if pattern.fullmatch(value) else problem


_SESSION_ID_RULE = "must have 3 to 63 characters of a-z, 0-9 and -, and not begin with -"
session_name = _pattern(ids.SESSION_NAME, f"must be sessions/{{id}}; the id {_SESSION_ID_RULE}")
session_id = _pattern(ids.SESSION_ID, _SESSION_ID_RULE)
function_name = _pattern(re.compile(r"[A-Za-z0-9_.-]{1,64}"), "must be like [A-Za-z0-9_.-]{1,64}")
request_id = _pattern(ids.REQUEST_ID, "must be a UUID")


def between(
    low: float, high: float, *, above: bool = False, limit: FromBounds | None = None, unless_zero: float = 0.0
) -> Check:
    """Check for ``low`` to ``high`` (or a configured ``limit``), or above ``low`` with ``above``. Rejects NaN.
    ``unless_zero``: the smallest value allowed besides 0, for temperatures, which divide logits."""
    least = 0.99 * unless_zero or low  # 0.01 as float32 is a little less than 0.01

    def check(value: Any, bounds: Bounds) -> str:
        top = high if limit is None else limit(bounds)
        inside = (low < value if above else least <= value) and value <= top  # false for NaN
        if inside or (unless_zero and value == 0):
            return ""
        least_words = f"0, or at least {unless_zero:.12g}" if unless_zero else f"at least {low:.12g}"
        words = f"above {low:.12g}" if above else least_words
        return f"must be {words} and at most {top:.12g}"

    return check


def text(max_chars: int | FromBounds) -> Check:
    def check(value: Any, bounds: Bounds) -> str:
        most = max_chars if isinstance(max_chars, int) else max_chars(bounds)
        return f"is longer than {most:.0f} characters" if len(value) > most else ""

    return check


prompt = text(lambda bounds: bounds.limits.max_input_chars)
mark = text(lambda bounds: bounds.limits.max_mark_chars)


def enum(kind: Any, *, unspecified: bool = True) -> Check:
    """Check for a value that this version knows; proto3 enums are open."""
    known = {number for number in kind.values() if number or unspecified}
    return lambda value, _: "" if value in known else "is not a known value" if value else "is required"


def at_most(count: FromBounds) -> Check:
    return lambda value, bounds: (
        f"has more than {count(bounds):g} elements" if len(value) > count(bounds) else ""
    )


def each(count: FromBounds, element: Check) -> Check:
    """Check a list: its length, then each element."""

    def parts(value: Any, bounds: Bounds) -> Iterator[Problem]:
        for index, one in enumerate(value):
            yield from _at(f"[{index}]", element(one, bounds))

    return lambda value, bounds: at_most(count)(value, bounds) or parts(value, bounds)


def entries(count: FromBounds, element: Check) -> Check:
    """Check a list of input items: their count, their total size, then each."""
    one_by_one = each(count, element)

    def check(value: Any, bounds: Bounds) -> str | Iterator[Problem]:
        if len(value) <= count(bounds) and sum(map(_chars, value)) > bounds.limits.max_input_chars:
            return f"has more than {bounds.limits.max_input_chars} characters"
        return one_by_one(value, bounds)

    return check


def _chars(item: Any) -> int:
    texts = len(item.text) + len(item.raw_text)
    return texts + sum(len(call.name) + len(call.arguments_json) for call in item.function_calls)


def json_object(value: str, _bounds: Bounds) -> str:
    return "" if is_json_object(value) else "must be a JSON object"


def json_schema(value: str, _bounds: Bounds) -> str:
    try:
        grammar_checker.parse_schema(value)
    except ValueError as error:
        return str(error)
    return ""


def grammar(value: str, _bounds: Bounds) -> str:
    if not value:
        return "is empty"
    most = grammar_checker.MAX_BYTES
    return f"is larger than {most} bytes" if len(value.encode()) > most else ""


def choice(value: Any, _bounds: Bounds) -> str:
    if not 0 < len(value.texts) <= grammar_checker.MAX_CHOICES:
        return f"must have 1 to {grammar_checker.MAX_CHOICES} texts"
    if not all(value.texts):
        return "has an empty text"
    too_large = sum(len(text.encode()) for text in value.texts) > grammar_checker.MAX_BYTES
    return f"has more than {grammar_checker.MAX_BYTES} bytes" if too_large else ""


def below_vocab(value: Any, bounds: Bounds) -> str:
    known = not len(value) or max(value) < bounds.vocab()
    return "" if known else f"has an id that is not below {bounds.vocab()}"


def token_ids(value: Any, bounds: Bounds) -> str | Iterator[Problem]:
    return below_vocab(value.ids, bounds) if value.ids else "has no ids"


def stops(value: Any, bounds: Bounds) -> str:
    limits = bounds.limits
    if len(value) > limits.max_stop_sequences:
        return f"has more than {limits.max_stop_sequences} elements"
    fitting = all(0 < len(stop) <= limits.max_stop_chars for stop in value)
    return (
        "" if fitting else f"has an element that is empty or longer than {limits.max_stop_chars} characters"
    )


def logit_bias(value: Any, bounds: Bounds) -> Iterator[Problem]:
    if len(value) > bounds.limits.max_logit_bias:
        yield "", f"has more than {bounds.limits.max_logit_bias} elements"
        return
    yield from _at("", below_vocab(value, bounds))
    if not all(-100.0 <= bias <= 100.0 for bias in value.values()):
        yield "", "has a bias outside -100 to 100"


def subject(value: str, _bounds: Bounds) -> str:
    return f"is longer than {MAX_SUBJECT_BYTES} bytes" if len(value.encode()) > MAX_SUBJECT_BYTES else ""


def _key_problem(value: Any, most: int) -> str:
    if len(value) > most:
        return f"has more than {most} elements"
    return "" if all(map(LABEL_KEY.fullmatch, value)) else f"has a key that is not like {LABEL_KEY.pattern}"


def labels(value: Any, bounds: Bounds) -> str:
    most = bounds.limits.max_label_chars
    too_long = f"has a value longer than {most} characters"
    return _key_problem(value, bounds.limits.max_labels) or (
        too_long if any(len(label) > most for label in value.values()) else ""
    )


def turn_annotations(value: Any, bounds: Bounds) -> str:
    most = bounds.limits.max_annotation_bytes
    too_large = sum(len(key) + len(text.encode()) for key, text in value.items()) > most
    return _key_problem(value, bounds.limits.max_annotations) or (
        f"has more than {most} bytes" if too_large else ""
    )


def not_empty(value: Any, _bounds: Bounds) -> str:
    return "" if value else "is required"


def cache_size(value: str, _bounds: Bounds) -> str:
    try:
        parse_cache_size(value, 1)
    except ValueError:
        return "must be a size such as 40GiB, 512MiB or 4096tokens"
    return ""


def label_selector(value: str, _bounds: Bounds) -> str:
    if not all(
        "=" in part and LABEL_KEY.fullmatch(part.split("=", 1)[0].strip()) for part in value.split(",")
    ):
        return "must be like key=value,key2=value2"
    keys = [part.split("=", 1)[0].strip() for part in value.split(",")]
    return "names a key twice" if len(set(keys)) < len(keys) else ""


item_number = between(0, (1 << 63) - 1)


def seconds(value: Any) -> float | None:
    """Return a protobuf Duration in seconds, or None if it is invalid."""
    in_range = abs(value.seconds) <= LONGEST_DURATION_S and abs(value.nanos) <= 999_999_999
    if not in_range or (value.seconds and value.nanos and (value.seconds < 0) != (value.nanos < 0)):
        return None
    return float(value.seconds + value.nanos / 1e9)


def positive(value: float, _bounds: Bounds) -> str:
    return "" if 0 < value < math.inf else "must be a finite number above 0"


def duration(low: float, high: FromBounds) -> Check:
    def check(value: Any, bounds: Bounds) -> str:
        length = seconds(value)
        fits = length is not None and low <= length <= high(bounds)
        return "" if fits else f"must be a duration of {low:g} to {high(bounds):g} s"

    return check


def ttl(value: Any, bounds: Bounds) -> str:
    """Check a time to live: 0 (never expires) or within the limits."""
    length = seconds(value)
    limits = bounds.limits
    fits = length is not None and (length == 0 or limits.min_ttl_s <= length <= limits.max_ttl_s)
    return "" if fits else f"must be 0 or a duration of {limits.min_ttl_s:g} to {limits.max_ttl_s:g} s"


def update_mask(value: Any, _bounds: Bounds) -> str:
    allowed = {"labels", "config", *UPDATABLE}
    return "" if set(value.paths) <= allowed else f"may name only {', '.join(sorted(allowed))}"


# ---- the table

_SHAPED: dict[str, tuple[Check, ...]] = {
    "stop": (stops,),
    "stop_token_ids": (at_most(lambda b: b.limits.max_stop_token_ids), below_vocab),
    "logit_bias": (logit_bias,),
    "candidate_choice": (enum(pb.CandidateChoice),),
}


def _sampling_rules() -> Iterator[Rule]:
    for field in pb.SamplingParams.DESCRIPTOR.fields:
        row = SAMPLING[field.name]
        if field.name in _SHAPED:
            yield _may(field.name, *_SHAPED[field.name])
        elif row.low is not None and row.high is not None:
            limit = operator.attrgetter(f"limits.{row.limit}") if row.limit else None
            check = between(
                row.low, row.high, above=row.low_exclusive, limit=limit, unless_zero=row.unless_zero
            )
            yield _may(field.name, check)


_SESSION_NAME = _must("name", session_name)
_SESSION = _must("session", session_name)
_REQUEST_ID = _may("request_id", request_id)
_PAGE = (_may("page_size", between(0, 1 << 31)), _may("page_token", text(4096)))
_FOLLOWED_BY = _may("followed_by", each(lambda _: 64, enum(pb.Role, unspecified=False)))
_NEW_ID = _may("session_id", session_id)
_SUBJECT = (_must("subject", not_empty, subject),)
_FUNCTIONS = each(lambda _: MAX_CALLS, function_name)

RULES: dict[type[Any], tuple[Rule, ...]] = {
    pb.CreateSessionRequest: (
        _REQUEST_ID,
        _NEW_ID,
        _may("config", _nested),
        _may("labels", labels),
        _may("initial_items", entries(lambda b: b.limits.max_initial_items, _nested)),
        _FOLLOWED_BY,
    ),
    pb.GetSessionRequest: (_SESSION_NAME, _may("view", enum(pb.SessionView))),
    pb.ListSessionsRequest: (*_PAGE, _may("label_selector", text(4096), label_selector)),
    pb.UpdateSessionRequest: (
        _SESSION_NAME,
        _must("update_mask", update_mask),
        _may("session", _nested),
    ),
    pb.Session: (_may("config", _nested), _may("labels", labels)),
    pb.DeleteSessionRequest: (_SESSION_NAME,),
    pb.ExportSessionRequest: (_SESSION_NAME,),
    pb.ForkSessionRequest: (_SESSION_NAME, _REQUEST_ID, _NEW_ID, _may("item", item_number), _may("ttl", ttl)),
    pb.RewindSessionRequest: (_SESSION_NAME, _REQUEST_ID, _must("item", item_number)),
    pb.AppendItemsRequest: (
        _SESSION_NAME,
        _REQUEST_ID,
        _must("items", entries(lambda b: b.limits.max_initial_items, _nested), not_empty),
        _FOLLOWED_BY,
    ),
    pb.ListItemsRequest: (_SESSION_NAME, *_PAGE, _may("after_item", item_number)),
    pb.StreamTurnRequest: (
        _SESSION,
        _may("on_disconnect", enum(pb.DisconnectPolicy)),
        _may("resume_attempt", text(64)),
        _may("stream_id", text(64)),
        _may("resume_candidate_offsets", at_most(lambda b: b.limits.max_candidates - 1)),
    ),
    pb.RunTurnRequest: (_SESSION,),
    pb.GetTurnRequest: (_SESSION, _must("request_id", request_id)),
    pb.FindTurnRequest: (
        _must("mark", not_empty, mark),
        _may("answer", prompt),
        _may("request_id", request_id),
    ),
    pb.ClaimRequestIdRequest: (
        _must("request_id", request_id),
        _must("session", session_name),
        _may("fingerprint", text(128)),
        _may("plan", text(1024)),
    ),
    pb.CancelTurnRequest: (
        _SESSION,
        _must("request_id", request_id),
        _may("keep", enum(pb.CancelTurnRequest.Keep)),
        _may("stream_id", text(64)),
    ),
    pb.ChooseCandidateRequest: (_SESSION, _must("request_id", request_id)),
    pb.WarmSessionRequest: (_SESSION,),
    pb.CompactSessionRequest: (
        _SESSION_NAME,
        _must("request_id", request_id),
        _may("instruction", prompt),
        _may("max_summary_tokens", between(1, (1 << 31) - 1)),
    ),
    pb.CountTokensRequest: (
        _may("session", session_name),
        _may("input", entries(lambda b: b.limits.max_input_items, _nested)),
    ),
    **dict.fromkeys(
        (pb.GetServerInfoRequest, pb.GetUsageRequest, pb.GetStatsRequest, pb.GetMemoryRequest), ()
    ),
    pb.EvictCacheRequest: (_may("session", session_name),),
    pb.SetMemoryRequest: (_must("device", cache_size),),
    pb.DrainRequest: (_may("deadline", duration(0.0, lambda _: 24 * 3600.0)),),
    pb.SessionConfig: (
        _may("model", text(256)),
        _may("system_prompt", prompt),
        _may("default_sampling", _nested),
        _may("ttl", ttl),
        _may("overflow_policy", enum(pb.OverflowPolicy)),
        _may("prefix_sharing", enum(pb.PrefixSharing)),
        _may("tools_json", prompt),
        _may("subject", subject),
        _may("summary", prompt),
    ),
    pb.EraseSubjectRequest: _SUBJECT,
    pb.ExportSubjectRequest: _SUBJECT,
    pb.ImportSessionRequest: (_NEW_ID,),
    pb.InputItem: (
        _must("role", enum(pb.Role, unspecified=False)),
        _may("tokens", token_ids),
        _may("function_calls", each(lambda _: MAX_CALLS, _nested)),
        _may("call_id", text(256)),
    ),
    pb.FunctionCall: (
        _must("name", function_name),
        _must("arguments_json", json_object),
        _may("id", text(256)),
    ),
    pb.TurnSpec: (
        _must("request_id", request_id),
        _may("input", entries(lambda b: b.limits.max_input_items, _nested)),
        _may("replace_after_item", item_number),
        _may("sampling", _nested),
        _may("output", _nested),
        _may("max_duration", duration(0.001, lambda b: b.limits.max_turn_s)),
        _may("priority", between(-10, 10)),
        _may("hints", _nested),
        _may("annotations", turn_annotations),
        _may("mark", mark),
        _may("calls", _nested),
        _may("format", _nested),
        _may("system_prompt", prompt),
        _may("tools_json", prompt),
        _may("prediction", text(MAX_PREDICTION_CHARS)),
    ),
    pb.CallBounds: (_may("begin_with", text(64)), _may("allowed", _FUNCTIONS), _may("strict", _FUNCTIONS)),
    pb.AnswerFormat: (
        _may("json_schema", json_schema),
        _may("regex", grammar),
        _may("lark", grammar),
        _may("choice", choice),
    ),
    pb.TurnHints: (
        _may("next_turn_in", duration(0.0, lambda _: LONGEST_DURATION_S)),
        _may("importance", positive),
    ),
    pb.SamplingParams: tuple(_sampling_rules()),
    pb.OutputOptions: (
        _may("top_logprobs", between(0, 20, limit=lambda b: b.limits.max_top_logprobs)),
        _may("max_chunk_tokens", between(1, (1 << 31) - 1)),
        _may("max_chunk_delay", duration(0.0, lambda _: 10.0)),
    ),
}

CROSS: dict[type[Any], tuple[Callable[[Any, Bounds], Iterator[Problem]], ...]] = {
    pb.StreamTurnRequest: (_has_turn,),
    pb.RunTurnRequest: (_has_turn,),
    pb.InputItem: (_entry_has_content, _tool_fields_fit_role),
    pb.TurnSpec: (_beams_alone_in_turn,),
    pb.CallBounds: (_calls_agree,),
    pb.AnswerFormat: (_format_is_given,),
    pb.SamplingParams: (_min_below_max, _beams_alone),
    pb.UpdateSessionRequest: (_same_name,),
}
