"""Completion in a shell: the scripts are there, and words, files and sessions are offered."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import BashComplete

from pensieve.cli import main as cli
from pensieve.client import Client
from support.service.fake_server import FakeServerThread
from support.sources import ROOT

PENSIEVE = Path(sys.executable).parent / "pensieve"


def offered(line: str) -> list[str]:
    """What a shell is offered for the last word of ``line``, as ``TYPE,VALUE`` each."""
    words = line.split(" ")[1:]
    completion = BashComplete(cli.cli, {}, "pensieve", "_PENSIEVE_COMPLETE")
    return [f"{item.type},{item.value}" for item in completion.get_completions(words[:-1], words[-1])]


def test_a_shell_takes_the_line_of_the_page() -> None:
    page = (ROOT / "docs/install.md").read_text()
    (line,) = re.findall(r"`(eval .*bash_source.*)`", page)
    path = f"{PENSIEVE.parent}{os.pathsep}{os.environ['PATH']}"
    result = subprocess.run(
        ["bash", "--norc", "-c", f"{line}\ncomplete -p pensieve"], env=os.environ | {"PATH": path},
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "_pensieve_completion pensieve" in result.stdout


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_the_script_for_each_shell(shell: str) -> None:
    result = subprocess.run(
        [PENSIEVE], env=os.environ | {"_PENSIEVE_COMPLETE": f"{shell}_source"}, capture_output=True, text=True,
        timeout=60, check=True,
    )  # fmt: skip
    assert "_PENSIEVE_COMPLETE" in result.stdout


def test_commands_options_words_and_files() -> None:
    assert {"plain,serve", "plain,sessions", "plain,simulate", "plain,store"} == set(offered("pensieve s"))
    assert offered("pensieve serve --max-q") == ["plain,--max-queued", "plain,--max-queued-tokens"]
    assert offered("pensieve serve --policy w") == ["plain,whole-session"]
    assert offered("pensieve serve --model ") == ["plain,demo", "plain,smollm2", "file,"]
    assert offered("pensieve serve --tls-cert ce") == ["file,ce"]
    assert offered("pensieve serve --cost-profile e") == ["plain,estimate", "file,e"]
    assert offered("pensieve store che") == ["plain,check"]


def test_sessions_of_the_target(monkeypatch: pytest.MonkeyPatch) -> None:
    with FakeServerThread() as server:
        with Client(server.target) as client:
            client.create_session(session_id="ada-1")
            client.create_session(session_id="rex-1")
        line = f"pensieve chat --target {server.target} --session a"
        assert offered(line) == ["plain,ada-1"]
        monkeypatch.setenv("PENSIEVE_CHAT_TARGET", server.target)
        assert offered("pensieve chat --session r") == ["plain,rex-1"]
        monkeypatch.delenv("PENSIEVE_CHAT_TARGET")
    assert offered(line) == [], "nobody answers"
    assert offered("pensieve chat --session a") == []
