"""Options from the environment: one rule for every command; what is wrong is told by its variable."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

import click
import pytest
from click.testing import CliRunner

from pensieve.cli import main as cli
from pensieve.cli.environment import NO_OPTIONS
from pensieve.spawn import ServerProcess
from support.sources import ROOT


class Result(NamedTuple):
    """What a command came to."""

    code: int | str | None
    stdout: str
    stderr: str


class Run(Protocol):
    """The program itself, in this process: most of what a fresh one does is importing."""

    def __call__(self, *arguments: str, **variables: str) -> Result: ...


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    def running(*arguments: str, **variables: str) -> Result:
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        out, err = capsys.readouterr()
        return Result(ended.value.code, out, err)

    return running


def shown(result: Result, option: str) -> str:
    assert result.code == 0, result.stderr
    return next(line for line in result.stdout.splitlines() if line.startswith(f"{option} = "))


def commands() -> Iterator[tuple[str, click.Command]]:
    """Every command with its path, as the program loads them."""
    context = click.Context(cli.cli)
    for name in cli.cli.list_commands(context):
        command = cli.cli.get_command(context, name)
        assert command is not None
        yield name, command
        for inner, below in getattr(command, "commands", {}).items():
            yield f"{name} {inner}", below


def test_every_option_of_every_command_has_its_variable() -> None:
    seen = set()
    for path, command in commands():
        for param in command.params:
            if isinstance(param, click.Option) and param.allow_from_autoenv:
                flag = max(param.opts, key=len).removeprefix("--")
                expected = f"PENSIEVE_{path}_{flag}".upper().replace(" ", "_").replace("-", "_")
                assert param.envvar is not None and expected in param.envvar, f"{path} --{flag}"
                assert expected not in seen, f"{expected} is two options"
                seen.add(expected)
    assert {"PENSIEVE_SERVE_MODEL", "PENSIEVE_CHAT_SESSION", "PENSIEVE_STORE_CHECK_STORE"} <= seen
    assert not seen & NO_OPTIONS


def test_the_page_says_what_is_so(run: Run) -> None:
    """The examples of docs/install.md: each variable does what the command beside it does; messages are as printed."""
    page = (ROOT / "docs/install.md").read_text()
    by_path = dict(commands())
    rows = re.findall(r"^\| `pensieve (.+) --(\S+)[^|]*` \| `(PENSIEVE_\w+)=(\S+)` \|$", page, re.MULTILINE)
    assert len(rows) == 5
    for path, flag, variable, _ in rows:
        param = next(one for one in by_path[path].params if f"--{flag}" in (*one.opts, *one.secondary_opts))
        assert param.envvar is not None and variable in param.envvar
    for variable, said in re.findall(r"^pensieve serve: (PENSIEVE_\w+)(.*)$", page, re.MULTILINE):
        value = said.rpartition(" ")[2] if "got" in said else "1"
        result = run("serve", "--print-config", **{variable: value})
        assert f"pensieve serve: {variable}{said}\n" in result.stderr


def test_flag_beats_environment_beats_file(run: Run, tmp_path: Path) -> None:
    config = tmp_path / "server.toml"
    config.write_text("max-running = 7\nmax-queued = 9\n")
    variables = {
        "PENSIEVE_SERVE_CONFIG": str(config),
        "PENSIEVE_SERVE_MAX_RUNNING": "3",
        "PENSIEVE_SERVE_LEASE": "20s",
        "PENSIEVE_SERVE_UNIFIED_BATCH": "false",
        "PENSIEVE_SERVE_DRAIN_GRACE": "",
    }
    result = run("serve", "--print-config", "--lease", "4s", **variables)
    assert shown(result, "max-running") == "max-running = 3  # environment PENSIEVE_SERVE_MAX_RUNNING"
    assert shown(result, "lease") == 'lease = "4s"  # flag --lease'
    assert (
        shown(result, "unified-batch") == "unified-batch = false  # environment PENSIEVE_SERVE_UNIFIED_BATCH"
    )
    assert shown(result, "max-queued") == f"max-queued = 9  # file {config}"
    assert "default" in shown(result, "drain-grace"), "what is empty is not set"
    assert result.stderr == ""


@pytest.mark.parametrize(
    ("command", "variable", "value", "said"),
    [
        ("serve", "PENSIEVE_SERVE_CHUNK_TOKENS", "33", "expected a power of two"),
        ("serve", "PENSIEVE_SERVE_STATELESS", "maybe", "'maybe' is not a valid boolean"),
        ("serve", "PENSIEVE_SERVE_CONFIG", "/no/such.toml", "cannot read /no/such.toml"),
        ("replay sharegpt", "PENSIEVE_REPLAY_RATE", "often", "'often' is not a valid float range"),
        ("chat", "PENSIEVE_CHAT_MAX_TOKENS", "0", "0 is not in the range"),
        ("store usage", "PENSIEVE_STORE_USAGE_STORE", "mysql://x", "expected memory:"),
    ],
)
def test_a_wrong_value_is_told_by_its_variable(
    run: Run, command: str, variable: str, value: str, said: str
) -> None:
    result = run(*command.split(), **{variable: value})
    assert result.code == 2
    assert result.stderr.count("\n") == 1 and said in result.stderr
    name = "--config" if variable.endswith("CONFIG") else variable
    assert result.stderr.startswith(f"pensieve {command.removesuffix(' sharegpt')}: {name}: ")


@pytest.mark.parametrize(
    ("variable", "meant"),
    [
        ("PENSIEVE_SERVE_MAX_RUNING", "; did you mean PENSIEVE_SERVE_MAX_RUNNING?"),
        ("PENSIEVE_MAX_RUNNING", "; did you mean PENSIEVE_SERVE_MAX_RUNNING?"),
        ("PENSIEVE_SERVE_COLOUR_OF_THE_DOOR", ""),
    ],
)
def test_a_variable_that_sets_nothing_is_told(run: Run, variable: str, meant: str) -> None:
    result = run("serve", "--print-config", **{variable: "3"})
    assert result.code == 0
    assert result.stderr == f"pensieve serve: ignoring {variable}: no such option{meant}\n"


def test_variables_of_others_are_nobodys_business(run: Run) -> None:
    """Among them those that Kubernetes sets for a service of this name."""
    others = {
        "PENSIEVE_VERSION": "1.2",
        "PENSIEVE_DEBUG": "0",
        "PENSIEVE_API_KEY": "k",
        "PENSIEVE_SERVICE_HOST": "10.0.0.1",
        "PENSIEVE_PORT": "tcp://10.0.0.1:50051",
        "PENSIEVE_CHAT_SESSION": "mine",
        "PENSIEVE_TEST_WITHOUT_REDIS": "1",
    }
    for command in ("serve", "doctor"):
        result = run(command, "--help", **others)
        assert (result.code, result.stderr) == (0, "")


def test_the_doctor_looks_at_what_is_set_for_the_server() -> None:
    result = CliRunner().invoke(cli.cli, ["doctor"], env={"PENSIEVE_SERVE_STORE": "mysql://x"})
    assert result.exit_code == 2 and "expected memory:" in result.output


def test_a_server_of_ones_own_takes_its_options_from_its_owner(monkeypatch: pytest.MonkeyPatch) -> None:
    """``chat``, ``demo`` and tests start servers; what the user has set for another one is not for these."""
    monkeypatch.setenv("PENSIEVE_SERVE_STORE", "mysql://x")
    seen: dict[str, str] = {}

    def start(command: list[str], *, env: dict[str, str], **others: object) -> None:
        seen.update(env)
        raise OSError

    monkeypatch.setattr("pensieve.spawn.subprocess.Popen", start)
    with pytest.raises(OSError):
        ServerProcess("--model", "demo")
    assert "PATH" in seen and "PENSIEVE_SERVE_STORE" not in seen
