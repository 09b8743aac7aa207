"""The key file: credentials, and the limits of each tenant. TOML::

    [[key]]
    id = "web1"
    sha256 = "<64 hex digits>"                      # of the secret; the secret itself is in no file
    tenant = "acme"
    scopes = ["sessions.read", "sessions.write"]    # and/or "admin", "grammars", "erase"; these two by default
    expires = 2027-01-01T00:00:00Z                  # optional

    [[certificate]]                                 # a client certificate, with --tls-client-ca
    name = "spiffe://acme/web"                      # one of its alternative names; its common name if it has none
    tenant = "acme"
    scopes = ["sessions.read"]
    expires = 2027-01-01T00:00:00Z

    [tenants.acme]                                  # limits: the fields of ``TenantLimits``, all optional
    max_sessions = 10_000
    turns_at_once = 32
    weight = 2.0
    cache_share = 0.25

    [limits]                                        # defaults for what a tenant's own table leaves out
    max_request_bytes = 1_000_000

Several keys and certificates may name one tenant, so that each can be rotated; they share its limits.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, TypeVar

import msgspec

from pensieve.errors import ResourceExhausted
from pensieve.options.values import toml_line_number

_Count = Annotated[int, msgspec.Meta(ge=1)]


class TenantLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Limits of one tenant, over all of its keys. None: not set, only the server's own limits apply."""

    max_sessions: _Count | None = None
    max_stored_bytes: _Count | None = None
    max_request_bytes: _Count | None = None
    """Bytes of one request on the wire; the server's own limit applies too."""
    turns_at_once: _Count | None = None
    queued_tokens: _Count | None = None
    """Input tokens waiting in the queue, all turns together."""
    tokens_per_minute: _Count | None = None
    """Tokens computed and generated, averaged over a minute."""
    weight: Annotated[float, msgspec.Meta(gt=0, le=1000)] | None = None
    """Weight in sharing a loaded server; 1 if not set."""
    cache_share: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    """Part of each cache tier that other tenants cannot take from it; 0 if not set."""


NO_LIMITS = TenantLimits()


class TenantTable:
    """The present limits of all tenants. Look limits up at each use, since the key file may change."""

    def __init__(
        self,
        tenants: Mapping[str, TenantLimits] | None = None,
        default: TenantLimits = NO_LIMITS,
        names: Iterable[str] = (),
    ) -> None:
        """``names``: all tenants that have a credential, with or without limits."""
        self._tenants: Mapping[str, TenantLimits] = {}
        self._default = NO_LIMITS
        self.tenant_names: frozenset[str] = frozenset()
        self.replace(tenants or {}, default, names)

    def limits(self, tenant: str) -> TenantLimits:
        """Return the limits of ``tenant``, or the default ones without an entry."""
        return self._tenants.get(tenant, self._default)

    def replace(
        self,
        tenants: Mapping[str, TenantLimits],
        default: TenantLimits = NO_LIMITS,
        names: Iterable[str] = (),
    ) -> None:
        """Replace all limits. Fields that a tenant's entry leaves open are taken from ``default``."""
        self.tenant_names = frozenset(names)
        self._default = default
        self._tenants = {name: _filled(limits, default) for name, limits in tenants.items()}


def _filled(limits: TenantLimits, default: TenantLimits) -> TenantLimits:
    own = {name: value for name in limits.__struct_fields__ if (value := getattr(limits, name)) is not None}
    return msgspec.structs.replace(default, **own)


def quota_exceeded(
    tenant: str, limit: str, description: str, retry_after_s: float | None = None
) -> ResourceExhausted:
    return ResourceExhausted(
        f"the limit is {description}",
        reason="QUOTA_EXCEEDED",
        metadata={"subject": tenant, "limit": limit},
        retry_after_s=retry_after_s,
    )


T = TypeVar("T")
READ: Final = "sessions.read"
WRITE: Final = "sessions.write"
ADMIN: Final = "admin"
GRAMMARS: Final = "grammars"
"""Answers that follow a regular expression or a grammar of the caller's own, which may cost much work."""
ERASE: Final = "erase"
"""Erasing everything about a person, in all sessions."""
ALL_SCOPES: Final = frozenset({READ, WRITE, ADMIN, GRAMMARS, ERASE})


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields common to all credentials."""

    tenant: str
    scopes: tuple[str, ...] = (READ, WRITE)
    expires: datetime.datetime | None = None


class ApiKey(Credential, frozen=True, kw_only=True, forbid_unknown_fields=True):
    id: str
    sha256: str


class Certificate(Credential, frozen=True, kw_only=True, forbid_unknown_fields=True):
    name: str


@dataclass(frozen=True, slots=True)
class KeyFile:
    keys: Mapping[str, ApiKey]
    certificates: Mapping[str, Certificate]
    tenants: Mapping[str, TenantLimits]
    limits: TenantLimits

    @property
    def tenant_names(self) -> frozenset[str]:
        """All tenants that have a credential."""
        return frozenset(entry.tenant for entry in (*self.keys.values(), *self.certificates.values()))

    def find(self, key_id: str) -> Credential | None:
        """Return the credential with this ``Identity.key_id``, or None."""
        if key_id.startswith(CERTIFICATE):
            return self.certificates.get(key_id.removeprefix(CERTIFICATE))
        return self.keys.get(key_id)


CERTIFICATE: Final = "certificate "
"""Prefix of a certificate's ``Identity.key_id``: key ids have no space."""
_TABLES: Final = frozenset({"key", "certificate", "tenants", "limits"})
TOLERANCE: Final = 1e-9
"""Tolerance: ten times 0.1 must count as 1."""
NO_KEYS: Final = KeyFile({}, {}, {}, NO_LIMITS)


