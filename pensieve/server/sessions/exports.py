"""The JSON lines of exported sessions, written and read. docs/personal-data.md shows them.

A session is one ``session`` line, a ``record`` line for each of its records, and a ``session-end`` line with the
SHA-256 of the bytes before. An ``end`` line follows the last session. Without these ends, lines were cut off.

An import takes the live history, as a fork does. Everything else, such as superseded items and the results of turns,
is in the lines to be read.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Final, NoReturn

import msgspec

from pensieve.core import packed_length
from pensieve.errors import DataLoss, InvalidArgument
from pensieve.store import HistoryStore, Key
from pensieve.store.records import History, Record, SessionRow

FORMAT: Final = 1
"""New fields keep the number; a change of meaning raises it."""
MAX_IMPORT_BYTES: Final = 64 << 20
CHUNK_BYTES: Final = 256 << 10
_TOKEN_BYTES: Final = 4


class SessionHeadLine(msgspec.Struct, frozen=True, tag_field="line", tag="session", omit_defaults=True):
    format: int
    session: str
    """Id."""
    subject: str = ""
    create_ms: int = 0
    update_ms: int = 0
    expire_ms: int = 0
    forked_from: str = ""
    forked_from_item: int = 0


class RecordLine(msgspec.Struct, frozen=True, tag_field="line", tag="record"):
    record: Record


class SessionEndLine(msgspec.Struct, frozen=True, tag_field="line", tag="session-end", omit_defaults=True):
    records: int
    sha256: str
    damage: str = ""
    """Why records are missing behind the last one."""


class EndLine(msgspec.Struct, frozen=True, tag_field="line", tag="end", omit_defaults=True):
    sessions: int
    undecided: tuple[str, ...] = ()
    """Ids of damaged sessions that were left out: whom they are about cannot be read."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(SessionHeadLine | RecordLine | SessionEndLine | EndLine)


def encode_line(line: msgspec.Struct) -> bytes:
    return _encoder.encode(line) + b"\n"


async def session_lines(store: HistoryStore, row: SessionRow) -> AsyncIterator[bytes]:
    """Yield the lines of a session, to the revision of ``row`` or a later one. Raises the errors of ``read_slice``,
    except that the lines of a damaged session end at the damage."""
    key, digest, count, damage = Key(row.tenant, row.session_id), hashlib.sha256(), 0, ""
    line = encode_line(
        SessionHeadLine(
            format=FORMAT,
            session=row.session_id,
            subject=row.config.subject,
            create_ms=row.create_ms,
            update_ms=row.update_ms,
            expire_ms=row.expire_ms,
            forked_from=row.forked_from,
            forked_from_item=row.forked_from_item,
        )
    )
    digest.update(line)
    yield line
    revision, chain = 0, ""
    while revision < row.revision and not damage:
        try:
            piece = await store.read_slice(key, after_revision=revision, head_hash=chain)
        except DataLoss as error:
            if error.reason != "HISTORY_CORRUPT":
                raise
            damage = error.message
            continue
        for one in piece.records:
            line = encode_line(RecordLine(one.record))
            digest.update(line)
            yield line
        count += len(piece.records)
        revision, chain = piece.records[-1].record.revision, piece.records[-1].head_hash
    yield encode_line(SessionEndLine(count, digest.hexdigest(), damage))


async def chunks(lines: AsyncIterator[bytes]) -> AsyncGenerator[bytes, None]:
    """Regroup lines into chunks of at most ``CHUNK_BYTES``."""
    waiting = bytearray()
    async for line in lines:
        waiting += line
        while len(waiting) >= CHUNK_BYTES:
            yield bytes(waiting[:CHUNK_BYTES])
            del waiting[:CHUNK_BYTES]
    if waiting:
        yield bytes(waiting)


@dataclass(frozen=True, slots=True)
class ImportedSession:
    """A whole session as its lines give it."""

    session_id: str
    history: History
    sha256: str


class ImportReader:
    """Reads one session's lines from chunks of bytes, and keeps its live history only."""

    def __init__(self) -> None:
        self._rest = bytearray()
        self._size = 0
        self._line = 0
        self._digest = hashlib.sha256()
        self._session: SessionHeadLine | None = None
        self._history = History()
        self._records = 0
        self._end: SessionEndLine | None = None

    def feed(self, data: bytes) -> None:
        """Read more bytes. Raises InvalidArgument, which names the line and never quotes it."""
        self._size += len(data)
        if self._size > MAX_IMPORT_BYTES:
            raise InvalidArgument.field("data", f"has more than {MAX_IMPORT_BYTES} bytes")
        begin = len(self._rest)
        self._rest += data
        end = self._rest.rfind(b"\n", begin) + 1
        if end:
            lines = bytes(self._rest[:end]).split(b"\n")[:-1]
            del self._rest[:end]
            self._read(lines)

    def finish(self) -> ImportedSession:
        """Return the session. Raises InvalidArgument unless its lines are whole and agree with each other."""
        if self._session is None or self._end is None or self._rest:
            raise InvalidArgument.field("data", "is cut short: the line session-end is missing")
        if problem := _problem(self._history):
            raise InvalidArgument.field("data", problem)
        return ImportedSession(self._session.session, self._history, self._end.sha256)

    def _read(self, lines: Sequence[bytes]) -> None:
        records = list[Record]()
        for raw in lines:
            self._line += 1
            try:
                line = _decoder.decode(raw)
            except (msgspec.MsgspecError, ValueError, RecursionError):
                self._refuse("is not a line of an export")
            match line:
                case RecordLine() if self._session is not None and self._end is None:
                    records.append(line.record)
                case SessionHeadLine() if self._session is None:
                    if line.format > FORMAT:
                        self._refuse(
                            f"has the format {line.format} of a newer server; this one reads up to {FORMAT}: upgrade it"
                        )
                    self._session = line
                case SessionEndLine() if self._session is not None and self._end is None:
                    self._check_end(line, self._records + len(records))
                    self._end = line
                case EndLine() if self._end is not None:
                    pass
                case _:
                    self._refuse("is out of place: one session's lines are expected")
            self._digest.update(raw + b"\n")
        try:
            self._history = self._history.after((record, "") for record in records)
        except ValueError:
            self._refuse("is after records that do not follow each other")
        self._records += len(records)

    def _check_end(self, line: SessionEndLine, records: int) -> None:
        if line.damage:
            self._refuse("says that the session is damaged: only whole sessions are imported")
        if (line.records, line.sha256) != (records, self._digest.hexdigest()):
            self._refuse("does not fit the lines before it: they were changed or lost")

    def _refuse(self, problem: str) -> NoReturn:
        raise InvalidArgument.field("data", f"line {self._line} {problem}") from None


def _problem(history: History) -> str:
    """Return the fault of a history that a client may have made up, or ""."""
    number = 0
    for item in history.items:
        if not number < item.number < 1 << 53:
            return "has item numbers that do not grow"
        number = item.number
        if len(item.tokens) % _TOKEN_BYTES or not 0 <= item.prefix_tokens <= packed_length(item.tokens):
            return f"has an item {number} with impossible tokens"
    return "" if 0 <= history.hidden_before < 1 << 53 else "has an impossible item number"
