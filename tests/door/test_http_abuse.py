"""Clients of the HTTP door that mean no good, or know no better: below the protocol, and against its objects."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.http import wire
from pensieve.http.app import make_app
from pensieve.http.common import bodies
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.settings import DoorSettings
from pensieve.http.run import running
from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
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
    monkeypatch.setattr(wire, "HEAD_S", 0.3)
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
        await asyncio.sleep(0.8)
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
    monkeypatch.setattr(bodies, "ROOM", 2)
    most = 4 * bodies.SMALL_BYTES
    head = POST + CLOSING + b"Content-Length: %d\r\n\r\n" % most
    async with wired(max_body_bytes=most) as on, contextlib.AsyncExitStack() as held:
        for _ in range(2):
            caller = held.enter_context(socket.socket())
            caller.setblocking(False)
            await asyncio.get_running_loop().sock_connect(caller, ("127.0.0.1", on.port))
            await asyncio.get_running_loop().sock_sendall(caller, head + b" " * (most - 1))

        async with asyncio.timeout(60):
            while on.door.bodies.room > 2:
                await asyncio.sleep(0.01)
        answer = await on.says(head + b" " * (most - len(BODY)) + BODY)
        assert error_in(answer) == (429, "server_overloaded") and b"retry-after: 1" in answer
        # Small ones pass, and when the others have left, so do large ones.
        small = POST + CLOSING + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        assert b" 200 OK" in await on.says(small)
        await held.aclose()
        async with asyncio.timeout(60):
            while on.door.bodies.room < 2 * most:
                await asyncio.sleep(0.01)
        assert b" 200 OK" in await on.says(head + b" " * (most - len(BODY)) + BODY)


async def test_the_key_of_a_stored_response_does_not_erase_it() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        key = {"Idempotency-Key": "one"}
        stored = (await http.post(RESPONSES, json={"input": "hi"}, headers=key)).json()
        again = await http.post(RESPONSES, json={"input": "hi", "store": False}, headers=key)
        assert again.status_code == 200 and again.json()["id"] != stored["id"]
        assert (await http.get(f"{RESPONSES}/{stored['id']}")).json() == stored
        assert (await http.get(f"{RESPONSES}/{again.json()['id']}")).status_code == 404
        other = await http.post(RESPONSES, json={"input": "ho"}, headers=key)
        assert (other.status_code, other.json()["error"]["param"]) == (409, "Idempotency-Key")
        assert (await http.post(RESPONSES, json={"input": "hi"}, headers=key)).json() == stored


async def test_numbers_in_queries() -> None:
    async with door() as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        made = (await http.post(RESPONSES, json={"input": "hi", "background": True})).json()["id"]
        for wrong in ("-1", "9" * 5000, "%D9%A3", "1e3", "", "+1", "%C2%B2"):
            for query in (f"?stream=true&starting_after={wrong}", f"/input_items?limit={wrong}"):
                answer = await http.get(f"{RESPONSES}/{made}{query}")
                assert answer.status_code == 400, query[:60]
                assert answer.json()["error"]["param"] in ("starting_after", "limit")
        beyond = await http.get(f"{RESPONSES}/{made}?stream=true&starting_after=100000")
        assert beyond.text == "data: [DONE]\n\n"


@asynccontextmanager
async def streaming(rig: HttpRig, **asked: Any) -> AsyncIterator[tuple[str, asyncio.Task[str]]]:
    """A response that has begun to stream: its id, and the task that reads it to the end."""
    begun: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def listen() -> str:
        text = ""
        async with http.stream("POST", RESPONSES, json={"input": "hi", "stream": True, **asked}) as answer:
            async for part in answer.aiter_text():
                text += part
                if "response.output_text.delta" in text and not begun.done():
                    line = next(line for line in text.splitlines() if line.startswith("data: "))
                    begun.set_result(json.loads(line.removeprefix("data: "))["response"]["id"])
        return text

    async with httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        listening = asyncio.create_task(listen())
        generation = await rig.service.link.next_generation()
        generation.admit()
        generation.emit(*encode("hello"))
        async with asyncio.timeout(60):
            yield await begun, listening


@pytest.mark.parametrize("background", [False, True])
async def test_a_response_that_is_deleted_while_it_streams_is_gone(background: bool) -> None:
    async with door(answer=None) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        async with streaming(rig, background=background) as (made, listening):
            gone = await http.delete(f"{RESPONSES}/{made}")
            assert gone.json() == {"id": made, "object": "response", "deleted": True}
            text = await listening
            assert "event: error" in text and text.endswith("data: [DONE]\n\n")
        assert (await http.get(f"{RESPONSES}/{made}")).status_code == 404
        assert (await http.delete(f"{RESPONSES}/{made}")).status_code == 404
        after = await http.post(RESPONSES, json={"input": "x", "previous_response_id": made})
        assert after.status_code == 400
        assert not rig.service.conversations.turns.running
        assert not (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions


async def test_a_conversation_outlives_a_response_that_is_deleted_while_it_streams() -> None:
    async with door(answer=None) as rig, httpx.AsyncClient(base_url=rig.url, timeout=60) as http:
        conversation = (await http.post("/v1/conversations", json={})).json()["id"]
        async with streaming(rig, conversation=conversation) as (made, listening):
            busy = await http.post(RESPONSES, json={"input": "x", "conversation": conversation})
            assert (busy.status_code, busy.json()["error"]["code"]) == (409, "turn_in_progress")
            assert (await http.delete(f"{RESPONSES}/{made}")).status_code == 200
            await listening
        assert (await http.get(f"{RESPONSES}/{made}")).status_code == 404
        assert (await http.get(f"/v1/conversations/{conversation}")).status_code == 200
        async with streaming(rig, conversation=conversation) as (made, listening):
            assert (await http.delete(f"/v1/conversations/{conversation}")).json()["deleted"] is True
            assert "event: error" in await listening
        assert (await http.get(f"{RESPONSES}/{made}")).status_code == 404
        assert not rig.service.conversations.turns.running


async def test_two_clients_take_up_one_stream() -> None:
    async with (
        door(answer=None) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
        streaming(rig, background=True) as (made, listening),
    ):
        others = [
            asyncio.create_task(http.get(f"{RESPONSES}/{made}?stream=true&starting_after={after}"))
            for after in (0, 3)
        ]
        generation = rig.service.link.generations[-1]
        generation.emit(*encode(" world"))
        generation.finish()
        whole = (await listening).split("\n\n")
        for other, after in zip(others, (0, 3), strict=True):
            assert (await other).text.split("\n\n") == whole[after + 1 :]


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


@pytest.mark.parametrize(("route", "asked"), ASKED)
async def test_who_leaves_at_any_event_leaves_no_turn(route: str, asked: dict[str, Any]) -> None:
    events = 5 if route == RESPONSES else 1
    async with door(answer=None) as rig:
        for leaving in range(events + 1):
            async with (
                httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
                http.stream("POST", route, json={**asked, "stream": True}) as answer,
            ):
                generation = await rig.service.link.next_generation()
                generation.admit()
                generation.emit(*encode("hello"))
                seen = 0
                async for line in answer.aiter_lines():
                    seen += line.startswith("data: ")
                    if seen >= leaving:
                        break
            async with asyncio.timeout(60):
                while rig.service.conversations.turns.running or not generation.cancelled:
                    await asyncio.sleep(0.01)
        sessions = (await rig.service.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert all(not one.HasField("active_turn") and one.revision <= 1 for one in sessions)
