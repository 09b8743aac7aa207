"""``pensieve serve --http``: the door as a child of the server, from the ready line to the last call."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import os
import shutil
import signal
import socket
import ssl
import tempfile
import time
import urllib.request
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx2 as httpx
import msgspec
import pytest
from click.testing import CliRunner
from openai import APIConnectionError, OpenAI

from pensieve import logs
from pensieve.config import DoorSettings
from pensieve.http import child
from pensieve.http.common.door import Readiness
from pensieve.options.serve import ServeOptions
from pensieve.server import gateway as keeper
from pensieve.server import ports
from pensieve.server.child import SilenceTimer
from pensieve.server.gateway import Gateway, GatewayCommand, GatewayError
from pensieve.spawn import read_metric
from support.engine.fake_engine import Script
from support.processes import alive, children, until
from support.service.certificates import authority, signed
from support.service.server_process import ServerProcess, launched

pytestmark = pytest.mark.timeout(300)
ANY_PORT = "127.0.0.1:0"
SLOW = Script(step_s=0.02)
PAGE = "https://a.example"
TOO_LONG = 4000
"""Tokens that nobody waits for."""


def client_of(server: ServerProcess, key: str = "none", **options: Any) -> OpenAI:
    options = {"max_retries": 0, "timeout": 60, "_strict_response_validation": True} | options
    return OpenAI(base_url=f"http://{server.http}/v1", api_key=key, **options)


def door_of(server: ServerProcess) -> int:
    """Process id of the door; 0 while there is none."""
    for pid in children(server.process.pid):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # it may have died by now
            if b"pensieve.http.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
    return 0


def page(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=20) as answer:
        text: str = answer.read().decode()
    return text


def respond(client: OpenAI, text: str, tokens: int = 6, **options: Any) -> Any:
    return client.responses.create(model="model", input=text, max_output_tokens=tokens, **options)


def test_a_door_that_dies_comes_back_and_a_drain_lets_streams_end(tmp_path: Path) -> None:
    limits = {"http_max_body": 1, "http_cors_origin": f"{PAGE} https://b.example", "http_host": "chat.lan"}
    with launched(tmp_path, SLOW, http=ANY_PORT, **limits) as server, client_of(server) as client:
        with httpx.Client(base_url=f"http://{server.http}/v1") as http:
            body = {"input": "x" * (1 << 20)}
            assert http.post("/responses", json=body).status_code == 413
            allowed = [
                http.get("/models", headers={"Origin": origin}).headers.get("access-control-allow-origin")
                for origin in (PAGE, "https://c.example")
            ]
            assert allowed == [PAGE, None]
            shown = http.get("/models", headers={"Origin": PAGE}).headers["access-control-expose-headers"]
            assert {"x-request-id", "retry-after"} <= set(shown.split(", ")), (
                "else a page's client never sees them"
            )
            names = ("localhost", "chat.lan", "evil.example")
            found = [http.get("/models", headers={"Host": name}).status_code for name in names]
            assert found == [200, 200, 403], "it asks for no key, and is on loopback"
        assert page(server.http, "/health") == page(server.http, "/ready") == '{"status":"ok"}'
        assert page(server.admin, "/readyz/http") == "ok\n"
        first = respond(client, "My name is Ada.")
        with httpx.Client() as http:
            assert http.get(f"http://{server.http}/metrics").status_code == 404, "for operators only"
        counted = {"route": "/v1/responses", "status": "200"}
        assert read_metric(server.admin, "pensieve_http_calls_total", **counted) == 1

        killed, killed_at = door_of(server), time.time() - 0.001  # the feed rounds
        os.kill(killed, signal.SIGKILL)
        # Whoever connects now waits until the next one is there.
        with client_of(server) as patient:
            second = respond(patient, "What is my name?", previous_response_id=first.id)
        assert second.usage.input_tokens > first.usage.input_tokens
        assert door_of(server) not in (0, killed) and server.process.poll() is None
        assert read_metric(server.admin, "pensieve_http_restarts_total") == 1
        assert read_metric(server.admin, "pensieve_http_up") == 1
        told = msgspec.json.decode(page(server.admin, "/state.json"))["server"]["door"]
        seen = told["state"], told["address"], told["restarts"]
        assert seen == ("serving", server.http, 1) and told["since_s"] >= killed_at
        stream = respond(client, "And mine?", tokens=100, stream=True, previous_response_id=second.id)
        next(event for event in stream if event.type == "response.output_text.delta")
        server.terminate()
        host, port = server.http.split(":")

        def refused() -> bool:
            with socket.socket() as probe:
                return probe.connect_ex((host, int(port))) != 0

        until(refused, "new calls are refused while it drains")
        last = list(stream)[-1]
        assert last.type == "response.incomplete" and last.response.usage.output_tokens == 100
        assert server.finish() == (0, "")
        assert "Traceback" not in server.stderr


@pytest.mark.fault(59)
@pytest.mark.parametrize("fault", [signal.SIGKILL, signal.SIGSTOP])
def test_a_door_that_is_killed_or_stands_still_in_mid_stream(tmp_path: Path, fault: signal.Signals) -> None:
    with launched(tmp_path, SLOW, http=ANY_PORT) as server, client_of(server) as client:
        stream = respond(client, "Tell me.", tokens=150, stream=True, background=True)
        events = [next(stream) for _ in range(8)]
        struck = door_of(server)
        os.kill(struck, fault)
        with pytest.raises((httpx.TransportError, APIConnectionError)):
            events.extend(stream)
        until(lambda: door_of(server) not in (0, struck), "no other door is started")
        assert read_metric(server.admin, "pensieve_http_restarts_total") == 1
        seen = events[-1].sequence_number
        with client_of(server) as again:
            name = events[0].response.id
            events.extend(again.responses.retrieve(name, stream=True, starting_after=seen))
            assert [event.sequence_number for event in events] == list(range(len(events)))
            text = "".join(event.delta for event in events if event.type == "response.output_text.delta")
            last = again.responses.retrieve(name)
        assert (last.status, last.output_text) == ("incomplete", text)
        assert last.usage.output_tokens == 150
        assert ("has not answered for" in server.stderr) is (fault is signal.SIGSTOP)


def test_the_chain_goes_on_after_a_power_cut(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    chain = []
    with launched(tmp_path / "one", http=ANY_PORT, store=store) as server, client_of(server) as client:
        for text in ("My name is Ada.", "I live in Lisbon."):
            previous = chain[-1].id if chain else None
            chain.append(respond(client, text, previous_response_id=previous))
        door = door_of(server)
        server.process.kill()
        server.process.wait()
        until(lambda: not alive(door), "the door outlived its server")
    with launched(tmp_path / "one", http=ANY_PORT, store=store) as server, client_of(server) as client:
        assert client.responses.retrieve(chain[-1].id).output_text == chain[-1].output_text
        more = respond(client, "Where do I live?", previous_response_id=chain[-1].id)
        assert more.usage.input_tokens > chain[-1].usage.total_tokens
        branch = respond(client, "Who am I?", previous_response_id=chain[0].id)
        assert chain[0].usage.total_tokens < branch.usage.input_tokens < more.usage.input_tokens
        server.terminate()
        assert server.finish() == (0, "")


def test_private_sockets_that_are_removed_are_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Programs that tidy up temporary folders take them away while a server runs."""
    # Not below tmp_path: a socket's path must be short, or the server takes another folder.
    temporary = Path(tempfile.mkdtemp(prefix="t-", dir="/tmp"))
    monkeypatch.setenv("TMPDIR", str(temporary))
    with launched(tmp_path, SLOW, http=ANY_PORT) as server, client_of(server) as client:
        first = respond(client, "My name is Ada.")
        (folder,) = temporary.glob("pensieve-*")
        shutil.rmtree(folder)
        until(
            lambda: (folder / "http").is_socket() and (folder / "admin").is_socket(),
            "they are not made again",
        )
        assert folder.stat().st_mode & 0o777 == 0o700
        os.kill(door_of(server), signal.SIGKILL)  # the next one has no connection yet
        with client_of(server) as later:
            assert respond(later, "And now?", previous_response_id=first.id).usage.output_tokens
        assert page(server.http, "/ready") == '{"status":"ok"}'
        assert page(server.admin, "/readyz/http") == "ok\n"
        assert "a private socket was removed, and is there again" in server.stderr
        server.terminate()
        assert server.finish() == (0, "")
    assert list(temporary.iterdir()) == []
    temporary.rmdir()


