"""Telemetry of ended turns: a log line, and OpenTelemetry spans sent by OTLP over HTTP (the extra ``otel``).

A turn's spans are made when it has ended, from times it recorded anyway: tracing costs a running turn nothing. They
join the trace that the client named, or a new one. Attributes are ids, counts, reasons and durations, never text;
``gen_ai.*`` names are OpenTelemetry's. Sampling and batching are configured by the SDK's own variables
(``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_…``).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import re
import threading
import time
from typing import Any, Final

import msgspec

from pensieve.server.values import TurnEnd
from pensieve.tracing import HEADER, incoming_traceparent

log = logging.getLogger(__name__)

SERVER_FAULTS: Final = frozenset(
    {
        "bug", "engine_failed", "engine_restarting", "history_corrupt", "history_regressed", "request_quarantined",
        "session_quarantined", "store_full", "store_replaced", "store_unavailable", "turn_fenced",
    }
)  # fmt: skip
"""Outcomes caused by the server, not by a request or a limit. Logged as warnings, all others for debugging."""


def log_turn(end: TurnEnd) -> None:
    """Log a turn. Call in its task: the log context holds session, request, tenant and trace."""
    level = logging.WARNING if end.outcome in SERVER_FAULTS else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    fields = {
        "outcome": end.outcome,
        "seconds": round(end.ended_at - end.arrived_at, 4),
        "context_tokens": end.context_tokens,
        "output_tokens": end.usage.output_tokens,
        "recomputed_tokens": end.usage.recomputed_tokens,
    }
    log.log(level, "turn ended", extra=fields)


_MODULES: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")

_URL_LOGGERS: Final = (_MODULES[1], "urllib3.connectionpool")
"""Loggers that name the URL."""
EXPORT_TIMEOUT_S: Final = 3
CLOSE_S: Final = 4
"""For the last spans, when the server ends: one export that fails, and a little."""


class TracesError(ValueError):
    """Traces cannot be sent; the message is for the operator."""


class TurnTraces:
    """Creates spans of turns. The SDK sends them in its own thread."""

    def __init__(self, provider: Any, model: str) -> None:
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("pensieve.server")
        self._trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = context.TraceContextTextMapPropagator()

    def turn_ended(self, end: TurnEnd) -> None:
        """Create the turn's spans. Call in the turn's task: its context holds the client's trace."""
        epoch = time.time() - asyncio.get_running_loop().time()
        parent = self._propagator.extract({HEADER: incoming_traceparent.get()})
        kind = self._trace.SpanKind
        root = self._span("pensieve.turn", kind.SERVER, parent, end.arrived_at + epoch, self._turn(end))
        if not end.committed:
            root.set_status(self._trace.StatusCode.ERROR, end.outcome)
        inside = self._trace.set_span_in_context(root)
        submitted, generated = end.submitted_at, end.generated_at
        prepared = submitted if submitted is not None else end.ended_at
        self._child("pensieve.prepare", inside, end.arrived_at + epoch, prepared + epoch)
        if submitted is not None:
            until = generated if generated is not None else end.ended_at
            span = self._span("pensieve.engine", kind.INTERNAL, inside, submitted + epoch, _receipt(end))
            if end.first_token_at is not None:
                span.add_event("first token", timestamp=_ns(end.first_token_at + epoch))
            span.end(_ns(until + epoch))
            if end.committed:
                self._child("pensieve.commit", inside, until + epoch, end.ended_at + epoch)
        root.end(_ns(end.ended_at + epoch))

    async def close(self) -> None:
        """Send remaining spans, for at most ``CLOSE_S``."""
        # The SDK tries one batch after the other, and a response that trickles in has no limit at all. A daemon: the
        # process must not wait for it when it ends.
        sending = threading.Thread(target=self._provider.shutdown, name="last traces", daemon=True)
        sending.start()
        await asyncio.to_thread(sending.join, CLOSE_S)
        if sending.is_alive():
            log.warning("the collector did not take the last traces in %d s", CLOSE_S)

    def _turn(self, end: TurnEnd) -> dict[str, Any]:
        return {
            "pensieve.session": end.key.session_id,
            "pensieve.tenant": end.key.tenant,
            "pensieve.request_id": end.request_id,
            "pensieve.outcome": end.outcome,
            "gen_ai.operation.name": "chat",
            "gen_ai.request.model": self._model,
            "gen_ai.usage.input_tokens": end.context_tokens,
            "gen_ai.usage.output_tokens": end.usage.output_tokens,
        }

    def _span(self, name: str, kind: Any, context: Any, start: float, attributes: dict[str, Any]) -> Any:
        return self._tracer.start_span(
            name, context=context, kind=kind, start_time=_ns(start), attributes=attributes
        )

    def _child(self, name: str, context: Any, start: float, end: float) -> None:
        self._span(name, self._trace.SpanKind.INTERNAL, context, start, {}).end(_ns(end))


def open_traces(endpoint: str, *, model: str, version: str, instance: str) -> TurnTraces:
    """Return an exporter to this URL, such as ``http://127.0.0.1:4318/v1/traces``. Raises TracesError without the
    extra."""
    try:
        sdk, exporter = (importlib.import_module(name) for name in _MODULES)
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
    except ImportError as error:
        raise TracesError(f"--traces: needs {error.name}: pip install 'pensieve[otel]'") from error
    for name in _URL_LOGGERS:
        logging.getLogger(name).addFilter(_without_query)
    names = {"service.name": "pensieve", "service.version": version, "service.instance.id": instance}
    provider = sdk.TracerProvider(resource=resources.Resource.create(names), shutdown_on_exit=False)
    provider.add_span_processor(
        export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_TIMEOUT_S))
    )
    return TurnTraces(provider, model)


def _without_query(record: logging.LogRecord) -> bool:
    """Filter of a log, which takes out what a URL has after ``?``: it may be a key of the collector."""
    record.msg, record.args = re.sub(r"\?[^\s\"')]+", "?***", record.getMessage()), ()
    return True


def _receipt(end: TurnEnd) -> dict[str, Any]:
    return {f"pensieve.{name}": value for name, value in msgspec.structs.asdict(end.usage).items()}


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
