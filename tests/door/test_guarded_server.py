"""A whole server with keys, in a process of its own: what each method asks for, what is told to whom, too many files.

Rows 34, 55 and 56 of the fault matrix.
"""

from __future__ import annotations

import asyncio
import hashlib
import resource
import secrets
import socket
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor import MethodDescriptor
from grpc import aio

from pensieve import rpc_status
from pensieve.errors import PensieveError
from pensieve.server.rpc.auth import SCOPE_OF_METHOD
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.service.server_process import ServerProcess, launched
from support.service.service_rig import spec, user

METHODS: list[MethodDescriptor] = [
    method for service in pb.DESCRIPTOR.services_by_name.values() for method in service.methods
]
SECRET = secrets.token_hex(32)
"""No key has it in its file, and nothing that the server writes may."""
KEYS = {
    "reader": ("acme", '["sessions.read"]', ""),
    "writer": ("acme", '["sessions.read", "sessions.write"]', ""),
    "root": ("ops", '["admin"]', ""),
    "old": ("acme", '["sessions.read", "sessions.write", "admin"]', "expires = 2020-01-01T00:00:00Z"),
    "stranger": ("other", '["sessions.read", "sessions.write", "admin"]', ""),
}


def key_file() -> str:
    digest = hashlib.sha256(SECRET.encode()).hexdigest()
    return "".join(
        f'[[key]]\nid = "{name}"\nsha256 = "{digest}"\ntenant = "{tenant}"\nscopes = {scopes}\n{extra}\n'
        for name, (tenant, scopes, extra) in KEYS.items()
    )


def login(name: str, secret: str = SECRET) -> Any:
    return (("authorization", f"Bearer ck_{name}_{secret}"),)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    folder = tmp_path_factory.mktemp("guarded")
    keys = folder / "keys.toml"
    keys.write_text(key_file())
    with launched(folder, api_keys=str(keys), log_level="debug") as server:
        yield server


async def ends(address: str, method: MethodDescriptor, request: bytes, metadata: Any) -> PensieveError | None:
    path = f"/{method.containing_service.full_name}/{method.name}"
    options = (("grpc.enable_retries", 0),)
    async with aio.insecure_channel(address, options=options) as channel:
        try:
            if method.server_streaming:
                async for _ in channel.unary_stream(path)(request, metadata=metadata, timeout=60):
                    pass
            else:
                await channel.unary_unary(path)(request, metadata=metadata, timeout=60)
        except aio.AioRpcError as error:
            return rpc_status.from_rpc_error(error)
    return None


def address_of(server: ServerProcess, method: MethodDescriptor) -> str:
    return server.admin if method.containing_service.name == "AdminService" else server.grpc


@pytest.mark.fault(55)
async def test_each_method_asks_for_its_scope(server: ServerProcess) -> None:
    """Nothing is decoded first: what would be refused as malformed is refused for the credential."""

    async def refused(method: MethodDescriptor, name: str) -> tuple[str, str]:
        scope = SCOPE_OF_METHOD[f"/{method.containing_service.full_name}/{method.name}"]
        expected = {
            "old": "CREDENTIAL_EXPIRED",
            "nobody": "CREDENTIAL_INVALID",
            "": "CREDENTIAL_MISSING",
        }.get(name)
        if expected is None:
            expected = "REQUEST_MALFORMED" if scope in KEYS[name][1] else "SCOPE_MISSING"
        error = await ends(address_of(server, method), method, b"\xff", login(name) if name else ())
        assert error is not None
        return f"{method.name} {name} {error.reason}", f"{method.name} {name} {expected}"

    names = ("reader", "writer", "root", "old", "nobody", "")
    # Side by side, since the answers to so many failed logins are held back.
    got = await asyncio.gather(*(refused(method, name) for method in METHODS for name in names))
    assert [found for found, _ in got] == [expected for _, expected in got]