async def test_a_door_that_does_not_reach_the_service_is_not_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(monkeypatch, StandIn) as (door, _):
        assert door._process is not None and door.problem == ""
        monkeypatch.setattr(StandIn, "away", True)
        assert door.problem == "the HTTP door does not reach the service"


async def test_a_socket_that_is_gone_is_seen_while_a_connection_is_there(tmp_path: Path) -> None:
    readiness = Readiness(DoorSettings(f"unix:{tmp_path / 'http'}"))
    assert await readiness.problem() == "the service's socket is gone"
    await readiness.close()


@pytest.mark.skipif(shutil.which("openssl") is None, reason="makes its certificates with openssl")
def test_tls_keys_and_certificates_are_those_of_the_server(tmp_path: Path) -> None:
    ours, strange = authority(tmp_path, "ours"), authority(tmp_path, "strange")
    cert, key = signed(tmp_path, ours, "server", "/CN=server", "IP:127.0.0.1")
    web = signed(tmp_path, ours, "web", "/CN=x", "URI:spiffe://acme/web")
    nobody = signed(tmp_path, ours, "nobody", "/CN=x", "URI:spiffe://nobody")
    forged = signed(tmp_path, strange, "forged", "/CN=x", "URI:spiffe://acme/web")
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nid = "k"\nsha256 = "{digest}"\ntenant = "keyed"\n'
        '[[certificate]]\nname = "spiffe://acme/web"\ntenant = "acme"\n'
    )
    files = {"tls_cert": str(cert), "tls_key": str(key), "tls_client_ca": str(ours), "api_keys": str(keys)}
    with launched(tmp_path / "server", SLOW, http=ANY_PORT, drain_grace_s=0.2, **files) as server:

        def calling(shown: tuple[Path, Path] | None, **headers: str) -> httpx.Client:
            context = ssl.create_default_context(cafile=str(ours))
            if shown is not None:
                context.load_cert_chain(*shown)
            url = f"https://{server.http}/v1"
            return httpx.Client(verify=context, base_url=url, headers=headers, timeout=60)

        def status(shown: tuple[Path, Path] | None, **headers: str) -> int:
            with calling(shown, **headers) as http:
                answer = http.get("/models")
                assert answer.headers.get("www-authenticate") == (
                    "Bearer" if answer.status_code == 401 else None
                )
                return answer.status_code

        bearer, told = "Bearer ck_k_secret", {"pensieve-certificate-name-bin": "c3BpZmZlOi8vYWNtZS93ZWI="}
        assert status(nobody, authorization=bearer) == 200
        assert status(web, authorization="Bearer ck_k_wrong") == 401, "a header is judged by itself"
        assert status(web) == 200, "the certificate logs in"
        assert status(nobody) == 401
        assert status(nobody, **told) == 401, "what a caller says of itself is not believed"
        for unknown in (None, forged):
            with pytest.raises(httpx.TransportError):
                status(unknown)

        # A renewed certificate, and another authority, are taken up by the next connection.
        renewed = signed(tmp_path, strange, "renewed", "/CN=server", "IP:127.0.0.1")
        shutil.copy(renewed[1], key)
        shutil.copy(renewed[0], cert)
        shutil.copy(strange, ours)
        until(lambda: status(forged) == 200, "the new files are not used")
        with pytest.raises(httpx.TransportError):
            status(web)

        # The grace time of a drain is over: the stream ends with an error, not with a cut.
        with calling(forged) as http:
            body = {"input": "hello", "stream": True, "max_output_tokens": TOO_LONG}
            with http.stream("POST", "/responses", json=body) as answer:
                lines = answer.iter_lines()
                assert next(line for line in lines if "output_text.delta" in line)
                server.terminate()
                rest = list(lines)
        assert [line for line in rest if line.startswith("event: ")][-2:] == [
            "event: error",
            "event: response.failed",
        ]
        assert [line for line in rest if line][-1] == "data: [DONE]"
        assert server.finish() == (0, "")


