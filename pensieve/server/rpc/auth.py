"""Authentication: find the caller and its scopes from a credential. Deny by default.

A caller sends ``authorization: Bearer ck_<id>_<secret>`` or shows a client certificate; ``server/keys.py`` reads the
file that lists both. If the header is there, it alone decides. The file is checked for changes every ``RELOAD_S``; a
new version that cannot be read is logged, and the old keys stay in force. Without a key file every caller is the
tenant ``default`` with every scope, which is meant for loopback.

The tenant comes from the credential only. Authentication needs no request body, so it runs before one is read.
"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import unquote

from pensieve.errors import PensieveError, PermissionDenied, Unauthenticated
from pensieve.hosts import owned_network
from pensieve.renewed_files import file_stamp
from pensieve.server.keys import (
    ADMIN,
    ALL_SCOPES,
    CERTIFICATE,
    ERASE,
    NO_KEYS,
    READ,
    WRITE,
    ApiKey,
    Credential,
    TenantTable,
    load_keys,
)

log = logging.getLogger(__name__)

PUBLIC: Final = ""
"""Scope of methods that any caller may use: health."""
ANY: Final = "any"
"""Scope of methods that need a valid credential with any scopes: reflection."""
FORWARDED_NAME_KEY: Final = "pensieve-certificate-name-bin"
FORWARDED_ADDRESS_KEY: Final = "pensieve-caller-address"
RELOAD_S: Final = 1.0
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
    _CONVERSATION + "AppendItems": WRITE,
    _CONVERSATION + "ListItems": READ,
    _CONVERSATION + "StreamTurn": WRITE,
    _CONVERSATION + "RunTurn": WRITE,
    _CONVERSATION + "GetTurn": READ,
    _CONVERSATION + "FindTurn": READ,
    _CONVERSATION + "ClaimRequestId": WRITE,
    _CONVERSATION + "CancelTurn": WRITE,
    _CONVERSATION + "ChooseCandidate": WRITE,
    _CONVERSATION + "WarmSession": READ,
    _CONVERSATION + "CompactSession": WRITE,
    _CONVERSATION + "CountTokens": READ,
    _CONVERSATION + "GetServerInfo": READ,
    _CONVERSATION + "EraseSubject": ERASE,
    _CONVERSATION + "ExportSession": READ,
    _CONVERSATION + "ExportSubject": READ,
    _CONVERSATION + "ImportSession": WRITE,
    _CONVERSATION + "GetUsage": READ,
    _ADMIN + "GetStats": ADMIN,
    _ADMIN + "EvictCache": ADMIN,
    _ADMIN + "Drain": ADMIN,
    _ADMIN + "GetMemory": ADMIN,
    _ADMIN + "SetMemory": ADMIN,
    "/grpc.health.v1.Health/Check": PUBLIC,
    "/grpc.health.v1.Health/Watch": PUBLIC,
    "/grpc.health.v1.Health/List": PUBLIC,
    "/grpc.reflection.v1.ServerReflection/ServerReflectionInfo": ANY,
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": ANY,
}
"""Full gRPC method name → required scope. Methods that are missing here are refused."""
FAILURES: Final = 10
"""Failed logins of one address that are answered without delay."""
FAILURES_PER_S: Final = 2.0
LONGEST_WAIT_S: Final = 5.0
_MAX_ADDRESSES: Final = 4096
"""Addresses tracked. Beyond that, the address whose last failure is oldest is forgotten."""
_MAX_HELD_BACK: Final = 1024
"""Answers that may be delayed at once, over all addresses. Each takes memory, so further ones are sent at once."""


class ForwardedCaller(NamedTuple):
    """A caller as reported by the HTTP door."""

    names: tuple[str, ...]
    address: str
    """IP address; "" if the door does not know it."""


class Peer:
    """A caller as seen from its connection. All properties are computed on demand."""

    def __init__(self, context: Any, forwarded: ForwardedCaller | None = None) -> None:
        """``forwarded``: the caller as the HTTP door reports it, when the call comes from the door."""
        self._context = context
        self._forwarded = forwarded

    @property
    def address(self) -> str:
        """IP address without the port; "" when there is none, as on a Unix socket."""
        if self._forwarded is not None:
            return self._forwarded.address
        kind, _, rest = unquote(self._context.peer()).partition(":")
        return rest.rpartition(":")[0].strip("[]") if kind in ("ipv4", "ipv6") else ""

    @property
    def connection(self) -> str:
        """Identifies the connection; "" for connections of the HTTP door, which carry many callers."""
        return "" if self._forwarded is not None else str(self._context.peer())

    @property
    def names(self) -> tuple[str, ...]:
        """Alternative names of the verified client certificate, or its common name if it has none; () without one."""
        if self._forwarded is not None:
            return self._forwarded.names
        properties = self._context.auth_context()
        found = properties.get("x509_subject_alternative_name") or properties.get("x509_common_name") or ()
        return tuple(name.decode("utf-8", "replace") for name in found)


def forwarded_caller(metadata: Iterable[tuple[str, str | bytes]]) -> ForwardedCaller:
    """Return the caller that the HTTP door reports in the metadata. Trust this on the door's private socket only."""
    names, address = list[str](), ""
    for name, value in metadata:
        if name == FORWARDED_NAME_KEY and isinstance(value, bytes):
            names.append(value.decode("utf-8", "replace"))
        elif name == FORWARDED_ADDRESS_KEY and isinstance(value, str):
            address = value
    return ForwardedCaller(tuple(names), address)


