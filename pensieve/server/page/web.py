"""HTTP requests of the page: the page itself, and the documents behind it."""

from __future__ import annotations

import base64
import hashlib
import importlib.resources
import re
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Final
from urllib.parse import parse_qs, unquote

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from pensieve.core import FinishReason, Usage
from pensieve.errors import NotFound, PensieveError, PermissionDenied, Unauthenticated
from pensieve.feed import MAX_LISTED, SessionLine
from pensieve.hosts import names_this_machine
from pensieve.server.ids import SESSION_ID, session_key
from pensieve.server.page.state import BUCKET_S, DEFAULT_LIMIT, StateView
from pensieve.store import HistoryStore, Key
from pensieve.store.records import Record, RecordKind, SessionRow

SERIES_SCHEMA: Final = "pensieve.series/1"
DEFAULT_TENANT: Final = "default"
_STATUS: Final[dict[type[PensieveError], int]] = {Unauthenticated: 401, PermissionDenied: 403, NotFound: 404}
_SESSION: Final = re.compile(r"/sessions/([^/]+)\.json")

AuthorizeOperator = Callable[[str, str], Awaitable[None]]
"""Checks a caller, given the ``Authorization`` header and the address. Raises Unauthenticated or PermissionDenied."""


class WebPage:
    """Answers the page's requests. Used on one event loop; ``close`` cancels what it runs."""

    def __init__(self, state: StateView, operator: AuthorizeOperator) -> None:
        self._state = state
        self._authorize = operator
        self._html = importlib.resources.files(__package__).joinpath("page.html").read_bytes()
        self._html_headers = {"Content-Security-Policy": content_policy(self._html), **_HEADERS}

    async def answer(self, path: str, request: Request) -> Response | None:
        """Return the answer to a GET of ``path`` (still quoted), or None if the page does not serve it."""
        if not (path in ("/", "/state.json", "/series.json") or path.startswith("/sessions/")):
            return None
        if not names_this_machine(request.headers.get("host", "")):
            return _refused(
                403,
                "HOST_REFUSED",
                "open the page by IP address, as localhost, or by this machine's name",
            )
        if path == "/":
            return Response(self._html, headers=self._html_headers, media_type="text/html")
        try:
            address = request.client.host if request.client is not None else ""
            await self._authorize(request.headers.get("authorization", ""), address)
            return await self._document(path, parse_qs(request.scope["query_string"].decode("latin-1")))
        except ValueError as error:
            return _refused(400, "FIELD_INVALID", str(error))
        except PensieveError as error:
            return _refused(_STATUS.get(type(error), 503), error.reason, error.message)

    async def close(self) -> None:
        await self._state.close()

    async def _document(self, path: str, query: Mapping[str, list[str]]) -> Response:
        if path == "/state.json":
            limit = _number(query, "limit", DEFAULT_LIMIT, MAX_LISTED)
            return _json(await self._state.document(limit, _number(query, "after", 0, 1 << 31)))
        if path == "/series.json":
            buckets = self._state.recent.series(time.monotonic())
            return _json({"schema": SERIES_SCHEMA, "bucket_s": BUCKET_S, "buckets": buckets})
        match = _SESSION.fullmatch(path)
        name = unquote(match[1]) if match else ""
        if not SESSION_ID.fullmatch(name):
            raise NotFound("no such session", reason="SESSION_NOT_FOUND")
        key = Key(query.get("tenant", [DEFAULT_TENANT])[0], name)
        cached = await self._state.session_line(key)
        return _json(await session_document(self._state.store, key, cached, text=self._state.shows_text))


def content_policy(html: bytes) -> str:
    """Return a Content-Security-Policy that runs only this page's own scripts and styles, by their hashes."""

    def hashes(tag: str) -> str:
        found = re.findall(rf"<{tag}>(.*?)</{tag}>".encode(), html, re.DOTALL)
        digests = (base64.b64encode(hashlib.sha256(part).digest()).decode() for part in found)
        return " ".join(f"'sha256-{digest}'" for digest in digests)

    return (
        f"default-src 'none'; script-src {hashes('script')}; style-src {hashes('style')}; connect-src 'self'; "
        "img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


_HEADERS: Final = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Resource-Policy": "same-origin",
}


