"""The front end's own failures: it cannot serve a call now, or an exception was not expected.

After an error that says when to retry, a retry will succeed soon, here or on another replica. Of a bug the caller gets
an error id, and the log gets the traceback under that id.
"""

from __future__ import annotations

import logging
import secrets
import traceback
from typing import Final

from pensieve.errors import Internal, Unavailable

log = logging.getLogger(__name__)

RETRY_AFTER_S: Final = 1.0


def starting() -> Unavailable:
    return Unavailable("the engine is starting", reason="STARTING", retry_after_s=RETRY_AFTER_S)


def restarting() -> Unavailable:
    return Unavailable(
        "the engine is restarting; nothing of this turn was committed",
        reason="ENGINE_RESTARTING",
        retry_after_s=RETRY_AFTER_S,
    )


def draining() -> Unavailable:
    return Unavailable("the server is shutting down", reason="DRAINING", retry_after_s=RETRY_AFTER_S)


def running_elsewhere() -> Unavailable:
    return Unavailable(
        "the turn runs on another server, which was asked to end it and has not",
        reason="TURN_RUNNING_ELSEWHERE",
        retry_after_s=RETRY_AFTER_S,
    )


def report_bug(error: BaseException, where: str) -> Internal:
    """Log ``error`` and return an error for the caller that holds only an id. The log gets types and source lines,
    but no messages or values: those may hold prompts."""
    error_id = secrets.token_hex(8)
    lines: list[str] = []
    link: BaseException | None = error
    while link is not None:
        lines += [f"{type(link).__module__}.{type(link).__qualname__} raised at:\n"]
        lines += traceback.format_tb(link.__traceback__)
        link = link.__cause__ or link.__context__
    log.error("bug %s in %s\n%s", error_id, where, "".join(lines))
    return Internal("internal error", metadata={"error_id": error_id})
