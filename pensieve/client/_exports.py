"""Lines of exported sessions: put together from a stream's pieces, and divided into the requests of imports. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Final

from pensieve.errors import InvalidArgument
from pensieve.v1 import pensieve_pb2 as pb

PIECE_BYTES: Final = 1 << 20
_SESSION, _SESSION_END, _END = b'{"line":"session",', b'{"line":"session-end",', b'{"line":"end",'


class LineJoiner:
    """Puts lines together from pieces that are cut anywhere."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Return the lines that ``data`` completes, each with its line feed."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [line + b"\n" for line in lines]


def divide(lines: Iterable[bytes]) -> list[bytes]:
    """Return the lines of each session in a whole export. Raises InvalidArgument if some are missing at its end."""
    sessions, lines_of_session = list[bytes](), list[bytes]()
    end: bytes | None = None
    for line in lines:
        if end is not None or (line.startswith(_SESSION) and lines_of_session):
            break
        if line.startswith(_END):
            end = line
            continue
        lines_of_session.append(line)
        if line.startswith(_SESSION_END):
            sessions.append(b"".join(lines_of_session))
            lines_of_session = []
    else:
        if end is not None and not lines_of_session and _count(end) == len(sessions):
            return sessions
    raise InvalidArgument.field(
        "lines",
        "are not one whole export: it ends with a line 'end', behind as many sessions as that line says",
    )


def _count(end: bytes) -> int:
    try:
        return int(json.loads(end)["sessions"])
    except (ValueError, TypeError, KeyError):
        return -1


def import_requests(
    session: bytes, session_id: str | None, *, new_id: bool
) -> tuple[pb.ImportSessionRequest, ...]:
    """Divide a session's lines into the messages of one call."""
    pieces = [session[at : at + PIECE_BYTES] for at in range(0, len(session), PIECE_BYTES)]
    first = pb.ImportSessionRequest(data=pieces[0], session_id=session_id or "", new_id=new_id)
    return (first, *(pb.ImportSessionRequest(data=piece) for piece in pieces[1:]))
