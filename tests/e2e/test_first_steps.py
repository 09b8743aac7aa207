"""The tutorial is done as it stands there: a program, the end of its server, and another server goes on."""

from __future__ import annotations

import contextlib
import io
import re
from pathlib import Path

import pytest

from pensieve.spawn import ServerProcess

PAGE = Path(__file__).parents[2] / "docs/first-steps.md"


@pytest.mark.timeout(200)
def test_first_steps(tmp_path: Path) -> None:
    programs = re.findall(
        r"^```python\n(.*?)^```", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL
    )
    assert len(programs) == 2, "one before the restart, one after it"
    said = []
    for program in programs:
        store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
        with ServerProcess("--model", "demo", "--store", store, "--threads", "1") as server:
            text = program.replace("127.0.0.1:50051", server.target)
            assert server.target in text
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile(text, str(PAGE), "exec"), {})
            said.append(out.getvalue())
            server.kill()
    assert "Your name is Ada." in said[0] and "were new" in said[0]
    assert "4 items are still there" in said[1] and "Your name is Ada." in said[1]
