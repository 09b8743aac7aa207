"""Sessions: they are made, read, changed, copied, cut and erased here. Their turns are in ``server.turns``."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import NamedTuple

import msgspec

from pensieve.core import Role
from pensieve.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    RevisionMismatch,
    Unavailable,
)
from pensieve.server import ids
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.cache import Histories
from pensieve.server.history.erased import check_not_erased, erasing
from pensieve.server.history.rendering import Renderer, too_long
from pensieve.server.links.engine_link import EngineLink, context_limit
from pensieve.server.sessions import records as session_records
from pensieve.server.sessions.paging import PageTokens
from pensieve.server.sessions.quotas import StorageQuotas
from pensieve.server.sessions.records import NewSession, SessionChange
from pensieve.server.settings import TurnSettings
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.turns import Turns
from pensieve.server.values import InputEntry, fingerprint
from pensieve.store import Counts, HistoryStore, Key
from pensieve.store.records import History, Item, Overflow, Record, RecordKind, SessionRow

log = logging.getLogger(__name__)

_RACES = 8
"""How often a change without ``expected_revision`` is tried again when another one came first."""


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


class Change(NamedTuple):
    """A record to append, and what is left of the records that it erases."""

    record: Record
    rests: tuple[Record, ...] = ()


class Sessions:
    """See the module docstring."""

    def __init__(
        self,
        store: HistoryStore,
        link: EngineLink,
        histories: Histories,
        renderer: Renderer,
        turns: Turns,
        served: ServedModel,
        settings: TurnSettings,
        quotas: StorageQuotas,
    ) -> None:
        """``turns``: where the running turns of a deleted session are ended."""
        self._store = store
        self._link = link
        self._histories = histories
        self._renderer = renderer
        self._turns = turns
        self._served = served
        self._settings = settings
        self._quotas = quotas
        self._pages = PageTokens(settings.page_secret, settings.page_token_s)

    async def create(self, tenant: str, new: NewSession) -> SessionRow:
        """Make a session. The same request, or the same id with the same content, again gives the session there is."""
        model = self._settings.model
        if new.config.model not in ("", model):
            raise InvalidArgument.field("config.model", f"is not served here; this server runs {model!r}")
        session_id = new.session_id or ids.derived_session_id("create", tenant, new.request_id)
        key = Key(tenant, session_id)
        limit = context_limit(self._link.info)
        prompt = InputEntry(Role.SYSTEM, new.config.system_prompt + new.config.tools)
        if new.config.overflow is Overflow.REJECT:
            self._renderer.check_size((prompt, *new.items), limit)
        else:
            # Together they may be too long, since the oldest turns are dropped. One alone must fit.
            for entry in (prompt, *new.items):
                self._renderer.check_size((entry,), limit)
        record = await session_records.create(self._renderer.of(tenant), new, self._served)
        counts = self._fitting_counts(History().apply(record, ""), limit)
        mark = fingerprint("create", new.config, new.labels, new.items)
        return await self._create(key, record, counts, mark, derived=not new.session_id)

    async def get(self, key: Key) -> SessionRow:
        return await self._store.load(key)

    async def list(
        self, tenant: str, *, page_size: int, page_token: str, labels: dict[str, str]
    ) -> SessionsPage:
        """Newest update first."""
        query = ("sessions", *(f"{name}={value}" for name, value in sorted(labels.items())))
        cursor = self._pages.open(tenant, query, page_token, str) if page_token else ""
        page = await self._store.list_sessions(
            tenant, limit=self._page_size(page_size), cursor=cursor, labels=labels or None
        )
        token = self._pages.seal(tenant, query, page.cursor) if page.cursor else ""
        return SessionsPage(page.rows, token)

    async def items(self, key: Key, *, page_size: int, page_token: str, after_item: int) -> ItemsPage:
        """Live items, oldest first. All pages of one listing show the revision of the first."""
        query = ("items", key.session_id, str(after_item))
        row = await self._store.load(key)
        revision, after = row.revision, after_item
        if page_token:
            revision, after = self._pages.open(key.tenant, query, page_token, tuple[int, int])
            history = await self._histories.at_revision(key, row, revision)
        else:
            history = await self._histories.at(key, row)
            revision = history.revision
        size = self._page_size(page_size)
        rest = [item for item in history.items if item.number > after]
        token = ""
        if len(rest) > size:
            self._histories.listed(key, history)
            token = self._pages.seal(key.tenant, query, (revision, rest[size - 1].number))
        return ItemsPage(tuple(rest[:size]), token, revision)

    async def update(self, key: Key, change: SessionChange, expected_revision: int | None) -> SessionRow:
        """Set fields; a changed system prompt renumbers all live items (``records.update``).

        Raises FailedPrecondition (MODEL_MISMATCH) for a system prompt in a session of another model, and where the
        session cannot be moved to the model that is served.
        """
        await self._quotas.change(key.tenant)
        if change.system_prompt is not None:
            prompt = InputEntry(Role.SYSTEM, change.system_prompt)
            self._renderer.check_size((prompt,), context_limit(self._link.info))
        if change.tools is not None:
            self._renderer.check_size(
                (InputEntry(Role.SYSTEM, change.tools),), context_limit(self._link.info)
            )

        async def made(base: History) -> Change:
            return Change(
                await session_records.update(self._renderer.of(key.tenant), base, change, self._served)
            )

        return await self._apply(key, made, "", expected_revision)

    async def rewind(
        self,
        key: Key,
        item: int,
        request_id: str,
        expected_revision: int | None,
        *,
        erase: bool = False,
    ) -> SessionRow:
        """Supersede the items after ``item``. Idempotent by request id.

        A tenant that stores too much may cut items off, so that a session can go on; a rewind that cuts off none is
        refused (ResourceExhausted).
        ``erase``: they are erased as well (``history.erased``), from the log and from the engine's cache.
        """
        known = bool(request_id) and await self._store.find_request(key, request_id) is not None

        async def change(base: History) -> Change:
            if not known:
                session_records.check_item(base, item)
            record = session_records.rewind(base, item, request_id)
            if not known and len(base.apply(record, "").items) == len(base.items):
                # It cuts nothing off, and is a record all the same: without end, as others are not.
                await self._quotas.change(key.tenant)
            if not erase:
                return Change(record)
            log = [one for one in await self._store.read(key) if one.record.revision <= base.revision]
            return Change(*erasing(base, record, log))

        mark = fingerprint("rewind", item, expected_revision, *(("erase",) if erase else ()))
        row = await self._apply(key, change, mark, expected_revision)
        if erase:
            await self._uncache(key)
        return row

    async def append(
        self,
        key: Key,
        entries: tuple[InputEntry, ...],
        request_id: str,
        expected_revision: int | None,
        followed_by: tuple[Role, ...] = (),
    ) -> tuple[SessionRow, tuple[Item, ...]]:
        """Add items behind the history, without an answer; the row, and the items. Idempotent by request id."""
        request_id = request_id or ids.new_request_id()
        await self._quotas.turn(key, request_id)
        limit = context_limit(self._link.info)
        self._renderer.check_size(entries, limit)
        known = await self._store.find_request(key, request_id)

        async def change(base: History) -> Change:
            made = await session_records.append(
                self._renderer.of(key.tenant), base, entries, request_id, self._served, followed_by
            )
            if known is None:
                self._fitting_counts(base.apply(made, ""), limit)
            return Change(made)

        row = await self._apply(
            key, change, fingerprint("append", entries, expected_revision), expected_revision
        )
        if known is not None:
            piece = await self._store.read_slice(key, after_revision=known - 1, limit=1)
            check_not_erased(item for one in piece.records for item in one.record.items)
        history = await self._histories.at(key, row)
        return row, tuple(item for item in history.items if item.request_id == request_id)

    async def fork(
        self,
        key: Key,
        *,
        item: int | None,
        request_id: str,
        session_id: str,
        expected_revision: int | None,
        candidate: int | None = None,
    ) -> SessionRow:
        """A new session with the live items up to ``item``, the last one of which may be another ``candidate`` of its
        turn. The same request again gives the same session.
        """
        target_id = session_id or ids.derived_session_id("fork", key.tenant, request_id)
        target = Key(key.tenant, target_id)
        row = await self._store.load(key)
        history = await self._histories.at(key, row)
        if not await self._exists(target):
            _check_revision(history.revision, expected_revision)
            if item is not None:
                session_records.check_item(history, item)
        record = session_records.fork(history, item, request_id)
        if candidate is not None:
            record = await self._ending_in(key, record, candidate)
        copy = History().apply(record, "")
        other = () if candidate is None else (candidate,)
        mark = fingerprint("fork", key.session_id, item, expected_revision, *other)
        source = (ids.session_name(key.session_id), copy.items[-1].number if copy.items else 0)
        counts = session_records.counts(self._renderer, copy)
        return await self._create(target, record, counts, mark, derived=not session_id, source=source)

    async def delete(
        self,
        key: Key,
        *,
        expected_revision: int | None,
        allow_missing: bool,
        unused_only: bool = False,
    ) -> None:
        """Erase content now, running turns included; the engine's cached state goes too, if an engine is up.

        A session that is not there, or was deleted before, is an error unless ``allow_missing``.
        ``unused_only``: its id is free again. Raises FailedPrecondition (SESSION_USED) where the session has had a
        turn, TurnInProgress while one runs.
        """
        if unused_only:
            await self._forget(key, expected_revision, allow_missing)
            return
        if not allow_missing:
            await self._store.load(key)
        await self._store.delete(key, expected_revision=expected_revision, allow_missing=allow_missing)
        self._quotas.freed(key.tenant)
        self._histories.forget(key)
        await self._turns.end_session(key, NotFound("the session was deleted", reason="SESSION_DELETED"))
        self._histories.forget(key)
        await self._uncache(key)

    # ---- parts

    async def _forget(self, key: Key, expected_revision: int | None, allow_missing: bool) -> None:
        """Remove a session that has never had a turn. No turn runs in it then: who comes next finds none."""
        try:
            head = await self._unused_head(key, expected_revision)
        except NotFound:
            if not allow_missing:
                raise
            return
        await self._store.forget(key, head)
        self._quotas.freed(key.tenant)
        self._histories.forget(key)
        await self._uncache(key)

    async def _unused_head(self, key: Key, expected_revision: int | None) -> str:
        """Chain hash of the session's newest record; no record up to it is a turn's.

        Raises DataLoss (HISTORY_REGRESSED) where the store may have lost a turn.
        """
        seen, revision, head = self._histories.known.of(key), 0, ""
        while True:
            piece = await self._store.read_slice(key, after_revision=revision, head_hash=head)
            self._histories.known.check(key, piece.row, seen)
            _check_revision(piece.row.revision, expected_revision)
            if any(one.record.kind is RecordKind.TURN for one in piece.records):
                raise FailedPrecondition(
                    "the session has had a turn: without unused_only it is deleted", reason="SESSION_USED"
                )
            if piece.records:
                revision, head = piece.records[-1].record.revision, piece.records[-1].head_hash
            if revision == piece.row.revision:
                return head

    async def _uncache(self, key: Key) -> None:
        """Drop the session's cached state, if an engine is up."""
        try:
            await self._link.evict(ids.session_key(key))
        except Unavailable as error:
            log.info("no cached state to drop: %s", error.reason)

    async def _ending_in(self, key: Key, record: Record, candidate: int) -> Record:
        """The fork of ``key`` with another answer at its end. Raises NotFound (CANDIDATE_NOT_FOUND)."""
        last = record.items[-1] if record.items else None
        revision = None
        if last is not None and last.role is Role.ASSISTANT and last.request_id:
            revision = await self._store.find_request(key, last.request_id)
        turn = None
        if revision is not None:
            turn = await turn_record.committed(self._store, key, revision)
        if last is None or turn is None:
            raise turn_record.no_candidate(candidate, 0)
        items = (*record.items[:-1], turn_record.answered(last, turn, candidate))
        return msgspec.structs.replace(record, items=items)

    async def _create(
        self,
        key: Key,
        record: Record,
        counts: Counts,
        mark: str,
        *,
        derived: bool,
        source: tuple[str, int] = ("", 0),
    ) -> SessionRow:
        assert record.config is not None and record.labels is not None
        row = SessionRow(
            tenant=key.tenant,
            session_id=key.session_id,
            head_item=counts.head_item,
            item_count=counts.item_count,
            context_tokens=counts.context_tokens,
            config=record.config,
            labels=record.labels,
            forked_from=source[0],
            forked_from_item=source[1],
        )
        try:
            async with self._quotas.session(key.tenant, lambda: self._exists(key)):
                created = await self._store.create(row, record, mark)
        except AlreadyExists as error:
            if derived:
                raise AlreadyExists(
                    "this request id was used for another session",
                    metadata={"request_id": record.request_id},
                ) from error
            raise
        self._histories.known.note(key, created)
        return created

    async def _apply(
        self,
        key: Key,
        build: Callable[[History], Awaitable[Change]],
        mark: str,
        expected_revision: int | None,
    ) -> SessionRow:
        for attempt in range(_RACES):
            row = await self._store.load(key)
            base = await self._histories.at(key, row)
            record, rests = await build(base)
            counts = session_records.counts(self._renderer, base.apply(record, ""))
            try:
                after = await self._store.apply(
                    key, mark, record, counts, expected_revision=expected_revision, rests=rests
                )
            except RevisionMismatch:
                if expected_revision is not None or attempt + 1 == _RACES:
                    raise
            else:
                self._histories.committed(key, base, record, after)
                return after
        raise AssertionError("unreachable: the last attempt returns or raises")

    async def _exists(self, key: Key) -> bool:
        try:
            await self._store.load(key)
        except NotFound:
            return False
        return True

    def _fitting_counts(self, history: History, limit: int) -> Counts:
        counts = session_records.counts(self._renderer, history)
        if counts.context_tokens >= limit and history.config.overflow is Overflow.REJECT:
            raise too_long(counts.context_tokens, limit)
        return counts

    def _page_size(self, asked: int) -> int:
        limits = self._settings.limits
        return min(asked or limits.default_page, limits.max_page)


def _check_revision(current: int, expected: int | None) -> None:
    metadata = {"current_revision": str(current)}
    if expected is not None and expected > current:
        raise DataLoss(
            "the history is behind the expected revision", reason="HISTORY_REGRESSED", metadata=metadata
        )
    if expected is not None and expected != current:
        raise RevisionMismatch("the session has moved on", metadata=metadata)