def _json(document: object, status: int = 200) -> Response:
    body = msgspec.json.encode(document)
    return Response(body, status, headers=_HEADERS, media_type="application/json")


def _refused(status: int, reason: str, message: str) -> Response:
    return _json({"reason": reason, "message": message}, status)


def _number(query: Mapping[str, list[str]], name: str, default: int, limit: int) -> int:
    text = query.get(name, [str(default)])[0]
    if not (text.isascii() and text.isdigit() and len(text) <= 10):
        raise ValueError(f"{name}: must be a number")
    return min(int(text), limit)


SESSION_SCHEMA: Final = "pensieve.session/1"
MAX_TURNS: Final = 50
MAX_CHARS: Final = 2000


class ItemText(msgspec.Struct, frozen=True, omit_defaults=True):
    role: str
    text: str
    cut: bool = False


class TurnReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of a session. Times in seconds; ``context_tokens`` = ``device`` + ``host`` + ``recomputed`` +
    ``new``."""

    revision: int
    time_s: float
    """Unix time of the commit."""
    kind: str
    """``turn``, or another kind of change."""
    request_id: str = ""
    finish_reason: str = ""
    candidates: int = 1
    context_tokens: int = 0
    device: int = 0
    host: int = 0
    recomputed: int = 0
    new: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    said: tuple[ItemText, ...] = ()
    """Empty unless ``serve --page-text``."""


class SessionDocument(msgspec.Struct, frozen=True):
    """The answer to ``/sessions/{id}.json``."""

    schema: str
    session: str
    tenant: str
    id: str
    labels: dict[str, str]
    revision: int
    items: int
    context_tokens: int
    created_s: float
    forked_from: str
    running_request: str
    cached: SessionLine | None
    """None: nothing of it is cached, or the engine does not answer."""
    turns: tuple[TurnReceipt, ...]
    earlier: int
    """Number of changes before these."""


async def session_document(
    store: HistoryStore, key: Key, cached: SessionLine | None, *, text: bool
) -> SessionDocument:
    """Return the document of one session. Raises NotFound and the store's errors."""
    row = await store.load(key)
    begin = max(row.revision - MAX_TURNS, 0)
    logged = await store.read(key, after_revision=begin)
    return _document(key, row, [one.record for one in logged], begin, cached, text=text)


def _document(
    key: Key, row: SessionRow, records: list[Record], begin: int, cached: SessionLine | None, *, text: bool
) -> SessionDocument:
    return SessionDocument(
        schema=SESSION_SCHEMA,
        session=session_key(key),
        tenant=key.tenant,
        id=key.session_id,
        labels=row.labels,
        revision=row.revision,
        items=row.item_count,
        context_tokens=row.context_tokens,
        created_s=row.create_ms / 1e3,
        forked_from=row.forked_from,
        running_request=row.running.request_id if row.running is not None else "",
        cached=cached,
        turns=tuple(_receipt(record, text=text) for record in records),
        earlier=begin,
    )


def _receipt(record: Record, *, text: bool) -> TurnReceipt:
    turn = record.turn
    usage = turn.usage if turn is not None else Usage()
    return TurnReceipt(
        revision=record.revision,
        time_s=record.time_ms / 1e3,
        kind=RecordKind(record.kind).value,
        request_id=record.request_id,
        finish_reason=FinishReason(turn.finish_reason).name.lower() if turn is not None else "",
        candidates=max(len(turn.candidates), 1) if turn is not None else 1,
        context_tokens=usage.context_tokens,
        device=usage.gpu_cached_tokens,
        host=usage.swapped_in_tokens,
        recomputed=usage.recomputed_tokens,
        new=usage.new_tokens,
        output_tokens=usage.output_tokens,
        queue_s=usage.queue_s,
        restore_s=usage.restore_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
        said=tuple(
            ItemText(item.role.name.lower(), item.text[:MAX_CHARS], len(item.text) > MAX_CHARS)
            for item in record.items
        )
        if text
        else (),
    )
