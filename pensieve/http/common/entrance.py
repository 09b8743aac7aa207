"""ASGI middleware that admits the caller before its body is read or an endpoint runs.

Without keys it also refuses requests that another site's page sends through a browser. With keys that is not
needed: such a page has no key.
"""

from __future__ import annotations

import re
from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pensieve.config import DoorSettings
from pensieve.errors import PensieveError
from pensieve.hosts import names_this_machine
from pensieve.http.common.callers import HOLDER, client_address, identity_from_header, identity_of_request
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure, failure_from_error

_SAFE_METHODS: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; the browser hides their answers from the page."""
_SIMPLE_CONTENT_TYPES: Final = frozenset({"text/plain", "multipart/form-data"})
"""Content types that a browser sends for any page without a preflight request. The third one,
application/x-www-form-urlencoded, is allowed: curl sends it by default."""


def check_host(request: Request, settings: DoorSettings) -> None:
    """Refuse a foreign Host name on loopback (DNS rebinding). Raises HttpFailure (403)."""
    host = request.headers.get("host", "")
    if settings.on_loopback and not names_this_machine(host, settings.hosts):
        raise HttpFailure(
            403,
            f"{host!r} is not a name of this machine: use localhost, or start the server with keys "
            "(--api-keys) or with this name (--http-host, of pensieve gateway --host)",
            code="foreign_host",
        )


def check_site(request: Request, settings: DoorSettings) -> None:
    """Refuse a change that another site's page requests. Raises HttpFailure (403, 415)."""
    if request.method in _SAFE_METHODS:
        return
    origin = request.headers.get("origin")
    if origin in settings.cors_origins or ("*" in settings.cors_origins and origin is not None):
        return
    site = request.headers.get("sec-fetch-site")
    if site is not None:  # a page cannot set it
        foreign = site.lower() not in ("same-origin", "none")
    else:
        foreign = origin is not None and not _is_same_origin(origin, request.headers.get("host", ""))
    if foreign:
        raise HttpFailure(
            403,
            "pages of other sites may not call: allow their origin (--http-cors-origin, of pensieve gateway "
            "--cors-origin), or start the server with keys (--api-keys)",
            code="foreign_origin",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _SIMPLE_CONTENT_TYPES:
        raise HttpFailure(
            415,
            f"a body of the type {kind} is not read: send content-type: application/json",
            code="unsupported_media_type",
        )


def _is_same_origin(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False


OPEN_PATHS: Final = frozenset({"/health", "/ready", "/metrics"})
"""Paths that need no credential and read no body."""
ON_ADMITTED: Final = "admitted"
"""Key in a request's state: the callback for when its caller is admitted, which marks the connection as known."""


_AUTHORIZATION: Final = re.compile(rb"\r\nauthorization:([^\r\n]*)\r\n", re.IGNORECASE)
_API_KEY: Final = re.compile(rb"\r\nx-api-key:([^\r\n]*)\r\n", re.IGNORECASE)


class AdmissionMiddleware:
    def __init__(self, app: ASGIApp, door: HttpDoor) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            await self._admit(request)
        except (HttpFailure, PensieveError) as error:
            failure = failure_from_error(error)
            failure.closes_connection = has_body(request)
            # The traceback would keep this frame, and the whole request, alive until a garbage collection.
            error.__traceback__ = failure.__traceback__ = None
            await self._door.refusal(failure, request)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _admit(self, request: Request) -> None:
        door, settings = self._door, self._door.settings
        who = identity_of_request(request, vouches=settings.vouches)
        await door.admission.admit(who)
        state = request.scope.setdefault("state", {})
        state[HOLDER] = who.credential.hex()
        # Behind this door's certificate, a caller without a key is the caller that the certificate names.
        borrows = bool(settings.tls_identity) and not who.authorization
        if borrows and settings.wants_keys:
            raise HttpFailure(
                401,
                "send a key: this door is open to a network, and its certificate (--tls-identity) is not for all",
                code="keys_required",
            )
        if door.admission.keyless or borrows:
            if settings.wants_keys:
                raise HttpFailure(
                    403,
                    "the server lets in callers without a key, and this door is open to a network: start the "
                    "server with --api-keys, or the door with --insecure-i-know",
                    code="keys_required",
                )
            check_host(request, settings)
            check_site(request, settings)
            # Where no key is checked, callers can send any; they cannot choose their address.
            state[HOLDER] = f"@{client_address(request)}"
        if (on_admitted := state.get(ON_ADMITTED)) is not None:
            on_admitted()


def is_known_caller(door: HttpDoor, scope: Scope) -> bool:
    """Whether the caller of a request was admitted before."""
    try:
        return door.admission.has_admitted(identity_of_request(Request(scope), vouches=door.settings.vouches))
    except HttpFailure:
        return False


def starts_with_known_key(door: HttpDoor, sent: bytes) -> bool:
    """Whether a connection's first bytes hold the key of a caller that was admitted before. Nothing else of
    them is checked."""
    key = None
    if (found := _AUTHORIZATION.search(sent)) is not None:
        key = found[1].strip().decode("latin-1")
    elif (found := _API_KEY.search(sent)) is not None:
        key = f"Bearer {found[1].strip().decode('latin-1')}"
    try:
        return door.admission.has_admitted(identity_from_header(key))
    except HttpFailure:
        return False


def has_body(request: Request) -> bool:
    """Whether the request has a body."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
