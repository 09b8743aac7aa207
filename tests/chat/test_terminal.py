"""``pensieve chat`` as it is typed at: a program on a terminal, and a server in this process."""

from __future__ import annotations

import stat
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.client import Client
from pensieve.errors import InvalidArgument, ResourceExhausted, Unavailable
from support.faults.fake_faults import Fault, answer_to
from support.service.fake_server import FakeServerThread
from support.terminal import CTRL_C, CTRL_D, CTRL_U, TAB, UP, chat_program

AWAY = Fault(error=Unavailable("not here"))


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def said(server: FakeServerThread) -> list[str]:
    """The messages of the one session."""
    (session,) = server.fake.sessions.values()
    return [one.text for one in session.items]


def test_a_conversation_is_left_picked_and_gone_on_with(server: FakeServerThread, tmp_path: Path) -> None:
    with chat_program(server.target, tmp_path) as chat:
        chat.prompt()
        chat.enter("one")
        chat.expect(answer_to("one"))
        chat.prompt()
        chat.enter('"""two')
        chat.expect("...> ")
        chat.enter('lines"""')
        chat.expect("tokens of context")
        chat.prompt()
        chat.type("/hist" + TAB + "\r")
        chat.expect("3 user: two")
        chat.prompt()
        chat.enter("/byee")
        chat.expect("did you mean /bye?")
        chat.prompt()
        chat.enter("/bye")
        assert f"to continue: pensieve chat --target {server.target} --session s0" in chat.finish()
    with chat_program(server.target, tmp_path) as chat:
        assert " 1  one" in chat.expect("or Enter for a new conversation: ")
        chat.enter("9")
        assert "there is no session 9" in chat.expect("or Enter for a new conversation: ")
        server.fake.unary_script.append(InvalidArgument("name: must be sessions/{id}"))
        chat.enter("My name is Ada.")
        assert "press Enter before typing a message" in chat.expect("or Enter for a new conversation: ")
        chat.enter("1")
        assert "two\r\nlines" in chat.prompt()
        chat.type(f"{UP}{UP}{UP}{UP}{CTRL_U}{UP}{UP}{UP}")  # /bye, /byee, /history, the two lines
        chat.type(f"{UP}{CTRL_U}/edit 1\r")
        chat.expect("its answer and the 1 turn after it will be dropped")
        chat.expect("edit> ")
        chat.enter(" more")
        chat.expect(answer_to("one more"))
        chat.prompt()
        chat.type(CTRL_D)
        chat.finish()
    assert said(server) == ["one more", answer_to("one more")]
    history = tmp_path / "pensieve/chat/history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600
    assert history.read_text().startswith('"one"\n"two\\nlines"\n')


def test_a_line_that_cannot_be_sent_is_kept_and_sent_once(server: FakeServerThread, tmp_path: Path) -> None:
    """Through Ctrl-C, through the end of the chat, and into the next one."""
    with Client(server.target) as client:
        client.create_session(session_id="ada").send("before")
    server.fake.script.extend([AWAY] * 50)
    with chat_program(server.target, tmp_path, "--session", "ada") as chat:
        chat.prompt()
        chat.enter("What is my name?")
        chat.expect("reconnecting…")
        chat.expect("s (Ctrl-C stops and keeps your text)")
        chat.type(CTRL_C)
        chat.expect("(stopped; the turn was discarded)")
        chat.expect("you> What is my name?")
        chat.process.kill()  # the terminal is closed
        chat.finish()
    server.fake.script.clear()
    with chat_program(server.target, tmp_path, "--session", "ad") as chat:
        chat.expect("this line was not answered last time")
        chat.expect("you> What is my name?")
        chat.type("\r")
        chat.expect(answer_to("What is my name?"))
        chat.prompt()
        chat.enter("/bye")
        chat.finish()
    assert said(server)[2:] == ["What is my name?", answer_to("What is my name?")]
    assert len({one.turn.request_id for one in server.fake.stream_requests[1:]}) == 1
    assert not list((tmp_path / "pensieve/chat/unsent").iterdir())


