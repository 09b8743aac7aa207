"""``pensieve`` with the fake engine behind each server, those too that a command starts for itself. Run as a script."""

from __future__ import annotations

import functools
import sys

from pensieve.cli.main import main
from pensieve.debug import child_environment
from pensieve.spawn import ServerProcess
from support.engine.fake_engine import BUILDER

PROGRAM = (sys.executable, "-P", __file__)


def environment() -> dict[str, str]:
    """With which the script finds what it imports."""
    return {"PYTHONPATH": child_environment()["PYTHONPATH"]}


if __name__ == "__main__":
    ServerProcess.program = PROGRAM[1:]
    if sys.argv[1] == "serve":
        from pensieve.server import app
        from support.service.kept_tokenizer import use_kept_tokenizers

        use_kept_tokenizers()
        app.run = functools.partial(app.run, builder=BUILDER)
    main()
