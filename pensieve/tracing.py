"""OpenTelemetry traces across processes: W3C's ``traceparent`` header, and the client's span of a turn.

Nothing here imports OpenTelemetry. A program that traces has imported its API before it makes a client; without it
there is no span, and the only header sent is a forwarded one. Header format, from
https://www.w3.org/TR/trace-context/: ``00-<trace id>-<span id>-<flags>``.
"""

from __future__ import annotations

import contextvars
import re
import sys
from collections.abc import Iterable, Mapping
from typing import Any, Final

HEADER: Final = "traceparent"
_FORM: Final = re.compile(r"[0-9a-f]{2}-(?!0{32})([0-9a-f]{32})-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")

incoming_traceparent: Final[contextvars.ContextVar[str]] = contextvars.ContextVar(
    "pensieve_traceparent", default=""
)
"""Header of the call being handled; "" without one."""


def traceparent_in(metadata: Iterable[tuple[str, str | bytes]]) -> str:
    """Return the header in a call's metadata; "" if it is missing or invalid."""
    for name, value in metadata:
        if name == HEADER and isinstance(value, str) and _FORM.fullmatch(value):
            return value
    return ""


def trace_id(header: str) -> str:
    """Return the trace's 32 hex digits; "" for an invalid header."""
    match = _FORM.fullmatch(header)
    return match[1] if match is not None else ""


def outgoing_traceparent() -> str:
    """Return the header for a new call: the program's current span, else the header of the call being handled."""
    api = sys.modules.get("opentelemetry.trace")
    return (_header(api.get_current_span()) if api is not None else "") or incoming_traceparent.get()


class ClientSpan:
    """The client's span of a turn, over all of its attempts. Does nothing if the program does not trace."""

    def __init__(self) -> None:
        self._span: Any = None
        self.header = ""

    def start(self, attributes: Mapping[str, str]) -> None:
        api = sys.modules.get("opentelemetry.trace")
        if api is not None:
            self._span = api.get_tracer("pensieve.client").start_span(
                "pensieve.turn", kind=api.SpanKind.CLIENT, attributes=dict(attributes)
            )
        self.header = (_header(self._span) if self._span is not None else "") or outgoing_traceparent()

    def end(self, attributes: Mapping[str, str | int | bool]) -> None:
        """End the span. Later calls have no effect."""
        span, self._span = self._span, None
        if span is not None:
            span.set_attributes(dict(attributes))
            span.end()


def _header(span: Any) -> str:
    context = span.get_span_context()
    if not context.is_valid:
        return ""
    return f"00-{context.trace_id:032x}-{context.span_id:016x}-{context.trace_flags:02x}"
