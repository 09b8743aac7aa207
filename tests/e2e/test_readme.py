"""The session on the README's first screen is run as it stands there."""

from __future__ import annotations

import doctest
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.spawn import ServerProcess
from support.lengths import at_length

README = Path(__file__).parents[2] / "README.md"


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    options = ("--model", "demo", "--store", "memory:", "--threads", "1", "--http", "127.0.0.1:0")
    with ServerProcess(*options) as running:
        yield running


@pytest.mark.timeout(200)
def test_the_session_in_the_readme(server: ServerProcess) -> None:
    block = re.search(r"```pycon\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    text = block[1].replace("127.0.0.1:50051", server.target)
    example = doctest.DocTestParser().get_doctest(text, {}, "README", str(README), 0)
    assert len(example.examples) == 8
    scope = example.globs
    result = doctest.DocTestRunner().run(example, clear_globs=False)
    scope["client"].close()
    assert result.failed == 0


@pytest.mark.timeout(200)
def test_commands_against_the_server_of_the_readme(server: ServerProcess, tmp_path: Path) -> None:
    """Every line of the README that talks to its server, in a shell that has the environment on its path."""
    (tmp_path / "examples").symlink_to(README.parent / "examples")
    text = README.read_text(encoding="utf-8")
    text = text.replace("--conversations 20 ", f"--conversations {at_length(4, 20)} ")
    lines = re.findall(r"^\$ (pensieve \w+ .*--target .*127\.0\.0\.1:50051)$", text, re.MULTILINE)
    assert {line.split()[1] for line in lines} == {"chat", "replay", "sessions"}
    lines += re.findall(r"^\$ (.*127\.0\.0\.1:8080.*)$", text, re.MULTILINE)[1:]
    programs = [line.split()[0] for line in lines[-2:]]
    assert programs == ["curl", "OPENAI_BASE_URL=http://127.0.0.1:8080/v1"], (
        "behind the line that starts the server"
    )
    if shutil.which("curl") is None:
        del lines[-2]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    # Other tests run beside this one: how late the replay's own loop is says nothing here.
    environment = os.environ | {"PATH": path, "PENSIEVE_REPLAY_MAX_LAG": "60"}
    for line in lines:
        done = subprocess.run(
            line.replace("127.0.0.1:50051", server.target).replace("127.0.0.1:8080", server.http), shell=True,
            cwd=tmp_path, text=True, timeout=150, input="My name is Ada.\n/quit\n",
            env=environment, capture_output=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, f"{line}: {done.stderr}"
        assert done.stdout.strip() and '"error":{' not in done.stdout, f"{line}: {done.stdout}"
    assert "Your name is Ada." in done.stdout and "Rex" in done.stdout, (
        "what the last of them, the example, says"
    )
