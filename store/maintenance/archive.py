"""A backup file: JSON, one value per line, either whole or absent.

The first line identifies the file and its source. Then follows each session with its records as they were
stored (base64: the chain hash is over these very bytes). The last line counts them and carries the SHA-256 of
all bytes before it; a file without it is refused. ``.gz`` in the name compresses.

A backup is not a SQLite store, although ``move`` could write one. A damaged session is saved as it was found:
without a row, without its first records, or with malformed entries. A store would have to omit or change such
a session. Also, any changed byte of a backup is refused before anything is written; SQLite's own check does
not promise that.
"""

from __future__ import annotations

import base64
import contextlib
import fcntl
import glob
import gzip
import hashlib
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Final, cast
from uuid import uuid4

import msgspec

from pensieve.store._codec import StoredRecord
from pensieve.store._raw import Problem, RawSession, Remedy, make_finding
from pensieve.store._rules import CommittedRequest, Meta
from pensieve.store.contract import Key
from pensieve.store.records import State

FORMAT: Final = 1
"""New fields keep the number; a change of meaning raises it."""


class BadBackup(Exception):
    """The file is not a backup, is incomplete, or was made by a newer program."""


class ArchiveHead(msgspec.Struct, frozen=True, tag_field="line", tag="pensieve-backup"):
    format: int
    kind: str
    store_id: str
    made_ms: int


class ArchivedSession(msgspec.Struct, frozen=True, tag_field="line", tag="session"):
    """One session or tombstone; ``records`` lines of its log follow."""

    tenant: str
    session: str
    meta: Meta | None
    requests: dict[str, tuple[str, int]]
    """Request id → fingerprint, revision."""
    records: int
    damage: tuple[str, ...] = ()
    """The session's faults when it was read."""


class ArchivedRecord(msgspec.Struct, frozen=True, tag_field="line", tag="record"):
    """One record of the preceding session."""

    revision: int
    crc: int
    hash: str
    data: str
    """Base64."""


class Totals(msgspec.Struct, frozen=True):
    """Counts of the contents of a store or an archive."""

    sessions: int = 0
    tombstones: int = 0
    records: int = 0
    requests: int = 0
    bytes: int = 0
    """Bytes of records."""
    damaged: int = 0

    def plus(self, session: RawSession, *, damaged: bool = False) -> Totals:
        gone = session.meta is not None and session.meta.row.state is State.DELETED
        return Totals(
            sessions=self.sessions + (not gone),
            tombstones=self.tombstones + gone,
            records=self.records + len(session.log),
            requests=self.requests + len(session.requests),
            bytes=self.bytes + session.size,
            damaged=self.damaged + damaged,
        )


class ArchiveEnd(msgspec.Struct, frozen=True, tag_field="line", tag="end"):
    """The last line. ``sha256`` is over all bytes of the lines before."""

    total: Totals
    sha256: str


Line = ArchiveHead | ArchivedSession | ArchivedRecord | ArchiveEnd

_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Line)


