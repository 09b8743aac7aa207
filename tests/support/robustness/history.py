"""What clients did and saw: one operation after another, as lines of JSON.

Times are nanoseconds of the recording process's monotonic clock. ``start`` is before the request was sent and ``end``
after its outcome was known, so an operation that took effect did so between the two, or, when its outcome is unknown,
at any time after ``start``.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import BinaryIO

import msgspec

ItemSeen = tuple[int, str, str, tuple[int, ...], str]
"""Number, role, text, tokens (empty: not shown), request id."""


class TurnSeen(msgspec.Struct, frozen=True, kw_only=True):
    """A turn as the server told it."""

    state: str
    revision: int = 0
    base_revision: int = 0
    context_tokens: int = 0
    output_tokens: int = 0
    finish: str = ""
    input: tuple[ItemSeen, ...] = ()
    output: ItemSeen | None = None


class Operation(msgspec.Struct, kw_only=True, omit_defaults=True):
    """One call of a client's, with all its retries."""

    client: int
    op: str
    """create, fork, send, edit, regenerate, attach, cancel, get_turn, read, look, rewind, delete."""
    session: str = ""
    request_id: str = ""
    start: int
    end: int = 0
    ok: bool = False
    """The answer was heard to its end (of a turn, ``turn`` has it). Else its outcome is unknown, or ``error`` tells."""
    error: str = ""
    """Reason, when there is one."""
    detail: str = ""
    text: str = ""
    """Input of a turn; how a cancel keeps ("partial", "nothing"); the session that was forked."""
    item: int | None = None
    """What an edit replaces from, a rewind keeps to, a fork copies to."""
    turn: TurnSeen | None = None
    revision: int = 0
    items: tuple[ItemSeen, ...] | None = None
    item_count: int = 0


class Recorder:
    """All operations of a run; also in a file when there is one."""

    def __init__(self, path: Path | None = None) -> None:
        self.operations: list[Operation] = []
        self._file: BinaryIO | None = path.open("wb") if path is not None else None

    def begin(self, client: int, op: str, session: str = "", request_id: str = "") -> Operation:
        return Operation(
            client=client, op=op, session=session, request_id=request_id, start=time.monotonic_ns()
        )

    def done(self, operation: Operation) -> None:
        """Its outcome is in it."""
        operation.end = time.monotonic_ns()
        self.operations.append(operation)
        if self._file is not None:
            self._file.write(msgspec.json.encode(operation) + b"\n")

    def close(self) -> None:
        if self._file is not None:
            self._file.close()


def read_history(path: Path) -> Iterator[Operation]:
    """What a ``Recorder`` wrote."""
    with path.open("rb") as lines:
        for line in lines:
            yield msgspec.json.decode(line, type=Operation)


def by_session(operations: Iterable[Operation]) -> dict[str, list[Operation]]:
    sessions: dict[str, list[Operation]] = {}
    for operation in operations:
        if operation.session:
            sessions.setdefault(operation.session, []).append(operation)
    return sessions
