"""What of a stored session is sound, what is not, and what it becomes then: pure functions over what was read.

``fixed`` keeps only what the records prove, and drops nothing of them unasked. ``salvaged`` says of a session whose row
cannot be read what its log still tells, which is nearly all of it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import msgspec

from pensieve.errors import DataLoss, FailedPrecondition
from pensieve.store._codec import StoredRecord, decode_record, verify_next
from pensieve.store._raw import Finding, Problem, RawSession, Remedy, make_finding, without_lease_holder
from pensieve.store._rules import CommittedRequest, Meta, ttl_ms
from pensieve.store.contract import Key, LoggedRecord
from pensieve.store.records import History, SessionRow, State


@dataclass(frozen=True, slots=True)
class Examination:
    """A session and what is known of it after every check."""

    session: RawSession
    findings: tuple[Finding, ...]
    sound: tuple[LoggedRecord, ...]
    """The records up to the first that is not proven."""
    history: History
    """What they add up to."""

    @property
    def is_sound(self) -> bool:
        return not self.findings

    @property
    def is_broken(self) -> bool:
        """Whether records are lost or changed, or nothing could be read at all."""
        return any(one.remedy is not Remedy.REBUILD for one in self.findings)

    @property
    def is_ahead(self) -> bool:
        """Whether the log is whole and goes on behind the head that the row names."""
        row = self.session.meta.row if self.session.meta is not None else None
        if row is None or len(self.sound) != len(self.session.log) or row.state is State.DELETED:
            return False
        return 0 < row.revision < len(self.sound) and self.sound[row.revision - 1].head_hash == row.head_hash

    def request_ids(self) -> dict[str, int]:
        """Request id of each sound record → its revision. The one that made the session is not kept by a store."""
        return {one.record.request_id: one.record.revision for one in self.sound[1:] if one.record.request_id}


def examine(session: RawSession) -> Examination:
    """Checksums, chain, head, item numbers and request ids. Raises FailedPrecondition on a newer program's records."""
    meta = session.meta
    if meta is not None and meta.row.state is State.DELETED:
        found = list(session.findings)
        if session.log or session.requests:
            detail = f"{len(session.log)} records are left of a deleted session"
            found.append(make_finding(session.key, Problem.LOG, detail, Remedy.REBUILD))
        return Examination(session, tuple(found), (), History())
    sound, history, problem = _sound_part(session)
    so_far = Examination(session, session.findings, sound, history)
    so_far = replace(so_far, findings=(*session.findings, *_of_log(so_far, problem)))
    found = [*so_far.findings, *_of_requests(so_far)]
    if meta is not None and not so_far.is_broken and not so_far.is_ahead:
        found += _of_row(session, meta, history)
    return replace(so_far, findings=tuple(found))


def _sound_part(session: RawSession) -> tuple[tuple[LoggedRecord, ...], History, str | None]:
    """Records that follow one another from the first on, what they add up to, and what is wrong with the next."""
    sound: list[LoggedRecord] = []
    history = History()
    for entry in session.log:
        try:
            logged = verify_next(session.key, entry, history.revision + 1, history.head_hash)
        except DataLoss as error:
            return tuple(sound), history, error.message.removeprefix(f"session {session.key.session_id!r}: ")
        sound.append(logged)
        history = history.apply(logged.record, logged.head_hash)
    return tuple(sound), history, None


def _of_log(examined: Examination, problem: str | None) -> Iterator[Finding]:
    session, history = examined.session, examined.history
    row = session.meta.row if session.meta is not None else None
    if problem is None and not session.log:
        problem = "no record is left"
    if problem is None and row is not None:
        if examined.is_ahead:
            detail = f"its log goes on to record {history.revision}, its row says {row.revision}"
            yield make_finding(session.key, Problem.LOG, detail, Remedy.REBUILD)
        elif history.revision < row.revision:
            problem = f"record {history.revision + 1} is missing, its row says {row.revision}"
        elif (history.revision, history.head_hash) != (row.revision, row.head_hash):
            problem = f"record {row.revision} is not the one that its row names as newest"
    beyond = max((known.revision for known in session.requests.values()), default=0)
    if problem is None and row is None and beyond > history.revision:
        problem = f"record {history.revision + 1} is missing, a request id names {beyond}"
    if problem is None and session.claimed is not None:
        # One of the two may be what fails the row's checksum.
        revision, head_hash = session.claimed
        if revision != history.revision and head_hash != history.head_hash:
            problem = f"record {history.revision} is not the newest that its row names, {revision}"
    if problem is not None:
        yield make_finding(session.key, Problem.LOG, problem, Remedy.MARK)


def _of_requests(examined: Examination) -> Iterator[Finding]:
    """Where no record is lost, an id that no record names was never committed."""
    session = examined.session
    named = examined.request_ids()
    for request_id, revision in named.items():
        known = session.requests.get(request_id)
        if known is None:
            detail = f"request id {request_id!r} of record {revision} is not known"
        elif known.revision != revision:
            detail = f"request id {request_id!r} leads to record {known.revision}, not {revision}"
        else:
            continue
        yield make_finding(session.key, Problem.REQUESTS, detail, Remedy.REBUILD)
    for request_id in () if examined.is_broken else session.requests:
        if request_id not in named:
            leads = session.requests[request_id].revision
            detail = f"request id {request_id!r} leads to record {leads}, which has another"
            yield make_finding(session.key, Problem.REQUESTS, detail, Remedy.REBUILD)


