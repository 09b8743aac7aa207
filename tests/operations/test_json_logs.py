"""The log as JSON, of all processes of a server."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from pathlib import Path

import pytest

from pensieve import tracing
from pensieve.client import AsyncClient
from support.service.server_process import launched

SECRET = "the-cat-is-called-Rex"
HEADER = "00-0123456789abcdef0123456789abcdef-0123456789abcdef-01"
OTHER = "00-fedcba9876543210fedcba9876543210-0123456789abcdef-01"


def ask_by_http(address: str) -> None:
    body = json.dumps({"model": "model", "input": SECRET, "max_output_tokens": 4}).encode()
    headers = {"content-type": "application/json", "traceparent": OTHER}
    request = urllib.request.Request(f"http://{address}/v1/responses", body, headers)
    with urllib.request.urlopen(request, timeout=30) as answer:
        assert answer.status == 200


@pytest.mark.timeout(120)
async def test_lines_say_whose_turn_it_is(tmp_path: Path) -> None:
    """Each line of all processes is an object; those of a turn name it, its tenant and its trace, and no text."""
    options = {"log_json": True, "log_level": "debug", "http": "127.0.0.1:0"}
    with launched(tmp_path, **options) as server:
        async with AsyncClient(server.grpc, metadata=[("traceparent", HEADER)]) as client:
            chat = await client.create_session()
            turn = await chat.send(SECRET, max_output_tokens=4)
        await asyncio.to_thread(ask_by_http, server.http)
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
