"""Identifies callers (credential, client certificate, address) and keeps one SDK client for each: the service
sees every caller as itself."""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter, OrderedDict
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, Final, NamedTuple

from starlette.requests import HTTPConnection, Request

from pensieve.client import AsyncClient, RetryPolicy
from pensieve.config import DoorSettings
from pensieve.errors import Cancelled
from pensieve.http.common.failures import HttpFailure

CERTIFICATE_NAMES: Final = "certificate_names"
"""Key in a connection's state: the names in its verified client certificate."""
HOLDER: Final = "holder"
"""Key in a request's state: the name of the caller that its body counts against."""
CERTIFICATE_KEY: Final = "pensieve-certificate-name-bin"
ADDRESS_KEY: Final = "pensieve-caller-address"
"""gRPC metadata with a certificate's name and with the caller's address. The service trusts both on its private
socket only."""
MAX_KEY_CHARS: Final = 4096
"""No key is longer, or has characters that gRPC does not send."""


class CallerIdentity(NamedTuple):
    """The identity that the service is to see."""

    authorization: str = ""
    """The header as the service expects it, also for a key in ``x-api-key``; "" if the caller sent none."""
    names: tuple[str, ...] = ()
    address: str = ""

    @property
    def credential(self) -> bytes:
        """Digest of the caller's header and certificate names; its address is not part of it."""
        found = hashlib.blake2b(self.authorization.encode())
        for name in self.names:
            found.update(b"\0" + name.encode())
        return found.digest()

    @property
    def metadata(self) -> list[tuple[str, str | bytes]]:
        """gRPC metadata that every call for this caller carries."""
        metadata: list[tuple[str, str | bytes]] = [(CERTIFICATE_KEY, name.encode()) for name in self.names]
        if self.address:
            metadata.append((ADDRESS_KEY, self.address))
        if self.authorization:
            metadata.append(("authorization", self.authorization))
        return metadata


def identity_of_request(request: HTTPConnection, *, vouches: bool) -> CallerIdentity:
    """Return the identity of a request's caller. ``vouches``: the service trusts this door's certificate names
    and addresses. Raises HttpFailure (401) for a header that cannot hold a credential."""
    # Authorization goes first: a proxy may have asked for an x-api-key of its own.
    given = request.headers.getlist("authorization")
    given = given or [f"Bearer {key}" for key in request.headers.getlist("x-api-key")]
    if len(given) > 1:
        raise _invalid_key("send one Authorization header, or else one x-api-key")
    authorization = _normalised(given[0]) if given else ""
    if not vouches:
        return CallerIdentity(authorization)
    state: dict[str, Any] = request.scope.get("state", {})
    return CallerIdentity(authorization, state.get(CERTIFICATE_NAMES, ()), client_address(request))


def identity_from_header(authorization: str | None) -> CallerIdentity:
    """Return the identity of any caller with this header and no certificate. Raises HttpFailure (401) as
    ``identity_of_request``."""
    return CallerIdentity("" if authorization is None else _normalised(authorization))


def client_address(request: HTTPConnection) -> str:
    """Return the request's source address; "" when a proxy named something else than an address."""
    try:
        return str(ip_address(request.client.host)) if request.client is not None else ""
    except ValueError:
        return ""


def _normalised(header: str) -> str:
    """Normalise a bearer token; leave other schemes as they are. A header is never dropped: the service would
    then identify the caller by its certificate."""
    if len(header) > MAX_KEY_CHARS or not (header.isascii() and header.isprintable()):
        raise _invalid_key("the key is not a key of this server")
    kind, _, key = header.strip().partition(" ")
    return f"Bearer {key.strip()}".strip() if kind.lower() == "bearer" else header.strip() or "none"


def _invalid_key(problem: str) -> HttpFailure:
    return HttpFailure(401, problem, code="invalid_api_key")


REQUESTS_PER_CLIENT: Final = 100
"""Concurrent requests per client. A server takes 256 calls per connection, and a request may make several.
Calls beyond that would wait silently."""
CONNECTIONS: Final = 64
"""Connections to the service in total; further clients share them. Each takes a file descriptor on both sides."""
_CONNECTION_OPTION: Final = "pensieve.connection"
"""A channel option unknown to gRPC: channels with equal options share one connection."""


@dataclass(slots=True)
class Caller:
    """A caller's identity and one of its SDK clients."""

    client: AsyncClient
    scope: bytes
    """Digest of the credential: entries cached for one caller are invisible to others."""
    connection: int = 0
    busy: int = 0


class Callers:
    """SDK clients by identity. When there are too many, it closes the least recently used idle ones. Only
    admitted callers get one (``Admission``). Busy clients are not bounded; the connections under them are."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._callers: OrderedDict[tuple[CallerIdentity, int], Caller] = OrderedDict()
        """By identity, and the client's number: when one has ``REQUESTS_PER_CLIENT`` requests, the next is used."""
        self._clients_on: Counter[int] = Counter(dict.fromkeys(range(CONNECTIONS), 0))
        self._closed = False

    @asynccontextmanager
    async def for_request(self, request: Request) -> AsyncIterator[Caller]:
        """Yield the caller of a request for as long as the request lasts. Raises HttpFailure (401) for a header
        that cannot hold a key, Cancelled (CLIENT_CLOSED) after ``close``."""
        who = identity_of_request(request, vouches=self._settings.vouches)
        key = next(
            (who, number)
            for number in itertools.count()
            if (found := self._callers.get((who, number))) is None or found.busy < REQUESTS_PER_CLIENT
        )
        caller = self._callers.get(key)
        if caller is None:
            if self._closed:
                raise closed_error()
            caller = self._callers[key] = self._connect(who)
        self._callers.move_to_end(key)
        caller.busy += 1
        try:
            yield caller
        finally:
            caller.busy -= 1
            await self._close_surplus()

    async def close(self) -> None:
        self._closed = True
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.client.close()

    def _connect(self, who: CallerIdentity) -> Caller:
        connection = min(self._clients_on, key=self._clients_on.__getitem__)
        self._clients_on[connection] += 1
        client = AsyncClient(
            self._settings.target,
            tls=self._settings.tls,
            credentials=self._settings.identity,
            retry=RetryPolicy(max_wait_s=self._settings.patience_s),
            options=connection_options(connection),
            metadata=who.metadata,
        )
        return Caller(client, who.credential, connection)

    async def _close_surplus(self) -> None:
        surplus = len(self._callers) - self._settings.max_callers
        if surplus <= 0:
            return
        idle = [key for key, caller in self._callers.items() if not caller.busy]
        for key in idle[:surplus]:
            caller = self._callers.pop(key)
            self._clients_on[caller.connection] -= 1
            await caller.client.close()


def connection_options(connection: int) -> tuple[tuple[str, int], ...]:
    """Return channel options. Clients with the same ``connection`` share one connection."""
    return ((_CONNECTION_OPTION, connection),)


def closed_error() -> Cancelled:
    return Cancelled("the door is closed", reason="CLIENT_CLOSED")