def _of_row(session: RawSession, meta: Meta, history: History) -> Iterator[Finding]:
    row = meta.row
    for name, found, right in (
        ("head_item", row.head_item, history.head_item),
        ("item_count", row.item_count, len(history.items)),
    ):
        if found != right:
            detail = f"its row says {name} {found}, its records {right}"
            yield make_finding(session.key, Problem.COUNTS, detail, Remedy.REBUILD)
    if row.state is State.DAMAGED:
        detail = "it is marked as damaged, and every record is sound"
        yield make_finding(session.key, Problem.MARKED, detail, Remedy.REBUILD)


@dataclass(frozen=True, slots=True)
class Fix:
    """A session as it shall be."""

    session: RawSession
    actions: tuple[str, ...]
    """What was done, in words."""
    records_cut: int = 0
    """Unproven records at its end that it no longer has."""


def plan_fix(examined: Examination, *, truncate: bool, now: int) -> Fix | None:
    """None when nothing can be done, or is to be done.

    A log that is not whole makes the session DAMAGED; with ``truncate`` it ends behind its last sound record instead,
    if it has one. A request id that comes back is known without its fingerprint: whatever is sent under it is
    answered by what was committed.
    """
    if examined.is_sound or any(one.remedy is Remedy.NONE for one in examined.findings):
        return None
    session = examined.session
    if session.meta is not None and session.meta.row.state is State.DELETED:
        rest = RawSession(session.key, session.meta)
        return Fix(rest, ("what was left of the deleted session is erased",))
    if examined.is_broken and not (truncate and examined.sound):
        return _marked(examined, now)
    requests = {
        request_id: CommittedRequest(_fingerprint(session, request_id, revision), revision)
        for request_id, revision in examined.request_ids().items()
    }
    log = session.log[: len(examined.sound)]
    fix = RawSession(session.key, _rebuilt(examined, now), log, requests)
    cut = len(session.log) - len(log)
    return Fix(fix, tuple(_words(examined, cut)), cut)


def _marked(examined: Examination, now: int) -> Fix | None:
    session, before = examined.session, examined.session.meta
    if before is not None and before.row.state is State.DAMAGED:
        return None
    if before is None and not examined.sound:
        return None
    meta = _rebuilt(examined, now) if before is None else without_lease_holder(before)
    row = msgspec.structs.replace(meta.row, state=State.DAMAGED)
    marked = RawSession(
        session.key, Meta(row, meta.create_fingerprint, meta.lease), session.log, session.requests
    )
    return Fix(marked, ("marked as damaged: it can be read up to there and exported, not continued",))


def _rebuilt(examined: Examination, now: int) -> Meta:
    """The row that the sound records lead to; of a lost one, who it was forked from is gone."""
    key, history, before = examined.session.key, examined.history, examined.session.meta
    if before is None:
        ttl = ttl_ms(history.config)
        first, last = examined.sound[0].record, examined.sound[-1].record
        row = SessionRow(
            tenant=key.tenant,
            session_id=key.session_id,
            create_ms=first.time_ms,
            update_ms=last.time_ms,
            expire_ms=now + ttl if ttl else 0,
        )
        before = Meta(row, "")
    kept = before.row.head_hash == history.head_hash and not any(
        one.problem is Problem.ROW for one in examined.findings
    )
    configured = any(one.record.config is not None for one in examined.sound)
    labelled = any(one.record.labels is not None for one in examined.sound)
    after = msgspec.structs.replace(
        before.row,
        state=State.ACTIVE,
        revision=history.revision,
        head_hash=history.head_hash,
        head_item=history.head_item,
        item_count=len(history.items),
        context_tokens=before.row.context_tokens if kept else int(history.tokens().size),
        config=history.config if configured else before.row.config,
        labels=dict(history.labels) if labelled else before.row.labels,
        running=None,
    )
    return without_lease_holder(Meta(after, before.create_fingerprint, before.lease))


def _fingerprint(session: RawSession, request_id: str, revision: int) -> str:
    """Of an entry that leads to the right record; of another one nothing is believed."""
    known = session.requests.get(request_id)
    return known.fingerprint if known is not None and known.revision == revision else ""


def _words(examined: Examination, cut: int) -> list[str]:
    problems = {one.problem for one in examined.findings}
    names = {
        Problem.ROW: "row rebuilt from the records",
        Problem.COUNTS: "item numbers corrected",
        Problem.REQUESTS: "request ids rebuilt",
        Problem.LISTING: "entered in the listing again",
        Problem.EXPIRY: "expiry set again",
        Problem.MARKED: "mark taken off",
    }
    words = [text for problem, text in names.items() if problem in problems]
    if examined.is_broken:
        words.insert(0, f"ends at revision {examined.history.revision}, {cut} unproven records cut")
    elif examined.is_ahead:
        words.insert(0, f"row moved on to revision {examined.history.revision}")
    elif Problem.LOG in problems:
        words.insert(0, "entries that are no records removed")
    return words


def salvage_meta(key: Key, stored: Sequence[StoredRecord], *, update_ms: int) -> Meta:
    """Metadata of a DAMAGED session, from its whole log (oldest first) as far as that can be read.

    It never expires: nobody knows when it would.
    """
    history = History()
    create_ms = 0
    for entry in stored:
        try:
            record = decode_record(entry.data)
            history = history.apply(record, entry.head_hash)
        except (msgspec.MsgspecError, ValueError, FailedPrecondition):
            break
        create_ms = create_ms or record.time_ms
    row = SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        state=State.DAMAGED,
        revision=stored[-1].revision if stored else 0,
        head_item=history.head_item,
        head_hash=stored[-1].head_hash if stored else "",
        item_count=len(history.items),
        context_tokens=len(history.tokens()),
        config=history.config,
        labels=dict(history.labels),
        create_ms=create_ms,
        update_ms=update_ms,
    )
    return Meta(row, "")