class ArchiveWriter:
    """Writes sessions to a file that gets its name only in ``finish``."""

    def __init__(self, path: Path, *, replace: bool = False) -> None:
        """``replace``: replace an existing file. Otherwise ``finish`` raises FileExistsError."""
        self._path = path
        self._replace = replace
        self._partial = path.with_name(f".{path.name}.{uuid4().hex[:8]}.part")
        self._file: IO[bytes] | None = None
        self._out: IO[bytes] | None = None
        self._sum = hashlib.sha256()
        self.total = Totals()

    def __enter__(self) -> ArchiveWriter:
        if not self._replace and self._path.exists():
            raise self._exists_error()
        self._file = self._create_partial()
        self._remove_abandoned()
        self._out = self._file
        if self._path.suffix == ".gz":
            packed = gzip.GzipFile("", "wb", compresslevel=6, fileobj=self._file, mtime=0)
            self._out = cast("IO[bytes]", packed)
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _traceback: object) -> None:
        """Remove the file unless it was finished."""
        if isinstance(error, OSError) and error.filename is None and error.errno:
            error.filename = str(self._path)
        if self._file is not None:
            with contextlib.suppress(FileNotFoundError):
                self._partial.unlink()
            with contextlib.suppress(OSError):  # the unfinished file is discarded anyway
                self._file.close()

    def begin(self, kind: str, store_id: str, made_ms: int) -> None:
        self._write(ArchiveHead(FORMAT, kind, store_id, made_ms))

    def add(self, session: RawSession, damage: tuple[str, ...] = ()) -> None:
        """Write ``session`` with all its records, sound or not."""
        requests = {name: (known.fingerprint, known.revision) for name, known in session.requests.items()}
        self._write(
            ArchivedSession(
                tenant=session.key.tenant,
                session=session.key.session_id,
                meta=session.meta,
                requests=requests,
                records=len(session.log),
                damage=damage,
            )
        )
        for entry in session.log:
            data = base64.b64encode(entry.data).decode("ascii")
            self._write(ArchivedRecord(entry.revision, entry.crc, entry.head_hash, data))
        self.total = self.total.plus(session, damaged=bool(damage))

    def finish(self) -> Totals:
        """Write the last line, flush the file to the disk, and give it its name."""
        assert self._file is not None and self._out is not None
        self._write(ArchiveEnd(self.total, self._sum.hexdigest()))
        if self._out is not self._file:
            self._out.close()
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        if self._replace:
            self._partial.replace(self._path)
        else:
            try:
                os.link(self._partial, self._path)
            except FileExistsError:  # it was created meanwhile
                raise self._exists_error() from None
            self._partial.unlink()
        folder = os.open(self._path.parent, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)
        return self.total

    def _exists_error(self) -> FileExistsError:
        return FileExistsError(f"{self._path} already exists: move it away, or choose another name")

    def _create_partial(self) -> IO[bytes]:
        """Create the partial file and lock it; the lock shows that its program still runs."""
        while True:
            descriptor = os.open(self._partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with contextlib.suppress(OSError):  # a file system without locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            if os.fstat(descriptor).st_nlink:
                return os.fdopen(descriptor, "wb")
            os.close(descriptor)  # before the lock was taken, another program removed it as an abandoned file

    def _remove_abandoned(self) -> None:
        """Remove partial files of this name whose programs were killed."""
        for abandoned in self._path.parent.glob(f".{glob.escape(self._path.name)}.????????.part"):
            with contextlib.suppress(OSError), abandoned.open("rb") as file:
                if abandoned != self._partial:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    abandoned.unlink()

    def _write(self, line: Line) -> None:
        assert self._out is not None
        data = _encoder.encode(line) + b"\n"
        self._sum.update(data)
        self._out.write(data)


def read_sessions(path: Path) -> Iterator[RawSession]:
    """Yield every session of a backup, then check its sum and counts. Raises BadBackup or OSError."""
    with _lines(path) as lines:
        _head(path, lines)
        total = Totals()
        while True:
            line = lines.next()
            if isinstance(line, ArchiveEnd):
                break
            if not isinstance(line, ArchivedSession):
                raise BadBackup(f"{path}: line {lines.number} does not belong to a session")
            session = _session(path, line, lines)
            total = total.plus(session, damaged=bool(line.damage))
            yield session
        if line != ArchiveEnd(total, lines.sum_before):
            raise BadBackup(f"{path}: its checksum or its counts are wrong: it was changed or damaged")
        if lines.has_more():
            raise BadBackup(f"{path}: there is data after its last line")


def _head(path: Path, lines: _Lines) -> ArchiveHead:
    first = lines.next()
    if not isinstance(first, ArchiveHead):
        raise BadBackup(f"{path} is not a backup")
    if first.format > FORMAT:
        raise BadBackup(
            f"{path} has format {first.format}, this program reads up to {FORMAT}: upgrade Pensieve"
        )
    return first


def _session(path: Path, line: ArchivedSession, lines: _Lines) -> RawSession:
    log = []
    for _ in range(line.records):
        record = lines.next()
        if not isinstance(record, ArchivedRecord):
            raise BadBackup(f"{path}: line {lines.number} should be a record")
        try:
            data = base64.b64decode(record.data, validate=True)
        except ValueError as error:
            raise BadBackup(f"{path}: line {lines.number} cannot be read") from error
        log.append(StoredRecord(record.revision, data, record.crc, record.hash))
    requests = {name: CommittedRequest(*known) for name, known in line.requests.items()}
    key = Key(line.tenant, line.session)
    lost = make_finding(key, Problem.ROW, "its row could not be read", Remedy.REBUILD)
    return RawSession(key, line.meta, tuple(log), requests, (lost,) if line.meta is None else ())


class _Lines:
    """The lines of a backup, hashed as they are read."""

    def __init__(self, path: Path, file: IO[bytes]) -> None:
        self._path = path
        self._file = file
        self._sum = hashlib.sha256()
        self.number = 0
        self.sum_before = ""
        """Hash of all lines before the last one read."""

    def next(self) -> Line:
        data = self._read()
        if not data.endswith(b"\n") and self.number > 0:
            raise BadBackup(f"{self._path} is incomplete: it ends in the middle")
        self.number += 1
        self.sum_before = self._sum.hexdigest()
        self._sum.update(data)
        try:
            line: Line = _decoder.decode(data)
        except (msgspec.MsgspecError, ValueError) as error:
            what = " is not a backup" if self.number == 1 else f": line {self.number} cannot be read"
            raise BadBackup(f"{self._path}{what}") from error
        return line

    def has_more(self) -> bool:
        return bool(self._read())

    def _read(self) -> bytes:
        try:
            return self._file.readline()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise BadBackup(f"{self._path} ends in the middle or is damaged ({error})") from error


@contextlib.contextmanager
def _lines(path: Path) -> Iterator[_Lines]:
    with path.open("rb") as raw:
        packed = raw.read(2) == b"\x1f\x8b"
        raw.seek(0)
        yield _Lines(path, cast("IO[bytes]", gzip.GzipFile(fileobj=raw)) if packed else raw)
