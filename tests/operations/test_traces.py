"""Traces from the client's call through the turn to the engine, across processes; and programs that do not trace."""

from __future__ import annotations

import asyncio
import itertools
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from pensieve import tracing
from pensieve.client import AsyncClient, Client
from pensieve.core import Usage
from pensieve.server.app import StartError
from pensieve.server.app import _explain as explained
from pensieve.server.operations.traces import CLOSE_S, TracesError, open_traces
from pensieve.server.values import TurnEnd
from pensieve.store import Key
from support.engine.fake_engine import Script
from support.otlp import Collector, collecting
from support.service.server_process import ServerProcess, launched
from support.store.redis_server import free_port

SECRET = "the-cat-is-called-Rex"


@pytest.fixture(scope="module")
def spans_of_the_program() -> InMemorySpanExporter:
    """A process may set its provider once, and from then on its clients make spans."""
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    trace.set_tracer_provider(provider)
    return exporter


@pytest.fixture
def ours(spans_of_the_program: InMemorySpanExporter) -> InMemorySpanExporter:
    """What the client's program sees of its own spans."""
    spans_of_the_program.clear()
    return spans_of_the_program


@pytest.fixture
def untraced(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients find that the program has not imported OpenTelemetry."""
    monkeypatch.delitem(sys.modules, "opentelemetry.trace")


@pytest.fixture
def collector() -> Iterator[Collector]:
    with collecting() as made:
        yield made


def ended(server: ServerProcess) -> None:
    """A server sends what is left before it ends."""
    server.terminate()
    assert server.finish()[0] == 0


@pytest.mark.timeout(120)
def test_one_trace_from_the_client_to_the_engine(
    tmp_path: Path, ours: InMemorySpanExporter, collector: Collector
) -> None:
    with launched(tmp_path, traces=collector.url) as server:
        with (
            Client(server.grpc) as client,
            trace.get_tracer("app").start_as_current_span("question") as outer,
        ):
            chat = client.create_session(system_prompt=SECRET)
            turn = chat.send(f"{SECRET}?", max_output_tokens=4)
        ended(server)
    spans = {span.name: span for span in collector.spans}
    assert set(spans) == {"pensieve.turn", "pensieve.prepare", "pensieve.engine", "pensieve.commit"}
    whole = f"{outer.get_span_context().trace_id:032x}"
    assert {span.trace for span in collector.spans} == {whole}

    [call] = [span for span in ours.get_finished_spans() if span.name == "pensieve.turn"]
    assert call.parent is not None and call.parent.span_id == outer.get_span_context().span_id
    assert call.attributes == {
        "pensieve.session": chat.name,
        "pensieve.request_id": turn.request_id,
        "pensieve.complete": True,
        "pensieve.resumes": 0,
    }
    root = spans.pop("pensieve.turn")
    assert root.parent == f"{call.context.span_id:016x}"
    assert all(span.parent == root.id for span in spans.values())

    in_order = [spans[f"pensieve.{name}"] for name in ("prepare", "engine", "commit")]
    assert root.start_ns == in_order[0].start_ns and root.end_ns == in_order[2].end_ns
    for before, after in itertools.pairwise(in_order):
        assert before.start_ns <= before.end_ns == after.start_ns
    assert root.attributes["pensieve.outcome"] == "length" and not root.failed
    assert root.attributes["gen_ai.usage.output_tokens"] == 4
    engine = spans["pensieve.engine"]
    assert engine.events == ("first token",)
    usage = turn.usage
    for name in ("context", "new", "gpu_cached", "swapped_in", "recomputed", "output"):
        assert engine.attributes[f"pensieve.{name}_tokens"] == getattr(usage, f"{name}_tokens"), name
    assert collector.resources[0]["service.name"] == "pensieve"
    assert SECRET.encode() not in collector.raw
    assert all(SECRET not in str(span.attributes) for span in ours.get_finished_spans())


@pytest.mark.timeout(120)
@pytest.mark.usefixtures("untraced")
async def test_a_turn_that_was_given_up_says_why(tmp_path: Path, collector: Collector) -> None:
    """And a client that names a trace in no form that there is begins a new one."""
    with launched(tmp_path, Script(step_s=0.02), traces=collector.url) as server:
        async with AsyncClient(server.grpc, metadata=[("traceparent", "nonsense")]) as client:
            chat = await client.create_session()
            stream = chat.stream("hello", max_output_tokens=500)
            async for _ in stream:
                break
            await chat.cancel(stream.request_id, keep="nothing")
        await asyncio.to_thread(ended, server)
    [root] = [span for span in collector.spans if span.name == "pensieve.turn"]
    assert root.failed == root.attributes["pensieve.outcome"] == "turn_cancelled"
    assert not root.parent
    assert {span.name for span in collector.spans if span.parent} == {"pensieve.prepare", "pensieve.engine"}


PASSED_ON = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-00"


def test_headers_of_the_right_form_are_taken_and_no_others() -> None:
    assert tracing.traceparent_in([("x", "y"), ("traceparent", PASSED_ON)]) == PASSED_ON
    assert tracing.trace_id(PASSED_ON) == "0123456789abcdef0123456789abcdef"
    zero = "00-" + "0" * 32 + "-0123456789abcdef-00"
    for wrong in ("", zero, PASSED_ON.upper(), PASSED_ON + "-x", "x" * 9999):
        assert tracing.traceparent_in([("traceparent", wrong)]) == "" == tracing.trace_id(wrong)


def test_without_opentelemetry_nothing_of_it_is_imported_and_headers_are_passed_on() -> None:
    program = """
import sys
from pensieve import tracing
from pensieve.client._transport import ClientSettings
span = tracing.ClientSpan()
span.start({"a": "b"}); span.end({})
assert span.header == "" and ClientSettings("x").metadata("") == []
tracing.incoming_traceparent.set("00-0123456789abcdef0123456789abcdef-0123456789abcdef-01")
span.start({})
assert span.header == tracing.incoming_traceparent.get()
assert ClientSettings("x").metadata("") == [("traceparent", span.header)]
assert not [name for name in sys.modules if name.startswith("opentelemetry")]
"""
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)


@pytest.mark.timeout(60)
async def test_a_collector_that_answers_without_end_does_not_hold_up_the_end(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The limit of an export is one for each read, and there may be many exports."""

    enough, closed = asyncio.Event(), asyncio.Event()

    async def trickle(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-length: 1000\r\n\r\n")
        while not enough.is_set():
            writer.write(b"x")
            await asyncio.sleep(0.2)
        writer.close()
        await writer.wait_closed()
        closed.set()

    server = await asyncio.start_server(trickle, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    traces = open_traces(f"http://127.0.0.1:{port}/v1/traces", model="m", version="1", instance="r")
    traces.turn_ended(TurnEnd(Key("t", "s"), "eos", True, 1, 1, Usage(), 0.0, 0.0, 1.0))
    async with asyncio.timeout(10 * CLOSE_S):  # the whole answer takes 200 s
        await traces.close()
    assert "did not take the last traces" in caplog.text
    enough.set()
    await closed.wait()
    server.close()


async def test_a_collector_that_is_away_costs_no_secret(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """OpenTelemetry names the whole URL in its warning."""
    caplog.set_level("DEBUG")
    url = f"http://user:s3cret@127.0.0.1:{free_port()}/v1/traces?key=s3cret"
    traces = open_traces(url, model="m", version="1", instance="i")
    traces._tracer.start_span("one").end()
    await traces.close()
    assert "/v1/traces?***" in caplog.text
    assert "s3cret" not in caplog.text


def test_what_is_missing_is_said_in_a_line_that_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)  # as if it were not installed
    with pytest.raises(
        TracesError, match=r"--traces: needs opentelemetry\S*: pip install 'pensieve\[otel\]'"
    ):
        open_traces("http://127.0.0.1:9/v1/traces", model="m", version="1", instance="r")
    error = explained(TracesError("why"))
    assert isinstance(error, StartError) and error.status == 2