def test_a_refused_line_is_offered_again_and_can_be_changed(server: FakeServerThread, tmp_path: Path) -> None:
    server.fake.script.append(Fault(error=ResourceExhausted("no quota left", reason="QUOTA_EXCEEDED")))
    with chat_program(server.target, tmp_path) as chat:
        chat.prompt()
        chat.enter("one")
        chat.expect("no quota left")
        chat.expect("you> one")
        chat.enter(" more")
        chat.expect(answer_to("one more"))
        chat.prompt()
        chat.type(CTRL_D)
        chat.finish()
    assert said(server) == ["one more", answer_to("one more")]


@pytest.mark.parametrize("commit", [True, False], ids=["answered", "still running"])
def test_a_line_that_arrived_before_the_chat_ended(
    server: FakeServerThread, tmp_path: Path, commit: bool
) -> None:
    server.fake.script.append(Fault(after=2, silent=True, commit=commit))
    with chat_program(server.target, tmp_path, "--new", "--session", "ada") as chat:
        chat.prompt()
        chat.enter("one")
        chat.expect("You")
        chat.process.kill()
        chat.finish()
    with chat_program(server.target, tmp_path, "--session", "ada") as chat:
        assert answer_to("one") in chat.prompt()
        chat.type(CTRL_D)
        assert "not answered last time" not in chat.finish()
    assert said(server) == ["one", answer_to("one")]


@pytest.mark.parametrize("plain", [(), ("--plain",)], ids=["markdown", "plain"])
def test_nothing_of_a_model_is_obeyed(
    server: FakeServerThread, tmp_path: Path, plain: tuple[str, ...]
) -> None:
    evil = "\x1b]0;owned\x07\x1b]52;c;eHh4\x07\x9b31m\u202etxt.exe &#x202e; <b>tag</b>"
    with Client(server.target) as client:
        client.create_session(session_id="ada", system_prompt=evil).send(evil)
    with chat_program(server.target, tmp_path, "--session", "last", *plain) as chat:
        chat.prompt()
        for command in ("/regenerate", "/history", "/sessions", "/system"):
            chat.enter(command)
            chat.prompt()
        chat.type(CTRL_D)
        text = chat.finish()
        assert text.count("␛]52;c;eHh4␇") >= 5 and text.count("<b>tag</b>") >= 5
        for raw in ("\x1b]", "\x9b", "\u202e", "\x07"):
            assert raw not in chat.raw


@pytest.mark.parametrize("environment", [{"TERM": "dumb"}, {"NO_COLOR": "1"}, {"COLUMNS": "20"}], ids=str)
def test_poor_terminals(server: FakeServerThread, tmp_path: Path, environment: dict[str, str]) -> None:
    with chat_program(server.target, tmp_path, **environment) as chat:
        chat.prompt()
        chat.enter("# 漢字 🙂")
        chat.expect("tokens of context")
        chat.prompt()
        chat.enter("/sessions")
        chat.expect("/switch N")
        chat.prompt()
        chat.type(CTRL_D)
        chat.finish()
        if "TERM" in environment:
            assert "\x1b" not in chat.raw
        if "NO_COLOR" in environment:
            assert "\x1b[1;36m" not in chat.raw
        assert "漢字" in chat.text


def test_ctrl_c_at_the_prompt(server: FakeServerThread, tmp_path: Path) -> None:
    with chat_program(server.target, tmp_path, "--no-history") as chat:
        chat.prompt()
        chat.type(CTRL_C)
        chat.expect("Ctrl-C again")
        chat.prompt()
        chat.enter("one")
        chat.expect("tokens of context")
        chat.prompt()
        chat.type(CTRL_C)
        chat.expect("Ctrl-C again")
        chat.prompt()
        chat.type(CTRL_C)
        assert "to continue:" in chat.finish() and chat.process.returncode == 0
    assert not (tmp_path / "pensieve").exists()


def test_a_wrong_session_is_an_error_with_the_near_ones(server: FakeServerThread, tmp_path: Path) -> None:
    with Client(server.target) as client:
        client.create_session(session_id="ada-1").send("one")
        client.create_session(session_id="ada-2").send("two")
    with chat_program(server.target, tmp_path, "--session", "ada-3") as chat:
        end = chat.finish()
        assert chat.process.returncode == 1
    assert "there is no session ada-3 (similar: ada-" in end and end.count("\n") == 1
    with chat_program(server.target, tmp_path, "--session", "ada") as chat:
        assert "several sessions begin with ada" in chat.finish()
    assert len(server.fake.sessions) == 2


