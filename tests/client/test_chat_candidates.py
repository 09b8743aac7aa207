"""Several answers in ``pensieve chat``: /candidates and /choose, in a pipe and on a terminal."""

from __future__ import annotations

import io
import os
import signal
import threading
import time
from collections.abc import Iterator

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pensieve.cli.chat import command as module
from pensieve.cli.chat.command import ChatLoop
from pensieve.client import Client
from support.faults.fake_faults import Fault, answer_to, drawn_answer
from support.service.fake_server import FakeServerThread


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def run(server: FakeServerThread, lines: str) -> Result:
    return CliRunner().invoke(
        module.chat, ["--target", server.target, "--new", "--session", "ada"], input=lines
    )


def listed(text: str, count: int, chosen: int) -> str:
    marks = ["*" if number == chosen else " " for number in range(count)]
    return "".join(f"{marks[i]} {i}: {drawn_answer(text, i)}\n" for i in range(count))


def test_a_pipe_shows_all_answers_and_goes_on_from_the_chosen(server: FakeServerThread) -> None:
    result = run(server, "zero\n/candidates 3\none\n/choose 2\n/candidates 1\ntwo\n/history\n")
    assert result.exit_code == 0
    shown = f"{answer_to('zero')}\n{listed('one', 3, 0)}{listed('one', 3, 2)}{answer_to('two')}\n"
    assert result.stdout.startswith(shown)
    assert f"3 user: one\n5 assistant: {drawn_answer('one', 2)}\n" in result.stdout
    assert [one.turn.sampling.candidates for one in server.fake.stream_requests] == [0, 3, 1]


def test_regenerate_draws_as_many(server: FakeServerThread) -> None:
    result = run(server, "/candidates 2\none\n/regenerate\n")
    assert result.stdout == listed("one", 2, 0) * 2


def test_what_cannot_be_done_is_said(server: FakeServerThread) -> None:
    before = ("/choose 1", "one", "/choose 1", "/candidates x", "/candidates 0", "/candidates")
    result = run(server, "\n".join((*before, "/candidates 2", "one", "/choose", "/choose x", "")))
    assert result.exit_code == 0
    assert result.stderr.count("the last turn has no other answers") == 2
    assert result.stderr.count("/candidates takes the number") == 2
    assert result.stderr.count("/choose takes the number of an answer") == 2
    assert "answers to each question: 1\n" in result.stderr and "ChooseCandidate" not in server.fake.calls


def test_an_answer_that_is_not_there_ends_a_pipe(server: FakeServerThread) -> None:
    result = run(server, "/candidates 2\none\n/choose 7\nnever\n")
    assert result.exit_code == 1 and "CANDIDATE_NOT_FOUND" in result.stderr
    assert "never" not in result.stdout


def test_the_help_names_both(server: FakeServerThread) -> None:
    notes = run(server, "/help\n").stderr
    assert "/candidates [N] " in notes and "/choose K " in notes


def terminal(client: Client, **session: int) -> tuple[ChatLoop, io.StringIO, io.StringIO]:
    chat = ChatLoop(client, client.create_session(**session), {}, interactive=True)  # type: ignore[arg-type]
    out, notes = io.StringIO(), io.StringIO()
    chat.screen.out, chat.screen.notes = Console(file=out, soft_wrap=True), Console(file=notes)
    return chat, out, notes


def feed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    source = iter(lines)

    def read(_prompt: object = "") -> str:
        try:
            return next(source)
        except StopIteration:
            raise EOFError from None

    monkeypatch.setattr("builtins.input", read)


def test_on_a_terminal(server: FakeServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    feed(monkeypatch, "/candidates 2", "one", "/choose 1", "/choose 9", "/candidates 1", "two")
    with Client(server.target) as client:
        chat, out, notes = terminal(client)
        chat.run()
    assert listed("one", 2, 0) in out.getvalue() and listed("one", 2, 1) in out.getvalue()
    assert "CANDIDATE_NOT_FOUND" in notes.getvalue()
    assert answer_to("two") in out.getvalue(), "one answer is shown as it comes"


def test_ctrl_c_keeps_the_first_answer_so_far(
    server: FakeServerThread, monkeypatch: pytest.MonkeyPatch
) -> None:
    server.fake.script.append(Fault(after=5, silent=True))  # accepted, and two deltas of each answer
    feed(monkeypatch, "/candidates 2", "one", "/candidates 1", "two")
    kept = answer_to("one")[:6]
    with Client(server.target) as client:
        chat, out, notes = terminal(client)

        def interrupt() -> None:
            deadline = time.monotonic() + 20
            while server.fake.calls.count("StreamTurn") < 1 and time.monotonic() < deadline:
                time.sleep(0.01)
            time.sleep(0.5)  # what was sent has arrived by then
            os.kill(os.getpid(), signal.SIGINT)

        thread = threading.Thread(target=interrupt)
        thread.start()
        chat.run()
        thread.join()
    (session,) = server.fake.sessions.values()
    assert [one.text for one in session.items] == ["one", kept, "two", answer_to("two")]
    assert f"{kept}\n" in out.getvalue() and "(cancelled)" in notes.getvalue()
