"""``pensieve top`` and ``pensieve sessions`` as they are called: answers, refusals in one line, exit codes."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec
import pytest
from click.shell_completion import BashComplete
from rich.cells import cell_len

from pensieve.cli import main as cli
from pensieve.cli.admin import default_admin
from pensieve.cli.output import describe_error
from pensieve.cli.sessions import session_rows
from pensieve.cli.top.command import top
from pensieve.client import Client, Residency, SessionInfo, SessionState
from pensieve.errors import PermissionDenied, Unauthenticated, Unavailable
from pensieve.feed import StateDocument
from pensieve.options.serve import ServeOptions
from support.engine import hash_engine
from support.page.feeds import FeedStub
from support.service.fake_server import FakeServerThread
from support.service.server_process import launched
from support.terminal import Terminal


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def pensieve(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout, stderr of the command, run in here."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    said = capsys.readouterr()
    return int(ended.value.code or 0), said.out, said.err


def test_top_where_there_is_no_feed(
    capsys: pytest.CaptureFixture[str], server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FeedStub() as stub:
        for status, body, said in (
            (200, b"ok", "is not an admin port of pensieve"),
            (404, b"not found", "is not an admin port of pensieve"),
            (200, b'{"schema": "pensieve.state/7"}', "sends 'pensieve.state/7'"),
            (
                401,
                b'{"reason": "CREDENTIAL_MISSING", "message": "no"}',
                "requires an API key with the scope admin",
            ),
            (403, b'{"reason": "SCOPE_MISSING", "message": "needs admin"}', "needs admin (SCOPE_MISSING)"),
        ):
            stub.status, stub.body = status, body
            for more in ((), ("--json",)):
                code, out, err = pensieve(capsys, "top", "--admin", stub.address, *more)
                assert (code, out, err.count("\n")) == (1, "", 1) and said in err, err
        stub.status, stub.body = 200, None
        monkeypatch.setenv("PENSIEVE_API_KEY", "ck_ops_x")
        monkeypatch.setenv("PENSIEVE_TOP_ADMIN", f"http://{stub.address}/")
        code, out, _ = pensieve(capsys, "top")
        assert code == 0 and "chat-0000" in out
        _, headers = stub.asked[-1]
        assert headers["Authorization"] == "Bearer ck_ops_x" and headers["Host"] == "127.0.0.1"
        gone = stub.address
    for address in (gone, server.target):
        code, out, err = pensieve(capsys, "top", "--admin", address, "--json")
        assert (code, out, err.count("\n")) == (1, "", 1), err
    for wrong in ("nowhere", "127.0.0.1:0", "127.0.0.1:x"):
        code, _, err = pensieve(capsys, "top", "--admin", wrong)
        assert code == 2 and "--admin" in err


def test_top_asks_where_servers_usually_are(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (admin,) = (param for param in top.params if param.name == "admin")
    assert default_admin() in (None, ServeOptions().admin)
    monkeypatch.setattr(admin, "default", None)
    code, _, err = pensieve(capsys, "top")
    assert code == 2 and "--admin is required" in err and err.count("\n") == 1
    with FeedStub() as stub:
        monkeypatch.setattr(admin, "default", stub.address)
        assert pensieve(capsys, "top")[0] == 0


def talk(server: FakeServerThread, *ids: str) -> None:
    with Client(server.target) as client:
        for number, one in enumerate(ids):
            chat = client.create_session(
                session_id=one, labels={"kind": "even" if number % 2 == 0 else "odd"}
            )
            chat.send("what is the secret")


def listed(out: str) -> set[str]:
    return {line.split()[0] for line in out.splitlines()[1:]}


def test_sessions_are_listed(capsys: pytest.CaptureFixture[str], server: FakeServerThread) -> None:
    target = ("--target", server.target)
    code, out, err = pensieve(capsys, "sessions", *target)
    assert (code, out) == (0, "") and "no sessions" in err
    ids = [f"talk-{number}" for number in range(7)]
    talk(server, *ids)
    assert listed(pensieve(capsys, "sessions", *target)[1]) == set(ids)
    _, out, err = pensieve(capsys, "sessions", "list", *target, "--limit", "3")
    assert len(listed(out)) == 3 and "--limit 0" in err
    _, out, err = pensieve(capsys, "sessions", "list", *target, "--limit", "7")
    assert len(listed(out)) == 7 and err == ""
    _, out, _ = pensieve(capsys, "sessions", "--label", "kind=odd", *target)
    assert listed(out) == {"talk-1", "talk-3", "talk-5"}
    _, out, _ = pensieve(capsys, "sessions", "list", "--json", "--limit", "0", *target)
    documents = [json.loads(line) for line in out.splitlines()]
    assert {one["id"] for one in documents} == set(ids) and documents[0]["items"] == 2
    for wrong, said in ((["--label", "odd"], "K=V"), (["lst"], "No such command 'lst'")):
        code, _, err = pensieve(capsys, "sessions", *wrong)
        assert code == 2 and said in err


def test_what_is_refused_and_what_cannot_be_shown(
    capsys: pytest.CaptureFixture[str], server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ("--target", server.target)
    for error, said in (
        (
            Unauthenticated("who?"),
            f"{server.target} requires an API key: pass --api-key, or set PENSIEVE_API_KEY (CREDENTIAL_MISSING)",
        ),
        (PermissionDenied("no \x1b[2J\x07"), f"{server.target}: no ␛[2J␇ [PERMISSION_DENIED/"),
    ):
        server.fake.unary_script.append(error)
        code, out, err = pensieve(capsys, "sessions", *target)
        assert (code, out, err.count("\n")) == (1, "", 1) and said in err
    with Client(server.target) as client:
        client.create_session(session_id="ada", labels={"title": "漢字"})
    latin = io.TextIOWrapper(io.BytesIO(), encoding="latin-1")
    monkeypatch.setattr(sys, "stdout", latin)
    monkeypatch.setenv("COLUMNS", "200")
    with pytest.raises(SystemExit) as ended:
        cli.main(("sessions", *target))
    assert ended.value.code == 0
    latin.flush()
    assert b"title=??" in latin.buffer.getvalue()  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (
            "failed to connect to all addresses; last error: UNKNOWN: ipv4:127.0.0.1:1: Failed to connect to remote "
            "host: Connection refused (given up after 7 tries in 3.0 s)",
            "Connection refused (given up after 7 tries in 3.0 s); the address is in the server's ready line, "
            "printed when it has started: grpc=…",
        ),
        (
            "errors resolving here:1: [field:hostname lookup error:address lookup failed for here:1: Domain name not "
            "found] (given up)",
            "Domain name not found (given up); the address is in the server's ready line, "
            "printed when it has started: grpc=…",
        ),
        (
            "Socket closed",
            "Socket closed; if the server uses TLS, add --tls, or --tls-identity if it has --tls-client-ca",
        ),
        (
            "a: WRONG_VERSION_NUMBER: b",
            "a: WRONG_VERSION_NUMBER: b; the server does not use TLS: remove --tls",
        ),
    ],
)
def test_why_no_server_answers(told: str, said: str) -> None:
    error = Unavailable(told, reason="TRANSPORT")
    assert describe_error(error, "here:1") == f"no server answers at here:1: {said}"


def test_the_library_writes_no_lines_of_its_own_beside_those_of_a_command() -> None:
    """There would be one for each try of a TLS handshake, also in a server's log, and for each program it starts."""
    seen = "import os; from pensieve.cli.main import cli; cli.get_command(cli.make_context('x', ['--', '{}']), '{}'); "
    seen += "print(os.environ.get('GRPC_VERBOSITY'), os.environ.get('GRPC_ENABLE_FORK_SUPPORT'))"
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith(("GRPC_VERB", "GRPC_ENABLE"))
    }
    for command in ("sessions", "chat", "gateway", "serve"):
        program = [sys.executable, "-P", "-c", seen.replace("{}", command)]
        assert subprocess.check_output(program, text=True, env=environment).split() == ["ERROR", "0"]


