"""Unknown callers of the HTTP door cost neither its event loop, nor memory, nor open files."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest

from pensieve.client import AsyncClient
from pensieve.config import DoorSettings
from pensieve.http import connections as connections_of
from pensieve.http import wire
from pensieve.http.app import make_app
from pensieve.http.common import admission, bodies
from pensieve.http.common.callers import identity_from_header
from pensieve.http.common.door import HttpDoor
from pensieve.http.connections import Connections
from pensieve.http.run import ManagedServer, running
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.interceptor import AccessControl
from support.http.http_rig import door
from support.service.service_rig import Rig, serving

RESPONSES = "/v1/responses"
BODY = b'{"input": "hi"}'
HEAD = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\n"
CHUNKED = b"Transfer-Encoding: chunked\r\n\r\n"
KEY = b"Authorization: Bearer ck_acme_secret\r\n"
GOOD = {"Authorization": "Bearer ck_acme_secret"}


@dataclass
class Keyed:
    """A door before a service that asks for a key."""

    service: Rig
    entry: AccessControl
    keys: Path
    server: ManagedServer
    door: HttpDoor
    url: str

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])

    async def says(self, *sent: bytes) -> bytes:
        """All that comes back until the door closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self.port)
        with contextlib.suppress(ConnectionError):
            for part in sent:
                writer.write(part)
                await writer.drain()
        async with asyncio.timeout(30):
            back = b""
            with contextlib.suppress(ConnectionError):
                while part := await reader.read(1 << 16):
                    back += part
        writer.close()
        return back


@asynccontextmanager
async def keyed(folder: Path, **settings: Any) -> AsyncIterator[Keyed]:
    keys = folder / "keys.toml"
    digest = hashlib.sha256(b"secret").hexdigest()
    keys.write_text(f'[[key]]\nid = "acme"\nsha256 = "{digest}"\ntenant = "acme"\n')
    entry = AccessControl(keys, Metrics())
    async with serving(door=entry) as service:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            app = make_app(DoorSettings(service.target, **settings))
            async with running(app, listener, None) as server:
                url = f"http://127.0.0.1:{listener.getsockname()[1]}"
                try:
                    yield Keyed(service, entry, keys, server, app.state.door, url)
                finally:
                    server.should_exit = server.force_exit = True


ROUTES = (b"responses", b"chat/completions", b"completions", b"conversations", b"messages")
WRONG = (b"", b"Authorization: Bearer nobody\r\n", b"Authorization: Basic eDp5\r\n", b"x-api-key: nobody\r\n")


@pytest.mark.fault(55)
@pytest.mark.parametrize("key", WRONG)
async def test_a_body_is_not_read_before_the_caller_is_known(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, key: bytes
) -> None:
    async def read(*_: Any) -> None:
        raise AssertionError("a stranger's body is read")

    monkeypatch.setattr(bodies.BodyReader, "read", read)
    async with keyed(tmp_path) as on:
        for route in ROUTES:
            head = HEAD.replace(b"responses", route) + key
            # Its body never comes whole, nor is it JSON: the answer does not wait for it.
            answer = await on.says(head + b"Content-Length: 100000\r\n\r\n" + b"{" * 50_000)
            assert answer.startswith(b"HTTP/1.1 401 "), (route, answer[:300])
            assert b"connection: close" in answer
        assert on.door.bodies.free_bytes == bodies.BodyBudget(64 * (4 << 20)).free


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    ("sent", "judged"),
    [
        (b"Authorization: Basic eDp5\r\n", "Basic eDp5"),
        (b"Authorization: bearer  ck_acme_no \r\n", "Bearer ck_acme_no"),
        (b"Authorization: Bearer\r\n", "Bearer"),
        (b"Authorization: \r\n", "none"),
        (b"X-API-Key: ck_acme_no\r\n", "Bearer ck_acme_no"),
        (b"X-API-Key: \r\n", "Bearer"),
    ],
)
async def test_who_sends_a_header_is_judged_by_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sent: bytes, judged: str
) -> None:
    """Whatever it is, the service sees it: without one, it would judge the caller by its certificate."""
    seen: set[str] = set()
    async with keyed(tmp_path, vouches=True) as on:
        check = on.entry._authenticator.check

        def noted(method: str, metadata: Any, peer: Any) -> Any:
            seen.add(str(dict(metadata).get("authorization")))
            return check(method, metadata, peer)

        monkeypatch.setattr(on.entry._authenticator, "check", noted)
        head = HEAD.replace(b"POST", b"GET") + b"Connection: close\r\n"
        assert (await on.says(head + sent + b"\r\n")).startswith(b"HTTP/1.1 401 ")
        assert seen == {judged}
        answer = await on.says(head + sent + sent + b"\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ") and b"send one Authorization header" in answer
        assert seen == {judged}, "of two headers none counts"


