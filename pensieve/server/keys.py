"""The key file: who may log in, and what each tenant may use. TOML::

    [[key]]
    id = "web1"
    sha256 = "<64 hex digits>"                      # of the secret; the secret itself is in no file
    tenant = "acme"
    scopes = ["sessions.read", "sessions.write"]    # and/or "admin"; these two where it is left out
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

    [limits]                                        # the same, for what a tenant's own table leaves open
    max_request_bytes = 1_000_000

Several keys and certificates may name one tenant, so that each can be rotated; they share its limits.
"""

from __future__ import annotations

import datetime
import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec

from pensieve.server.tenants import NO_LIMITS, TenantLimits

READ: Final = "sessions.read"
WRITE: Final = "sessions.write"
ADMIN: Final = "admin"
ALL_SCOPES: Final = frozenset({READ, WRITE, ADMIN})


class Credential(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What every entry says, whatever it is that a caller shows."""

    tenant: str
    scopes: tuple[str, ...] = (READ, WRITE)
    expires: datetime.datetime | None = None


class ApiKey(Credential, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[key]]``."""

    id: str
    sha256: str


class Certificate(Credential, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One ``[[certificate]]``."""

    name: str


class _Written(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    key: tuple[ApiKey, ...] = ()
    certificate: tuple[Certificate, ...] = ()
    tenants: dict[str, TenantLimits] = {}
    limits: TenantLimits = NO_LIMITS


@dataclass(frozen=True, slots=True)
class KeyFile:
    """A key file as read and checked."""

    keys: Mapping[str, ApiKey]
    """By id."""
    certificates: Mapping[str, Certificate]
    """By name."""
    tenants: Mapping[str, TenantLimits]
    limits: TenantLimits

    @property
    def names(self) -> frozenset[str]:
        """All tenants that have a credential."""
        return frozenset(entry.tenant for entry in _all(self.keys, self.certificates))

    def named(self, key_id: str) -> Credential | None:
        """The entry that an ``Identity.key_id`` speaks of."""
        if key_id.startswith(CERTIFICATE):
            return self.certificates.get(key_id.removeprefix(CERTIFICATE))
        return self.keys.get(key_id)


CERTIFICATE: Final = "certificate "
"""Before the name, in ``Identity.key_id``: no id of a key has a space."""
ROUNDING: Final = 1e-9
"""Ten times 0.1 is a whole."""
NO_KEYS: Final = KeyFile({}, {}, {}, NO_LIMITS)


def load_keys(path: Path) -> KeyFile:
    """Raises ValueError (what is wrong, and in which entry) or OSError."""
    try:
        written = msgspec.convert(tomllib.loads(path.read_text(encoding="utf-8")), _Written)
    except (tomllib.TOMLDecodeError, msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: {error}") from error
    keys: dict[str, ApiKey] = {}
    for key in written.key:
        problem = _key_problem(key, keys) or _problem(key)
        if problem:
            raise ValueError(f"{path}: key {key.id!r}: {problem}")
        keys[key.id] = key
    certificates: dict[str, Certificate] = {}
    for entry in written.certificate:
        problem = "name must not be empty" if not entry.name else _problem(entry)
        if problem or entry.name in certificates:
            raise ValueError(f"{path}: certificate {entry.name!r}: {problem or 'name occurs twice'}")
        certificates[entry.name] = entry
    if not keys and not certificates:
        raise ValueError(f"{path}: holds no [[key]] and no [[certificate]]")
    known = {entry.tenant for entry in _all(keys, certificates)}
    if strangers := written.tenants.keys() - known:
        raise ValueError(f"{path}: tenant {min(strangers)!r} has limits and no key")
    shares = [
        (written.tenants.get(name, written.limits).cache_share, written.limits.cache_share) for name in known
    ]
    together = sum(own if own is not None else default or 0.0 for own, default in shares)
    if together > 1 + ROUNDING:
        raise ValueError(f"{path}: the tenants' cache_share add up to {together:g}, more than 1")
    return KeyFile(keys, certificates, written.tenants, written.limits)


def _all(keys: Mapping[str, ApiKey], certificates: Mapping[str, Certificate]) -> Iterable[Credential]:
    return (*keys.values(), *certificates.values())


def _key_problem(entry: ApiKey, others: Mapping[str, ApiKey]) -> str:
    if not re.fullmatch(r"[A-Za-z0-9-]{1,64}", entry.id):
        return "id must be 1 to 64 letters, digits or '-'"
    if entry.id in others:
        return "id occurs twice"
    if not re.fullmatch(r"[0-9a-f]{64}", entry.sha256):
        return "sha256 must be 64 lower-case hex digits"
    return ""


def _problem(entry: Credential) -> str:
    if not re.fullmatch(r"[A-Za-z0-9._-]{1,64}", entry.tenant):
        return "tenant must be 1 to 64 letters, digits, '.', '_' or '-'"
    unknown = set(entry.scopes) - ALL_SCOPES
    if unknown or not entry.scopes:
        return f"scopes must be among {', '.join(sorted(ALL_SCOPES))}"
    if entry.expires is not None and entry.expires.tzinfo is None:
        return "expires must name its time zone, as in 2027-01-01T00:00:00Z"
    return ""
