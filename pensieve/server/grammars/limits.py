"""Limits of the forms that callers want for answers, checked before anything is compiled."""

from __future__ import annotations

import json
import math
import re
from itertools import accumulate
from typing import Any, Final

MAX_BYTES: Final = 64 * 1024
"""Size of a schema, a pattern, a grammar or a list of choices, as UTF-8."""
MAX_TOTAL_BYTES: Final = 256 * 1024
"""Size of all grammars of one answer together: its form, and the arguments of the functions that it may call."""
MAX_DEPTH: Final = 100
"""Objects and arrays within each other."""
MAX_CHOICES: Final = 4096
_NO_BRACKETS: Final = re.compile(r'(?:"(?:[^"\\]|\\.)*+"?|[^"\[\]{}]++)++', re.DOTALL)
_STEPS: Final = {"[": 1, "{": 1, "]": -1, "}": -1}


def parse_schema(text: str) -> dict[str, Any] | bool:
    """Parse a JSON schema. Raises ValueError with the problem."""
    if len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise ValueError(f"is larger than {MAX_BYTES} bytes")
    if is_too_deep(text):
        raise ValueError(f"is nested deeper than {MAX_DEPTH} levels")
    try:
        found = json.loads(text, parse_constant=_refuse_constant, parse_float=_finite)
    except json.JSONDecodeError as error:
        raise ValueError(f"is not JSON: {error}") from error
    except ValueError as error:
        raise ValueError(f"has a number that is not JSON or too large: {error}") from error
    if not isinstance(found, dict | bool):
        raise ValueError("must be a JSON object")
    if isinstance(found, dict) and "x-guidance" in found:
        raise ValueError("the keyword 'x-guidance' is not supported")
    return found


def is_too_deep(text: str) -> bool:
    """Whether a text that may be JSON has more than ``MAX_DEPTH`` brackets open."""
    # No loop of Python: the event loop waits for this, and 64 KiB may be brackets alone.
    brackets = _NO_BRACKETS.sub("", text)
    return max(accumulate(map(_STEPS.__getitem__, brackets)), default=0) > MAX_DEPTH


def _finite(text: str) -> float:
    number = float(text)
    if math.isinf(number):
        raise ValueError(text)
    return number


def _refuse_constant(name: str) -> float:
    raise ValueError(name)
