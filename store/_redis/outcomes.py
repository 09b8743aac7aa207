"""The error that an outcome of a script stands for."""

from __future__ import annotations

from typing import Any

from pensieve.errors import PensieveError
from pensieve.store import _refusals
from pensieve.store.contract import Key


def refusal(
    key: Key, outcome: bytes, values: list[Any], request_id: str, expected: int | None, offered: int
) -> PensieveError:
    """``offered``: the revision of the record that was to be appended."""
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
        case b"DIVERGED":
            return _refusals.diverged(int(values[0]))
        case b"NOT_NEXT":
            return _refusals.not_next(int(values[0]), offered)
        case b"FENCED":
            return _refusals.fenced()
    raise AssertionError(f"unknown script outcome {outcome!r}")