@pytest.mark.fault(36)
@pytest.mark.parametrize("asks", [True, False], ids=["with keys", "without"])
async def test_bodies_count_for_whom_the_service_knows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, asks: bool
) -> None:
    holders: list[str] = []
    place = bodies.BodyBudget.reserve

    def noted(self: bodies.BodyBudget, holder: str, end: Any) -> Any:
        holders.append(holder)
        return place(self, holder, end)

    monkeypatch.setattr(bodies.BodyBudget, "reserve", noted)
    async with contextlib.AsyncExitStack() as stack:
        if asks:
            on = await stack.enter_async_context(keyed(tmp_path))
            other = on.keys.read_text().replace('id = "acme"', 'id = "other"')
            on.keys.write_text(on.keys.read_text() + other)
            on.entry.reload_keys(always=True)
            url = on.url
        else:
            rig = await stack.enter_async_context(
                door(service_options={"door": AccessControl(None, Metrics())})
            )
            url = rig.url
        http = await stack.enter_async_context(httpx.AsyncClient(base_url=url, timeout=60))
        for key in ("acme", "other"):
            headers = {"Authorization": f"Bearer ck_{key}_secret", "Content-Type": "application/json"}
            assert (await http.post(RESPONSES, content=BODY, headers=headers)).status_code == 200
    assert len(set(holders)) == (2 if asks else 1), "where no key is asked for, an address is a caller"
    assert asks or set(holders) == {"@127.0.0.1"}


def connections_to(port: int) -> int:
    """Connections that are open to a port of this machine."""
    tables = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
    rows = [line.split() for line in tables.splitlines()]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "01" for row in rows)


@pytest.mark.fault(60)
async def test_questions_about_many_keys_share_one_connection(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "MAX_CHECKS", 8)
    answered, seen = 0, asyncio.Event()
    ask = AsyncClient.server_info

    async def held(self: AsyncClient) -> Any:
        nonlocal answered
        try:
            return await ask(self)
        finally:
            answered += 1
            async with asyncio.timeout(30):
                await seen.wait()

    async with keyed(tmp_path) as on, httpx.AsyncClient(base_url=on.url, timeout=60) as http:
        monkeypatch.setattr(AsyncClient, "server_info", held)
        wrong = [{"Authorization": f"Bearer ck_{number}_{number}"} for number in range(8)]
        asking = asyncio.gather(*(http.get("/v1/models", headers=headers) for headers in wrong))
        async with asyncio.timeout(30):
            while answered < len(wrong):
                await asyncio.sleep(0.005)
        good = asyncio.create_task(http.get("/v1/models", headers=GOOD))
        async with asyncio.timeout(30):
            while answered < len(wrong) + 1:
                await asyncio.sleep(0.005)
        count = connections_to(int(on.service.target.rpartition(":")[2]))
        seen.set()
        statuses = [answer.status_code for answer in await asking]
        known = await good
        assert sorted(statuses) == [401] * 7 + [503], "of more, the oldest question makes way"
        assert known.status_code == 200
        assert count == 1


@pytest.mark.fault(55)
async def test_not_even_a_small_body_of_a_stranger_is_waited_for(tmp_path: Path) -> None:
    async with keyed(tmp_path) as on:
        answer = await on.says(HEAD + b"Authorization: Bearer nobody\r\nContent-Length: 10\r\n\r\n")
        assert answer.startswith(b"HTTP/1.1 401 ") and b"connection: close" in answer


