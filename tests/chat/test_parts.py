"""What a chat is made of, without a terminal."""

from __future__ import annotations

import io
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import ClassVar

import grpc
import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pensieve import own_server
from pensieve.cli.chat import command, screen, sessions
from pensieve.cli.chat.command import ChatLoop
from pensieve.cli.chat.prompt import Unsent, UnsentFolder
from pensieve.cli.chat.screen import MarkdownView, markdown, split_blocks
from pensieve.cli.output import clean
from pensieve.cli.sessions import sessions as listing
from pensieve.client import Client
from pensieve.errors import InvalidArgument
from pensieve.own_server import OwnServer
from pensieve.spawn import SpawnError
from support.processes import until
from support.service.fake_server import FakeServerThread


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def run(server: FakeServerThread, *arguments: str, lines: str = "") -> Result:
    return CliRunner().invoke(command.chat, ["--target", server.target, *arguments], input=lines)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("plain\ttext\r\nand\nmore 漢字 🙂", "plain\ttext\nand\nmore 漢字 🙂"),
        ("\x1b[2J\x00\x07\r", "␛[2J␀␇␍"),
        ("\x7f\x85\x9b1m", "␡<U+0085><U+009B>1m"),
        ("a\u202eb\u2066", "a<U+202E>b<U+2066>"),
        ("क्\u200dष 👨\u200d👧 全角\u3000空白\xa0%", "क्\u200dष 👨\u200d👧 全角\u3000空白\xa0%"),
    ],
)
def test_clean(text: str, shown: str) -> None:
    assert clean(text) == shown


def test_clean_of_one_line() -> None:
    assert clean("a\tb\nc\u2028d", lines=False) == "a␉b␊c<U+2028>d"


@pytest.mark.parametrize(
    ("text", "complete"),
    [
        ("a", ""),
        ("a\n\nb", "a\n\n"),
        ("a\n\n  b", ""),
        ("```\na\n\nb\n", ""),
        ("```\na\n\nb\n```\n\nc", "```\na\n\nb\n```\n\n"),
        ("~~~~\n~~~\n\na", ""),
        ("1. a\n\n2. b\n\n   c", "1. a\n\n"),
    ],
)
def test_blocks_that_are_complete(text: str, complete: str) -> None:
    assert split_blocks(text) == (complete, text[len(complete) :])


def drawn(text: str, height: int = 10) -> str:
    """What a terminal was sent for an answer that came in small pieces."""
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=40, height=height, color_system=None)
    view = MarkdownView(console)
    for start in range(0, len(text), 7):
        view.add(text[start : start + 7])
    view.end()
    return file.getvalue()


def test_a_long_answer_costs_no_more_than_its_length(monkeypatch: pytest.MonkeyPatch) -> None:
    laid_out: list[int] = []
    monkeypatch.setattr(screen, "REDRAW_S", 0.0)
    monkeypatch.setattr(screen, "markdown", lambda text: laid_out.append(len(text)) or markdown(text))
    text = "".join(f"Paragraph **{number}** of them.\n\n" for number in range(300))
    file = drawn(text)
    assert all(file.count(f"Paragraph {number} of them.") >= 1 for number in range(300))
    assert sum(laid_out) < 10 * len(text)


def test_a_block_higher_than_the_terminal_is_whole_in_the_end() -> None:
    text = "```\n" + "".join(f"line {number}\n" for number in range(100)) + "```\n"
    end = drawn(text).rpartition("\x1b[2K")[2]
    assert [f"line {number}" in end for number in range(100)] == [True] * 100


def test_markdown_leaves_nothing_out() -> None:
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=60)
    console.print(markdown("a <b>c</b>\nnext\n\n<div>\nx\n</div>\n\n[bank](http://evil) &#x202e;&#27;[2J"))
    shown = Console(file=io.StringIO())
    text = "".join(shown.render_str(file.getvalue(), markup=False).plain)
    for part in ("<b>c</b>", "next", "http://evil", "<U+202E>"):
        assert part in text
    assert (
        "\x1b]8" not in file.getvalue()
        and "\u202e" not in file.getvalue()
        and "\x1b[2J" not in file.getvalue()
    )


