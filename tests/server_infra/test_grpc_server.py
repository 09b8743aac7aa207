"""Binding and TLS of the gRPC servers, and the folder of their sockets."""

from __future__ import annotations

import asyncio
import resource
import shutil
import stat
import struct
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio

from pensieve.debug import child_environment
from pensieve.server.ports import PrivateFolder
from pensieve.server.rpc.grpc_server import (
    SERVER_OPTIONS,
    BindError,
    add_health_and_reflection,
    bind,
    connection_limit,
    make_server,
    split_address,
    tls_credentials,
)


def serving() -> aio.Server:
    server = make_server([])
    add_health_and_reflection(server, health_aio.HealthServicer(), [])
    return server


async def test_a_port_is_taken_once() -> None:
    first, second = serving(), serving()
    port = bind(first, "127.0.0.1:0", None)
    assert port > 0
    with pytest.raises(BindError, match=f"cannot listen on 127.0.0.1:{port}: Address already in use"):
        bind(second, f"127.0.0.1:{port}", None)
    await first.start()
    with pytest.raises(BindError, match="Address already in use"):
        bind(second, f"127.0.0.1:{port}", None)
    await first.stop(None)
    await second.stop(None)


@pytest.mark.parametrize("address", ["no.such.host.invalid:1", "192.0.2.1:0"])
async def test_an_address_of_somebody_else_is_refused(address: str) -> None:
    server = serving()
    with pytest.raises(BindError, match="cannot listen on"):
        bind(server, address, None)
    await server.stop(None)


def test_addresses() -> None:
    assert split_address("127.0.0.1:80") == ("127.0.0.1", 80)
    assert split_address("[::1]:80") == ("::1", 80)


def frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    """An HTTP/2 frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


async def test_an_answer_to_a_client_that_has_gone_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    async def answer(_request: bytes, _context: Any) -> bytes:
        return bytes(1 << 20)  # more than the client takes

    server = make_server([])
    methods = {"Call": grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("a.Service", methods),))
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    fields = (":method", "POST"), (":scheme", "http"), (":path", "/a.Service/Call"), (":authority", "a")
    head = b"".join(
        b"\0%c%b%c%b" % (len(name), name.encode(), len(value), value.encode())
        for name, value in (*fields, ("te", "trailers"), ("content-type", "application/grpc"))
    )
    call = frame(4, 0, 0) + frame(1, 4, 1, head) + frame(0, 1, 1, bytes(5))
    writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + call)
    received = 0
    while received < 1 << 16:
        received += len(await asyncio.wait_for(reader.read(1 << 16), 10))
    writer.close()
    await asyncio.sleep(0.2)
    await server.stop(0)
    assert not caplog.records


@pytest.mark.fault(4)
def test_dead_peers_and_double_binds_are_in_the_options() -> None:
    options = dict(SERVER_OPTIONS)
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.http2.ping_timeout_ms"] <= 20_000  # without it a dead peer is held for a minute more


async def answered(connections: list[tuple[asyncio.StreamReader, asyncio.StreamWriter]]) -> int:
    """How many of them the server speaks to; the others it has closed."""
    firsts = await asyncio.gather(
        *(asyncio.wait_for(reader.read(9), 30) for reader, _ in connections), return_exceptions=True
    )
    assert not any(isinstance(first, TimeoutError) for first in firsts)
    return sum(isinstance(first, bytes) and first != b"" for first in firsts)


@pytest.mark.fault(34)
async def test_connections_beyond_the_limit_are_closed() -> None:
    """Who is connected is served meanwhile, and others are as soon as there is room again."""
    server = make_server([], connections=8)
    add_health_and_reflection(server, health_aio.HealthServicer(), [])
    port = bind(server, "127.0.0.1:0", None)
    await server.start()
    check = health_pb2.HealthCheckRequest()
    own_pool = (("grpc.use_local_subchannel_pool", 1), ("grpc.initial_reconnect_backoff_ms", 100))
    async with aio.insecure_channel(f"127.0.0.1:{port}", options=own_pool) as early:
        await health_pb2_grpc.HealthStub(early).Check(check, timeout=30)
        crowd = [await asyncio.open_connection("127.0.0.1", port) for _ in range(20)]
        assert await answered(crowd) == 7
        await health_pb2_grpc.HealthStub(early).Check(check, timeout=30)
        for _, writer in crowd:
            writer.close()
        async with aio.insecure_channel(f"127.0.0.1:{port}", options=own_pool) as late:
            await health_pb2_grpc.HealthStub(late).Check(check, timeout=60, wait_for_ready=True)
    await server.stop(None)


def test_the_limit_on_connections_leaves_files_for_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    for files, most in ((1024, 768), (300, 150), (resource.RLIM_INFINITY, 0)):
        monkeypatch.setattr(resource, "getrlimit", lambda _, files=files: (files, files))
        assert (connection_limit(0), connection_limit(5)) == (most, 5)


def certificate(folder: Path, name: str) -> tuple[Path, Path]:
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:prime256v1",
        "-nodes",
    ]
    command += ["-days", "1", "-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost,IP:127.0.0.1"]
    subprocess.run([*command, "-keyout", key, "-out", cert], check=True, capture_output=True)
    return cert, key


async def check(port: int, root: Path) -> Any:
    credentials = grpc.ssl_channel_credentials(root.read_bytes())
    async with aio.secure_channel(f"127.0.0.1:{port}", credentials) as channel:
        return await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
async def test_tls_and_a_renewed_certificate(tmp_path: Path) -> None:
    old, new = certificate(tmp_path, "old"), certificate(tmp_path, "new")
    cert, key = tmp_path / "cert.pem", tmp_path / "key.pem"
    for source, target in zip(old, (cert, key), strict=True):
        shutil.copy(source, target)
    server = serving()
    port = bind(server, "127.0.0.1:0", tls_credentials(cert, key))
    await server.start()
    assert (await check(port, old[0])).status == health_pb2.HealthCheckResponse.SERVING
    for source, target in zip(new, (cert, key), strict=True):
        shutil.copy(source, target)
    assert (await check(port, new[0])).status == health_pb2.HealthCheckResponse.SERVING
    with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
        await check(port, old[0])
    async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        with pytest.raises(aio.AioRpcError, match="UNAVAILABLE"):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
    await server.stop(None)


@pytest.fixture
def short_path() -> Iterator[Path]:
    """Room for the path of a socket in it, which that of a test's own folder may not have."""
    with tempfile.TemporaryDirectory(prefix="p-", dir="/tmp") as folder:
        yield Path(folder)


