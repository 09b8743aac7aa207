"""The servers of an act: with a history on disk, and there again when somebody has ended them."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from pensieve.own_server import OwnServer


@contextlib.contextmanager
def own_servers(*commands: Sequence[str]) -> Iterator[list[OwnServer]]:
    """Servers with these options of ``pensieve serve`` each, started side by side; they and their histories end with
    the block. Raises SpawnError."""
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="pensieve-demo-")))
        made = [
            OwnServer(*options, "--store", f"sqlite:///{folder / f'history-{number}.sqlite3'}")
            for number, options in enumerate(commands, 1)
        ]
        for one in made:
            stack.callback(one.close)
        yield [stack.enter_context(one) for one in made]
