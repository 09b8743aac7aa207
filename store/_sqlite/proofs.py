"""Checksums of what the history file derives from its records: a row that fails one is made again from them.

SQLite's pages carry no checksum. A changed byte in a row of ``sessions`` or ``requests`` would be read as if it had
been written.
"""

from __future__ import annotations

import json
import zlib

from pensieve.store.contract import Key


def crc_of_row(key: Key, meta: bytes) -> int:
    """Checksum of a row of ``sessions``: its name and its metadata, which all other columns follow from."""
    name = f"{key.tenant}\0{key.session_id}\0"
    return zlib.crc32(meta, zlib.crc32(name.encode("utf-8", "surrogatepass")))


def crc_of_request(session: int, request_id: str, fingerprint: str, revision: int) -> int:
    """Checksum of a row of ``requests``."""
    text = f"{session}\0{request_id}\0{fingerprint}\0{revision}"
    return zlib.crc32(text.encode("utf-8", "surrogatepass"))


def name_of(key: Key) -> str:
    """The session's name as its first record carries it: a checksum, then JSON."""
    text = json.dumps([key.tenant, key.session_id], separators=(",", ":"))
    return f"{zlib.crc32(text.encode()):08x}{text}"


def named(text: object) -> Key | None:
    """The inverse of ``name_of``; None for anything that it did not make."""
    if not isinstance(text, str) or len(text) < 9:
        return None
    try:
        tenant, session_id = json.loads(text[8:])
        key = Key(tenant, session_id)
        return key if name_of(key) == text else None
    except (ValueError, TypeError):
        return None