def test_sockets_of_a_killed_server_are_removed_by_the_next(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no others: of servers that live, of other programs, and what only looks like one."""
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    killed = subprocess.run(
        [sys.executable, "-P", "-c", "import os; from pensieve.server.ports import PrivateFolder as F; "
         "F(); os.kill(os.getpid(), 9)"],
        env={**child_environment(), "TMPDIR": str(short_path)},
        timeout=60,
    )  # fmt: skip
    assert killed.returncode == -9
    (dead,) = short_path.iterdir()
    precious = short_path / "precious"
    precious.mkdir()
    (precious / "lock").touch()
    (short_path / "pensieve-link").symlink_to(precious)
    (short_path / "pensieve-bench").mkdir()
    first = PrivateFolder()
    assert not dead.exists() and stat.S_IMODE(first.path.stat().st_mode) == 0o700
    second = PrivateFolder()
    assert first.path.exists() and (precious / "lock").exists() and (short_path / "pensieve-bench").exists()
    first.close()
    second.close()
    assert not first.path.exists() and not second.path.exists()


def test_a_lock_that_cannot_be_made_again_closes_no_other_file(
    short_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(short_path))
    folder = PrivateFolder()
    (folder.path / "lock").unlink()
    (folder.path / "new").mkdir()  # so that no file can be made
    files = []
    for _ in range(2):
        with pytest.raises(OSError):
            folder.restore()
        files.append((short_path / "other").open("w"))
    (folder.path / "new").rmdir()
    folder.restore()
    for file in files:
        file.close()
    assert (folder.path / "lock").exists()
    folder.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_files_that_are_no_pair_are_told_as_that(tmp_path: Path) -> None:
    cert, key = certificate(tmp_path, "own")
    with pytest.raises(BindError, match="--tls-cert"):
        tls_credentials(key, cert)