def test_a_wrong_address_is_one_line(tmp_path: Path) -> None:
    began = time.monotonic()
    with chat_program("127.0.0.1:1", tmp_path) as chat:
        chat.expect("waiting for the server…")
        chat.type(CTRL_C)
        chat.finish()
        assert chat.process.returncode == 130
    assert time.monotonic() - began < 60


def test_a_line_that_was_answered_unseen_is_not_doubled(server: FakeServerThread, tmp_path: Path) -> None:
    """And what is not answered goes along into a new conversation."""
    refused = ResourceExhausted("no quota left", reason="QUOTA_EXCEEDED")
    server.fake.script.append(Fault(after=3, commit=True, error=refused))
    with chat_program(server.target, tmp_path, "--plain") as chat:
        chat.prompt()
        chat.enter("one")
        chat.expect("no quota left")
        chat.expect("you> one")
        chat.type(CTRL_U)
        chat.enter("two")
        chat.expect("the previous message had arrived")
        chat.expect(answer_to("one"))
        chat.expect("you> two")
        assert said(server) == ["one", answer_to("one")]
        chat.type(CTRL_U)
        chat.enter("/new")
        chat.expect("you> two")
        chat.type("\r")
        chat.expect(answer_to("two"))
        chat.prompt()
        chat.type(CTRL_D)
        chat.finish()
    assert [one.items[0].text for one in server.fake.sessions.values()] == ["one", "two"]


def test_ctrl_c_twice_leaves_an_answer_that_cannot_be_stopped(
    tmp_path: Path, server: FakeServerThread
) -> None:
    server.fake.script.append(Fault(after=3, silent=True))
    with chat_program(server.target, tmp_path, "--plain") as chat:
        chat.prompt()
        chat.enter("one")
        chat.expect("You")
        server.fake.unary_script.extend([Unavailable("not here")] * 50)
        chat.type(CTRL_C)
        chat.expect("stopping…")
        chat.type(CTRL_C)
        assert "to continue:" in chat.finish() and chat.process.returncode == 0


def test_characters_that_the_locale_lacks_and_bytes_that_are_none(
    tmp_path: Path, server: FakeServerThread
) -> None:
    """A container has often the locale C: the editor knows ASCII then, and what is typed is UTF-8."""
    words = "hé 漢字"
    for utf8 in ("1", "0"):
        locale = {"LC_ALL": "C", "PYTHONUTF8": utf8, "PYTHONCOERCECLOCALE": "0"}
        with chat_program(server.target, tmp_path, "--new", **locale) as chat:  # "0": with the history of "1"
            chat.prompt()
            chat.type("h\udcff\r")
            chat.expect("; it was not sent")
            chat.prompt()
            chat.enter(f"{CTRL_U}{words}" if utf8 == "1" else "plain")
            chat.expect("tokens of context")
            chat.prompt()
            chat.enter("/bye")
            chat.finish()
            assert chat.process.returncode == 0 and "Traceback" not in chat.text
    assert [one.items[0].text for one in server.fake.sessions.values()] == [words, "plain"]


def test_a_session_that_somebody_else_has_erased(tmp_path: Path, server: FakeServerThread) -> None:
    with chat_program(server.target, tmp_path, "--new", "--session", "ada") as chat:
        chat.prompt()
        chat.enter("one")
        chat.expect("tokens of context")
        chat.prompt()
        with Client(server.target) as client:
            client.session("ada").delete()
        chat.enter("two")
        chat.expect("/new starts another conversation")
        chat.expect("you> two")
        chat.enter(f"{CTRL_U}/new")
        chat.expect("you> two")
        chat.enter("")
        chat.expect(answer_to("two"))
        chat.prompt()
        chat.enter("/bye")
        assert chat.end() == 0
    assert said(server) == ["two", answer_to("two")]
