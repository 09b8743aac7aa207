"""Unexpected exceptions: the caller gets an error id, the log gets the traceback under that id."""

from __future__ import annotations

import logging
import secrets
import traceback

from pensieve.errors import Internal

log = logging.getLogger(__name__)


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