def test_unsent_lines_outlive_the_chat_and_are_private(tmp_path: Path) -> None:
    folder = UnsentFolder(tmp_path / "a" / "unsent")
    kept = Unsent("héllo\nthere", "id", {"temperature": 0.5})
    folder.put("../x", kept)
    (file,) = (tmp_path / "a" / "unsent").iterdir()
    assert file.stat().st_mode & 0o777 == 0o600 and file.parent.stat().st_mode & 0o777 == 0o700
    again = UnsentFolder(tmp_path / "a" / "unsent")
    assert again.get("../x") == kept and again.get("y") is None
    file.write_text("{")
    assert UnsentFolder(tmp_path / "a" / "unsent").get("../x") is None
    folder.drop("../x")
    assert folder.get("../x") is None and not file.exists()


def test_a_disk_that_takes_nothing_costs_no_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    folder = UnsentFolder(tmp_path / "file" / "unsent")
    folder.put("x", Unsent("text", "id"))
    assert folder.get("x") == Unsent("text", "id")
    nothing = UnsentFolder(None)
    nothing.put("x", Unsent("text", "id"))
    assert nothing.get("x") is not None


@pytest.mark.parametrize(
    ("ago", "said"),
    [(5, "just now"), (60, "1 min ago"), (7200, "2 h ago"), (86400 * 3, "3 d ago"), (-5, "just now")],
)
def test_age(ago: float, said: str) -> None:
    now = datetime.now(UTC)
    assert sessions.age(now - timedelta(seconds=ago), now) == said


def test_titles_and_order(server: FakeServerThread) -> None:
    with Client(server.target) as client:
        client.create_session(session_id="empty")
        client.create_session(session_id="named", labels={"title": "A name"}).send("one")
        client.create_session(session_id="long").send("many  words\n" * 20)
        for number, session in enumerate(server.fake.sessions.values()):
            session.message.update_time.FromSeconds(1000 + number)
        found = sessions.recent(client)
        assert [one.info.id for one in found] == ["long", "named"]
        assert found[0].title.startswith("many words many words") and len(found[0].title) == 48
        assert (found[1].title, found[1].turns) == ("A name", 1)
        assert sessions.find_session(client, "last").id == "long"
        assert sessions.find_session(client, "nam").id == "named"
        short = InvalidArgument("name: at least 3 characters", reason="FIELD_INVALID")
        server.fake.unary_script.append(short)
        assert sessions.find_session(client, "na").id == "named", (
            "too short for an id, and the beginning of one"
        )
        server.fake.unary_script.append(short)
        with pytest.raises(InvalidArgument, match="at least 3"):
            sessions.find_session(client, "My name is Ada.")


def test_a_pipe_makes_no_session_by_mistake(server: FakeServerThread) -> None:
    result = run(server, "--session", "ada", lines="one\n")
    assert result.exit_code == 1 and len(server.fake.sessions) == 0
    assert "there is no session ada" in result.stderr and "--new" in result.stderr
    assert run(server, "--session", "last").stderr == "Error: there is no session yet\n"


