"""``pensieve chat``: piped lines, commands, Ctrl-C, and a server of its own."""

from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from types import TracebackType

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pensieve.cli.chat import command as module
from pensieve.cli.chat.command import ChatLoop
from pensieve.client import Client
from pensieve.errors import ResourceExhausted, Unauthenticated
from support.faults.fake_faults import Fault, answer_to
from support.service.fake_server import FakeServerThread


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def run(server: FakeServerThread | None, *arguments: str, lines: str = "") -> Result:
    target = ["--target", server.target] if server is not None else []
    return CliRunner().invoke(module.chat, [*target, *arguments], input=lines)


def test_each_line_is_a_turn_and_each_answer_goes_to_stdout(server: FakeServerThread) -> None:
    server.fake.script.append(Fault(after=3, end=True, lose_attempt=True))
    result = run(server, "--system", "Be brief.", lines="My name is Ada.\n\nWhat is my [b]name[/b]? :dog:\n")
    assert result.exit_code == 0
    expected = [answer_to("My name is Ada."), answer_to("What is my [b]name[/b]? :dog:")]
    assert result.stdout == "\n".join(expected) + "\n"
    assert next(iter(server.fake.sessions.values())).items[0].text == "Be brief."


def test_commands(server: FakeServerThread) -> None:
    lines = "one\ntwo\n/rewind\n/history\n/fork\nthree\n/regenerate\n/receipt\n/nope\n/help\n/quit\nnever\n"
    result = run(
        server, "--new", "--session", "ada", "--temperature", "0.5", "--max-tokens", "9", lines=lines
    )
    assert result.exit_code == 0
    assert f"1 user: one\n2 assistant: {answer_to('one')}\n{answer_to('three')}\n" in result.stdout
    assert "recomputed" in result.stdout
    for note in ("dropped 1 of 2 turns", "a copy of sessions/ada", "no command /nope", "/regenerate"):
        assert note in result.stderr
    assert "never" not in result.stdout
    original, fork = server.fake.sessions.values()
    assert [one.text for one in original.items] == ["one", answer_to("one")]
    assert [one.text for one in fork.items][2:] == ["three", answer_to("three")]
    assert server.fake.stream_requests[-1].turn.HasField("replace_after_item")
    sampling = server.fake.stream_requests[0].turn.sampling
    assert (sampling.temperature, sampling.max_output_tokens) == (0.5, 9)


def test_rewind_counts_turns(server: FakeServerThread) -> None:
    run(
        server,
        "--new",
        "--session",
        "x-1",
        "--system",
        "s",
        lines="one\n/regenerate\ntwo\nthree\n/rewind 2\n",
    )
    session = server.fake.sessions["sessions/x-1"]
    assert [one.text for one in session.items] == ["s", "one", answer_to("one")]
    result = run(server, "--session", "x-1", lines="/rewind 99\n/rewind\n/rewind x\n")
    assert [one.text for one in session.items] == ["s"]
    assert "nothing to drop" in result.stderr


def test_a_session_is_gone_on_with(server: FakeServerThread) -> None:
    run(server, "--new", "--session", "ada", lines="one\n")
    run(server, "--session", "ada", lines="two\n")
    assert len(server.fake.sessions["sessions/ada"].items) == 4
    result = run(server, "--session", "ada", "--system", "s")
    assert (result.exit_code, "exists already" in result.stderr) == (2, True)


def test_an_error_ends_a_pipe_with_one_line(server: FakeServerThread) -> None:
    server.fake.script.append(Fault(error=Unauthenticated("who are you?")))
    result = run(server, lines="one\ntwo\n")
    assert result.exit_code == 1
    assert result.stdout == ""
    assert (
        result.stderr
        == f"Error: {server.target} requires an API key: pass --api-key, or set PENSIEVE_API_KEY (CREDENTIAL_MISSING)\n"
    )
    server.fake.script.append(Fault(error=ResourceExhausted("no\x1b[2J room\x07", reason="QUOTA_EXCEEDED")))
    said = run(server, lines="one\n").stderr
    assert said.count("\n") == 1 and "\x1b" not in said and "\x07" not in said and "QUOTA_EXCEEDED" in said


def test_a_pipe_is_told_of_a_line_that_is_no_text_and_of_a_wrong_address(
    server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines = b"one\nh\xff\nthree\n"
    result = CliRunner().invoke(module.chat, ["--target", server.target], input=lines)
    assert (result.exit_code, result.stdout) == (1, answer_to("one") + "\n")
    assert result.stderr.startswith("Error: line 2 of the input is not UTF-8; it was not sent")
    monkeypatch.setattr(module, "CONNECT_TIMEOUT_S", 0.2)
    result = run(None, "--target", "127.0.0.1:1", lines="one\n")
    assert result.exit_code == 1 and "no server answers at 127.0.0.1:1: " in result.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["--target", "h:1", "--model", "demo"],
        ["--target", "h:1", "--store", "memory:"],
        ["--tls"],
        ["--temperature", "-1"],
    ],
)
def test_options_that_do_not_go_together(arguments: list[str]) -> None:
    assert run(None, *arguments).exit_code == 2


