"""Connections before they are served: who is next, how many there may be, and how long a TLS handshake may take."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import shutil
import socket
import ssl
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx2 as httpx
import pytest
from door.test_http_strangers import GOOD, KEY, keyed

from pensieve.config import DoorSettings
from pensieve.http import arrivals, run, wire
from pensieve.http.app import make_app
from pensieve.http.arrivals import Acceptor
from pensieve.http.common import admission
from pensieve.http.common.admission import Admission
from pensieve.http.connections import Connections
from pensieve.http.run import TlsFiles, running
from support.service.certificates import authority, signed
from support.service.service_rig import serving

CLOSE = b"Connection: close\r\n\r\n"
ASKED = b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\n"


API_KEY = b"X-API-Key: ck_acme_secret\r\n"


async def opened(port: int, sent: bytes = b"") -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    writer.write(sent)
    return reader, writer


@pytest.mark.fault(60)
async def test_a_known_caller_is_served_before_strangers_who_came_earlier(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keyed(tmp_path) as on:
        assert b" 200 OK" in await on.says(ASKED + KEY + CLOSE)
        monkeypatch.setattr(Acceptor, "_serve_newest", lambda _: None)  # it is never a stranger's turn
        strange = [
            await opened(on.port, ASKED + b"Authorization: Bearer ck_%d_x\r\n\r\n" % n) for n in range(50)
        ]
        for key in (KEY, KEY.lower(), b"X: y\r\nAUTHORIZATION:  bearer  ck_acme_secret \r\n", API_KEY):
            async with asyncio.timeout(30):
                assert b" 200 OK" in await on.says(ASKED + key + CLOSE)
        for _, writer in strange:
            writer.close()


def dialled(port: int, sent: bytes) -> socket.socket:
    """A connection that the event loop here has not seen yet."""
    one = socket.create_connection(("127.0.0.1", port))
    one.sendall(sent)
    return one


@pytest.mark.fault(60)
async def test_strangers_who_come_at_once_evict_no_known_caller(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counted = Connections(files=64)
    monkeypatch.setattr(run, "Connections", lambda _: counted)
    async with keyed(tmp_path) as on:
        assert b" 200 OK" in await on.says(ASKED + KEY + CLOSE)
        monkeypatch.setattr(Acceptor, "_serve_newest", lambda _: None)
        known = dialled(on.port, ASKED + KEY + CLOSE)
        strange = [
            dialled(on.port, ASKED + b"Authorization: Bearer ck_%d_x\r\n\r\n" % number)
            for number in range(2 * counted.max_connections)
        ]
        reader, writer = await asyncio.open_connection(sock=known)
        async with asyncio.timeout(30):
            assert (await reader.read()).startswith(b"HTTP/1.1 200 ")
        writer.close()
        for one in strange:
            one.close()


@pytest.mark.fault(60)
async def test_a_connection_that_makes_way_before_it_has_begun_is_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with keyed(tmp_path) as on:
        monkeypatch.setattr(Acceptor, "_serve_newest", lambda _: None)
        (intake,) = on.server.servers
        reader, writer = await opened(on.port, ASKED + b"Authorization: Bearer ck_x_x\r\n\r\n")
        async with asyncio.timeout(30):
            while not intake._waiting:
                await asyncio.sleep(0.01)
            (one,) = intake._waiting
            intake._serve(one)
            one.evict()
            assert (await reader.read()).startswith(b"HTTP/1.1 503 ")
            while intake._starting:
                await asyncio.sleep(0.01)
        writer.close()


@pytest.mark.fault(60)
async def test_a_known_caller_does_not_wait_for_questions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(admission, "ACCEPTED_S", 0.0)
    monkeypatch.setattr(admission, "MAX_CHECKS", 1)

    async def silent(*_: Any) -> None:
        await asyncio.Event().wait()

    async with keyed(tmp_path) as on, httpx.AsyncClient(base_url=on.url, timeout=30) as http:
        assert (await http.get("/v1/models", headers=GOOD)).status_code == 200
        monkeypatch.setattr(Admission, "_check_unknown", silent)
        for number in range(3):
            with contextlib.suppress(httpx.TimeoutException):
                await http.get("/v1/models", headers={"Authorization": f"Bearer ck_{number}_x"}, timeout=0.1)
            assert (await http.get("/v1/models", headers=GOOD)).status_code == 200


@pytest.mark.fault(60)
async def test_a_closed_connection_leaves_nothing_to_collect(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    alive: weakref.WeakSet[wire.GuardedProtocol] = weakref.WeakSet()
    made = wire.GuardedProtocol.connection_made

    def noted(self: wire.GuardedProtocol, transport: asyncio.BaseTransport) -> None:
        alive.add(self)
        made(self, transport)

    monkeypatch.setattr(wire.GuardedProtocol, "connection_made", noted)
    async with keyed(tmp_path) as on:
        gc.disable()
        try:
            for number in range(10):
                key = KEY if number % 2 else b"Authorization: Bearer ck_%d_x\r\n" % number
                await on.says(ASKED + key + CLOSE)
            async with asyncio.timeout(10):
                while alive:
                    await asyncio.sleep(0.01)
        finally:
            gc.enable()


@asynccontextmanager
async def with_tls(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[tuple[int, Connections, ssl.SSLContext]]:
    """The port of a door with room for few connections, what counts them, and what its clients need."""
    ours = authority(folder, "ours")
    files = TlsFiles(*signed(folder, ours, "server", "/CN=server", "IP:127.0.0.1"))
    counted = Connections(files=64)
    monkeypatch.setattr(run, "Connections", lambda _: counted)
    async with serving() as service:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            async with running(make_app(DoorSettings(service.target)), listener, files) as server:
                try:
                    yield listener.getsockname()[1], counted, ssl.create_default_context(cafile=ours)
                finally:
                    server.should_exit = server.force_exit = True


NEEDS_OPENSSL = pytest.mark.skipif(
    shutil.which("openssl") is None, reason="makes its certificates with openssl"
)


@NEEDS_OPENSSL
@pytest.mark.fault(60)
async def test_connections_in_the_handshake_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with with_tls(tmp_path, monkeypatch) as (port, counted, trust):
        silent = [await opened(port) for _ in range(3 * counted.max_connections)]
        over = [asyncio.create_task(reader.read()) for reader, _ in silent]
        async with asyncio.timeout(30):
            while sum(one.done() for one in over) < len(silent) - counted.max_strangers:
                await asyncio.sleep(0.01)
        assert 0 < len(counted) <= counted.max_strangers
        async with httpx.AsyncClient(base_url=f"https://127.0.0.1:{port}", timeout=30, verify=trust) as http:
            assert (await http.get("/health")).status_code == 200
        for _, writer in silent:
            writer.close()
        async with asyncio.timeout(30):
            while len(counted):
                await asyncio.sleep(0.01)
        for one in over:
            one.cancel()


@NEEDS_OPENSSL
async def test_a_handshake_has_a_deadline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arrivals, "HANDSHAKE_S", 0.1)
    async with with_tls(tmp_path, monkeypatch) as (port, counted, _):
        for sent in (b"", b"\x16\x03\x01\x02\x00\x01", b"GET / HTTP/1.1\r\n\r\n"):
            reader, writer = await opened(port, sent)
            async with asyncio.timeout(30):
                with contextlib.suppress(ConnectionError):
                    while await reader.read(1000):
                        pass
                while len(counted):
                    await asyncio.sleep(0.01)
            writer.close()
