"""All errors a caller can see, one class per way to react.

::

    PensieveError
    ├── InvalidArgument        INVALID_ARGUMENT     a field is wrong; ``violations`` lists the problems
    ├── Unauthenticated        UNAUTHENTICATED
    ├── PermissionDenied       PERMISSION_DENIED
    ├── NotFound               NOT_FOUND            no such session, turn or item; deleted; expired
    ├── AlreadyExists          ALREADY_EXISTS       the id is already taken
    ├── FailedPrecondition     FAILED_PRECONDITION  damaged session, newer store schema
    ├── ContextLimitExceeded   OUT_OF_RANGE
    ├── Aborted                ABORTED
    │   ├── RevisionMismatch       the session has moved on
    │   ├── TurnInProgress         another turn runs in this session
    │   └── TurnFenced             the turn lost its lease
    ├── DataLoss               DATA_LOSS            history is corrupt, has a gap, or lost acknowledged changes
    ├── ResourceExhausted      RESOURCE_EXHAUSTED   queue full, quota
    ├── Unavailable            UNAVAILABLE          draining, starting, engine restarting, store down: try again
    ├── DeadlineExceeded       DEADLINE_EXCEEDED
    ├── Cancelled              CANCELLED            the turn was cancelled and discarded
    └── Internal               INTERNAL             engine failed in this turn, or a bug

``code`` is the name of the gRPC status code, ``reason`` the ``google.rpc.ErrorInfo.reason``. ``docs/errors.md`` lists
the reasons, with their meaning and whether to try again. Imports nothing of the project; usable from the store, the
engine, the server and the client.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

ERROR_DOMAIN = "pensieve.v1"


class PensieveError(Exception):
    """Base of all errors. ``retry_after_s``: when to try again, if known."""

    code: ClassVar[str] = "UNKNOWN"
    default_reason: ClassVar[str] = "UNKNOWN"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.message = message
        self.reason = reason or self.default_reason
        self.metadata: dict[str, str] = dict(metadata or {})
        self.retry_after_s = retry_after_s

    def __str__(self) -> str:
        return f"{self.message} [{self.code}/{self.reason}]"


class InvalidArgument(PensieveError):
    """A field of the request is wrong. ``violations``: pairs of field path and problem."""

    code = "INVALID_ARGUMENT"
    default_reason = "FIELD_INVALID"

    def __init__(
        self,
        message: str,
        *,
        reason: str | None = None,
        metadata: Mapping[str, str] | None = None,
        retry_after_s: float | None = None,
        violations: Sequence[tuple[str, str]] = (),
    ) -> None:
        super().__init__(message, reason=reason, metadata=metadata, retry_after_s=retry_after_s)
        self.violations = tuple(violations)

    @classmethod
    def field(cls, path: str, problem: str) -> InvalidArgument:
        return cls(f"{path}: {problem}", violations=((path, problem),))


class Unauthenticated(PensieveError):
    code = "UNAUTHENTICATED"
    default_reason = "CREDENTIAL_MISSING"


class PermissionDenied(PensieveError):
    code = "PERMISSION_DENIED"
    default_reason = "SCOPE_MISSING"


class NotFound(PensieveError):
    code = "NOT_FOUND"
    default_reason = "SESSION_NOT_FOUND"


class AlreadyExists(PensieveError):
    code = "ALREADY_EXISTS"
    default_reason = "REQUEST_ID_REUSED"


class FailedPrecondition(PensieveError):
    code = "FAILED_PRECONDITION"
    default_reason = "SESSION_DAMAGED"


class ContextLimitExceeded(PensieveError):
    code = "OUT_OF_RANGE"
    default_reason = "CONTEXT_LIMIT_EXCEEDED"


class Aborted(PensieveError):
    code = "ABORTED"
    default_reason = "ABORTED"


class RevisionMismatch(Aborted):
    default_reason = "REVISION_MISMATCH"


class TurnInProgress(Aborted):
    default_reason = "TURN_IN_PROGRESS"


class TurnFenced(Aborted):
    default_reason = "TURN_FENCED"


class DataLoss(PensieveError):
    code = "DATA_LOSS"
    default_reason = "HISTORY_CORRUPT"


class ResourceExhausted(PensieveError):
    code = "RESOURCE_EXHAUSTED"
    default_reason = "SERVER_OVERLOADED"


class Unavailable(PensieveError):
    code = "UNAVAILABLE"
    default_reason = "STORE_UNAVAILABLE"


class DeadlineExceeded(PensieveError):
    code = "DEADLINE_EXCEEDED"
    default_reason = "DEADLINE_TOO_SHORT"


class Cancelled(PensieveError):
    code = "CANCELLED"
    default_reason = "TURN_CANCELLED"


class Internal(PensieveError):
    code = "INTERNAL"
    default_reason = "BUG"


BY_REASON: dict[str, type[PensieveError]] = {
    cls.default_reason: cls for cls in (RevisionMismatch, TurnInProgress, TurnFenced)
}
"""Reasons with a more precise class than their status code has."""

BY_CODE: dict[str, type[PensieveError]] = {
    cls.code: cls
    for cls in (
        InvalidArgument,
        Unauthenticated,
        PermissionDenied,
        NotFound,
        AlreadyExists,
        FailedPrecondition,
        ContextLimitExceeded,
        Aborted,
        DataLoss,
        ResourceExhausted,
        Unavailable,
        DeadlineExceeded,
        Cancelled,
        Internal,
    )
}
