"""Read a session from the history file, and report every contradiction between its rows and its records.

SQLite's pages carry no checksum, so rows of ``sessions`` and ``requests`` have checksums of their own.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import zlib
from collections.abc import Iterator, Sequence
from typing import Any, Final, NamedTuple

import msgspec

from pensieve.store._codec import StoredRecord
from pensieve.store._listing import mark_entries_of_log
from pensieve.store._raw import Finding, Problem, RawSession, Remedy, make_finding
from pensieve.store._rules import CommittedRequest, Meta
from pensieve.store.contract import Key
from pensieve.store.records import State

ORPHANS: Final = """
WITH RECURSIVE has(session) AS (
    SELECT MIN(session) FROM records
    UNION ALL
    SELECT (SELECT MIN(session) FROM records WHERE session > has.session) FROM has WHERE has.session IS NOT NULL
)
SELECT has.session, (SELECT named FROM records WHERE session = has.session AND revision = 1)
    FROM has WHERE has.session IS NOT NULL AND has.session NOT IN (SELECT id FROM sessions NOT INDEXED)
"""
"""Numbers of sessions that have records but no row, with the name in their first record."""


def crc_of_row(key: Key, meta: bytes) -> int:
    """Checksum of a row of ``sessions``: its name and its metadata, from which all other columns follow."""
    name = f"{key.tenant}\0{key.session_id}\0"
    return zlib.crc32(meta, zlib.crc32(name.encode("utf-8", "surrogatepass")))


def crc_of_request(session: int, request_id: str, fingerprint: str, revision: int) -> int:
    text = f"{session}\0{request_id}\0{fingerprint}\0{revision}"
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def name_of(key: Key) -> str:
    """Encode the session's name for its first record: a checksum, then JSON."""
    text = json.dumps([key.tenant, key.session_id], separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}{text}"


def key_from_name(text: object) -> Key | None:
    """Decode ``name_of``'s text; None for any other text."""
    if not isinstance(text, str) or len(text) < 9:
        return None
    try:
        tenant, session_id = json.loads(text[8:])
        key = Key(tenant, session_id)
        return key if name_of(key) == text else None
    except (ValueError, TypeError):
        return None


CHECKSUM_SCHEMA: Final = 4
"""First schema with checksums of derived rows."""
SUMS_SCHEMA: Final = 2
"""First schema with sizes, sums and labels."""

_meta_decoder = msgspec.msgpack.Decoder(Meta)


class ReadRow(NamedTuple):
    """A decoded row of ``sessions``. ``meta`` is None if its checksum fails or it cannot be decoded."""

    meta: Meta | None
    problem: str
    claimed: tuple[int, str] | None
    """Newest revision and chain hash according to the row, proven or not."""


def columns_of(meta: Meta) -> tuple[int, int, int, int]:
    """Return update_ms, expire_ms, deleted and leased of the row with this metadata."""
    row = meta.row
    return row.update_ms, row.expire_ms, int(row.state is State.DELETED), int(meta.lease is not None)


def read_row(key: Key, crc: object, blob: Any) -> ReadRow:
    """Decode and verify a row. ``crc``: None in a file without checksums. ``blob``: any value from the file."""
    try:
        meta = _meta_decoder.decode(blob)
    except (msgspec.MsgspecError, TypeError, ValueError) as error:
        return ReadRow(None, f"its row cannot be decoded ({type(error).__name__})", None)
    if (meta.row.tenant, meta.row.session_id) != (key.tenant, key.session_id):
        return ReadRow(None, "its row is that of another session", None)
    if crc is not None and crc != crc_of_row(key, blob):
        return ReadRow(None, "its row fails its checksum", (meta.row.revision, meta.row.head_hash))
    return ReadRow(meta, "", (meta.row.revision, meta.row.head_hash))


def find_number(connection: sqlite3.Connection, key: Key, schema: int = CHECKSUM_SCHEMA) -> int | None:
    """Find the session's number by its row or its first record. Raises sqlite3's errors."""
    found = connection.execute(
        "SELECT id FROM sessions WHERE tenant = ? AND session_id = ?", (key.tenant, key.session_id)
    ).fetchone()
    if found is None and schema >= CHECKSUM_SCHEMA:
        found = connection.execute("SELECT session FROM records WHERE named = ?", (name_of(key),)).fetchone()
    return None if found is None else int(found[0])


def read_raw(
    connection: sqlite3.Connection, key: Key, number: int, schema: int = CHECKSUM_SCHEMA
) -> RawSession:
    """Read all that is stored of the session with this number. Raises sqlite3's errors."""
    kept = ", bytes" if schema >= SUMS_SCHEMA else ", 0"
    kept += ", crc, requests_sum, marks, labels" if schema >= CHECKSUM_SCHEMA else ", NULL, 0, 0, 0"
    row = connection.execute(
        f"SELECT update_ms, expire_ms, deleted, leased, meta, tenant, session_id{kept} FROM sessions WHERE id = ?",
        (number,),
    ).fetchone()
    log = tuple(
        to_stored_record(*one)
        for one in connection.execute(
            "SELECT revision, data, crc, head_hash FROM records WHERE session = ? ORDER BY revision",
            (number,),
        )
    )
    requests, total, wrong = _requests(connection, number, schema)
    findings = [make_finding(key, Problem.REQUESTS, detail, Remedy.REBUILD) for detail in wrong]
    if row is None:
        lost = make_finding(key, Problem.ROW, "its row is missing", Remedy.REBUILD)
        return RawSession(key, None, log, requests, (lost, *findings))
    *columns, blob, tenant, session_id, size, crc, requests_sum, marks, labels = row
    stamp = hashlib.sha1(repr(blob).encode(), usedforsecurity=False).hexdigest()
    if (tenant, session_id) != (key.tenant, key.session_id):
        read = ReadRow(None, "its row has another name", None)
    else:
        read = read_row(key, crc, blob)
    if read.meta is None:
        lost = make_finding(key, Problem.ROW, read.problem, Remedy.REBUILD)
        return RawSession(key, None, log, requests, (lost, *findings), stamp, read.claimed)
    findings += _column_findings(key, read.meta, columns)
    if schema >= CHECKSUM_SCHEMA and total != requests_sum:
        detail = "its request ids are not those that were written"
        findings.append(make_finding(key, Problem.REQUESTS, detail, Remedy.REBUILD))
    if schema >= SUMS_SCHEMA:
        findings += _derived_findings(connection, key, number, read.meta, log, size)
    if schema >= CHECKSUM_SCHEMA:
        findings += _count_findings(connection, key, number, read.meta, marks, labels)
    return RawSession(key, read.meta, log, requests, tuple(findings), stamp)