@pytest.mark.parametrize("columns", ["60", "80", "200"])
def test_an_id_is_never_cut(
    columns: str,
    capsys: pytest.CaptureFixture[str],
    server: FakeServerThread,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    name = "abcdefghijklmnopqrstuvwxyz"
    with Client(server.target) as client:
        client.create_session(session_id=name, labels={"evil": "\x1b[2J"})
    _, out, _ = pensieve(capsys, "sessions", "--target", server.target)
    assert listed(out) == {name}
    assert max(map(len, out.splitlines())) <= int(columns) and "\x1b" not in out


@pytest.mark.parametrize("columns", [60, 80, 100, 200])
def test_figures_are_not_cut_either(columns: int) -> None:
    now = datetime(2026, 1, 2, tzinfo=UTC)
    info = SessionInfo(
        name="sessions/abcdefghijklmnopqrstuvwxyz", state=SessionState.ACTIVE, revision=9, item_count=1234,
        context_tokens=123_456, context_limit=200_000, model="m", system_prompt="", default_sampling={}, ttl_s=0.0,
        overflow="reject", labels={"title": "x" * 300}, create_time=now - timedelta(days=400), update_time=now,
        active_request_id="r", residency=Residency("left", 9, 41_152, 41_152, 41_152),
    )  # fmt: skip
    _, text = session_rows([info], now, columns)
    line = text.plain
    for whole in (info.id, "123,456", "running", "d33" if columns < 100 else "device 33 %"):
        assert whole in line, whole
    assert columns < 80 or ("400d" in line and "1,234" in line)
    assert cell_len(line) <= columns


def test_one_session_is_shown(capsys: pytest.CaptureFixture[str], server: FakeServerThread) -> None:
    talk(server, "ada-1", "ada-2", "rex")
    target = ("--target", server.target)
    code, out, _ = pensieve(capsys, "sessions", "show", "re", *target)
    assert code == 0 and "rex" in out and "CONTEXT" in out and "secret" not in out
    _, out, _ = pensieve(capsys, "sessions", "show", "rex", "--text", *target)
    assert "1 user: what is the secret" in out
    _, out, _ = pensieve(capsys, "sessions", "show", "ada-2", "--json", *target)
    (turn,) = json.loads(out)["turns"]
    assert turn["context_tokens"] == sum(turn[one] for one in ("device", "host", "recomputed", "new")) > 0
    assert "secret" not in out
    for wrong, said in (
        ("ada", "'ada' is ambiguous: ada-1, ada-2"),
        ("bob", "no session 'bob'"),
        ("", "no session"),
    ):
        code, out, err = pensieve(capsys, "sessions", "show", wrong, *target)
        assert (code, out, err.count("\n")) == (2, "", 1) and said in err
    code, _, err = pensieve(capsys, "sessions", "show", "rex", "--target", "127.0.0.1:1")
    assert code == 1 and err.count("\n") == 1 and "127.0.0.1:1" in err


def test_the_target_may_be_a_variable_and_ids_are_completed(
    capsys: pytest.CaptureFixture[str], server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    talk(server, "ada-1", "rex")
    monkeypatch.setenv("PENSIEVE_SESSIONS_TARGET", server.target)
    code, out, err = pensieve(capsys, "sessions")
    assert (code, listed(out), err) == (0, {"ada-1", "rex"}, "")
    for words in (["sessions", "show"], ["sessions", "delete", "rex"]):
        completion = BashComplete(cli.cli, {}, "pensieve", "_PENSIEVE_COMPLETE")
        assert [item.value for item in completion.get_completions(words, "a")] == ["ada-1"]


def test_sessions_are_erased_when_that_is_meant(
    capsys: pytest.CaptureFixture[str], server: FakeServerThread
) -> None:
    talk(server, "ada-1", "ada-2", "rex", "pia")
    target = ("--target", server.target)

    def left() -> set[str]:
        return listed(pensieve(capsys, "sessions", *target)[1])

    code, _, err = pensieve(capsys, "sessions", "delete", "rex", *target)
    assert code == 2 and "--yes" in err, "nobody can be asked here"
    code, _, err = pensieve(capsys, "sessions", "delete", "rex", "nobody", "--yes", *target)
    assert code == 2 and left() >= {"rex"}, "one of them is wrong"
    code, _, err = pensieve(capsys, "sessions", "delete", "re", "--yes", *target)
    assert code == 2 and "write the full id rex" in err and left() >= {"rex"}
    code, out, _ = pensieve(capsys, "sessions", "delete", "rex", "--yes", *target)
    assert (code, out) == (0, "erased rex\n") and left() == {"ada-1", "ada-2", "pia"}
    with Terminal("sessions", "delete", "pi", "ada-1", *target) as terminal:
        terminal.until(r"erase pia \(2 items.*\[y/N\]")
        terminal.type("y\n")
        terminal.until(r"erase ada-1 .*\[y/N\]")
        terminal.type("\n")
        assert terminal.end() == 0
    assert left() == {"ada-1", "ada-2"}


def missing(kind: Any, document: dict[str, Any], path: str = "") -> Iterator[str]:
    """Fields that ``top`` reads and the feed does not tell."""
    for field in msgspec.structs.fields(kind):
        if field.name not in document:
            yield f"{path}{field.name}"
        value = document.get(field.name)
        for inner in getattr(field.type, "__args__", (field.type,)):
            if isinstance(inner, type) and issubclass(inner, msgspec.Struct) and value:
                for one in value if isinstance(value, list) else [value]:
                    yield from missing(inner, one, f"{path}{field.name}.")


@pytest.mark.timeout(200)
def test_a_real_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with launched(
        tmp_path,
        builder=hash_engine.BUILDER,
        device_cache="512tokens",
        host_cache="256tokens",
        chunk_tokens=8,
    ) as server:
        with Client(server.grpc) as client:
            chat = client.create_session(session_id="ada-lovelace", labels={"title": "engines"})
            for _ in range(3):
                chat.send("one two three", max_output_tokens=8)
        code, out, _ = pensieve(capsys, "top", "--admin", server.admin, "--json")
        assert code == 0
        document = json.loads(out)
        assert document["lately"]["turns"] == 3
        assert list(missing(StateDocument, document)) == []
        assert document["sessions"]["rows"][0]["id"] == "ada-lovelace"
        for _ in range(100):  # a step may end a little after its last token has come
            code, out, _ = pensieve(capsys, "top", "--admin", server.admin)
            assert code == 0 and "serving" in out and "1 session, " in out
            if "1 session, 0 running" in out:
                break
            time.sleep(0.1)
        else:
            pytest.fail(f"it runs for ever: {out}")
        _, out, _ = pensieve(capsys, "sessions", "--target", server.grpc)
        assert "ada-lovelace" in out
        _, out, _ = pensieve(
            capsys, "sessions", "show", "ada", "--json", "--turns", "2", "--target", server.grpc
        )
        shown = json.loads(out)
        assert [turn["revision"] for turn in shown["turns"]] == [3, 4]
        assert all(
            turn["context_tokens"] == turn["device"] + turn["host"] + turn["recomputed"] + turn["new"]
            for turn in shown["turns"]
        )
        pensieve(capsys, "sessions", "delete", "ada-lovelace", "--yes", "--target", server.grpc)
        assert pensieve(capsys, "sessions", "--target", server.grpc)[1] == ""


def test_neither_needs_torch() -> None:
    program = (
        "import sys; import pensieve.cli.top.command, pensieve.cli.sessions; "
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'redis')))"
    )
    subprocess.run([sys.executable, "-P", "-c", program], check=True, timeout=60)
