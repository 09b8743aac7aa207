"""The line that was typed and is not answered yet, kept in a file of its session until it is.

It is written before the turn is sent, with the turn's request id: whoever sends it again, in this chat or after a
crash of it, sends the same turn, and history has it once.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import quote

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Unsent:
    """A turn that may or may not have reached the server."""

    text: str
    request_id: str
    options: dict[str, Any] = field(default_factory=dict)
    """Keyword arguments of ``Session.stream``: the same turn has the same ones."""


class UnsentFolder:
    """One file per session, readable by its user alone. ``folder`` None: nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, Unsent] = {}

    def get(self, session: str) -> Unsent | None:
        """What was kept for the session ``session``, an id."""
        if session in self._memory or self._folder is None:
            return self._memory.get(session)
        try:
            kept = json.loads(self._path(self._folder, session).read_text("utf-8"))
            return Unsent(str(kept["text"]), str(kept["request_id"]), dict(kept["options"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("what was kept of %s cannot be read: %s", session, error)
            return None

    def put(self, session: str, unsent: Unsent) -> None:
        """Keep it. A disk that takes nothing costs only what a crash of the chat would lose."""
        self._memory[session] = unsent
        if self._folder is None:
            return
        path = self._path(self._folder, session)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, json.dumps(asdict(unsent)))
        except OSError as error:
            log.warning("what was typed is kept in memory only: %s", error)

    def drop(self, session: str) -> None:
        """It is answered, or given up."""
        self._memory.pop(session, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path(self._folder, session).unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, session: str) -> Path:
        return folder / f"{quote(session, safe='')}.json"


def write_private(path: Path, text: str) -> None:
    """Replace a file in one step by one that nobody else can read. Raises OSError."""
    beside = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    beside.replace(path)
