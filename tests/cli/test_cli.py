"""The ``pensieve`` command as a user meets it: help, version, exit codes, one line per mistake."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
import tomllib
import types
from pathlib import Path

import pytest
from click.testing import CliRunner

from pensieve import __version__
from pensieve.cli import main as cli
from pensieve.options import serve as options
from pensieve.options.table import BASIC_OPTIONS, GROUPS, HIDDEN_OPTIONS, OPTIONS

PENSIEVE = Path(sys.executable).parent / "pensieve"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([PENSIEVE, *arguments], capture_output=True, text=True, timeout=60, check=False)


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of the command, in this process."""
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


def loaded_modules(code: str) -> set[str]:
    """Names in ``sys.modules`` after ``code``, in a fresh interpreter."""
    script = f"{code}\nimport sys; print(' '.join(sys.modules))"
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True
    )
    return set(result.stdout.splitlines()[-1].split())


def test_help_lists_every_command_and_loads_none() -> None:
    result = run("--help")
    assert result.returncode == 0
    for name in ("serve", *cli.SUBCOMMANDS):
        assert re.search(rf"^  {name} ", result.stdout, re.MULTILINE), name


def test_help_imports_nothing_heavy() -> None:
    code = "from click.testing import CliRunner; from pensieve.cli.main import cli; CliRunner().invoke(cli, ['--help'])"
    heavy = {"torch", "transformers", "grpc", "redis", "rich", "pensieve.server", "pensieve.client"}
    assert not heavy & loaded_modules(code)


def test_serve_help_names_every_option() -> None:
    result = run("serve", "--help", "all")
    assert result.returncode == 0
    for option in OPTIONS:
        assert option.name in HIDDEN_OPTIONS or f"--{option.name}" in result.stdout
    assert "--insecure-i-know " in result.stdout
    assert "TEXT" not in result.stdout


@pytest.mark.parametrize("name", sorted(cli.SUBCOMMANDS))
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, name, "--help")
    assert (code, err) == (0, "")
    assert out.startswith(f"Usage: pensieve {name} ")


