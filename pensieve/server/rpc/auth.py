"""Who is calling and what they may do. Deny by default.

A caller sends ``authorization: Bearer ck_<id>_<secret>``. The key file (TOML) keeps only the SHA-256 of each secret::

    [[key]]
    id = "web1"
    sha256 = "<64 hex digits>"
    tenant = "acme"
    scopes = ["sessions.read", "sessions.write"]   # and/or "admin"
    expires = 2027-01-01T00:00:00Z                  # optional

Several keys may name one tenant, so a key can be rotated. The file is read again within ``RELOAD_S`` of a change; a
change that cannot be read keeps the keys in force and is logged. Without a key file everybody is the tenant
``default`` with every scope: meant for loopback.

The tenant comes from the credential and from nowhere else. Needs no request body, so it runs before decoding.
"""

from __future__ import annotations

import datetime
import hashlib
import hmac
import logging
import re
import time
import tomllib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pensieve.errors import PermissionDenied, Unauthenticated

log = logging.getLogger(__name__)

READ: Final = "sessions.read"
WRITE: Final = "sessions.write"
ADMIN: Final = "admin"
PUBLIC: Final = ""
"""Scope of methods that anyone may call: health and reflection."""
ALL_SCOPES: Final = frozenset({READ, WRITE, ADMIN})
RELOAD_S: Final = 5.0
DEFAULT_TENANT: Final = "default"

_CONVERSATION = "/pensieve.v1.ConversationService/"
_ADMIN = "/pensieve.v1.AdminService/"
SCOPE_OF_METHOD: Final[dict[str, str]] = {
    _CONVERSATION + "CreateSession": WRITE,
    _CONVERSATION + "GetSession": READ,
    _CONVERSATION + "ListSessions": READ,
    _CONVERSATION + "UpdateSession": WRITE,
    _CONVERSATION + "DeleteSession": WRITE,
    _CONVERSATION + "ForkSession": WRITE,
    _CONVERSATION + "RewindSession": WRITE,
    _CONVERSATION + "ListItems": READ,
    _CONVERSATION + "StreamTurn": WRITE,
    _CONVERSATION + "RunTurn": WRITE,
    _CONVERSATION + "GetTurn": READ,
    _CONVERSATION + "CancelTurn": WRITE,
    _CONVERSATION + "ChooseCandidate": WRITE,
    _CONVERSATION + "WarmSession": READ,
    _CONVERSATION + "CountTokens": READ,
    _CONVERSATION + "GetServerInfo": READ,
    _ADMIN + "GetStats": ADMIN,
    _ADMIN + "EvictCache": ADMIN,
    _ADMIN + "Drain": ADMIN,
    "/grpc.health.v1.Health/Check": PUBLIC,
    "/grpc.health.v1.Health/Watch": PUBLIC,
    "/grpc.health.v1.Health/List": PUBLIC,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": PUBLIC,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": PUBLIC,
}
"""Full gRPC method name → scope it takes. A method that is not in here is refused."""


@dataclass(frozen=True, slots=True)
class Identity:
    """An authenticated caller."""

    tenant: str
    key_id: str
    """Names the key in logs; "" when no key file is in force."""
    scopes: frozenset[str]


ANONYMOUS: Final = Identity(tenant=DEFAULT_TENANT, key_id="", scopes=ALL_SCOPES)
_NOBODY: Final = Identity(tenant="", key_id="", scopes=frozenset())


