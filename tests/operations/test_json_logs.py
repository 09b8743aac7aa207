"""The log as JSON, of all processes of a server."""

from __future__ import annotations

import asyncio
import json
import logging
import socket
import urllib.request
from pathlib import Path

import pytest

from pensieve import tracing
from pensieve.client import AsyncClient
from pensieve.core import FinishReason, RequestKey, Sampling, Usage
from pensieve.engine.messages import Cancel, Failed, Finished, Submit
from pensieve.engine.process.loop import RequestLogFilter
from pensieve.errors import Internal
from support.engine.fake_engine import Script
from support.service.server_process import launched
from support.service.service_rig import encode

SECRET = "the-cat-is-called-Rex"
HEADER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
TURN = "b4556090-b6e0-532f-8b7f-80b9e2dbb450"
OTHER = "00-fedcba9876543210fedcba9876543210-0123456789abcdef-01"


def ask_by_http(address: str) -> None:
    body = json.dumps({"model": "model", "input": SECRET, "max_output_tokens": 4}).encode()
    headers = {"content-type": "application/json", "traceparent": OTHER}
    request = urllib.request.Request(f"http://{address}/v1/responses", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


def say_what_is_no_http(address: str) -> None:
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port)), timeout=30) as caller:
        caller.sendall(b"\x16\x03\x01 as of TLS\r\n\r\n")
        assert caller.recv(100).startswith(b"HTTP/1.1 400")


@pytest.mark.timeout(120)
async def test_lines_say_whose_turn_it_is(tmp_path: Path) -> None:
    """Each line of all processes is an object; those of a turn name it, its tenant and its trace, and no text."""
    options = {"log_json": True, "log_level": "debug", "http": "127.0.0.1:0"}
    with launched(tmp_path, **options) as server:
        async with AsyncClient(server.grpc, metadata=[("traceparent", HEADER)]) as client:
            chat = await client.create_session()
            turn = await chat.send(SECRET, max_output_tokens=4)
        await asyncio.to_thread(ask_by_http, server.http)
        await asyncio.to_thread(say_what_is_no_http, server.http)
        server.terminate()
        assert (await asyncio.to_thread(server.finish))[0] == 0
    lines = [json.loads(line) for line in server.stderr.splitlines()]
    for line in lines:
        assert {"time", "level", "logger", "event", "message"} <= set(line), line
        assert line["time"].endswith("Z") and "T" in line["time"]
    assert "pensieve.engine.process.host" in {line["logger"] for line in lines}
    ending, by_http = (line for line in lines if line["event"] == "turn ended")
    assert by_http["trace_id"] == tracing.trace_id(OTHER), "the door passes on what its caller sent"
    assert ending["session"] == chat.id and ending["request_id"] == turn.request_id
    assert ending["tenant"] and ending["trace_id"] == tracing.trace_id(HEADER)
    assert ending["outcome"] == "length" and ending["output_tokens"] == 4
    assert SECRET not in server.stderr


@pytest.mark.timeout(120)
async def test_what_goes_wrong_in_the_engine_names_the_turn(tmp_path: Path) -> None:
    """In lines of the engine's process, which knows sessions, and of the front end, which knows all of it."""
    (poison,) = encode("Z")
    with launched(tmp_path, Script(poison=poison), log_json=True) as server:
        async with AsyncClient(server.grpc, metadata=[("traceparent", HEADER)], retry_for=60) as client:
            chat = await client.create_session()
            with pytest.raises(Internal) as caught:
                await chat.send(f"{SECRET} Z", request_id=TURN)
        assert caught.value.reason == "REQUEST_QUARANTINED"
        server.terminate()
        await asyncio.to_thread(server.finish)
    lines = [json.loads(line) for line in server.stderr.splitlines() if line.startswith("{")]
    by_event = {line["event"]: line for line in lines}
    failed = by_event["engine failed"]
    assert (failed["session"], failed["tenant"]) == (chat.id, "default") and "poisoned" in failed["exception"]
    for event in (
        "the engine ended at work on this turn, of %d",
        "a request has ended the engine twice and is refused from now on: its session is told",
    ):
        line = by_event[event]
        assert (line["session"], line["request_id"], line["tenant"]) == (chat.id, TURN, "default")
        assert line["trace_id"] == tracing.trace_id(HEADER)
    assert SECRET not in server.stderr


def test_an_engine_names_sessions_in_place_of_its_requests() -> None:
    names = RequestLogFilter()
    for number in range(1, 12):
        names.on_command(Submit(number, f"acme/s{number:02}", b"", 0, Sampling()))
    names.owner = lambda key: RequestKey(7) if key == 70 else key

    def line(*requests: int) -> dict[str, object]:
        record = logging.makeLogRecord({"requests": [RequestKey(one) for one in requests]})
        assert names.filter(record)
        found = vars(record)
        return {key: found[key] for key in ("session", "tenant", "sessions", "requests") if key in found}

    assert line(3) == {"session": "s03", "tenant": "acme"}
    assert line(7, 70) == line(70) == {"session": "s07", "tenant": "acme"}, (
        "a further candidate is its turn's"
    )
    assert line(2, 1) == {"sessions": ["acme/s01", "acme/s02"], "requests": 2}
    assert len(line(*range(1, 12))["sessions"]) == 8  # type: ignore[arg-type]
    names.on_command(Cancel(request=3))
    names.on_command(Cancel(request=4, candidate=1))
    names.on_events([Finished(5, FinishReason.EOS, Usage()), Failed(6, "", "")])
    assert line(3) == line(5) == line(6) == line() == {}
    assert line(4) == {"session": "s04", "tenant": "acme"}