def load_keys(path: Path) -> KeyFile:
    """Read a key file. Raises OSError, or ValueError with the line, the entry, the field and the problem."""
    try:
        text = path.read_text(encoding="utf-8-sig")  # may begin with a byte order mark
        data = tomllib.loads(text)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    return _Reader(path, text).read(data)


class _Reader:
    """Converts the parsed file to values, and finds line numbers for errors."""

    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._text = text

    def read(self, data: dict[str, Any]) -> KeyFile:
        if unknown := data.keys() - _TABLES:
            name = min(unknown)
            known = "there are [[key]], [[certificate]], [tenants.NAME] and [limits]"
            raise self._error(f"nothing is called {name!r}: {known}", name)
        keys: dict[str, ApiKey] = {}
        for number, key in enumerate(self._entries(data, "key", ApiKey)):
            if problem := _key_problem(key, keys) or _credential_problem(key):
                raise self._error(f"key {key.id!r}: {problem}", "key", number, problem.split()[0])
            keys[key.id] = key
        certificates: dict[str, Certificate] = {}
        for number, entry in enumerate(self._entries(data, "certificate", Certificate)):
            if problem := _certificate_problem(entry, certificates) or _credential_problem(entry):
                where = f"certificate {entry.name!r}"
                raise self._error(f"{where}: {problem}", "certificate", number, problem.split()[0])
            certificates[entry.name] = entry
        if not keys and not certificates:
            raise ValueError(f"{self._path}: holds no [[key]] and no [[certificate]]")
        limits = self._value(data.get("limits", {}), TenantLimits, "limits", "limits")
        tenant_names = {entry.tenant for entry in (*keys.values(), *certificates.values())}
        tenants = self._tenants(data.get("tenants", {}), tenant_names)
        self._check_shares(tenant_names, tenants, limits)
        return KeyFile(keys, certificates, tenants, limits)

    def _entries(self, data: dict[str, Any], heading: str, kind: type[T]) -> Iterator[T]:
        """Yield the entries below ``[[heading]]`` one by one, so that the first invalid one is reported."""
        entries = data.get(heading, [])
        if not isinstance(entries, list):
            raise self._error(f"Expected [[{heading}]], got {entries!r}", "", 0, heading)
        for number, entry in enumerate(entries):
            name = next(
                (entry[one] for one in ("id", "name") if isinstance(entry, dict) and one in entry), None
            )
            entry_name = f"{heading} {name!r}" if name else f"{heading} number {number + 1}"
            yield self._value(entry, kind, entry_name, heading, number)

    def _tenants(self, data: Any, tenant_names: set[str]) -> dict[str, TenantLimits]:
        if not isinstance(data, dict):
            raise self._error(f"Expected [tenants.NAME], got {data!r}", "", 0, "tenants")
        found = {}
        for name, entry in data.items():
            heading = f"tenants.{name}"
            if name not in tenant_names:
                raise self._error(f"tenant {name!r} has limits and no key", heading)
            found[name] = self._value(entry, TenantLimits, f"tenant {name!r}", heading)
        return found

    def _check_shares(
        self, tenant_names: set[str], tenants: Mapping[str, TenantLimits], limits: TenantLimits
    ) -> None:
        shares = [(tenants.get(name, limits).cache_share, limits.cache_share) for name in tenant_names]
        together = sum(own if own is not None else default or 0.0 for own, default in shares)
        if together > 1 + TOLERANCE:
            raise ValueError(f"{self._path}: the tenants' cache_share add up to {together:g}, more than 1")

    def _value(self, entry: Any, kind: type[T], entry_name: str, heading: str, number: int = 0) -> T:
        try:
            return msgspec.convert(entry, kind)
        except msgspec.ValidationError as error:
            detail = str(error)
            field = re.search(r"field `(\w+)`|at `\$\.(\w+)", detail)
            name = (field[1] or field[2]) if field else ""
            problem = re.sub(r"^Object (contains )?| - at `\$.*`$", "", detail)
            words = f"{name}: {problem}" if field and field[2] else problem
            raise self._error(f"{entry_name}: {words}", heading, number, name) from error

    def _error(self, problem: str, heading: str, number: int = 0, field: str = "") -> ValueError:
        line = toml_line_number(self._text, heading, number, field)
        return ValueError(f"{self._path}: {problem}" if line is None else f"{self._path}:{line}: {problem}")


def _key_problem(entry: ApiKey, others: Mapping[str, ApiKey]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", entry.id):
        return "id must be 1 to 64 letters, digits or '-'"
    if entry.id in others:
        return "id occurs twice"
    if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
        return "sha256 must be 64 lower-case hex digits"
    return ""


def _certificate_problem(entry: Certificate, others: Mapping[str, Certificate]) -> str:
    if not entry.name:
        return "name must not be empty"
    return "name occurs twice" if entry.name in others else ""


def _credential_problem(entry: Credential) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", entry.tenant):
        return "tenant must be 1 to 64 letters, digits, '.', '_' or '-'"
    unknown = set(entry.scopes) - ALL_SCOPES
    if unknown or not entry.scopes:
        return f"scopes must be among {', '.join(sorted(ALL_SCOPES))}"
    if entry.expires is not None and entry.expires.tzinfo is None:
        return "expires must name its time zone, as in 2027-01-01T00:00:00Z"
    return ""