@pytest.mark.fault(60)
async def test_invented_keys_cost_no_connections(tmp_path: Path) -> None:
    async with keyed(tmp_path) as on, httpx.AsyncClient(base_url=on.url, timeout=60) as http:
        assert (await http.get("/v1/models", headers=GOOD)).status_code == 200
        before = len(os.listdir("/proc/self/fd"))
        for number in range(30):
            wrong = {"Authorization": f"Bearer ck_{number}_{number}"}
            with contextlib.suppress(TimeoutError, httpx.TimeoutException):
                answer = await http.get("/v1/models", headers=wrong, timeout=0.2)
                assert answer.status_code == 401
        assert len(on.door.callers._callers) == 1, "a client is for callers that are known"
        assert len(os.listdir("/proc/self/fd")) < before + 30 + 5


@pytest.mark.fault(60)
async def test_a_bad_key_that_is_tried_again_is_asked_about_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "IMMEDIATE_REFUSALS", 20)
    monkeypatch.setattr(admission, "REFUSED_S", 60.0)
    async with keyed(tmp_path) as on, httpx.AsyncClient(base_url=on.url, timeout=60) as http:
        checks = 0
        check = on.entry._authenticator.check

        def counted(*args: Any) -> Any:
            nonlocal checks
            checks += 1
            return check(*args)

        monkeypatch.setattr(on.entry._authenticator, "check", counted)
        for _ in range(21):
            assert (await http.get("/v1/models")).status_code == 401
        with pytest.raises(httpx.ReadTimeout):  # the next ones are answered when it is asked about again
            await http.get("/v1/models", timeout=0.2)
        assert checks == 1


@pytest.mark.parametrize("lasting", [False, True], ids=["verdict over", "verdict in force"])
async def test_a_key_that_is_revoked_is_refused_from_then_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, lasting: bool
) -> None:
    conversation = "/v1/conversations/conv_" + "0" * 32
    async with keyed(tmp_path) as on, httpx.AsyncClient(base_url=on.url, timeout=60) as http:
        monkeypatch.setattr(admission, "ACCEPTED_S", 60.0 if lasting else 0.0)
        assert (await http.get("/v1/models", headers=GOOD)).status_code == 200
        who = identity_from_header(GOOD["Authorization"])
        assert on.door.admission.has_admitted(who)
        on.keys.write_text(on.keys.read_text().replace("acme", "other"))
        on.entry.reload_keys(always=True)
        for path in ("/v1/models", "/v1/models/tiny", conversation):
            assert (await http.get(path, headers=GOOD)).status_code == 401, path
        if not lasting:  # else nothing but the calls themselves would be refused
            broken = await http.post(RESPONSES, content=b"{", headers=GOOD)
            assert broken.status_code == 401, "its body is read"
            assert not on.door.admission.has_admitted(who), "it goes before strangers"


PIECES: dict[str, bytes] = {
    "one-byte chunks": CHUNKED + b"1\r\n \r\n" * 20_000 + b"0\r\n\r\n",
    "chunk extensions": CHUNKED + (b"40;" + b"x" * 4000 + b"\r\n" + b" " * 64 + b"\r\n") * 100 + b"0\r\n\r\n",
    "trailers": CHUNKED + b"f\r\n" + BODY + b"\r\n0\r\n" + b"a: b\r\n" * 30_000 + b"\r\n",
}


@pytest.mark.parametrize("sent", PIECES.values(), ids=PIECES.keys())
async def test_a_body_in_tiny_parts_is_refused(tmp_path: Path, sent: bytes) -> None:
    async with keyed(tmp_path) as on:
        answer = await on.says(HEAD + KEY + sent)
        assert answer.startswith(b"HTTP/1.1 400 ") and b"chunks of the body are too small" in answer


async def test_a_short_body_may_come_byte_by_byte(tmp_path: Path) -> None:
    body = b"".join(b"1\r\n%c\r\n" % byte for byte in BODY) + b"0\r\nX-Behind: 1\r\n\r\n"
    async with keyed(tmp_path) as on:
        assert b" 200 OK" in await on.says(HEAD + KEY + b"Connection: close\r\n" + CHUNKED + body)
        length = b"Connection: close\r\nContent-Length: %d\r\n\r\n" % len(BODY)
        assert b" 200 OK" in await on.says(HEAD + KEY + length, *(bytes([byte]) for byte in BODY))
        upgrade = (
            b"Connection: Upgrade, HTTP2-Settings, close\r\nUpgrade: h2c\r\nHTTP2-Settings: AAMAAABk\r\n"
        )
        asked = HEAD + KEY + upgrade + b"Content-Length: %d\r\n\r\n" % len(BODY) + BODY
        assert b" 200 OK" in await on.says(asked), "as Java's client asks for another protocol"