@dataclass(frozen=True, slots=True)
class Identity:
    tenant: str
    key_id: str
    """Credential id for logs; "" when no key file is in force."""
    scopes: frozenset[str]
    digest: str = ""
    """Hash of the key's secret at login. After the secret changes, the identity is no longer valid."""


ANONYMOUS: Final = Identity(tenant=DEFAULT_TENANT, key_id="", scopes=ALL_SCOPES)
_NO_IDENTITY: Final = Identity(tenant="", key_id="", scopes=frozenset())


class Authenticator:
    """Checks credentials against the key file. Without a file, every caller is the tenant ``default``."""

    def __init__(
        self,
        path: Path | None = None,
        *,
        on_failure: Callable[[], None] = lambda: None,
        wall: Callable[[], float] = time.time,
    ) -> None:
        """Read the file. Raises ValueError or OSError when it cannot be used."""
        self._path = path
        self._on_failure = on_failure
        self._wall = wall
        self._stamp = self._file_stamp()
        self._file = load_keys(path) if path is not None else NO_KEYS
        self._reported = ""
        self.tenants = TenantTable(self._file.tenants, self._file.limits, self._names)

    def check(
        self, method: str, metadata: Iterable[tuple[str, str | bytes]], peer: Peer | None = None
    ) -> Identity:
        """Return the caller of ``method``. Raises Unauthenticated or PermissionDenied, with constant messages."""
        try:
            return self._check(method, metadata, peer)
        except (Unauthenticated, PermissionDenied):
            self._on_failure()
            raise

    def revocation_error(self, identity: Identity) -> PensieveError | None:
        """Return the error for an identity that is no longer valid, or None if it still is."""
        if self._path is None or not identity.key_id:
            return None
        entry = self._file.find(identity.key_id)
        if entry is None or entry.tenant != identity.tenant or _digest(entry) != identity.digest:
            return _invalid()
        if identity.scopes - set(entry.scopes):
            return _invalid()
        return _expired() if self._is_expired(entry) else None

    def reload(self, *, always: bool = False) -> None:
        """Read the file again if it has changed. Keeps the present keys if the new file cannot be used."""
        if self._path is None:
            return
        try:
            stamp = self._file_stamp()
            if stamp == self._stamp and not always:
                return
            self._file = load_keys(self._path)
        except (OSError, ValueError) as error:
            # Logged once per error: the same file is checked again every second.
            if str(error) != self._reported:
                self._reported = str(error)
                log.error("the key file could not be read again; the present keys stay in force: %s", error)
            return
        self._stamp, self._reported = stamp, ""
        self.tenants.replace(self._file.tenants, self._file.limits, self._names)
        log.info("key file read again: %d keys", len(self._file.keys) + len(self._file.certificates))

    @property
    def _names(self) -> frozenset[str]:
        return self._file.tenant_names if self._path is not None else frozenset({DEFAULT_TENANT})

    def _check(self, method: str, metadata: Iterable[tuple[str, str | bytes]], peer: Peer | None) -> Identity:
        scope = SCOPE_OF_METHOD.get(method)
        if scope is None:
            raise PermissionDenied("this method is not open to any credential")
        if self._path is None:
            return ANONYMOUS
        if scope == PUBLIC:
            return _NO_IDENTITY
        identity = self._identify(metadata, peer)
        if scope != ANY and scope not in identity.scopes:
            raise PermissionDenied(f"the credential lacks the scope {scope}", metadata={"scope": scope})
        return identity

    def _identify(self, metadata: Iterable[tuple[str, str | bytes]], peer: Peer | None) -> Identity:
        header = next((value for name, value in metadata if name.lower() == "authorization"), None)
        if header is None:
            return self._identity_by_certificate(peer)
        text = header if isinstance(header, str) else header.decode("ascii", "replace")
        match = re.fullmatch(r"[Bb]earer ck_([A-Za-z0-9-]{1,64})_(\S{1,512})", text)
        key = self._file.keys.get(match[1]) if match else None
        secret = match[2] if match else ""
        # An unknown id is compared too, so that response times do not reveal which ids exist.
        digest = hashlib.sha256(secret.encode()).hexdigest()
        matches = hmac.compare_digest(digest, key.sha256 if key else "0" * 64)
        if key is None or not matches:
            raise _invalid()
        return self._identity_for(key, key.id)

    def _identity_by_certificate(self, peer: Peer | None) -> Identity:
        if peer is not None and self._file.certificates:
            for name in peer.names:
                entry = self._file.certificates.get(name)
                if entry is not None:
                    return self._identity_for(entry, CERTIFICATE + name)
        raise Unauthenticated("no credential: send 'authorization: Bearer ck_<id>_<secret>'")

    def _identity_for(self, entry: Credential, key_id: str) -> Identity:
        if self._is_expired(entry):
            raise _expired()
        return Identity(entry.tenant, key_id, frozenset(entry.scopes), _digest(entry))

    def _is_expired(self, entry: Credential) -> bool:
        return entry.expires is not None and entry.expires.timestamp() <= self._wall()

    def _file_stamp(self) -> tuple[int, int, int]:
        if self._path is None:
            return (0, 0, 0)
        return file_stamp(self._path)


