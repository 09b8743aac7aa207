"""What a damaged session becomes: only what its records prove, and nothing of them is dropped unasked."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from pensieve.store._examine import Examined
from pensieve.store._raw import Problem, RawSession, Remedy, at_rest
from pensieve.store._rules import Known, Meta, ttl_ms
from pensieve.store.records import SessionRow, State


@dataclass(frozen=True, slots=True)
class Fix:
    """A session as it shall be."""

    session: RawSession
    actions: tuple[str, ...]
    """What was done, in words."""
    records_cut: int = 0
    """Unproven records at its end that it no longer has."""


def fixed(examined: Examined, *, truncate: bool, now: int) -> Fix | None:
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
        request_id: Known(_fingerprint(session, request_id, revision), revision)
        for request_id, revision in examined.request_ids().items()
    }
    log = session.log[: len(examined.sound)]
    fix = RawSession(session.key, _rebuilt(examined, now), log, requests)
    cut = len(session.log) - len(log)
    return Fix(fix, tuple(_words(examined, cut)), cut)


def _marked(examined: Examined, now: int) -> Fix | None:
    session, before = examined.session, examined.session.meta
    if before is not None and before.row.state is State.DAMAGED:
        return None
    if before is None and not examined.sound:
        return None
    meta = _rebuilt(examined, now) if before is None else at_rest(before)
    row = msgspec.structs.replace(meta.row, state=State.DAMAGED)
    marked = RawSession(
        session.key, Meta(row, meta.create_fingerprint, meta.lease), session.log, session.requests
    )
    return Fix(marked, ("marked as damaged: it can be read up to there and exported, not continued",))


def _rebuilt(examined: Examined, now: int) -> Meta:
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
    return at_rest(Meta(after, before.create_fingerprint, before.lease))


def _fingerprint(session: RawSession, request_id: str, revision: int) -> str:
    """Of an entry that leads to the right record; of another one nothing is believed."""
    known = session.requests.get(request_id)
    return known.fingerprint if known is not None and known.revision == revision else ""


def _words(examined: Examined, cut: int) -> list[str]:
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
