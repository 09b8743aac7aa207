"""Creates, reads, updates, forks, rewinds and deletes sessions. Their turns are in ``server.turns``."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import msgspec

from pensieve.core import Role
from pensieve.errors import (
    AlreadyExists,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RevisionMismatch,
    TurnInProgress,
    Unavailable,
)
from pensieve.server import ids
from pensieve.server.clock import now_ms
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.cuts import check_not_erased, erasing_record
from pensieve.server.history.rendering import check_tools, context_too_long
from pensieve.server.history.transcript import Transcript, initial_history
from pensieve.server.links.engine_link import EngineLink, context_limit
from pensieve.server.sessions import records as session_records
from pensieve.server.sessions.exports import ImportedSession
from pensieve.server.sessions.quotas import StorageQuotas
from pensieve.server.sessions.records import NewFork, NewSession, SessionChange
from pensieve.server.settings import TurnSettings
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.record import CommittedTurn
from pensieve.server.turns.turns import Turns
from pensieve.server.values import InputEntry, TurnView, fingerprint
from pensieve.store import Counts, Key
from pensieve.store.records import History, Item, Overflow, Record, RecordKind, SessionRow, State

log = logging.getLogger(__name__)

_MAX_TRIES = 8
"""Tries of a change without ``expected_revision`` when other changes come first."""
_MAC_BYTES = 16
Cursor = TypeVar("Cursor")


@dataclass(frozen=True, slots=True)
class ItemsPage:
    """One page of a history at one revision."""

    items: tuple[Item, ...]
    next_token: str
    revision: int


@dataclass(frozen=True, slots=True)
class SessionsPage:
    rows: tuple[SessionRow, ...]
    next_token: str


class PreparedChange(NamedTuple):
    """A record to append, and the remains of the records that it erases."""

    record: Record
    rests: tuple[Record, ...] = ()


class Sessions:
    """All operations on sessions except their turns. Used on one event loop."""

    def __init__(
        self,
        transcript: Transcript,
        link: EngineLink,
        turns: Turns,
        served: ServedModel,
        settings: TurnSettings,
        quotas: StorageQuotas,
    ) -> None:
        """``turns``: ends the running turns of a deleted session."""
        self._transcript = transcript
        self._store = transcript.store
        self._renderer = transcript.renderer
        self._link = link
        self._turns = turns
        self._served = served
        self._settings = settings
        self._quotas = quotas
        self._pages = PageTokens(settings.page_secret, settings.page_token_s)

    async def create(self, tenant: str, new: NewSession) -> SessionRow:
        """Create a session. A repeated request, or the same id and content, returns the existing session."""
        model = self._settings.model
        if new.config.model not in ("", model):
            raise InvalidArgument.field("config.model", f"is not served here; this server runs {model!r}")
        session_id = new.session_id or ids.derived_session_id("create", tenant, new.request_id)
        key = Key(tenant, session_id)
        limit = context_limit(self._link.info)
        prompt = InputEntry(Role.SYSTEM, new.config.prompt + new.config.tools)
        if new.config.overflow is Overflow.REJECT:
            self._renderer.check_size((prompt, *new.items), limit)
        else:
            # Together they may be too long: the oldest turns are dropped. Each alone must fit.
            for entry in (prompt, *new.items):
                self._renderer.check_size((entry,), limit)
        record = await session_records.create(self._renderer.for_tenant(tenant), new, self._served)
        made = initial_history(record)
        self._check_fits(made, limit)
        mark = fingerprint("create", new.config, new.labels, new.items)
        return await self._create(key, record, made, mark, derived=not new.session_id)

    async def get(self, key: Key) -> SessionRow:
        return await self._store.load(key)

    async def list(
        self, tenant: str, *, page_size: int, page_token: str, labels: dict[str, str]
    ) -> SessionsPage:
        """The latest update first."""
        query = ("sessions", *(f"{name}={value}" for name, value in sorted(labels.items())))
        cursor = self._pages.open(tenant, query, page_token, str) if page_token else ""
        page = await self._store.list_sessions(
            tenant, limit=self._page_size(page_size), cursor=cursor, labels=labels or None
        )
        token = self._pages.seal(tenant, query, page.cursor) if page.cursor else ""
        return SessionsPage(page.rows, token)

    async def items(self, key: Key, *, page_size: int, page_token: str, after_item: int) -> ItemsPage:
        """Live items, oldest first. All pages of a listing show the revision of the first page."""
        query = ("items", key.session_id, str(after_item))
        row = await self._store.load(key)
        revision, after = row.revision, after_item
        if page_token:
            revision, after = self._pages.open(key.tenant, query, page_token, tuple[int, int])
            history = await self._transcript.history_at_revision(key, row, revision)
        else:
            history = await self._transcript.history_at(key, row)
            revision = history.revision
        size = self._page_size(page_size)
        rest = [item for item in history.items if item.number > after]
        token = ""
        if len(rest) > size:
            self._transcript.keep_listed(key, history)
            token = self._pages.seal(key.tenant, query, (revision, rest[size - 1].number))
        return ItemsPage(tuple(rest[:size]), token, revision)

    async def update(self, key: Key, change: SessionChange, expected_revision: int | None) -> SessionRow:
        """Set fields (``records.update``). Raises FailedPrecondition (MODEL_MISMATCH) for a new system prompt
        or tools in another model's session, and for a session that cannot be rebound."""
        await self._quotas.check_change(key.tenant)
        for name in ("system_prompt", "tools"):
            if name in change.config:
                entry = InputEntry(Role.SYSTEM, change.config[name])
                self._renderer.check_size((entry,), context_limit(self._link.info))

        return await self._update(key, change, expected_revision)

    async def set_lifetime(self, key: Key, ttl_s: float) -> None:
        """Change the idle lifetime, whatever the tenant's quota. No effect if the session has this one."""
        if (await self._store.load(key)).config.ttl_s == ttl_s:
            return
        await self._update(key, SessionChange(config={"ttl_s": ttl_s}), None)

    async def rewind(
        self,
        key: Key,
        item: int,
        request_id: str,
        expected_revision: int | None,
        *,
        erase: bool = False,
    ) -> SessionRow:
        """Supersede the items after ``item``; ``erase`` also removes them from the log and the engine's
        cache. Idempotent by request id. A tenant over its quota may only rewind if that removes items
        (ResourceExhausted)."""
        known = bool(request_id) and await self._store.find_request(key, request_id) is not None

        async def change(base: History) -> PreparedChange:
            if not known:
                session_records.check_item(base, item)
            record = session_records.rewind(base, item, request_id)
            if not known and len(base.apply(record, "").items) == len(base.items):
                # A rewind that removes nothing still adds a record, and could be repeated without end.
                await self._quotas.check_change(key.tenant)
            if not erase:
                return PreparedChange(record)
            records = await self._store.read(key)
            logged = [one for one in records if one.record.revision <= base.revision]
            return PreparedChange(*erasing_record(base, record, logged))

        mark = fingerprint("rewind", item, expected_revision, *(("erase",) if erase else ()))
        row = await self._apply(key, change, mark, expected_revision)
        if erase:
            await self._evict(key)
        return row

    async def append(
        self,
        key: Key,
        entries: tuple[InputEntry, ...],
        request_id: str,
        expected_revision: int | None,
        followed_by: tuple[Role, ...] = (),
    ) -> tuple[SessionRow, tuple[Item, ...]]:
        """Append items to the history without an answer; return the row and the items. Idempotent by request id."""
        request_id = request_id or ids.new_request_id()
        await self._quotas.check_turn(key, request_id)
        limit = context_limit(self._link.info)
        self._renderer.check_size(entries, limit)
        known = await self._store.find_request(key, request_id)

        async def change(base: History) -> PreparedChange:
            made = await session_records.append(
                self._renderer.for_tenant(key.tenant), base, entries, request_id, self._served, followed_by
            )
            if known is None:
                self._check_fits(base.apply(made, ""), limit)
            return PreparedChange(made)

        row = await self._apply(
            key, change, fingerprint("append", entries, expected_revision), expected_revision
        )
        if known is not None:
            piece = await self._store.read_slice(key, after_revision=known - 1, limit=1)
            check_not_erased(item for one in piece.records for item in one.record.items)
        history = await self._transcript.history_at(key, row)
        return row, tuple(item for item in history.items if item.request_id == request_id)

    async def fork(self, key: Key, new: NewFork) -> SessionRow:
        """Fork a session. A repeated request returns the same session."""
        target_id = new.session_id or ids.derived_session_id("fork", key.tenant, new.request_id)
        target = Key(key.tenant, target_id)
        _, history = await self._transcript.read(key, known_revision=new.expected_revision)
        if not await self._exists(target):
            check_revision(history.revision, new.expected_revision)
            if new.item is not None:
                session_records.check_item(history, new.item)
        record = session_records.fork(history, new.item, new.request_id, new.ttl_s)
        if new.candidate is not None:
            record = await self._with_last_answer(key, record, new.candidate)
        copy = initial_history(record)
        other = () if new.candidate is None else (new.candidate,)
        lifetime = () if new.ttl_s is None else ("ttl", new.ttl_s)
        mark = fingerprint("fork", key.session_id, new.item, new.expected_revision, *other, *lifetime)
        source = (ids.session_name(key.session_id), copy.items[-1].number if copy.items else 0)
        row = await self._create(target, record, copy, mark, derived=not new.session_id, source=source)
        try:
            await self._store.load(key)
        except NotFound:
            # Erased while it was copied. An erasure of all sessions about a person may have missed the copy.
            await self.delete(target, expected_revision=None, allow_missing=True)
            raise
        return row

    async def put_summary(
        self, key: Key, base: History, summary: str, keep_turns: int, request_id: str, mark: str
    ) -> SessionRow:
        """Replace all turns of ``base`` but the last ``keep_turns`` by a summary, in one change. Idempotent by request
        id. Raises RevisionMismatch if the session is no longer at ``base``, and the errors of ``records.compact``."""
        record = await session_records.compact(
            self._renderer.for_tenant(key.tenant), base, summary, keep_turns, request_id, self._served
        )
        return await self._append(key, base, PreparedChange(record), mark, base.revision)

    async def import_session(self, tenant: str, imported: ImportedSession, *, session_id: str) -> SessionRow:
        """Create a session with an exported one's live history, as a fork would. ``session_id``: "" for an id that
        follows from the lines. The same lines return the same session."""
        await check_tools(imported.history.config, self._renderer.for_tenant(tenant))
        record = session_records.fork(imported.history, None, "")
        key = Key(tenant, session_id or ids.derived_session_id("import", tenant, imported.sha256))
        mark = fingerprint("import", imported.sha256)
        return await self._create(key, record, initial_history(record), mark, derived=False)

    async def choose(
        self, key: Key, request_id: str, candidate: int, expected_revision: int | None
    ) -> TurnView:
        """Make another candidate of the latest turn its answer; return the turn. No effect for the present
        answer. Raises NotFound (TURN_NOT_FOUND, CANDIDATE_NOT_FOUND), FailedPrecondition (TURN_NOT_LATEST),
        ResourceExhausted (QUOTA_EXCEEDED: each choice adds a record), TurnInProgress, RevisionMismatch."""
        for _ in range(_MAX_TRIES):
            turn = await self._committed_turn(key, request_id)
            view = turn_record.committed_view(key, turn)
            count = max(1, len(view.candidates))
            if candidate >= count:
                raise turn_record.candidate_not_found(candidate, count)
            if candidate == view.chosen:
                return view
            if not turn.latest:
                raise FailedPrecondition("the session has changed since this turn", reason="TURN_NOT_LATEST")
            await self._quotas.check_change(key.tenant)
            _, base = await self._transcript.read(key)
            if base.revision != turn.head_revision:
                continue
            record = turn_record.choice_record(base, turn, candidate, now_ms())
            mark = fingerprint("choose", turn.record.request_id, candidate)
            try:
                await self._append(key, base, PreparedChange(record), mark, expected_revision)
            except RevisionMismatch:
                if expected_revision is not None:
                    raise
                continue
            if candidate:  # candidate 0's KV was already released
                self._link.choose(ids.session_key(key), candidate)
            chosen = CommittedTurn(turn.record, record, head_revision=record.revision, latest=True)
            return turn_record.committed_view(key, chosen)
        raise RevisionMismatch("the session changes too often to choose a candidate")

    async def delete(
        self,
        key: Key,
        *,
        expected_revision: int | None,
        allow_missing: bool,
        unused_only: bool = False,
        keep_cached: bool = False,
    ) -> int:
        """Erase the session, end its running turns, and drop the engine's cached state; return the number of
        tokens dropped. Raises NotFound for a missing session unless ``allow_missing``. ``unused_only``: free its
        id too; raises FailedPrecondition (SESSION_USED) if it has had a turn, TurnInProgress while one runs.
        ``keep_cached``: leave the cached state, unless the session has a subject."""
        if unused_only:
            return await self._delete_unused(key, expected_revision, allow_missing)
        try:
            if keep_cached or not allow_missing:
                row = await self._store.load(key)
                keep_cached = keep_cached and row.state is State.ACTIVE and not row.config.subject
        except NotFound:
            if not allow_missing:
                raise
        await self._store.delete(key, expected_revision=expected_revision, allow_missing=allow_missing)
        self._quotas.on_session_removed(key.tenant)
        self._transcript.forget(key)
        await self._turns.end_session(key, NotFound("the session was deleted", reason="SESSION_DELETED"))
        self._transcript.forget(key)
        return 0 if keep_cached else await self._evict(key)

    # ---- parts

    async def _update(self, key: Key, change: SessionChange, expected_revision: int | None) -> SessionRow:
        renderer = self._renderer.for_tenant(key.tenant)

        async def updated(base: History) -> PreparedChange:
            return PreparedChange(await session_records.update(renderer, base, change, self._served))

        return await self._apply(key, updated, "", expected_revision)

    async def _committed_turn(self, key: Key, request_id: str) -> CommittedTurn:
        revision = await self._store.find_request(key, request_id)
        turn = None if revision is None else await turn_record.load_committed(self._store, key, revision)
        if turn is not None:
            return turn
        running = (await self._store.load(key)).running
        if running is not None and running.request_id == request_id:
            raise TurnInProgress(
                "the turn still runs",
                metadata={"active_request_id": request_id},
                retry_after_s=running.lease_ms_left / 1000,
            )
        raise NotFound("no such turn in this session", reason="TURN_NOT_FOUND")

    async def _delete_unused(self, key: Key, expected_revision: int | None, allow_missing: bool) -> int:
        """Remove a session that has had no turn. None is running, and the next one will find no session."""
        try:
            head = await self._unused_head(key, expected_revision)
        except NotFound:
            if not allow_missing:
                raise
            return 0
        await self._store.forget(key, head)
        self._quotas.on_session_removed(key.tenant)
        self._transcript.forget(key)
        return await self._evict(key)

    async def _unused_head(self, key: Key, expected_revision: int | None) -> str:
        """Chain hash of the session's newest record. Raises FailedPrecondition (SESSION_USED) if a record is
        a turn's, DataLoss (HISTORY_REGRESSED) when the store may have lost one."""
        if expected_revision:
            await self._store.load(key, known_revision=expected_revision)
        seen, revision, head = self._transcript.known.get(key), 0, ""
        while True:
            piece = await self._store.read_slice(key, after_revision=revision, head_hash=head)
            self._transcript.known.check(key, piece.row, seen)
            check_revision(piece.row.revision, expected_revision)
            if any(one.record.kind is RecordKind.TURN for one in piece.records):
                raise FailedPrecondition(
                    "the session has had a turn; delete it without unused_only", reason="SESSION_USED"
                )
            if piece.records:
                revision, head = piece.records[-1].record.revision, piece.records[-1].head_hash
            if revision == piece.row.revision:
                return head

    async def _evict(self, key: Key) -> int:
        try:
            return await self._link.evict(ids.session_key(key))
        except Unavailable as error:
            log.info("no cached state to drop: %s", error.reason)
            return 0

    async def _with_last_answer(self, key: Key, record: Record, candidate: int) -> Record:
        """The fork of ``key`` with another candidate as its last answer. Raises NotFound (CANDIDATE_NOT_FOUND)."""
        last = record.items[-1] if record.items else None
        revision = None
        if last is not None and last.role is Role.ASSISTANT and last.request_id:
            revision = await self._store.find_request(key, last.request_id)
        turn = None
        if revision is not None:
            turn = await turn_record.load_committed(self._store, key, revision)
        if last is None or turn is None:
            raise turn_record.candidate_not_found(candidate, 0)
        items = (*record.items[:-1], turn_record.with_candidate(last, turn, candidate))
        return msgspec.structs.replace(record, items=items)

    async def _create(
        self,
        key: Key,
        record: Record,
        made: History,
        mark: str,
        *,
        derived: bool,
        source: tuple[str, int] = ("", 0),
    ) -> SessionRow:
        try:
            async with self._quotas.reserve_session(key.tenant, lambda: self._exists(key)):
                return await self._transcript.create(key, record, made, mark, source)
        except AlreadyExists as error:
            if derived:
                raise AlreadyExists(
                    "this request id was used for another session",
                    metadata={"request_id": record.request_id},
                ) from error
            raise

    async def _apply(
        self,
        key: Key,
        build: Callable[[History], Awaitable[PreparedChange]],
        mark: str,
        expected_revision: int | None,
    ) -> SessionRow:
        tries = 0
        while True:
            _, base = await self._transcript.read(key, known_revision=expected_revision)
            change, tries = await build(base), tries + 1
            try:
                return await self._append(key, base, change, mark, expected_revision)
            except RevisionMismatch:
                if expected_revision is not None or tries == _MAX_TRIES:
                    raise

    async def _append(
        self, key: Key, base: History, change: PreparedChange, mark: str, expected_revision: int | None
    ) -> SessionRow:
        async def write(counts: Counts) -> SessionRow:
            return await self._store.apply(
                key,
                mark,
                change.record,
                counts,
                expected_revision=expected_revision,
                erased_records=change.rests,
            )

        return (await self._transcript.append(key, base, change.record, write)).row

    async def _exists(self, key: Key) -> bool:
        try:
            await self._store.load(key)
        except NotFound:
            return False
        return True

    def _check_fits(self, history: History, limit: int) -> None:
        length = self._renderer.length(history)
        if length >= limit and history.config.overflow is Overflow.REJECT:
            raise context_too_long(length, limit)

    def _page_size(self, asked: int) -> int:
        limits = self._settings.limits
        return min(asked or limits.default_page, limits.max_page)


