"""The checks that the table in ``validation`` is made of. Each looks at one value and notes what is wrong with it."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pensieve.server import ids
from pensieve.server.settings import RequestLimits
from pensieve.speech import is_object

Problems = list[tuple[str, str]]
"""(field path, what is wrong) pairs."""

LABEL_KEY = re.compile(r"[A-Za-z0-9][A-Za-z0-9_./-]{0,62}", re.ASCII)
LONGEST_DURATION_S = 315_576_000_000
"""What a protobuf Duration may say, 10,000 years."""
UPDATABLE = frozenset(
    {
        "labels",
        "config",
        "config.system_prompt",
        "config.default_sampling",
        "config.ttl",
        "config.overflow_policy",
        "config.prefix_sharing",
        "config.tools_json",
    }
)
"""Paths that an update mask may name."""


@dataclass(frozen=True, slots=True)
class Bounds:
    """The limits that requests are checked against."""

    limits: RequestLimits
    vocab: Callable[[], int]
    """Number of token ids. Asked only when a request holds some; may raise Unavailable (STARTING)."""


Check = Callable[[Any, Bounds, str, Problems], None]
FromBounds = Callable[[Bounds], float]


def _pattern(pattern: re.Pattern[str], problem: str) -> Check:
    def check(value: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
        if not pattern.fullmatch(value):
            problems.append((path, problem))

    return check


session_name = _pattern(ids.SESSION_NAME, "must be sessions/{id} with an id like [a-z0-9][a-z0-9-]{2,62}")
session_id = _pattern(ids.SESSION_ID, "must be like [a-z0-9][a-z0-9-]{2,62}")
function_name = _pattern(re.compile(r"[A-Za-z0-9_.-]{1,64}"), "must be like [A-Za-z0-9_.-]{1,64}")
request_id = _pattern(ids.REQUEST_ID, "must be a UUID")


def between(
    low: float, high: float, *, above: bool = False, limit: FromBounds | None = None, unless_zero: float = 0.0
) -> Check:
    """``low`` to ``high`` (or a configured ``limit``); with ``above``, larger than ``low``. Never NaN or infinite.

    ``unless_zero``: the least value beside 0, for a temperature, by which logits are divided.
    """
    if unless_zero:
        return _zero_or_between(unless_zero, high)

    def check(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
        top = high if limit is None else limit(bounds)
        inside = low < value <= top if above else low <= value <= top  # false for NaN
        if not inside:
            problems.append((path, f"must be {'above' if above else 'at least'} {low:g} and at most {top:g}"))

    return check


def _zero_or_between(low: float, high: float) -> Check:
    def check(value: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
        if value != 0 and not 0.99 * low <= value <= high:  # 0.01 as float32 is a little less than 0.01
            problems.append((path, f"must be 0, or at least {low:g} and at most {high:g}"))

    return check


def text(max_chars: int) -> Check:
    def check(value: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
        if len(value) > max_chars:
            problems.append((path, f"is longer than {max_chars} characters"))

    return check


def prompt(value: str, bounds: Bounds, path: str, problems: Problems) -> None:
    text(bounds.limits.max_input_chars)(value, bounds, path, problems)


def enum(kind: Any, *, unspecified: bool = True) -> Check:
    """A value that this version knows; proto3 enums are open."""
    known = {number for number in kind.values() if number or unspecified}

    def check(value: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
        if value not in known:
            problems.append((path, "is not a known value" if value else "is required"))

    return check


def at_most(count: FromBounds) -> Check:
    def check(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
        if len(value) > count(bounds):
            problems.append((path, f"has more than {count(bounds):g} elements"))

    return check


def entries(count: FromBounds, element: Check) -> Check:
    """A list of input items: their number, then their size together, then each."""

    def check(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
        if len(value) > count(bounds):
            problems.append((path, f"has more than {count(bounds):g} items"))
            return
        if sum(_chars(item) for item in value) > bounds.limits.max_input_chars:
            problems.append((path, f"has more than {bounds.limits.max_input_chars} characters"))
            return
        for index, item in enumerate(value):
            element(item, bounds, f"{path}[{index}]", problems)

    return check


def each(count: FromBounds, element: Check) -> Check:
    """A list: its number, then each."""

    def check(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
        if len(value) > count(bounds):
            problems.append((path, f"has more than {count(bounds):g} elements"))
            return
        for index, one in enumerate(value):
            element(one, bounds, f"{path}[{index}]", problems)

    return check


def _chars(item: Any) -> int:
    texts = len(item.text) + len(item.raw_text)
    return texts + sum(len(call.name) + len(call.arguments_json) for call in item.function_calls)


def json_object(value: str, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not is_object(value):
        problems.append((path, "must be a JSON object"))


def below_vocab(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    if len(value) and max(value) >= bounds.vocab():
        problems.append((path, f"has an id that is not below {bounds.vocab()}"))


def token_ids(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    if not value.ids:
        problems.append((path, "has no ids"))
    below_vocab(value.ids, bounds, path, problems)


def stops(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    limits = bounds.limits
    if len(value) > limits.max_stop_sequences:
        problems.append((path, f"has more than {limits.max_stop_sequences} elements"))
    elif not all(0 < len(stop) <= limits.max_stop_chars for stop in value):
        problems.append(
            (path, f"has an element that is empty or longer than {limits.max_stop_chars} characters")
        )


def logit_bias(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    if len(value) > bounds.limits.max_logit_bias:
        problems.append((path, f"has more than {bounds.limits.max_logit_bias} elements"))
        return
    below_vocab(value, bounds, path, problems)
    if not all(-100.0 <= bias <= 100.0 for bias in value.values()):
        problems.append((path, "has a bias outside -100 to 100"))


def labels(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    limits = bounds.limits
    if len(value) > limits.max_labels:
        problems.append((path, f"has more than {limits.max_labels} elements"))
    elif not all(LABEL_KEY.fullmatch(key) for key in value):
        problems.append((path, f"has a key that is not like {LABEL_KEY.pattern}"))
    elif not all(len(label) <= limits.max_label_chars for label in value.values()):
        problems.append((path, f"has a value longer than {limits.max_label_chars} characters"))


def turn_annotations(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    limits = bounds.limits
    if len(value) > limits.max_annotations:
        problems.append((path, f"has more than {limits.max_annotations} elements"))
    elif not all(LABEL_KEY.fullmatch(key) for key in value):
        problems.append((path, f"has a key that is not like {LABEL_KEY.pattern}"))
    elif sum(len(key) + len(text.encode()) for key, text in value.items()) > limits.max_annotation_bytes:
        problems.append((path, f"has more than {limits.max_annotation_bytes} bytes"))


def not_empty(value: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not value:
        problems.append((path, "is required"))


def mark(value: str, bounds: Bounds, path: str, problems: Problems) -> None:
    text(bounds.limits.max_mark_chars)(value, bounds, path, problems)


def label_selector(value: str, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not all(
        "=" in part and LABEL_KEY.fullmatch(part.split("=", 1)[0].strip()) for part in value.split(",")
    ):
        problems.append((path, "must be like key=value,key2=value2"))
        return
    keys = [part.split("=", 1)[0].strip() for part in value.split(",")]
    if len(set(keys)) < len(keys):
        problems.append((path, "names a key twice"))


def item_number(value: int, _bounds: Bounds, path: str, problems: Problems) -> None:
    between(0, (1 << 63) - 1)(value, _bounds, path, problems)


def seconds(value: Any) -> float | None:
    """A protobuf Duration in seconds; None when it is not a valid one."""
    in_range = abs(value.seconds) <= LONGEST_DURATION_S and abs(value.nanos) <= 999_999_999
    if not in_range or (value.seconds and value.nanos and (value.seconds < 0) != (value.nanos < 0)):
        return None
    return float(value.seconds + value.nanos / 1e9)


def positive(value: float, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not 0 < value < math.inf:
        problems.append((path, "must be a finite number above 0"))


def duration(low: float, high: FromBounds) -> Check:
    def check(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
        length = seconds(value)
        if length is None or not low <= length <= high(bounds):
            problems.append((path, f"must be a duration of {low:g} to {high(bounds):g} s"))

    return check


def ttl(value: Any, bounds: Bounds, path: str, problems: Problems) -> None:
    """A time to live is 0 (the session never expires) or within the limits."""
    length = seconds(value)
    limits = bounds.limits
    if length is None or (length != 0 and not limits.min_ttl_s <= length <= limits.max_ttl_s):
        problems.append((path, f"must be 0 or a duration of {limits.min_ttl_s:g} to {limits.max_ttl_s:g} s"))


def update_mask(value: Any, _bounds: Bounds, path: str, problems: Problems) -> None:
    if not set(value.paths) <= UPDATABLE:
        problems.append((path, f"may name only {', '.join(sorted(UPDATABLE))}"))
