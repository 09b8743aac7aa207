"""A pytest plugin that records the lines that each test reaches: ``-p support.mutation.contexts``.

Lines of the test process are recorded with the test's name as their context. Child processes start their own coverage
(``sitecustomize`` of the working copy) and belong to the whole test file: one pytest process runs one file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator

import coverage
import pytest

_coverage = coverage.Coverage(config_file=os.environ["COVERAGE_PROCESS_START"], data_suffix=True)
_coverage.start()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    _coverage.switch_context(item.nodeid)
    try:
        return (yield)
    finally:
        _coverage.switch_context("")


def pytest_unconfigure() -> None:
    _coverage.stop()
    _coverage.save()