def check_revision(current: int, expected: int | None) -> None:
    """Raises RevisionMismatch."""
    if expected is not None and expected != current:
        raise RevisionMismatch(
            "the session has changed since the expected revision",
            metadata={"current_revision": str(current)},
        )


class PageTokens:
    """Page tokens: opaque, authenticated, bound to tenant and query, of limited age. They grant no access."""

    def __init__(self, secret: bytes, lifetime_s: float, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._lifetime_s = lifetime_s
        self._clock = clock

    def seal(self, tenant: str, query: tuple[str, ...], cursor: object) -> str:
        payload = msgspec.msgpack.encode((int(self._clock() + self._lifetime_s), cursor))
        return (
            base64.urlsafe_b64encode(self._mac(tenant, query, payload) + payload).decode("ascii").rstrip("=")
        )

    def open(self, tenant: str, query: tuple[str, ...], token: str, kind: type[Cursor]) -> Cursor:
        """The sealed cursor. Raises the same InvalidArgument for a forged, foreign or expired token."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise _bad_token() from error
        mac, payload = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(tenant, query, payload)):
            raise _bad_token()
        try:
            expires, raw_cursor = msgspec.msgpack.decode(payload, type=tuple[int, msgspec.Raw])
            cursor = msgspec.msgpack.decode(raw_cursor, type=kind)
        except msgspec.DecodeError as error:
            raise _bad_token() from error
        if self._clock() > expires:
            raise _bad_token()
        return cursor

    def _mac(self, tenant: str, query: tuple[str, ...], payload: bytes) -> bytes:
        signed = msgspec.msgpack.encode((tenant, query, payload))
        return hmac.new(self._secret, signed, hashlib.sha256).digest()[:_MAC_BYTES]


def _bad_token() -> InvalidArgument:
    return InvalidArgument.field("page_token", "is not a token of this listing, or has expired")