def test_version() -> None:
    assert run("--version").stdout == f"pensieve, version {__version__}\n"


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["serve", "--chunk-tokens", "33"], "pensieve serve: --chunk-tokens: expected a power of two"),
        (["serve", "--bogus"], "pensieve serve: No such option '--bogus'"),
        (["serve", "--config", "/no/such.toml"], "pensieve serve: --config: cannot read /no/such.toml"),
        (["serve", "stray"], "pensieve serve: Got unexpected extra argument"),
        (["serve", "--listen", "0.0.0.0:0"], "pensieve serve: --listen: 0.0.0.0:0 is not loopback"),
        (["doctor", "--store", "mysql://x"], "pensieve doctor: --store: expected memory:"),
        (["nonsense"], "pensieve: No such command 'nonsense'"),
        (["gateway", "--target", "nowhere"], "pensieve gateway: --target: expected HOST:PORT"),
        (
            ["gateway", "--target", "h:1", "--listen", "h:99999"],
            "pensieve gateway: --listen: expected HOST:PORT",
        ),
    ],
)
def test_a_mistake_is_one_line_and_code_2(
    arguments: list[str], line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    code, out, err = said(capsys, *arguments)
    assert (code, out) == (2, "")
    assert err.startswith(line)
    assert err.count("\n") == 1


def test_the_program_ends_with_the_code_and_the_line_of_a_mistake() -> None:
    result = run("nonsense")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == "pensieve: No such command 'nonsense'.\n"


def test_a_door_whose_address_is_taken_says_so() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        result = run("gateway", "--target", "127.0.0.1:1", "--listen", address)
    assert (result.returncode, result.stdout) == (2, "")
    assert (
        result.stderr == f"pensieve gateway: --listen: cannot listen on {address}: Address already in use\n"
    )


@pytest.mark.parametrize("name", ["", "serve", *sorted(cli.SUBCOMMANDS)])
def test_help_fits_a_terminal_of_80_columns(name: str) -> None:
    shown = CliRunner().invoke(cli.cli, [*name.split(), "--help"]).output
    assert shown.startswith("Usage: ") and max(map(len, shown.splitlines())) <= 80


def test_the_help_of_serve_is_in_groups() -> None:
    lines = run("serve", "--help", "all").stdout.splitlines()
    headings = [line for line in lines if re.fullmatch(r"[A-Z][^:]*:", line)]
    assert headings == [f"{title}:" for title in GROUPS]
    assert lines.index("Model:") < next(at for at, line in enumerate(lines) if line.startswith("  --model "))
    assert "PENSIEVE_SERVE_<OPTION>" in lines[-1]


def flags_in(text: str) -> set[str]:
    return {found[1] for line in text.splitlines() if (found := re.match(r"  (?:-h, )?--([\w-]+)", line))}


def test_the_first_help_of_serve_is_short_and_names_the_rest() -> None:
    """All options are in one of two screens, but for the switches of single ideas, which ``--off`` stands for."""
    first, everything = (CliRunner().invoke(cli.cli, ["serve", *arguments.split()]).output
                         for arguments in ("-h", "--help all"))  # fmt: skip
    assert flags_in(first) == BASIC_OPTIONS and len(BASIC_OPTIONS) <= 25
    known = {option.name for option in OPTIONS} | {"config", "print-config", "help", "off"}
    assert flags_in(everything) == known - HIDDEN_OPTIONS
    assert (
        f"`cli serve --help all` shows {len(known - HIDDEN_OPTIONS - BASIC_OPTIONS)} more options." in first
    )
    assert "more options" not in everything and "\nOther:\n" not in everything
    assert CliRunner().invoke(cli.cli, ["serve", "all"]).exit_code == 2, "a word of its own means nothing"


def test_no_option_of_replay_is_left_without_a_heading() -> None:
    shown = CliRunner().invoke(cli.cli, ["replay", "--help"]).output
    assert "\nTargets:\n" in shown and "\nOther:\n" not in shown and "\nOptions:\n" not in shown


def test_no_arguments_shows_help() -> None:
    result = run()
    assert result.returncode == 2
    assert "Commands:" in result.stdout + result.stderr


def test_print_config(tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("max-queued = 5\n")
    result = run("serve", "--config", str(config), "--lease", "3s", "--no-unified-batch", "--print-config")
    assert result.returncode == 0
    values = tomllib.loads(result.stdout)
    assert (values["max-queued"], values["lease"], values["unified-batch"]) == (5, "3s", False)
    assert f"file {config}" in result.stdout


def install_server(monkeypatch: pytest.MonkeyPatch, code: int) -> list[options.ServeOptions]:
    """Put a recording server in the place of the real one, which needs a model."""
    seen: list[options.ServeOptions] = []

    def fake_run(given: options.ServeOptions) -> int:
        seen.append(given)
        return code

    module = types.ModuleType("pensieve.server.app")
    module.run = fake_run  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "pensieve.server.app", module)
    return seen


def test_serve_hands_over_the_options_and_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    seen = install_server(monkeypatch, 3)
    result = CliRunner().invoke(cli.cli, ["serve", "--max-running", "2", "--insecure-i-know"])
    assert result.exit_code == 3
    assert seen == [options.ServeOptions(max_running=2, insecure_i_know=True)]
    assert (tmp_path / "pensieve").stat().st_mode & 0o777 == 0o700


def test_serve_makes_no_folder_for_a_store_that_was_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    install_server(monkeypatch, 0)
    result = CliRunner().invoke(cli.cli, ["serve", "--store", "memory:"])
    assert result.exit_code == 0
    assert list(tmp_path.iterdir()) == []


def test_a_state_folder_that_cannot_be_made_is_one_line(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """As in a container whose user has no home."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    done = run("serve")
    assert (done.returncode, done.stderr.count("\n")) == (2, 1) and "--store" in done.stderr


def test_a_command_that_cannot_be_loaded_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(cli.SUBCOMMANDS, "chat", ("pensieve.no_such_module", "chat", ""))
    result = CliRunner().invoke(cli.cli, ["chat"])
    assert result.exit_code == 1
    assert "cannot load `pensieve chat`: No module named 'pensieve.no_such_module'" in result.output


def test_interrupt_is_130(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(**_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(options, "resolve", interrupted)
    monkeypatch.setattr(options, "by_name", lambda _: interrupted())
    with pytest.raises(SystemExit) as caught:
        cli.main(["serve"])
    assert caught.value.code == 130
