"""Who calls (credential, client certificate, address), and SDK clients: the service sees every caller as itself."""

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
from pensieve.errors import Cancelled
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.settings import DoorSettings

CERTIFICATE_NAMES: Final = "certificate_names"
"""Where a connection's state has the names in its verified client certificate."""
HOLDER: Final = "holder"
"""Where a request's state has the name of the caller that its body counts for."""
CERTIFICATE_KEY: Final = "pensieve-certificate-name-bin"
ADDRESS_KEY: Final = "pensieve-caller-address"
"""Metadata that tell the service a name and the caller's address; it listens to them on its private socket only."""
MAX_KEY_CHARS: Final = 4096
"""A longer header, or one with characters that gRPC does not send, holds no key of any server."""


class CallerIdentity(NamedTuple):
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


def identity_of_request(request: HTTPConnection, *, vouches: bool) -> CallerIdentity:
    """Who makes a request. ``vouches``: the service believes names and addresses from this door.

    Raises HttpFailure (401) for a header that can hold no credential.
    """
    given = request.headers.getlist("authorization")
    if len(given) > 1:
        raise _no_key("send one Authorization header")
    authorization = _as_judged(given[0]) if given else ""
    if not vouches:
        return CallerIdentity(authorization)
    state: dict[str, Any] = request.scope.get("state", {})
    return CallerIdentity(authorization, state.get(CERTIFICATE_NAMES, ()), client_address(request))


def identity_from_header(authorization: str | None) -> CallerIdentity:
    """Who sends this header, from anywhere and without a certificate. Raises HttpFailure (401) as ``identity_of_request``."""
    return CallerIdentity("" if authorization is None else _as_judged(authorization))


def client_address(request: HTTPConnection) -> str:
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


REQUESTS_EACH: Final = 100
"""At once of one client. A server takes 256 calls on each connection, and a request may make several at a time; what
goes beyond would wait in silence until another call ends."""
CONNECTIONS: Final = 64
"""To the service, in total. Each takes a file here and one at the service; further clients share them."""
_SLOT: Final = "pensieve.connection"
"""A channel option that gRPC does not know: channels with the same options share one connection."""


@dataclass(slots=True)
class Caller:
    """A credential, where it is used, and one of its clients."""

    client: AsyncClient
    scope: bytes
    """Names the credential without showing it: what is remembered for one is not found by another."""
    slot: int = 0
    """The connection that the client uses."""
    busy: int = 0


class Callers:
    """Clients by credentials. When there are too many, it closes the idle one that was used least recently.

    Only callers that the service has let in get one (``Admission``). Their number is not bounded while they are busy;
    the number of connections under them is.
    """

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._callers: OrderedDict[tuple[CallerIdentity, int], Caller] = OrderedDict()
        """By who calls, and the number of the client among theirs: a full one is followed by the next."""
        self._clients_on: Counter[int] = Counter(dict.fromkeys(range(CONNECTIONS), 0))
        """Clients by connection."""
        self._closed = False

    @asynccontextmanager
    async def for_request(self, request: Request) -> AsyncIterator[Caller]:
        """The caller of a request, for as long as the request lasts.

        Raises HttpFailure (401) for what can be no key, Cancelled (CLIENT_CLOSED) after ``close``.
        """
        who = identity_of_request(request, vouches=self._settings.vouches)
        place = next(
            (who, number)
            for number in itertools.count()
            if (found := self._callers.get((who, number))) is None or found.busy < REQUESTS_EACH
        )
        caller = self._callers.get(place)
        if caller is None:
            if self._closed:
                raise Cancelled("the door is closed", reason="CLIENT_CLOSED")
            caller = self._callers[place] = self._connected(who)
        self._callers.move_to_end(place)
        caller.busy += 1
        try:
            yield caller
        finally:
            caller.busy -= 1
            await self._shrink()

    async def close(self) -> None:
        """End all connections, and make no more."""
        self._closed = True
        while self._callers:
            _, caller = self._callers.popitem()
            await caller.client.close()

    def _connected(self, who: CallerIdentity) -> Caller:
        slot = min(self._clients_on, key=self._clients_on.__getitem__)
        self._clients_on[slot] += 1
        client = AsyncClient(
            self._settings.target,
            tls=self._settings.tls,
            retry=RetryPolicy(max_wait_s=self._settings.patience_s),
            options=connection(slot),
            metadata=who.metadata,
        )
        return Caller(client, who.credential, slot)

    async def _shrink(self) -> None:
        surplus = len(self._callers) - self._settings.max_callers
        if surplus <= 0:
            return
        idle = [place for place, caller in self._callers.items() if not caller.busy]
        for place in idle[:surplus]:
            caller = self._callers.pop(place)
            self._clients_on[caller.slot] -= 1
            await caller.client.close()


def connection(slot: int) -> tuple[tuple[str, int], ...]:
    """Channel options of a client that shares the connection ``slot`` with others of the same number."""
    return ((_SLOT, slot),)