def test_a_server_of_its_own(server: FakeServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[object] = []

    class Own:
        target = server.target
        running = True

        def __init__(self, *arguments: str, start_timeout_s: float, listen: str, wait: bool) -> None:
            events.append(arguments)

        def wait_ready(self) -> None:
            events.append("ready")

        def __exit__(
            self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
        ) -> None:
            events.append("stopped")

    monkeypatch.setattr("pensieve.own_server.ServerProcess", Own)
    monkeypatch.setenv("PENSIEVE_API_KEY", "of another command")
    result = run(None, "--model", "demo", "--store", "memory:", lines="one\n")
    assert result.stdout == answer_to("one") + "\n"
    assert events == [("--model", "demo", "--store", "memory:"), "ready", "stopped"]


def test_as_a_program(server: FakeServerThread) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pensieve", "chat", "--target", server.target],
        input="one\ntwo\n",
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"{answer_to('one')}\n{answer_to('two')}\n"


def interactive(client: Client) -> tuple[ChatLoop, io.StringIO, io.StringIO]:
    chat = ChatLoop(client, client.create_session(), {}, interactive=True)
    out, notes = io.StringIO(), io.StringIO()
    chat.screen.out, chat.screen.notes = (
        Console(file=out, soft_wrap=True),
        Console(file=notes, soft_wrap=True),
    )
    return chat, out, notes


def feed(monkeypatch: pytest.MonkeyPatch, *lines: str | type[BaseException]) -> None:
    source = iter(lines)

    def read(_prompt: object = "") -> str:
        line = next(source, EOFError)
        if not isinstance(line, str):
            raise line
        return line

    monkeypatch.setattr("builtins.input", read)


def test_on_a_terminal(server: FakeServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    lost, refused = Fault(after=3, end=True, lose_attempt=True), Fault(error=Unauthenticated("who are you?"))
    server.fake.script.extend([lost, Fault(), refused])
    feed(monkeypatch, "one", KeyboardInterrupt, "two", "three")
    with Client(server.target) as client:
        chat, out, notes = interactive(client)
        chat.run()
    assert out.getvalue().count(answer_to("one")) == 1
    assert answer_to("one")[:6] + "\n" in out.getvalue()  # What the lost attempt had said.
    assert "had to restart this answer" in notes.getvalue()
    assert "of context =" in notes.getvalue()
    assert "who are you?" in notes.getvalue()
    assert answer_to("three") in out.getvalue()


def warm_calls(server: FakeServerThread, wanted: int) -> bool:
    """Whether so many calls came; waits for them a while."""
    deadline = time.monotonic() + 10
    while server.fake.calls.count("WarmSession") < wanted and time.monotonic() < deadline:
        time.sleep(0.005)
    return server.fake.calls.count("WarmSession") == wanted


def test_the_session_is_warmed_while_the_user_types(
    server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When there is something to warm, and not where a turn has just ended."""
    asked: list[int] = []

    def read(_prompt: object = "") -> str:
        place = len(asked)
        wanted = (0, 0, 1, 1)[place]
        assert warm_calls(server, wanted), f"prompt {place}: {server.fake.calls}"
        asked.append(wanted)
        return ("one", "/fork", "two", "/quit")[place]

    monkeypatch.setattr("builtins.input", read)
    with Client(server.target) as client:
        chat, _, notes = interactive(client)
        chat.run()
        assert len(asked) == 4
        reopened = client.session(chat.session.id)
        reopened.refresh()
        again = ChatLoop(client, reopened, {}, interactive=True)
        again.screen.notes = Console(file=notes)
        server.fake.unary_script.append(Unauthenticated("who are you?"))
        monkeypatch.setattr("builtins.input", lambda _="": "/quit" if warm_calls(server, 2) else "never")
        again.run()
    assert "who are you?" not in notes.getvalue()


def test_nothing_waits_for_warming(server: FakeServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    hold = threading.Event()
    over: list[bool] = []
    monkeypatch.setattr("pensieve.client.Session.warm", lambda _: over.append(hold.wait(60)))
    feed(monkeypatch, "/fork", "/fork", "one")
    with Client(server.target) as client:
        chat, out, _ = interactive(client)
        chat.session.send("zero")
        chat.run()
        assert answer_to("one") in out.getvalue() and not over
    hold.set()


def test_a_pipe_warms_nothing(server: FakeServerThread) -> None:
    run(server, "--new", "--session", "ada", lines="one\n/fork\ntwo\n")
    assert "WarmSession" not in server.fake.calls


def test_ctrl_c_stops_the_answer_and_keeps_what_was_shown(
    server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.fake.script.append(Fault(after=3, silent=True))
    feed(monkeypatch, "one", "two")
    shown = answer_to("one")[:6]
    before = signal.getsignal(signal.SIGINT)  # ignored, where the tests run in the background of a script
    with Client(server.target) as client:
        chat, out, notes = interactive(client)

        def interrupt() -> None:
            deadline = time.monotonic() + 20
            while shown not in out.getvalue() and time.monotonic() < deadline:
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        chat.run()
        thread.join()
    (session,) = server.fake.sessions.values()
    assert [one.text for one in session.items] == ["one", shown, "two", answer_to("two")]
    assert "(cancelled)" in notes.getvalue()
    assert signal.getsignal(signal.SIGINT) is before