def to_stored_record(revision: object, data: object, crc: object, head_hash: object) -> StoredRecord:
    """Convert a row of ``records``. A malformed row becomes a record that no check accepts."""
    return StoredRecord(
        revision if isinstance(revision, int) else -1,
        data if isinstance(data, bytes) else b"",
        crc if isinstance(crc, int) else -1,
        head_hash if isinstance(head_hash, str) else "",
    )


def verified_request(
    session: int, request_id: object, fingerprint: object, revision: object, crc: object
) -> CommittedRequest | None:
    """Return None if the row of ``requests`` fails its checksum."""
    if not (isinstance(request_id, str) and isinstance(fingerprint, str) and isinstance(revision, int)):
        return None
    right = crc_of_request(session, request_id, fingerprint, revision) == crc
    return CommittedRequest(fingerprint, revision) if right else None


def _requests(
    connection: sqlite3.Connection, number: int, schema: int
) -> tuple[dict[str, CommittedRequest], int, list[str]]:
    """Return the sound rows, the sum of their checksums, and what is wrong with the others."""
    requests: dict[str, CommittedRequest] = {}
    total = bad = 0
    crc_column = "crc" if schema >= CHECKSUM_SCHEMA else "NULL"
    for name, fingerprint, revision, crc in connection.execute(
        f"SELECT request_id, fingerprint, revision, {crc_column} FROM requests WHERE session = ?", (number,)
    ):
        if crc is None:
            requests[str(name)] = CommittedRequest(
                str(fingerprint), revision if isinstance(revision, int) else -1
            )
        elif (known := verified_request(number, name, fingerprint, revision, crc)) is None:
            bad += 1
        else:
            requests[name] = known
            total += crc
    return requests, total, [f"{bad} of its request ids fail their checksum"] if bad else []


def _derived_findings(
    connection: sqlite3.Connection, key: Key, number: int, meta: Meta, log: Sequence[StoredRecord], size: int
) -> Iterator[Finding]:
    """Report wrong derived data: size, labels and marks."""
    right_size = sum(len(entry.data) for entry in log)
    if size != right_size:
        detail = f"its records take {right_size} bytes, column bytes is {size}"
        yield make_finding(key, Problem.LISTING, detail, Remedy.REBUILD)
    row = meta.row
    labels = connection.execute(
        "SELECT name, value, tenant, update_ms, session_id FROM labels WHERE session = ?", (number,)
    )
    right = {(name, value, row.tenant, row.update_ms, row.session_id) for name, value in row.labels.items()}
    if set(labels) != right:
        yield make_finding(
            key, Problem.LISTING, "it is listed under other labels than its own", Remedy.REBUILD
        )
    found_by = connection.execute(
        "SELECT found_by, time_ms, revision, tenant FROM marks WHERE session = ?", (number,)
    )
    if set(found_by) != {(*one, row.tenant) for one in mark_entries_of_log(log)}:
        yield make_finding(
            key, Problem.LISTING, "its turns are indexed under other marks than their own", Remedy.REBUILD
        )


def _count_findings(
    connection: sqlite3.Connection, key: Key, number: int, meta: Meta, marks: int, labels: int
) -> Iterator[Finding]:
    ((kept,),) = connection.execute("SELECT COUNT(*) FROM marks WHERE session = ?", (number,))
    if kept != marks or labels != len(meta.row.labels):
        detail = "it has lost or gained marks or labels"
        yield make_finding(key, Problem.LISTING, detail, Remedy.REBUILD)
    if meta.row.state is not State.DELETED:
        first = connection.execute(
            "SELECT named FROM records WHERE session = ? AND revision = 1", (number,)
        ).fetchone()
        if first is not None and first[0] != name_of(key):
            yield make_finding(key, Problem.LISTING, "its first record does not name it", Remedy.REBUILD)


def _column_findings(key: Key, meta: Meta, columns: list[Any]) -> Iterator[Finding]:
    """Report columns that do not match ``meta``; listing, expiry and leases are found by them."""
    names = ("update_ms", "expire_ms", "deleted", "leased")
    for name, found, right in zip(names, columns, columns_of(meta), strict=True):
        if found != right:
            detail = f"column {name} is {found}, its row says {right}"
            problem = Problem.EXPIRY if name == "expire_ms" else Problem.LISTING
            yield make_finding(key, problem, detail, Remedy.REBUILD)
