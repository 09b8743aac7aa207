"""What of a stored session is sound, and what is not: pure functions over what was read."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pensieve.errors import DataLoss
from pensieve.store._codec import verify_next
from pensieve.store._raw import Finding, Problem, RawSession, Remedy, finding
from pensieve.store._rules import Meta
from pensieve.store.contract import LoggedRecord
from pensieve.store.records import History, State


@dataclass(frozen=True, slots=True)
class Examined:
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


def examine(session: RawSession) -> Examined:
    """Checksums, chain, head, item numbers and request ids. Raises FailedPrecondition on a newer program's records."""
    meta = session.meta
    if meta is not None and meta.row.state is State.DELETED:
        found = list(session.findings)
        if session.log or session.requests:
            detail = f"{len(session.log)} records are left of a deleted session"
            found.append(finding(session.key, Problem.LOG, detail, Remedy.REBUILD))
        return Examined(session, tuple(found), (), History())
    sound, history, problem = _sound_part(session)
    so_far = Examined(session, session.findings, sound, history)
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


def _of_log(examined: Examined, problem: str | None) -> Iterator[Finding]:
    session, history = examined.session, examined.history
    row = session.meta.row if session.meta is not None else None
    if problem is None and not session.log:
        problem = "no record is left"
    if problem is None and row is not None:
        if examined.is_ahead:
            detail = f"its log goes on to record {history.revision}, its row says {row.revision}"
            yield finding(session.key, Problem.LOG, detail, Remedy.REBUILD)
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
        yield finding(session.key, Problem.LOG, problem, Remedy.MARK)


def _of_requests(examined: Examined) -> Iterator[Finding]:
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
        yield finding(session.key, Problem.REQUESTS, detail, Remedy.REBUILD)
    for request_id in () if examined.is_broken else session.requests:
        if request_id not in named:
            leads = session.requests[request_id].revision
            detail = f"request id {request_id!r} leads to record {leads}, which has another"
            yield finding(session.key, Problem.REQUESTS, detail, Remedy.REBUILD)


def _of_row(session: RawSession, meta: Meta, history: History) -> Iterator[Finding]:
    row = meta.row
    for name, found, right in (
        ("head_item", row.head_item, history.head_item),
        ("item_count", row.item_count, len(history.items)),
    ):
        if found != right:
            detail = f"its row says {name} {found}, its records {right}"
            yield finding(session.key, Problem.COUNTS, detail, Remedy.REBUILD)
    if row.state is State.DAMAGED:
        detail = "it is marked as damaged, and every record is sound"
        yield finding(session.key, Problem.MARKED, detail, Remedy.REBUILD)