class ApiKey(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One entry of the key file."""

    id: str
    sha256: str
    tenant: str
    scopes: tuple[str, ...] = (READ, WRITE)
    expires: datetime.datetime | None = None


class _KeyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: tuple[ApiKey, ...] = ()


def load_keys(path: Path) -> dict[str, ApiKey]:
    """The key file, by key id. Raises ValueError (what is wrong, and in which key) or OSError."""
    try:
        entries = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _KeyFile).key
    except (tomllib.TOMLDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    keys: dict[str, ApiKey] = {}
    for entry in entries:
        problem = _problem(entry, keys)
        if problem:
            raise ValueError(f"{path}: key {entry.id!r}: {problem}")
        keys[entry.id] = entry
    if not keys:
        raise ValueError(f"{path}: holds no [[key]]")
    return keys


def _problem(entry: ApiKey, others: dict[str, ApiKey]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", entry.id):
        return "id must be 1 to 64 letters, digits or '-'"
    if entry.id in others:
        return "id occurs twice"
    if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
        return "sha256 must be 64 lower-case hex digits"
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", entry.tenant):
        return "tenant must be 1 to 64 letters, digits, '.', '_' or '-'"
    unknown = set(entry.scopes) - ALL_SCOPES
    if unknown or not entry.scopes:
        return f"scopes must be among {', '.join(sorted(ALL_SCOPES))}"
    if entry.expires is not None and entry.expires.tzinfo is None:
        return "expires must name its time zone, as in 2027-01-01T00:00:00Z"
    return ""


class Authenticator:
    """Checks credentials against the key file, or lets everybody in as ``default`` when there is none."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        on_failure: Callable[[], None] = lambda: None,
        monotonic: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Reads the file at once. Raises ValueError or OSError when it cannot be used."""
        self._path = path
        self._on_failure = on_failure
        self._monotonic = monotonic
        self._wall = wall
        self._keys = load_keys(path) if path is not None else {}
        self._stamp = self._file_stamp()
        self._checked_at = monotonic()

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        """The caller of ``method``. Raises Unauthenticated or PermissionDenied, in constant words."""
        try:
            return self._check(method, metadata)
        except (Unauthenticated, PermissionDenied):
            self._on_failure()
            raise

    def _check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        scope = SCOPE_OF_METHOD.get(method)
        if scope is None:
            raise PermissionDenied("this method is not open to any credential")
        if self._path is None:
            return ANONYMOUS
        if scope == PUBLIC:
            return _NOBODY
        self._reload_if_changed()
        identity = self._identify(metadata)
        if scope not in identity.scopes:
            raise PermissionDenied(f"the credential lacks the scope {scope}", metadata={"scope": scope})
        return identity

    def _identify(self, metadata: Iterable[tuple[str, str | bytes]]) -> Identity:
        header = next((value for name, value in metadata if name.lower() == "authorization"), None)
        if header is None:
            raise Unauthenticated("no credential: send 'authorization: Bearer ck_<id>_<secret>'")
        text = header if isinstance(header, str) else header.decode("ascii", "replace")
        match = re.fullmatch(r"[Bb]earer ck_([A-Za-z0-9-]{1,64})_(\S{1,512})", text)
        key = self._keys.get(match[1]) if match else None
        secret = match[2] if match else ""
        # An unknown id is compared too, so that time does not tell which ids exist.
        digest = hashlib.sha256(secret.encode()).hexdigest()
        matches = hmac.compare_digest(digest, key.sha256 if key else "0" * 64)
        if key is None or not matches:
            raise Unauthenticated("the credential is not valid", reason="CREDENTIAL_INVALID")
        if key.expires is not None and key.expires.timestamp() <= self._wall():
            raise Unauthenticated("the credential has expired", reason="CREDENTIAL_EXPIRED")
        return Identity(tenant=key.tenant, key_id=key.id, scopes=frozenset(key.scopes))

    def _file_stamp(self) -> tuple[int, int, int]:
        if self._path is None:
            return (0, 0, 0)
        status = self._path.stat()
        return (status.st_mtime_ns, status.st_size, status.st_ino)

    def _reload_if_changed(self) -> None:
        assert self._path is not None
        if self._monotonic() - self._checked_at < RELOAD_S:
            return
        self._checked_at = self._monotonic()
        try:
            stamp = self._file_stamp()
            if stamp == self._stamp:
                return
            self._keys = load_keys(self._path)
        except (OSError, ValueError) as error:
            log.error("key file not read again, the keys in force stay: %s", error)
            return
        self._stamp = stamp
        log.info("key file read again: %d keys", len(self._keys))