def test_what_keeps_it_from_opening_is_said_in_one_line(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        with launched(tmp_path, ready=False, http=address) as server:
            assert server.finish() == (2, "")
            line = f"pensieve serve: --http: cannot listen on {address}: Address already in use"
            assert server.stderr.strip().splitlines()[-1] == line


async def test_files_of_no_use_are_refused_at_the_start(tmp_path: Path) -> None:
    broken = tmp_path / "broken.pem"
    broken.write_text("not a certificate")
    door = Gateway(GatewayCommand(DoorSettings(f"unix:{tmp_path / 'socket'}"), broken, broken))
    door.open("127.0.0.1", 0)
    door.start()
    with pytest.raises(GatewayError, match="the HTTP door did not start: it ended with status 1 after: "):
        await door.ready()
    await door.close()


@pytest.mark.parametrize("address", ["127.0.0.1:0", "0.0.0.0:0"])
def test_the_door_has_the_options_of_its_server(monkeypatch: pytest.MonkeyPatch, address: str) -> None:
    commands: list[GatewayCommand] = []
    served: list[DoorSettings] = []

    class Opened:
        def __init__(self, command: GatewayCommand) -> None:
            commands.append(command)

        def open(self, _host: str, port: int) -> int:
            return port

    async def serve(settings: DoorSettings, *sockets: Any) -> None:
        served.append(settings)
        for one in sockets[:2]:
            one.close()

    monkeypatch.setattr(ports, "Gateway", Opened)
    monkeypatch.setattr(child, "_serve", serve)
    monkeypatch.setattr(logs, "configure_logging", lambda **_: None)
    for name in ("leave_signals_to_parent", "die_with_parent"):
        monkeypatch.setattr(child, name, lambda *_, **__: True)
    options = ServeOptions(
        heartbeat_s=3.5,
        http_max_body=7,
        http_patience_s=1.5,
        http_cors_origin=f"{PAGE} https://b.example",
        http_trusted_proxy="10.0.0.0/8 192.0.2.1",
        http_host="chat.lan model.lan",
    )
    private = SimpleNamespace(path=Path("/private"))
    server: Any = SimpleNamespace(_options=options, _folder=private)
    server._on_private_socket = server._add_server = lambda *_: None
    never: Any = None
    ports.Ports._bind_http(server, address, never, never)
    files = [one.detach() for one in socket.socketpair()]
    arguments = commands[0].arguments(*files)
    said = CliRunner().invoke(child.main, arguments[arguments.index("pensieve.http.child") + 1 :])
    assert said.exit_code == 0, said.output
    assert served == [
        DoorSettings(
            "unix:/private/http",
            patience_s=1.5,
            max_body_bytes=7 << 20,
            cors_origins=(PAGE, "https://b.example"),
            shows_metrics=False,
            vouches=True,
            proxies=("10.0.0.0/8", "192.0.2.1"),
            on_loopback=address.startswith("127."),
            hosts=("chat.lan", "model.lan"),
            heartbeat_s=3.5,
        )
    ]


class StandIn:
    """In place of a process: ready at once, lives until it is killed."""

    away = False

    def __init__(self) -> None:
        self._over = asyncio.Event()
        self.silence = SilenceTimer(0.01)

    @classmethod
    async def spawn(cls, *_: object) -> StandIn:
        return cls()

    async def ready(self) -> None:
        return

    async def wait(self) -> int:
        await self._over.wait()
        return -9

    def send(self, word: str) -> None:
        assert word == "drain"

    def last_words(self, status: int) -> str:
        return f"signal {-status}"

    def kill(self) -> None:
        self._over.set()


class Talking(StandIn):
    """One that is heard of again and again."""

    def __init__(self) -> None:
        super().__init__()
        self.silence = SilenceTimer(0.001)
        self._talking = asyncio.create_task(self._talk())

    async def _talk(self) -> None:
        while not self._over.is_set():
            self.silence.reset()
            await asyncio.sleep(0.001)


class Dying(StandIn):
    """One that dies when it is ready."""

    async def wait(self) -> int:
        return -9


@asynccontextmanager
async def kept(monkeypatch: pytest.MonkeyPatch, process: type[StandIn]) -> AsyncIterator[tuple[Gateway, int]]:
    """A door whose process is a stand-in, and its port."""
    monkeypatch.setattr(keeper, "GatewayProcess", process)
    door = Gateway(GatewayCommand(DoorSettings("unix:x")))
    try:
        port = door.open("127.0.0.1", 0)
        door.start()
        await door.ready()
        yield door, port
    finally:
        await door.close()


async def test_pauses_grow_while_it_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    pauses: list[float] = []
    monkeypatch.setattr(keeper, "FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr(keeper, "LONGEST_PAUSE_S", 0.003)
    monkeypatch.setattr(keeper.log, "error", lambda *_, extra: pauses.append(extra["pause_s"]))
    async with kept(monkeypatch, Dying):
        while len(pauses) < 5:
            await asyncio.sleep(0.001)
        assert pauses[:5] == [0.001, 0.002, 0.003, 0.003, 0.003]


async def test_a_door_that_says_nothing_counts_as_stuck_and_is_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, seconds in (("QUIET_S", 0.02), ("HUNG_S", 0.3), ("FIRST_PAUSE_S", 0.001)):
        monkeypatch.setattr(keeper, name, seconds)
    async with kept(monkeypatch, StandIn) as (door, _):
        first = door._process
        while door.problem != "the HTTP door does not answer":
            await asyncio.sleep(0.001)
        assert door._process is first and door.state == "hung"
        while door._process in (None, first):
            await asyncio.sleep(0.001)
        assert (door.problem, door.state) == ("", "serving")


async def test_a_door_that_says_something_now_and_then_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keeper, "HUNG_S", 0.02)
    async with kept(monkeypatch, Talking) as (door, _):
        first = door._process
        for _ in range(50):
            await asyncio.sleep(0.002)
        assert door._process is first


async def test_while_it_drains_nobody_waits_in_the_backlog(monkeypatch: pytest.MonkeyPatch) -> None:
    async with kept(monkeypatch, StandIn) as (door, port):
        where = "127.0.0.1", port
        with socket.socket() as early, socket.socket() as late:
            assert early.connect_ex(where) == 0
            await door.drain()
            assert late.connect_ex(where) != 0
        assert door.problem == door.state == "draining"