async def test_heads_are_bounded(tmp_path: Path) -> None:
    async with keyed(tmp_path) as on:
        many = await on.says(HEAD + b"a: b\r\n" * 10_000 + b"\r\n")
        assert many.startswith(b"HTTP/1.1 431 ") and b"invalid_http" in many
        two = await on.says(HEAD + b"Host: other\r\n\r\n")
        assert two.startswith(b"HTTP/1.1 400 ")


async def test_requests_on_one_connection_are_parsed_as_they_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ahead = 0
    begin = wire.GuardedProtocol.on_message_begin

    def counted(self: wire.GuardedProtocol) -> None:
        nonlocal ahead
        ahead = max(ahead, len(self.pipeline))
        begin(self)

    monkeypatch.setattr(wire.GuardedProtocol, "on_message_begin", counted)
    asked = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
    async with keyed(tmp_path) as on:
        answer = await on.says(asked * 2000 + asked.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert answer.count(b" 200 OK") == 2001
        assert ahead <= wire.HEAD_PIECE_BYTES // len(asked) + 1


class Fake:
    """A connection that is only counted."""

    idle = True

    def __init__(self, of: Connections) -> None:
        self.evicted = False
        self._of = of

    def evict(self) -> None:
        self.evicted = True


@pytest.mark.fault(60)
def test_strangers_make_way_and_known_callers_stay() -> None:
    counted = Connections(files=1024)
    known = [Fake(counted) for _ in range(20)]
    for one in known:
        assert counted.on_connect(one, "10.0.0.1")
        counted.on_admitted(one)
        one.idle = False
    strangers = [Fake(counted) for _ in range(2000)]
    for number, one in enumerate(strangers):
        assert counted.on_connect(one, f"10.0.1.{number % 2}")
    quiet = Fake(counted)
    assert counted.on_connect(quiet, "10.0.0.2")
    assert counted.strangers <= counted.max_strangers and len(counted) < 1024 // 2
    assert not any(one.evicted for one in (*known, quiet)), "the address that has most makes way"
    assert not any(one.evicted for one in strangers[-50:]), "the newest have had no time yet"
    for one in [*known, *strangers, quiet]:
        counted.on_close(one)
    assert (len(counted), counted.strangers, counted._count_of_address) == (0, 0, {})


@pytest.mark.fault(60)
def test_one_address_leaves_connections_to_others() -> None:
    counted = Connections(files=1024)
    busy = [Fake(counted) for _ in range(1000)]
    taken = []
    for one in busy:
        if counted.on_connect(one, "10.0.0.1"):
            counted.on_admitted(one)
            one.idle = False
            taken.append(one)
        else:
            counted.on_close(one)
    assert 256 < len(taken) < counted.max_connections < 512
    assert counted.on_connect(Fake(counted), "10.0.0.2")


def test_who_is_known_too_late_is_not_counted_again() -> None:
    counted = Connections(files=1024)
    one = Fake(counted)
    counted.on_connect(one, "10.0.0.1")
    counted.on_close(one)
    counted.on_admitted(one)
    assert len(counted) == 0 and counted.strangers == 0


async def test_unknown_callers_are_looked_at_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections_of, "STRANGER_TIMEOUT_S", 60.0)
    counted, begun = Connections(files=1024), list[int]()
    asking = [Fake(counted) for _ in range(100)]
    for number, one in enumerate(asking):
        counted.on_connect(one, "10.0.0.1")
        counted.queue.enter(one, lambda number=number: begun.append(number))  # type: ignore[misc]
    assert begun == list(range(connections_of.MAX_STRANGERS_AT_ONCE))
    counted.on_admitted(asking[0])
    counted.on_close(asking[98])
    assert begun[-1] == 99, "the newest is next"
    counted.on_close(asking[1])
    assert begun[-1] == 97