def naming(method: MethodDescriptor, session: str) -> bytes | None:
    """A request of this method that names the session and is otherwise right; None: it names none."""
    kind: Any = getattr(pb, method.input_type.name)
    field = next((name for name in ("name", "session") if name in kind.DESCRIPTOR.fields_by_name), "")
    if not field or method.containing_service.name == "AdminService" or method.name == "ClaimRequestId":
        # EvictCache looks nothing up: it drops what is cached of a session, if anything is. A claim keeps a name.
        return None
    request = kind(**{field: session})
    if "turn" in kind.DESCRIPTOR.fields_by_name:
        request.turn.CopyFrom(spec("hi"))
    elif "request_id" in kind.DESCRIPTOR.fields_by_name:
        request.request_id = spec("hi").request_id
    if method.name == "UpdateSession":
        request.session.labels["a"] = "b"
    if method.name == "AppendItems":
        request.items.add(role=pb.ROLE_USER, text="hi")
    data: bytes = request.SerializeToString()
    return data


@pytest.mark.fault(22)
async def test_a_foreign_session_is_not_there(server: ServerProcess) -> None:
    async with aio.insecure_channel(server.grpc) as channel:
        api = pensieve_pb2_grpc.ConversationServiceStub(channel)
        await api.CreateSession(
            pb.CreateSessionRequest(session_id="theirs"), metadata=login("stranger"), timeout=60
        )
    asked = 0
    for method in METHODS:
        answers = []
        for name in ("sessions/theirs", "sessions/nobodys"):
            request = naming(method, name)
            if request is None:
                continue
            error = await ends(server.grpc, method, request, login("writer"))
            assert error is not None, method.name
            assert (error.code, error.reason) == ("NOT_FOUND", "SESSION_NOT_FOUND"), method.name
            answers.append((str(error), error.metadata))
        asked += len(answers)
        assert len(set(map(str, answers))) <= 1
    assert asked >= 2 * 12


@pytest.mark.fault(56)
async def test_nothing_that_was_said_or_shown_is_written_anywhere(tmp_path: Path) -> None:
    """At the most talkative level: the log, the metrics and the texts of errors."""
    canary = f"canary{secrets.token_hex(8)}"
    keys = tmp_path / "keys.toml"
    keys.write_text(key_file())
    errors: list[str] = []
    with launched(tmp_path, api_keys=str(keys), log_level="debug") as server:
        async with aio.insecure_channel(server.grpc) as channel:
            api = pensieve_pb2_grpc.ConversationServiceStub(channel)
            said: list[Callable[[], Any]] = [
                lambda: api.CreateSession(
                    pb.CreateSessionRequest(
                        session_id="said",
                        config=pb.SessionConfig(system_prompt=canary),
                        labels={"a": canary},
                        initial_items=[user(canary)],
                    ),
                    metadata=(*login("writer"), ("x-note", canary)),
                ),
                lambda: api.RunTurn(
                    pb.RunTurnRequest(session="sessions/said", turn=spec(canary)), metadata=login("writer")
                ),
                lambda: api.CountTokens(
                    pb.CountTokensRequest(input=[user(canary)]), metadata=login("writer")
                ),
                lambda: api.GetSession(pb.GetSessionRequest(name=canary), metadata=login("writer")),
                lambda: api.GetSession(
                    pb.GetSessionRequest(name=f"sessions/{canary}"), metadata=login("writer")
                ),
                lambda: api.GetSession(pb.GetSessionRequest(), metadata=login("writer", canary)),
                lambda: api.ListSessions(pb.ListSessionsRequest(page_token=canary), metadata=login("writer")),
                lambda: api.ListSessions(
                    pb.ListSessionsRequest(label_selector=canary), metadata=login("writer")
                ),
                lambda: api.CreateSession(
                    pb.CreateSessionRequest(labels={canary: "b" * 999}), metadata=login("writer")
                ),
                lambda: channel.unary_unary("/pensieve.v1.ConversationService/GetSession")(
                    canary.encode(), metadata=login("writer")
                ),
            ]
            for call in said:
                try:
                    await asyncio.wait_for(call(), 60)
                except aio.AioRpcError as error:
                    errors.append(f"{error.details()} {list(error.trailing_metadata() or ())}")
        metrics = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{server.admin}/metrics", timeout=60).read().decode()
        )
        server.terminate()
        server.finish()
        written = server.stderr
    assert len(errors) == 7
    for text in (written, metrics, *errors):
        assert canary not in text and SECRET not in text
    assert "draining" in written, "the log was looked at"