def _digest(entry: Credential) -> str:
    return entry.sha256 if isinstance(entry, ApiKey) else ""


def _invalid() -> Unauthenticated:
    return Unauthenticated("the credential is not valid", reason="CREDENTIAL_INVALID")


def _expired() -> Unauthenticated:
    return Unauthenticated("the credential has expired", reason="CREDENTIAL_EXPIRED")


class LoginThrottle:
    """Counts failed logins per address and delays the answers after the first few. One per server.

    No caller is locked out. A valid credential is served at once, however many guesses came from the same address.
    Only answers to failures are delayed, so guessing is limited by the bucket and by the streams of a connection.
    """

    def __init__(
        self,
        on_held_back: Callable[[], None] = lambda: None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_held_back = on_held_back
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Address (IPv6: network) → tokens left, possibly negative, and the time of that count."""
        self._held_back = 0

    def record_failure(self, address: str) -> float:
        """Count a failed login. Return how many seconds to delay its answer."""
        network = owned_network(address)
        now = self._monotonic()
        tokens, updated_at = self._buckets.pop(network, (float(FAILURES), now))
        tokens = min(FAILURES, tokens + (now - updated_at) * FAILURES_PER_S) - 1
        tokens = max(tokens, -LONGEST_WAIT_S * FAILURES_PER_S)
        self._buckets[network] = tokens, now
        if len(self._buckets) > _MAX_ADDRESSES:
            self._buckets.popitem(last=False)
        if tokens >= 0 or self._held_back >= _MAX_HELD_BACK:
            return 0.0
        return -tokens / FAILURES_PER_S

    async def hold_back(self, seconds: float) -> None:
        self._on_held_back()
        self._held_back += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._held_back -= 1