@pytest.mark.fault(36)
async def test_slow_bodies_make_way_for_other_callers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "EVICT_SOON_S", 0.01)
    monkeypatch.setattr(bodies, "EVICT_AFTER_S", 60.0)
    shared = bodies.BodyBudget(100)
    ended: list[int] = []
    with contextlib.ExitStack() as stack:
        greedy = [
            stack.enter_context(shared.reserve("a", lambda number=number: ended.append(number)))  # type: ignore[misc]
            for number in range(10)
        ]
        for one in greedy:
            await shared.acquire(one, 10)
        other = stack.enter_context(shared.reserve("b", lambda: ended.append(-1)))
        async with asyncio.timeout(10):
            await shared.acquire(other, 10)
        assert ended == [0], "the oldest of the caller that holds too much"
        mine = stack.enter_context(shared.reserve("a", lambda: None))
        with pytest.raises(Exception, match="too many large bodies"):
            await shared.acquire(mine, 10)
        for one in (*greedy, other):
            one.is_arriving = False  # they wait for this server now
        third = stack.enter_context(shared.reserve("c", lambda: None))
        with pytest.raises(Exception, match="too many large bodies"):
            await shared.acquire(third, 20)
    assert shared.free == 100 and not shared._bytes_of_holder


@pytest.mark.fault(36)
async def test_a_callers_old_body_makes_way_for_its_next(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "EVICT_AFTER_S", 0.0)
    shared, ended = bodies.BodyBudget(100), list[str]()
    with shared.reserve("a", lambda: ended.append("old")) as old, shared.reserve("a", lambda: None) as new:
        await shared.acquire(old, 100)
        await shared.acquire(new, 100)
        assert ended == ["old"] and old.is_evicted
    assert shared.free == 100


@pytest.mark.fault(36)
async def test_behind_one_address_a_slow_body_makes_way_for_another(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "EVICT_AFTER_S", 0.01)
    shared, ended = bodies.BodyBudget(100), list[str]()
    with (
        shared.reserve("@10.0.0.1", lambda: ended.append("slow")) as slow,
        shared.reserve("@10.0.0.1", lambda: ended.append("quick")) as quick,
    ):
        await shared.acquire(slow, 100)
        async with asyncio.timeout(10):
            await shared.acquire(quick, 50)
    assert ended == ["slow"]


LOOPBACK = {"on_loopback": True}
SITES: tuple[tuple[dict[str, str], int], ...] = (
    ({}, 200),
    ({"Host": "localhost:8080"}, 200),
    ({"Host": "[::1]:8080"}, 200),
    ({"Host": "chat.lan:8080"}, 200),
    ({"Host": "host.docker.internal:8080"}, 200),
    ({"Host": "evil.example"}, 403),
    ({"Host": "localhost.evil.example:8080"}, 403),
    ({"Host": "127.0.0.1.evil.example"}, 403),
    ({"Content-Type": "application/x-www-form-urlencoded"}, 200),
    ({"Content-Type": "text/plain"}, 415),
    ({"Content-Type": "text/plain;charset=UTF-8"}, 415),
    ({"Content-Type": "multipart/form-data; boundary=x"}, 415),
    ({"Origin": "https://evil.example"}, 403),
    ({"Origin": "null"}, 403),
    ({"Sec-Fetch-Site": "cross-site"}, 403),
    ({"Sec-Fetch-Site": "same-site", "Origin": "http://localhost:3000"}, 403),
    ({"Sec-Fetch-Site": "same-origin", "Origin": "http://localhost:5173"}, 200),
    ({"Origin": "https://friend.example", "Sec-Fetch-Site": "cross-site"}, 200),
    ({"Host": "localhost:8080", "Origin": "http://localhost:8080"}, 200),
)


