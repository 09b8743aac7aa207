"""Clients of the HTTP door that mean no good, or know no better, below the application: bytes and connections."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from pensieve.config import DoorSettings
from pensieve.http import wire
from pensieve.http.app import make_app
from pensieve.http.common import bodies
from pensieve.http.common.door import HttpDoor
from pensieve.http.run import running
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, encode, serving

RESPONSES = "/v1/responses"
BODY = b'{"input": "hi"}'
POST = b"POST /v1/responses HTTP/1.1\r\nHost: x\r\n"


@dataclass
class Wire:
    """A door as it really runs, and what is behind it."""

    service: Rig
    door: HttpDoor
    port: int

    async def says(self, *sent: bytes, pause_s: float = 0.0) -> bytes:
        """All that comes back until the door closes the connection."""
        loop, back = asyncio.get_running_loop(), b""
        with socket.socket() as caller:
            caller.setblocking(False)
            await loop.sock_connect(caller, ("127.0.0.1", self.port))
            with contextlib.suppress(ConnectionError):
                for part in sent:
                    await loop.sock_sendall(caller, part)
                    await asyncio.sleep(pause_s)
            with contextlib.suppress(ConnectionError):
                async with asyncio.timeout(60):
                    while part := await loop.sock_recv(caller, 1 << 16):
                        back += part
        return back


@asynccontextmanager
async def wired(**settings: Any) -> AsyncIterator[Wire]:
    async with serving() as service:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # each connection's
            app = make_app(DoorSettings(service.target, **settings))
            async with running(app, listener, None) as server:
                try:
                    yield Wire(service, app.state.door, listener.getsockname()[1])
                finally:
                    server.should_exit = server.force_exit = True


def error_in(answer: bytes) -> tuple[int, str | None]:
    """Status and code of an answer in the form of all errors."""
    head, _, body = answer.partition(b"\r\n\r\n")
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"} and error["message"]
    assert b"content-type: application/json" in head and b"x-request-id: " in head
    return int(head.split()[1]), error["code"]


CLOSING = b"Connection: close\r\n"
NO_HTTP: tuple[bytes, ...] = (
    b"\x16\x03\x01\x00\xff\x00 a hello in TLS\r\n\r\n",
    b"GET /v1/models HTTP/1.1\r\n\r\n",
    POST + b"Content-Length: many\r\n\r\n",
    POST + b"Content-Length: -5\r\n\r\n",
    POST + b"Content-Length: 5\r\nContent-Length: 6\r\n\r\n{}{}{}",
    POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n",
    POST + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n{}\r\n0\r\n\r\n",
    POST + b"X-A: a\0b\r\n\r\n",
    POST + b"X-A: " + b"a" * 70_000,
    b"GET /v1/responses/" + b"a" * 70_000,
)
REFUSED: tuple[tuple[bytes, int, str], ...] = (
    (b"Authorization: Bearer \xe9\xff\r\n", 401, "invalid_api_key"),
    (b"Authorization: Bearer a\tb\r\n", 401, "invalid_api_key"),
    (b"Authorization: Bearer " + b"k" * 20_000 + b"\r\n", 401, "invalid_api_key"),
    (b"X-API-Key: \xe9\xff\r\n", 401, "invalid_api_key"),
    (b"X-API-Key: " + b"k" * 20_000 + b"\r\n", 401, "invalid_api_key"),
    (b"Content-Encoding: gzip\r\n", 415, "unsupported_media_type"),
)


async def test_what_is_no_http_is_an_error_in_the_usual_form() -> None:
    async with wired() as on:
        for sent in NO_HTTP:
            assert error_in(await on.says(sent)) == (400, "invalid_http"), sent[:80]
        length = b"Content-Length: %d\r\n" % len(BODY)
        for headers, status, code in REFUSED:
            answer = await on.says(POST + CLOSING + length + headers + b"\r\n" + BODY)
            assert error_in(answer) == (status, code), headers[:80]
        assert not on.service.link.generations
        assert not (await on.service.api.ListSessions(pb.ListSessionsRequest())).sessions


async def test_odd_http_is_served() -> None:
    length = b"Content-Length: %d\r\n" % len(BODY)
    async with wired() as on:
        old = POST.replace(b"1.1", b"1.0") + length + b"\r\n" + BODY
        expecting = POST + CLOSING + length + b"Expect: 100-continue\r\n\r\n" + BODY
        chunked = POST + CLOSING + b"Transfer-Encoding: chunked\r\n\r\n" + b"f\r\n" + BODY + b"\r\n0\r\n\r\n"
        two = POST + length + b"\r\n" + BODY + POST + CLOSING + length + b"\r\n" + BODY
        for sent, answers in ((old, 1), (expecting, 1), (chunked, 1), (two, 2)):
            assert (await on.says(sent)).count(b" 200 OK") == answers, sent
        assert len(on.service.link.generations) == 5


async def test_who_stands_still_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "HEAD_S", 0.7)
    async with wired() as on:
        assert error_in(await on.says()) == (408, "request_timeout")
        # One byte now and then is standing still, too: on a fresh connection, and behind an answer.
        drips = [b"X"] * 40
        assert b" 408 " in await on.says(POST, *drips, pause_s=0.05)
        answer = await on.says(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n", POST, *drips, pause_s=0.05)
        assert b" 200 OK" in answer and b" 408 " in answer
        # An answer takes as long as it takes.
        on.service.link.answer = None
        asking = asyncio.create_task(
            on.says(POST + CLOSING + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY)
        )
        generation = await on.service.link.next_generation()
        generation.admit()
        await asyncio.sleep(1.0)
        generation.emit(*encode("a"))
        generation.finish()
        assert b" 200 OK" in await asking


async def test_who_reads_nothing_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(wire, "STALLED_S", 0.3)
    async with wired() as on:
        on.service.link.answer = None
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            client.connect(("127.0.0.1", on.port))
            asked = b'{"input": "hi", "stream": true, "include": ["message.output_text.logprobs"]}'
            client.sendall(POST + b"Content-Length: %d\r\n\r\n" % len(asked) + asked)
            generation = await on.service.link.next_generation()
            generation.admit()
            for _ in range(40):  # with their log-probabilities more than sockets and door hold
                generation.emit(*encode("a" * 50))
                await asyncio.sleep(0.01)
            async with asyncio.timeout(60):
                while on.service.conversations.turns.running:
                    await asyncio.sleep(0.01)
            assert generation.cancelled
        sessions = (await on.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert [one.item_count for one in sessions] == [0]


async def test_large_bodies_that_never_end_have_bounded_room(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "MAX_LARGE_BODIES", 2)
    most = 4 * bodies.SMALL_BYTES
    head = POST + CLOSING + b"Content-Length: %d\r\n\r\n" % most
    async with wired(max_body_bytes=most) as on, contextlib.AsyncExitStack() as held:
        for _ in range(2):
            caller = held.enter_context(socket.socket())
            caller.setblocking(False)
            await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", on.port))
            await asyncio.get_running_loop().sock_sendall(caller, head + b" " * (most - 1))

        async with asyncio.timeout(60):
            while on.door.bodies.free_bytes > 2:
                await asyncio.sleep(0.01)
        answer = await on.says(head + b" " * (most - len(BODY)) + BODY)
        assert error_in(answer) == (429, "server_overloaded") and b"retry-after: 1" in answer
        # Small ones pass, and when the others have left, so do large ones.
        small = POST + CLOSING + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        assert b" 200 OK" in await on.says(small)
        await held.aclose()
        async with asyncio.timeout(60):
            while on.door.bodies.free_bytes < 2 * most:
                await asyncio.sleep(0.01)
        assert b" 200 OK" in await on.says(head + b" " * (most - len(BODY)) + BODY)


ASKED: tuple[tuple[str, dict[str, Any]], ...] = (
    (RESPONSES, {"input": "hi"}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}),
    ("/v1/completions", {"prompt": "hi"}),
)


@pytest.mark.parametrize(("route", "asked"), ASKED)
async def test_who_does_not_wait_for_a_whole_answer_leaves_no_turn(route: str, asked: dict[str, Any]) -> None:
    body = json.dumps(asked).encode()
    head = f"POST {route} HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    async with wired() as on:
        on.service.link.answer = None
        with socket.create_connection(("127.0.0.1", on.port)) as caller:
            caller.sendall(head + body)
            generation = await on.service.link.next_generation()
            generation.admit()
            generation.emit(*encode("hello"))
        async with asyncio.timeout(60):
            while on.service.conversations.turns.running or not generation.cancelled:
                await asyncio.sleep(0.01)
        sessions = (await on.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert all(not one.HasField("active_turn") and one.revision <= 1 for one in sessions)


@pytest.mark.parametrize(("sent", "closes"), [(100, False), (100_000, True)])
async def test_an_answer_before_the_end_of_a_large_body_is_the_last_of_its_connection(
    sent: int, closes: bool
) -> None:
    """The caller is told so. A small body is read to its end, and the connection goes on."""
    async with wired() as wire:
        head = b"POST /v1/nowhere HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
        first = head + b"Content-Length: %d\r\n\r\n" % sent
        last = b"GET /v1/models HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n"
        back = await wire.says(first, b" " * sent + last)
        assert back.startswith(b"HTTP/1.1 404 ")
        assert (b"connection: close" in back.lower().partition(b"\r\n\r\n")[0]) is closes
        assert (b" 200 OK" in back) is not closes
