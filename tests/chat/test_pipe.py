"""``pensieve chat`` on a pipe: an answer is written as it comes, and a line that is too long is not sent."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from click.testing import CliRunner

from pensieve.cli.chat import command
from support.engine.fake_engine import Script
from support.service.fake_server import FakeServerThread
from support.service.server_process import launched
from support.terminal import PENSIEVE

pytestmark = pytest.mark.timeout(200)


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def test_pieces_come_before_the_answer_is_whole(tmp_path: Path) -> None:
    # The engine says a part and then no more: what is read here cannot be a whole answer.
    with (
        launched(tmp_path / "server", Script(hang_at_step=80)) as server,
        subprocess.Popen(
            [*PENSIEVE, "chat", "--target", server.grpc, "--max-tokens", "100"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
        ) as chat,
    ):
        try:
            assert chat.stdin is not None and chat.stdout is not None
            chat.stdin.write(b"Tell me all of it.\n")
            chat.stdin.close()
            read = b""
            while b"ABC" not in read:
                piece = os.read(chat.stdout.fileno(), 4096)
                assert piece, f"it ended after {read!r}"
                read += piece
            assert chat.poll() is None
        finally:
            chat.kill()


@pytest.mark.parametrize("before", ["", "one\n"])
def test_a_line_beyond_the_bound_is_refused(
    server: FakeServerThread, before: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "MAX_LINE_CHARS", 100)
    lines = f"{before}{'x' * 100}\ntwo\n"
    result = CliRunner().invoke(command.chat, ["--target", server.target, "--new"], input=lines)
    number = 1 + before.count("\n")
    assert result.exit_code != 0 and result.stderr.count("\n") == 1
    assert f"line {number} of the input is longer than 100 characters; it was not sent" in result.stderr
    assert len(server.fake.stream_requests) == number - 1, "nor is anything behind it"


def test_a_line_at_the_bound_is_sent(server: FakeServerThread, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "MAX_LINE_CHARS", 100)
    lines = f"{'x' * 99}\n"
    result = CliRunner().invoke(command.chat, ["--target", server.target, "--new"], input=lines)
    assert result.exit_code == 0, result.stderr
    assert len(server.fake.stream_requests) == 1
