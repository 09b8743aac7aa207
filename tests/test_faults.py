"""``docs/faults.md`` is what the tests' own markers say, and each row has a test or a reason."""

from __future__ import annotations

from support import matrix
from support.matrix_rows import GROUPS, ROWS, UNTESTED


def test_the_page_is_made_of_the_tests() -> None:
    assert matrix.PAGE.read_text() == matrix.page(), "run: python tests/support/matrix.py --write"


def test_each_row_has_a_test_or_a_reason() -> None:
    tested = {one.row for one in matrix.provoked()}
    assert tested <= set(ROWS), "a test names a row that is not there"
    assert set(ROWS) == set(range(1, len(ROWS) + 1))
    assert set(ROWS) == {row for _, first, last in GROUPS for row in range(first, last + 1)}
    assert set(ROWS) - tested == set(UNTESTED), "a row without a test needs a reason, one with a test none"


def test_the_reader_of_markers() -> None:
    rows = {one.row for one in matrix.provoked() if one.name == "test_in_each_phase"}
    assert {25, 27} <= rows