async def test_pages_of_other_sites_do_not_reach_a_door_without_keys() -> None:
    own: dict[str, Any] = {**LOOPBACK, "hosts": ("chat.lan",), "cors_origins": ("https://friend.example",)}
    async with (
        door(service_options={"door": AccessControl(None, Metrics())}, **own) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
    ):
        for route, body in ((RESPONSES, BODY), ("/v1/conversations", b"{}")):
            for headers, status in SITES:
                sent = {"Content-Type": "application/json", "Authorization": "Bearer any", **headers}
                answer = await http.post(route, content=body, headers=sent)
                assert answer.status_code == status, (route, headers, answer.text)
        foreign = {"Host": "evil.example"}
        assert (await http.get("/v1/models", headers=foreign)).status_code == 403
        assert (await http.get("/health", headers=foreign)).status_code == 200, (
            "a prober may call it as it likes"
        )


async def test_a_door_with_keys_has_any_name(tmp_path: Path) -> None:
    async with keyed(tmp_path, **LOOPBACK) as on, httpx.AsyncClient(base_url=on.url, timeout=60) as http:
        named = {**GOOD, "Host": "api.example", "Origin": "https://evil.example"}
        assert (await http.post("/v1/conversations", json={}, headers=named)).status_code == 200


async def test_a_door_on_a_network_wants_keys(tmp_path: Path) -> None:
    async with (
        door(service_options={"door": AccessControl(None, Metrics())}, wants_keys=True) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
    ):
        refused = await http.get("/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "keys_required")
    async with keyed(tmp_path, wants_keys=True) as on, httpx.AsyncClient(base_url=on.url, timeout=60) as http:
        assert (await http.get("/v1/models", headers=GOOD)).status_code == 200


async def test_an_error_names_no_file_of_the_server(tmp_path: Path) -> None:
    gone = f"unix:{tmp_path / 'secret-folder' / 'http'}"
    app = make_app(DoorSettings(gone, patience_s=0.1))
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with running(app, listener, None) as server:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            async with httpx.AsyncClient(base_url=url, timeout=60) as http:
                for path in ("/v1/models", "/ready"):
                    answer = await http.get(path)
                    assert answer.status_code == 503
                    assert "secret" not in answer.text and str(tmp_path) not in answer.text
            server.should_exit = server.force_exit = True


STREAMS: tuple[tuple[str, dict[str, Any]], ...] = (
    (RESPONSES, {"input": "hi", "stream": True}),
    ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}], "stream": True}),
    ("/v1/completions", {"prompt": "hi", "stream": True}),
)


@pytest.mark.parametrize(("route", "asked"), STREAMS)
async def test_a_stream_is_never_silent(route: str, asked: dict[str, Any]) -> None:
    async with (
        asyncio.timeout(30),
        door(answer=None, heartbeat_s=0.05) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
        http.stream("POST", route, json=asked) as answer,
    ):
        generation = await rig.service.link.next_generation()
        generation.admit()
        assert await comments_in(answer, generation) >= 3


async def test_a_stream_that_is_resumed_is_never_silent() -> None:
    async with (
        asyncio.timeout(30),
        door(answer=None, heartbeat_s=0.05) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
    ):
        begun = await http.post(RESPONSES, json={"input": "hi", "background": True})
        generation = await rig.service.link.next_generation()
        generation.admit()
        path = f"{RESPONSES}/{begun.json()['id']}"
        async with http.stream("GET", path, params={"stream": "true"}) as answer:
            assert await comments_in(answer, generation) >= 3


async def comments_in(answer: httpx.Response, generation: Any) -> int:
    """Comments of a stream whose generation ends after three of them."""
    comments = 0
    async for line in answer.aiter_lines():
        comments += line == ":"
        assert line == "" or line.startswith((":", "data: ", "event: "))
        if comments == 3:
            generation.finish()
    return comments


async def test_a_whole_answer_has_no_comments() -> None:
    async with (
        door(answer=None, heartbeat_s=0.01) as rig,
        httpx.AsyncClient(base_url=rig.url, timeout=60) as http,
    ):
        asking = asyncio.create_task(http.post(RESPONSES, json={"input": "hi"}))
        generation = await rig.service.link.next_generation()
        generation.admit()
        await asyncio.sleep(0.1)
        generation.finish()
        assert (await asking).json()["object"] == "response"


def test_large_means_more_than_is_read_at_once() -> None:
    assert bodies.SMALL_BYTES >= wire.WAITING_BYTES + wire.STRANGER_READ_BYTES
