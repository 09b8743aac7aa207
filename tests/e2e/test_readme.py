"""The session on the README's first screen is run as it stands there."""

from __future__ import annotations

import doctest
import re
from pathlib import Path

import pytest

from pensieve.spawn import ServerProcess

README = Path(__file__).parents[2] / "README.md"


@pytest.mark.timeout(200)
def test_the_session_in_the_readme() -> None:
    block = re.search(r"```pycon\n(.*?)```", README.read_text(encoding="utf-8"), re.DOTALL)
    assert block is not None
    with ServerProcess("--model", "demo", "--store", "memory:", "--threads", "1") as server:
        text = block[1].replace("127.0.0.1:50051", server.target)
        example = doctest.DocTestParser().get_doctest(text, {}, "README", str(README), 0)
        assert len(example.examples) == 8
        scope = example.globs
        result = doctest.DocTestRunner().run(example, clear_globs=False)
        scope["client"].close()
    assert result.failed == 0