def test_a_wrong_address_is_told_soon_and_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a pipe too, where nobody would see that it is waited for; an admin port is none, and says so at once."""
    monkeypatch.setattr(command, "CONNECT_TIMEOUT_S", 0.5)
    other = grpc.server(ThreadPoolExecutor(1))  # without our service, as the admin port is
    address = f"127.0.0.1:{other.add_insecure_port('127.0.0.1:0')}"
    other.start()
    for target, said in ((address, "is not a gRPC port of pensieve"), ("127.0.0.1:9", "no server answers")):
        result = CliRunner().invoke(command.chat, ["--target", target], input="one\n")
        assert result.exit_code == 1 and said in result.stderr and result.stderr.count("\n") == 1
    result = CliRunner().invoke(listing, ["--target", address])
    assert result.exit_code == 1 and "is not a gRPC port of pensieve" in result.stderr
    other.stop(None).wait()


def test_commands_in_a_pipe(server: FakeServerThread, tmp_path: Path) -> None:
    text, listed = tmp_path / "talk.md", tmp_path / "talk.json"
    lines = (
        "/set temprature 1", "/set temperature x", "/set temperature 0.5", "/set seed 3", "/set seed default", "/set",
        "one", "/system", "/system Be brief.", "/system", f"/save {text}", f"/save {text}", f"/save {listed}",
        "/new", "/etc/passwd is a file", "/sessions", "/switch ada", "/history", "/switch nobody", "/bye", "never",
    )  # fmt: skip
    result = run(server, "--new", "--session", "ada", lines="\n".join(lines))
    assert result.exit_code == 0, result.stderr
    for note in (
        "did you mean temperature?", "temperature takes a number", "temperature 0.5\n", "saved 2 messages",
        "not saved: [Errno 17]", "there is no session nobody",
    ):  # fmt: skip
        assert note in result.stderr
    assert "(none)\nBe brief.\n" in result.stdout and "/etc/passwd is a file" in result.stdout
    assert "never" not in result.stdout
    assert text.read_text().startswith("## user\n\none\n\n## assistant\n\n")
    assert '"role": "user"' in listed.read_text()
    sampling = server.fake.stream_requests[0].turn.sampling
    assert sampling.temperature == 0.5 and not sampling.HasField("seed")


def test_completion(server: FakeServerThread) -> None:
    with Client(server.target) as client:
        loop = ChatLoop(client, client.create_session(), {}, interactive=False)
        complete = loop.commands.complete
        assert complete("/re") == ["/receipt ", "/regenerate ", "/rewind "]
        assert complete("/set temp") == ["/set temperature "]
        assert complete("hello") == complete("/nope x") == []


class Mortal:
    """Stands for a server process: dies when told, and starts again or not."""

    lives: ClassVar[list[Mortal]] = []
    starts = True

    def __init__(
        self, *arguments: str, listen: str = "", start_timeout_s: float = 0, wait: bool = True
    ) -> None:
        self.target = listen or "127.0.0.1:7"
        self.running = True
        self.lives.append(self)

    def wait_ready(self) -> None:
        if not self.starts:
            self.running = False
            raise SpawnError("no room")

    def kill(self) -> None:
        self.running = False

    def __exit__(self, *_: object) -> None:
        self.running = False


@pytest.mark.parametrize("starts", [True, False])
def test_a_server_of_its_own_is_started_again(monkeypatch: pytest.MonkeyPatch, starts: bool) -> None:
    monkeypatch.setattr(own_server, "ServerProcess", Mortal)
    monkeypatch.setattr(own_server, "LOOK_S", 0.01)
    monkeypatch.setattr(Mortal, "lives", [])
    with OwnServer("--model", "demo") as own:
        monkeypatch.setattr(Mortal, "starts", starts)
        Mortal.lives[0].running = False
        until(lambda: len(Mortal.lives) == (2 if starts else 1 + own_server.TRIES), "it is not started again")
        assert {one.target for one in Mortal.lives} == {own.target}
        until(lambda: starts or own.failure == "no room", "no reason given")
    assert not any(one.running for one in Mortal.lives)
    assert "own-server" not in {one.name for one in threading.enumerate()}


def test_a_schema_for_the_answers_to_come(server: FakeServerThread, tmp_path: Path) -> None:
    schema, broken = tmp_path / "schema.json", tmp_path / "broken.json"
    schema.write_text('{"type": "object"}')
    broken.write_text("{")
    lines = f"/schema {broken}\n/schema {tmp_path / 'none.json'}\n/schema {schema}\nhi\n/schema off\nagain\n"
    result = run(server, lines=lines)
    assert result.exit_code == 0, result.output
    assert result.output.count("no schema was read") == 2
    assert result.output.index("answers follow the schema") < result.output.index("answers are any text")
    asked = [request.turn.format.json_schema for request in server.fake.stream_requests]
    assert asked == ['{"type": "object"}', ""]
