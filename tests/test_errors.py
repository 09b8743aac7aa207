"""``docs/errors.md`` names every reason that a caller can meet and no other, with its code and what the client does."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve import errors, rpc_status
from pensieve.client._retry import Verdict, verdict
from pensieve.errors import BY_CODE, PensieveError
from support.sources import nodes, python_files

PAGE = Path(__file__).parents[1] / "docs" / "errors.md"
ERRORS = {
    name: kind
    for name, kind in vars(errors).items()
    if isinstance(kind, type) and issubclass(kind, PensieveError)
}
PLACEHOLDERS = {PensieveError.default_reason, errors.Aborted.default_reason}
"""Defaults of classes that are only raised with a reason, or as one of their subclasses."""
ENGINE_CODES = {
    "CONTEXT_LIMIT_EXCEEDED": "OUT_OF_RANGE",
    "GRAMMAR_TOO_COSTLY": "INVALID_ARGUMENT",
    "SERVER_OVERLOADED": "RESOURCE_EXHAUSTED",
    "DRAINING": "UNAVAILABLE",
}
"""What the front end makes of the engine's ``Failed``; of all other reasons it makes INTERNAL."""
VERDICTS = {
    "raise": Verdict.RAISE,
    "again": Verdict.RESEND,
    "again, slowly": Verdict.RESEND_SLOWLY,
    "once": Verdict.RESEND_ONCE,
}


class Row:
    """One reason of the page."""

    def __init__(self, heading: str, line: str) -> None:
        reason, meaning, client = (cell.strip() for cell in line.strip().strip("|").split("|"))
        self.reason = reason.strip("`")
        self.client = client
        own = [
            code for code in re.findall(r"\b[A-Z_]+\b", re.sub(r"`[^`]*`", "", meaning)) if code in BY_CODE
        ]
        self.codes = own or [
            code for code in re.findall(r"[A-Z_]+", heading.partition(":")[0]) if code in BY_CODE
        ]


def page() -> list[Row]:
    rows, heading = [], ""
    for line in PAGE.read_text().splitlines():
        if line.startswith("## "):
            heading = line
        elif line.startswith("| `"):
            rows.append(Row(heading, line))
    return rows


def texts(node: ast.AST | None) -> set[str]:
    """String constants in an expression, all alternatives of a conditional included."""
    found = ast.walk(node) if node is not None else ()
    return {
        one.value
        for one in found
        if isinstance(one, ast.Constant) and isinstance(one.value, str) and one.value
    }


def raised() -> Iterator[tuple[str, str, str]]:
    """(reason, code or "" when it cannot be told, place) of every error that the sources make."""
    for path in python_files("pensieve", "store"):
        if "v1" in path.parts:
            continue
        for node in nodes(path):
            if not isinstance(node, ast.Call):
                continue
            name = node.func.id if isinstance(node.func, ast.Name) else ""
            place = f"{path}:{node.lineno}"
            if name == "Failed" and len(node.args) == 3:
                for reason in texts(node.args[1]):
                    yield reason, ENGINE_CODES.get(reason, "INTERNAL"), place
            for keyword in node.keywords:
                if keyword.arg == "reason":
                    for reason in texts(keyword.value):
                        yield reason, ERRORS[name].code if name in ERRORS else "", place


def reasons() -> set[str]:
    """Of the sources: the ones that are raised, the defaults, and the ones that clients and the wire know."""
    defaults = {kind.default_reason for kind in ERRORS.values()} - PLACEHOLDERS
    wire = {
        rpc_status.TRANSPORT,
        rpc_status.TRANSPORT_FINAL,
        rpc_status.MESSAGE_TOO_LARGE,
        *rpc_status.LIBRARY_MAY_RETRY,
    }
    compared = {
        "QUOTA_EXCEEDED",
        "STREAM_INCONSISTENT",
    }  # set apart by ``rpc_status`` and by the client's retries
    return defaults | wire | compared | {reason for reason, _, _ in raised()}


def test_the_page_names_every_reason_and_no_other() -> None:
    named = [row.reason for row in page()]
    assert len(named) == len(set(named)), "a reason stands on the page twice"
    assert set(named) == reasons()


def test_reasons_stand_under_their_code() -> None:
    codes = {row.reason: row.codes for row in page()}
    defaults = ((kind.default_reason, kind.code, name) for name, kind in ERRORS.items())
    for reason, code, place in (*raised(), *defaults):
        if code and reason not in PLACEHOLDERS and codes[reason]:
            assert code in codes[reason], f"{place} raises {reason} as {code}"


@pytest.mark.parametrize("row", page(), ids=lambda row: row.reason)
def test_the_page_says_what_the_client_does(row: Row) -> None:
    kind = BY_CODE[row.codes[0]] if row.codes else errors.Unavailable
    assert verdict(kind("x", reason=row.reason)) is VERDICTS[row.client]


def test_only_reasons_of_unavailable_may_be_replayed_by_the_library() -> None:
    codes = {row.reason: row.codes for row in page()}
    assert {code for reason in rpc_status.LIBRARY_MAY_RETRY for code in codes[reason]} == {"UNAVAILABLE"}
