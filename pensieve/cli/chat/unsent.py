"""The typed line that is not answered yet, kept in a file of its session.

It is written before the turn is sent, with the turn's request id. Sending it again, in this chat or after a
crash, therefore sends the same turn, and history has it once.
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
    """Keyword arguments of ``Session.stream``; a retry must repeat them."""


class UnsentFolder:
    """One private file per session. ``folder`` None: nothing is written."""

    def __init__(self, folder: Path | None) -> None:
        self._folder = folder
        self._memory: dict[str, Unsent] = {}

    def get(self, session: str) -> Unsent | None:
        """Return the line kept for a session. ``session``: its id."""
        if session in self._memory or self._folder is None:
            return self._memory.get(session)
        try:
            saved = json.loads(self._path(self._folder, session).read_text("utf-8"))
            return Unsent(str(saved["text"]), str(saved["request_id"]), dict(saved["options"]))
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            log.warning("cannot read the unsent line of %s: %s", session, error)
            return None

    def put(self, session: str, unsent: Unsent) -> None:
        """Keep a line. If the disk fails, only a crash of the chat loses it."""
        self._memory[session] = unsent
        if self._folder is None:
            return
        path = self._path(self._folder, session)
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            write_private(path, json.dumps(asdict(unsent)))
        except OSError as error:
            log.warning("the unsent line is kept in memory only: %s", error)

    def drop(self, session: str) -> None:
        """Delete the line: it is answered or no longer wanted."""
        self._memory.pop(session, None)
        if self._folder is not None:
            with contextlib.suppress(OSError):
                self._path(self._folder, session).unlink(missing_ok=True)

    @staticmethod
    def _path(folder: Path, session: str) -> Path:
        return folder / f"{quote(session, safe='')}.json"


def write_private(path: Path, text: str) -> None:
    """Replace a file atomically by one that only its user can read. Raises OSError."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
    temporary.replace(path)
