"""Refuses what a page of another site sends through a browser to a door that asks for no key.

With keys there is nothing to refuse: such a page has none.
"""

from __future__ import annotations

from typing import Final
from urllib.parse import urlsplit

from starlette.requests import Request

from pensieve.hosts import names_this_machine
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.settings import DoorSettings

_READING: Final = frozenset({"GET", "HEAD", "OPTIONS"})
"""Methods that change nothing; what they answer, the browser keeps from the page."""
_UNASKED: Final = frozenset({"text/plain", "multipart/form-data"})
"""Types of content that a browser sends for any page without asking the server first. The third one,
application/x-www-form-urlencoded, is what curl sends where it is told no type."""


def check_host(request: Request, settings: DoorSettings) -> None:
    """Refuse a foreign name on loopback, which another site may have led here. Raises HttpFailure (403)."""
    host = request.headers.get("host", "")
    if settings.on_loopback and not names_this_machine(host, settings.hosts):
        raise HttpFailure(
            403,
            f"{host!r} is no name of this machine: call it localhost, or start the server with keys "
            "(--api-keys) or with this name (--http-host, of pensieve gateway --host)",
            kind="permission_error",
            code="foreign_host",
        )


def check_site(request: Request, settings: DoorSettings) -> None:
    """Refuse a change that a page of another site asks for. Raises HttpFailure (403, 415)."""
    if request.method in _READING:
        return
    origin = request.headers.get("origin")
    if origin in settings.cors_origins or ("*" in settings.cors_origins and origin is not None):
        return
    site = request.headers.get("sec-fetch-site")
    if site is not None:  # a page cannot set it
        foreign = site.lower() not in ("same-origin", "none")
    else:
        foreign = origin is not None and not _is_own(origin, request.headers.get("host", ""))
    if foreign:
        raise HttpFailure(
            403,
            "pages of other sites may not call: allow their origin (--http-cors-origin, of pensieve gateway "
            "--cors-origin), or start the server with keys (--api-keys)",
            kind="permission_error",
            code="foreign_origin",
        )
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind in _UNASKED:
        raise HttpFailure(
            415,
            f"a body of the type {kind} is not read: send content-type: application/json",
            code="unsupported_media_type",
        )


def _is_own(origin: str, host: str) -> bool:
    try:
        return urlsplit(origin).netloc.lower() == host.lower() != ""
    except ValueError:
        return False
