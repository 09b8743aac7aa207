"""What Redis' errors, and what the scripts answer instead of "OK", mean for the store."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from redis import exceptions

from pensieve.errors import DataLoss, FailedPrecondition, PensieveError
from pensieve.store import _refusals
from pensieve.store.contract import Key

_REFUSES_WRITES = ("MISCONF", "OOM")
_FORBIDDEN = ("unknown command", "ACL failure in script", "can't run this command")
_PASSING = (
    *("BUSY", "NOREPLICAS", "LOADING", "MASTERDOWN", "READONLY", "TRYAGAIN", "CLUSTERDOWN", "ASK"),
    "WAIT cannot be used with replica",
)
_PASSING_TYPES = (
    exceptions.ConnectionError,
    exceptions.TimeoutError,
    exceptions.ReadOnlyError,
    exceptions.ClusterError,
    exceptions.RedisClusterException,
    exceptions.AskError,
    exceptions.TryAgainError,
)


class StoreReplacedError(exceptions.ResponseError):
    """A connection was made to a Redis that does not hold our store."""


def is_wrong_type(error: Exception) -> bool:
    """Whether a key holds something else than is always written to it."""
    return str(error).startswith("WRONGTYPE")


@contextmanager
def translated(place: str) -> Iterator[None]:
    """Raises the store's errors for those of Redis; what can only be a bug of ours passes as it is."""
    try:
        yield
    except (exceptions.RedisError, exceptions.RedisClusterException) as error:
        meaning = _meaning(error, place)
        if meaning is None:
            raise
        raise meaning from error


def meant(error: Exception, place: str) -> PensieveError:
    """The store's error for one that stood in the place of a reply. Raises what can only be a bug of ours."""
    meaning = _meaning(error, place)
    if meaning is None:
        raise error
    return meaning


def refusal(
    key: Key, outcome: bytes, values: list[Any], request_id: str, expected: int | None, offered: int
) -> PensieveError:
    """The error that an outcome of a script stands for. ``offered``: the revision of what was to be appended."""
    match outcome:
        case b"NOT_FOUND":
            return _refusals.not_found()
        case b"DELETED":
            return _refusals.deleted()
        case b"EXISTS":
            return _refusals.session_exists(key)
        case b"DAMAGED":
            return _refusals.damaged()
        case b"REUSED":
            return _refusals.request_reused(request_id)
        case b"BUSY":
            return _refusals.busy(values[0].decode(), int(values[1]))
        case b"REVISION":
            return _refusals.wrong_revision(int(values[0]), expected or 0)
        case b"CORRUPT":
            return _refusals.corrupt(key, int(values[0]), values[1].decode())
        case b"OTHER_HEAD":
            return _refusals.other_head(int(values[0]))
        case b"DIVERGED":
            return _refusals.diverged(int(values[0]))
        case b"NOT_NEXT":
            return _refusals.not_next(int(values[0]), offered)
        case b"FENCED":
            return _refusals.fenced()
    raise AssertionError(f"unknown script outcome {outcome!r}")


def _meaning(error: Exception, place: str) -> PensieveError | None:
    text = str(error)
    problem = f"Redis at {place}: {text}"
    if isinstance(error, StoreReplacedError):
        return _refusals.replaced(f"the Redis at {place} was emptied or replaced")
    if isinstance(error, exceptions.OutOfMemoryError) or text.startswith(_REFUSES_WRITES):
        return _refusals.full(problem)
    if isinstance(error, exceptions.NoPermissionError) or any(words in text for words in _FORBIDDEN):
        return FailedPrecondition(f"history store: {problem}", reason="STORE_FORBIDDEN")
    if is_wrong_type(error):
        return DataLoss(f"a key of a session holds something else: {problem}", reason="HISTORY_CORRUPT")
    if isinstance(error, exceptions.MovedError):
        return FailedPrecondition(
            f"the Redis at {place} is part of a Cluster: use redis+cluster://", reason="STORE_UNSAFE"
        )
    if isinstance(error, _PASSING_TYPES) or text.startswith(_PASSING):
        return _refusals.unavailable(problem)
    return None
