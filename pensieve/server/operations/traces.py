"""What is told of turns that have ended: a line of the log, and spans sent by OTLP over HTTP (the extra ``otel``).

A turn's spans are made when it has ended, from the times that it noted anyway: while it runs, tracing costs nothing.
They belong to the trace that its client named, or to a new one. Attributes are ids, counts, reasons and durations,
never text; names of ``gen_ai.*`` are OpenTelemetry's for such calls. Sampling and batches are set by the SDK's own
variables (``OTEL_TRACES_SAMPLER``, ``OTEL_BSP_…``).
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import logging
import time
from typing import Any, Final

from pensieve.server.values import TurnEnd
from pensieve.tracing import HEADER, incoming_traceparent

log = logging.getLogger(__name__)

SERVER_FAULTS: Final = frozenset(
    {
        "bug", "engine_failed", "engine_restarting", "history_corrupt", "history_regressed", "request_quarantined",
        "session_quarantined", "store_full", "store_replaced", "store_unavailable", "turn_fenced",
    }
)  # fmt: skip
"""Outcomes that are no wish of a caller and no limit: they are logged as warnings, all others for debugging."""


def log_turn(end: TurnEnd) -> None:
    """Log a turn. Called in its task, to which session, request, tenant and trace are bound: they stand in the line."""
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


_PARTS: Final = ("opentelemetry.sdk.trace", "opentelemetry.exporter.otlp.proto.http.trace_exporter")

PATIENCE_S: Final = 3
"""Of a batch with the collector, retries included: the end of a server may have to wait for one."""


class TracesError(ValueError):
    """Traces cannot be sent; the text is for the operator."""


class TurnTraces:
    """Makes spans of turns and hands them to the SDK, whose thread sends them."""

    def __init__(self, provider: Any, model: str) -> None:
        """``provider``: a ``TracerProvider`` of OpenTelemetry's SDK."""
        self._provider = provider
        self._model = model
        self._tracer = provider.get_tracer("pensieve.server")
        self._trace = importlib.import_module("opentelemetry.trace")
        context = importlib.import_module("opentelemetry.trace.propagation.tracecontext")
        self._propagator = context.TraceContextTextMapPropagator()

    def turn_ended(self, end: TurnEnd) -> None:
        """Called in the turn's own task: the trace that its client named is found there."""
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
        """Send what is left. A collector that does not answer is waited for no longer than the exporter does."""
        await asyncio.to_thread(self._provider.shutdown)

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
    """Send to this URL, as ``http://127.0.0.1:4318/v1/traces``. Raises TracesError without the extra."""
    try:
        sdk, exporter = (importlib.import_module(name) for name in _PARTS)
        export = importlib.import_module("opentelemetry.sdk.trace.export")
        resources = importlib.import_module("opentelemetry.sdk.resources")
    except ImportError as error:
        raise TracesError(f"--traces: needs {error.name}: pip install 'pensieve[otel]'") from error
    names = {"service.name": "pensieve", "service.version": version, "service.instance.id": instance}
    provider = sdk.TracerProvider(resource=resources.Resource.create(names), shutdown_on_exit=False)
    provider.add_span_processor(
        export.BatchSpanProcessor(exporter.OTLPSpanExporter(endpoint=endpoint, timeout=PATIENCE_S))
    )
    return TurnTraces(provider, model)


def _receipt(end: TurnEnd) -> dict[str, Any]:
    usage = end.usage
    return {
        "pensieve.context_tokens": usage.context_tokens,
        "pensieve.new_tokens": usage.new_tokens,
        "pensieve.gpu_cached_tokens": usage.gpu_cached_tokens,
        "pensieve.swapped_in_tokens": usage.swapped_in_tokens,
        "pensieve.recomputed_tokens": usage.recomputed_tokens,
        "pensieve.output_tokens": usage.output_tokens,
        "pensieve.queue_s": usage.queue_s,
        "pensieve.restore_s": usage.restore_s,
        "pensieve.prefill_s": usage.prefill_s,
        "pensieve.decode_s": usage.decode_s,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
