"""What goes wrong is told in one form by every command: the command as it was typed, a colon, what is wrong."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import click
import pytest

from pensieve.cli import main as cli

PENSIEVE = Path(sys.executable).parent / "pensieve"


def below(path: str, command: click.Command) -> Iterator[tuple[str, click.Command]]:
    yield path, command
    for name, inner in getattr(command, "commands", {}).items():
        yield from below(f"{path} {name}", inner)


def every_command() -> dict[str, click.Command]:
    """As typed, ``store check``, without ``pensieve`` itself."""
    context = click.Context(cli.cli)
    found: dict[str, click.Command] = {}
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        assert command is not None
        found.update(below(name, command))
    return found


COMMANDS = every_command()


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


def test_all_commands_are_looked_at() -> None:
    assert {"serve", "chat", "sessions delete", "store check", "replay", "replay compare"} < set(COMMANDS)


@pytest.mark.parametrize("path", sorted(COMMANDS))
def test_a_wrong_option_is_told_behind_the_name_of_the_command(
    path: str, capsys: pytest.CaptureFixture[str]
) -> None:
    default = {"sessions": "sessions list"}  # what runs where none is named
    code, out, err = said(capsys, *path.split(), "--no-such-option")
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert err.startswith(f"pensieve {default.get(path, path)}: No such option '--no-such-option'.")


@pytest.mark.parametrize("path", sorted(path for path in COMMANDS if path not in ("sessions", "store")))
@pytest.mark.parametrize(
    ("raised", "code", "line"),
    [
        (lambda: click.ClickException("it broke"), 1, "it broke"),
        (lambda: click.UsageError("not so"), 2, "not so"),
        (lambda: OSError(28, "No room"), 1, "cannot write the output: No room"),
        (
            lambda: ModuleNotFoundError(name="no_such.of_it"),
            2,
            "no_such is not installed: pip install 'pensieve[it]'",
        ),
    ],
    ids=["run time", "usage", "no room", "no extra"],
)
def test_whatever_fails_is_told_behind_the_name_of_the_command(
    path: str,
    raised: Callable[[], Exception],
    code: int,
    line: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise raised()

    monkeypatch.setattr("pensieve.extras.EXTRAS", {"it": ("no_such",)})
    monkeypatch.setattr(COMMANDS[path], "params", [])
    monkeypatch.setattr(COMMANDS[path], "callback", fail)
    monkeypatch.setattr("os.dup2", lambda *_: None)  # it would be the stdout of these tests
    monkeypatch.setattr("sys.argv", ["pensieve"])
    assert said(capfd, *path.split()) == (code, "", f"pensieve {path}: {line}\n")


def test_an_error_of_no_command_is_told_behind_the_name_of_the_program(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert said(capsys, "nonsense") == (2, "", "pensieve: No such command 'nonsense'.\n")
    assert said(capsys, "store", "nonsense") == (2, "", "pensieve store: No such command 'nonsense'.\n")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A folder with a length trace, and a file of nothing in particular."""
    (tmp_path / "trace.jsonl").write_text(
        '{"session_id":"a","turn":0,"input_tokens":5,"output_tokens":5,"timestamp_s":0}\n'
    )
    (tmp_path / "file").write_text("words\n")
    return tmp_path


AS_PROGRAM = ("serve", "profile", "sessions --target http", "top")
"""Commands run as a program of their own: they change the process they run in, or stand for the others."""


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (
            "chat --model FILES/none",
            2,
            "pensieve chat: the server did not start: FILES/none: no such folder\n",
        ),
        ("chat --store nonsense:", 2, "pensieve chat: the server did not start: --store: expected memory:, "),
        (
            "chat --target NOBODY",
            1,
            "pensieve chat: no server answers at NOBODY: ",
        ),
        (
            "chat --target http://NOBODY",
            2,
            "pensieve chat: --target: must be HOST:PORT, got 'http://NOBODY'\n",
        ),
        ("serve --store memory: --model FILES/none", 2, "pensieve serve: FILES/none: no such folder"),
        ("profile --model FILES/none", 2, "pensieve profile: FILES/none: no such folder"),
        (
            "sessions --target NOBODY",
            1,
            "pensieve sessions list: no server answers at NOBODY: Connection refused (",
        ),
        (
            "sessions show x --target NOBODY",
            1,
            "pensieve sessions show: no server answers at NOBODY: Connection re",
        ),
        (
            "sessions --target http://NOBODY",
            2,
            "pensieve sessions list: --target: must be HOST:PORT, got 'http",
        ),
        (
            "sessions --api-key é",
            2,
            "pensieve sessions list: --api-key: must consist of printable ASCII characters",
        ),
        ("store check --store sqlite:///FILES/none", 1, "pensieve store check: there is no history file"),
        (
            "store restore FILES/file --to sqlite:///FILES/new",
            1,
            "pensieve store restore: FILES/file is not a",
        ),
        (
            "replay FILES/trace.jsonl --target pensieve://NOBODY",
            1,
            "pensieve replay: a target cannot be reached",
        ),
        ("replay compare FILES/file", 1, "pensieve replay compare: FILES/file: Expecting value"),
        (
            "simulate FILES/trace.jsonl --rate 1 --think-time 1 --policy lru --json FILES/file/x",
            1,
            "pensieve simulate: cannot write FILES/file/x: Not a directory",
        ),
        (
            "gateway --target NOBODY --listen 127.0.0.1:0 --tls-cert FILES/file --tls-key FILES/file",
            2,
            "pensieve gateway: --tls-cert, --tls-key: ",
        ),
        ("top --admin NOBODY", 1, "pensieve top: cannot connect to NOBODY: Connection refused"),
    ],
)
def test_errors_of_run_time_are_told_behind_the_name_of_the_command(
    files: Path,
    words: str,
    code: int,
    line: str,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with socket.socket() as bound:  # without listening: nobody answers there, and nobody else takes the port
        bound.bind(("127.0.0.1", 0))
        names = {"FILES": str(files), "NOBODY": f"127.0.0.1:{bound.getsockname()[1]}"}
        for name, value in names.items():
            words, line = words.replace(name, value), line.replace(name, value)
        if words.startswith(AS_PROGRAM):
            done = subprocess.run(
                [PENSIEVE, *words.split()],
                stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60, check=False,
            )  # fmt: skip
            status, err = done.returncode, done.stderr
        else:
            with open(os.devnull) as nothing:
                monkeypatch.setattr("sys.stdin", nothing)
                status, _, err = said(capfd, *words.split())
    assert status == code
    assert err.startswith(line), err
    assert err.count("\n") == 1, err


def test_a_report_that_cannot_be_written_is_told_behind_the_name_of_the_command(
    files: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace, report, wrong = files / "trace.jsonl", files / "report.json", files / "file" / "x"
    simulate = ["simulate", trace, "--rate", "1", "--think-time", "1", "--policy", "lru", "--json", report]
    assert said(capsys, *map(str, simulate))[0] == 0
    for option in ("--json", "--html", "--plots"):
        status, _, err = said(capsys, "replay", "compare", str(report), option, str(wrong))
        line = f"pensieve replay compare: cannot write {wrong}: Not a directory\n"
        assert (status, err) == (1, line)
