"""ASGI middleware: nothing of a request's body is read, and no endpoint runs, before the service knows the caller."""

from __future__ import annotations

from typing import Final

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pensieve.errors import PensieveError
from pensieve.http.common.credentials import HOLDER, address_of, who_calls
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import HttpFailure, failure_of
from pensieve.http.common.sites import check_host, check_site

OPEN: Final = frozenset({"/health", "/ready", "/metrics"})
"""Paths that take no credential and read no body."""
ADMITTED: Final = "admitted"
"""Where a request's state has what is called when its caller is let in: the connection is a known caller's then."""


class Entrance:
    """See the module docstring."""

    def __init__(self, app: ASGIApp, door: HttpDoor) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in OPEN:
            await self._app(scope, receive, send)
            return
        request = Request(scope)
        try:
            await self._admit(request)
        except (HttpFailure, PensieveError) as error:
            failure = error if isinstance(error, HttpFailure) else failure_of(error)
            failure.closes = has_body(request)
            await self._door.refusal(failure, request)(scope, receive, send)
            return
        await self._app(scope, receive, send)

    async def _admit(self, request: Request) -> None:
        """Raises HttpFailure or PensieveError."""
        door, settings = self._door, self._door.settings
        who = who_calls(request, vouches=settings.vouches)
        await door.admission.admit(who)
        state = request.scope.setdefault("state", {})
        state[HOLDER] = who.credential.hex()
        if door.admission.keyless:
            if settings.wants_keys:
                raise HttpFailure(
                    403,
                    "the server lets in callers without a key, and this door is open to a network: start the "
                    "server with --api-keys, or the door with --insecure-i-know",
                    kind="permission_error",
                    code="keys_required",
                )
            check_host(request, settings)
            check_site(request, settings)
            # Callers choose what they send as a key where none is asked for, but not their address.
            state[HOLDER] = f"@{address_of(request)}"
        if (admitted := state.get(ADMITTED)) is not None:
            admitted()


def has_body(request: Request) -> bool:
    """Whether a body comes with the request."""
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers
