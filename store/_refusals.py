"""The store's errors, each made in one place so that all implementations give the same one."""

from __future__ import annotations

from pensieve.errors import (
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    NotFound,
    PensieveError,
    RevisionMismatch,
    TurnFenced,
    TurnInProgress,
    Unavailable,
)
from pensieve.store.contract import Key


def not_found() -> NotFound:
    """Names no id: another tenant's session must read exactly like a missing one."""
    return NotFound("no such session", reason="SESSION_NOT_FOUND")


def deleted() -> NotFound:
    return NotFound("the session was deleted", reason="SESSION_DELETED")


def expired() -> NotFound:
    return NotFound("the session has expired", reason="SESSION_EXPIRED")


def session_exists(key: Key) -> AlreadyExists:
    return AlreadyExists(
        f"session {key.session_id!r} exists with another configuration", reason="SESSION_EXISTS"
    )


def request_reused(request_id: str) -> AlreadyExists:
    return AlreadyExists(
        f"request id {request_id!r} was already used for another request in this session",
        reason="REQUEST_ID_REUSED",
    )


def busy(active_request_id: str, lease_ms_left: int) -> TurnInProgress:
    seconds = max(lease_ms_left, 0) / 1000
    return TurnInProgress(
        "another turn runs in this session",
        metadata={"active_request_id": active_request_id, "retry_after_s": f"{seconds:.3f}"},
        retry_after_s=seconds,
    )


def damaged() -> FailedPrecondition:
    return FailedPrecondition(
        "the session's history is damaged: it can be read and exported, not continued",
        reason="SESSION_DAMAGED",
    )


def wrong_revision(current: int, expected: int) -> PensieveError:
    """RevisionMismatch if the session has moved on, DataLoss if the store is behind the caller."""
    metadata = {"current_revision": str(current)}
    if expected > current:
        return DataLoss(
            f"the store holds revision {current}, the caller has seen {expected}: history went back in time",
            reason="HISTORY_REGRESSED",
            metadata=metadata,
        )
    return RevisionMismatch(f"the session is at revision {current}, not {expected}", metadata=metadata)


def not_next(current: int, offered: int) -> RevisionMismatch:
    return RevisionMismatch(
        f"revision {offered} cannot follow revision {current}", metadata={"current_revision": str(current)}
    )


def other_head(current: int) -> RevisionMismatch:
    return RevisionMismatch("the session has changed meanwhile", metadata={"current_revision": str(current)})


def diverged(revision: int) -> DataLoss:
    """The log is sound but is not the one the caller has seen: a fail-over lost acknowledged records."""
    return DataLoss(
        f"the store's history at revision {revision} is not the one the caller has seen",
        reason="HISTORY_REGRESSED",
    )


def lost() -> DataLoss:
    """The session was acknowledged here, neither erased nor expired, and is not there."""
    return DataLoss(
        "the store no longer has the session, which was acknowledged: history went back in time",
        reason="HISTORY_REGRESSED",
        metadata={"current_revision": "0"},
    )


def fenced() -> TurnFenced:
    return TurnFenced("the turn no longer holds the session's lease; nothing was appended")


def corrupt(key: Key, revision: int, problem: str) -> DataLoss:
    return DataLoss(
        f"session {key.session_id!r}: record {revision} {problem}",
        reason="HISTORY_CORRUPT",
        metadata={"revision": str(revision)},
    )


def unavailable(problem: str) -> Unavailable:
    return Unavailable(f"history store: {problem}", reason="STORE_UNAVAILABLE", retry_after_s=1.0)


def full(problem: str) -> Unavailable:
    return Unavailable(
        f"history store is full or read-only: {problem}", reason="STORE_FULL", retry_after_s=5.0
    )


def replaced(problem: str) -> Unavailable:
    return Unavailable(
        f"{problem}; refusing all work, because an empty store must not look like a store without sessions. "
        "Bring its own data back, or restart Pensieve to accept this store, as after `pensieve store restore`",
        reason="STORE_REPLACED",
        retry_after_s=5.0,
    )


def newer_schema(found: str, known: int) -> FailedPrecondition:
    return FailedPrecondition(
        f"the history store has schema {found}, this program supports {known}: upgrade Pensieve",
        reason="STORE_VERSION",
    )