@pytest.mark.fault(36)
async def test_a_caller_with_many_connections_keeps_nobody_out(server: ServerProcess) -> None:
    """Half of them are silent, half greet and ask for nothing; another caller logs in and has its turn."""
    host, _, port = server.grpc.rpartition(":")
    crowd = [await asyncio.open_connection(host, int(port)) for _ in range(256)]
    try:
        firsts = await asyncio.gather(*(asyncio.wait_for(reader.read(9), 60) for reader, _ in crowd))
        assert all(firsts), "the server had closed some"
        for _, writer in crowd[::2]:
            writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + b"\0\0\0\4" + bytes(5))
        async with aio.insecure_channel(server.grpc) as channel:
            api = pensieve_pb2_grpc.ConversationServiceStub(channel)
            metadata = login("writer")
            made = await api.CreateSession(pb.CreateSessionRequest(), timeout=60, metadata=metadata)
            turn = pb.RunTurnRequest(session=made.session.name, turn=spec("hi"))
            assert (await api.RunTurn(turn, timeout=60, metadata=metadata)).turn.revision == 2
    finally:
        for _, writer in crowd:
            writer.close()


@pytest.mark.fault(34)
def test_the_last_free_file_goes_to_the_first_connection(tmp_path: Path) -> None:
    """What that connection would open besides fails. The admin port answers once there are files again."""
    with launched(tmp_path) as server:
        pid = server.process.pid
        taken = {int(path.name) for path in Path(f"/proc/{pid}/fd").iterdir()}
        lowest = min(set(range(len(taken) + 1)) - taken)
        before = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (lowest + 1, before[1]))
        host, _, port = server.admin.rpartition(":")
        with socket.create_connection((host, int(port)), timeout=30) as first:
            first.sendall(b"GET /readyz HTTP/1.1\r\nHost: a\r\n\r\n")
            answer = first.makefile("rb").readline()
            resource.prlimit(pid, resource.RLIMIT_NOFILE, before)
        assert answer == b"HTTP/1.1 200 OK\r\n", server.stderr
        with urllib.request.urlopen(f"http://{server.admin}/readyz", timeout=30) as ready:
            assert ready.read() == b"ok\n"


@pytest.mark.fault(34)
async def test_too_many_open_files_are_survived(tmp_path: Path) -> None:
    """Connections beyond the limit are refused or wait; when they have gone, calls are served as before."""
    with launched(tmp_path) as server:
        pid = server.process.pid
        open_files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        _, hard = resource.prlimit(pid, resource.RLIMIT_NOFILE)
        resource.prlimit(pid, resource.RLIMIT_NOFILE, (open_files + 20, hard))
        host, _, port = server.grpc.rpartition(":")
        idle = []
        for number in (port, server.admin.rpartition(":")[2]):
            for _ in range(40):
                try:
                    idle.append((await asyncio.wait_for(asyncio.open_connection(host, int(number)), 10))[1])
                except (OSError, TimeoutError):
                    break
        async with asyncio.timeout(30):
            while len(list(Path(f"/proc/{pid}/fd").iterdir())) < open_files + 15:  # the limit is met
                await asyncio.sleep(0.05)
        for writer in idle:
            writer.close()
        async with asyncio.timeout(60):
            while True:
                try:
                    async with aio.insecure_channel(server.grpc) as channel:
                        api = pensieve_pb2_grpc.ConversationServiceStub(channel)
                        made = await api.CreateSession(pb.CreateSessionRequest(), timeout=5)
                        turn = pb.RunTurnRequest(session=made.session.name, turn=spec("hi"))
                        assert (await api.RunTurn(turn, timeout=20)).turn.revision == 2
                    break
                except grpc.RpcError:
                    await asyncio.sleep(0.1)
        ready = await asyncio.to_thread(
            lambda: urllib.request.urlopen(f"http://{server.admin}/readyz", timeout=30).read()
        )
        assert ready == b"ok\n"
        assert server.process.poll() is None
