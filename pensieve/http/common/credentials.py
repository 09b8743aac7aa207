"""Reads who calls from a request: its credential, the client certificate behind it, and where it comes from."""

from __future__ import annotations

import hashlib
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

from starlette.requests import HTTPConnection

from pensieve.http.common.failures import HttpFailure

CERTIFICATE_NAMES: Final = "certificate_names"
"""Where a connection's state has the names in its verified client certificate."""
HOLDER: Final = "holder"
"""Where a request's state has the name of the caller that its body counts for."""
CERTIFICATE_KEY: Final = "pensieve-certificate-name-bin"
ADDRESS_KEY: Final = "pensieve-caller-address"
"""Metadata that tell the service a name and the caller's address; it listens to them on its private socket only."""
MAX_KEY_CHARS: Final = 4096
"""A longer header, or one with characters that gRPC does not send, holds no key of any server."""


class Who(NamedTuple):
    """Whom the service is to see."""

    authorization: str = ""
    """The header, as the service is to judge it; "" where the caller sent none."""
    names: tuple[str, ...] = ()
    """In the verified client certificate."""
    address: str = ""

    @property
    def credential(self) -> bytes:
        """Digest of what the caller logs in with, wherever it calls from."""
        found = hashlib.blake2b(self.authorization.encode())
        for name in self.names:
            found.update(b"\0" + name.encode())
        return found.digest()

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        """What every call of the service carries for this caller."""
        told: list[tuple[str, str | bytes]] = [(CERTIFICATE_KEY, name.encode()) for name in self.names]
        if self.address:
            told.append((ADDRESS_KEY, self.address))
        if self.authorization:
            told.append(("authorization", self.authorization))
        return told


def who_calls(request: HTTPConnection, *, vouches: bool) -> Who:
    """Who makes a request. ``vouches``: the service believes names and addresses from this door.

    Raises HttpFailure (401) for a header that can hold no credential.
    """
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise _no_key("send one Authorization header")
    authorization = _as_judged(given[0]) if given else ""
    if not vouches:
        return Who(authorization)
    state: dict[str, Any] = request.scope.get("state", {})
    return Who(authorization, state.get(CERTIFICATE_NAMES, ()), address_of(request))


def who_says(authorization: str | None) -> Who:
    """Who sends this header, from anywhere and without a certificate. Raises HttpFailure (401) as ``who_calls``."""
    return Who("" if authorization is None else _as_judged(authorization))


def address_of(request: HTTPConnection) -> str:
    """Where the request comes from; "" for what a proxy named and is no address."""
    try:
        return str(ip_address(request.client.host)) if request.client is not None else ""
    except ValueError:
        return ""


def _as_judged(header: str) -> str:
    """A bearer token in the form that the service knows; any other scheme as it is.

    A header is never dropped: the caller would be judged by its certificate instead.
    """
    if len(header) > MAX_KEY_CHARS or not (header.isascii() and header.isprintable()):
        raise _no_key("the key is not a key of this server")
    kind, _, key = header.strip().partition(" ")
    return f"Bearer {key.strip()}".strip() if kind.lower() == "bearer" else header.strip() or "none"


def _no_key(problem: str) -> HttpFailure:
    return HttpFailure(401, problem, kind="authentication_error", code="invalid_api_key")
