"""Requests of any kind get an answer or a refusal with a reason, and never one that says that we were wrong.

A few hundred in CI, the same each time; ``HYPOTHESIS_PROFILE=explore`` looks for new ones, and
``python tests/robustness/fuzz.py --seconds 600`` goes on for so long.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import given

from support.robustness.fuzzed_server import FuzzedServer
from support.robustness.fuzzing import METHODS, drawn, requests


@pytest.fixture(scope="module")
def server() -> Iterator[FuzzedServer]:
    with FuzzedServer() as running:
        yield running


@pytest.mark.fault(16, 17)
@given(request=requests())
def test_any_request_is_answered_or_refused_with_a_reason(
    server: FuzzedServer, request: tuple[str, bytes]
) -> None:
    server.send(*request)


def test_what_is_drawn_gets_far() -> None:
    """Beyond the decoder, in a good part: else the fuzzer would only ever test that."""
    parsed = 0
    for seed in range(300):
        method, data = drawn(seed)
        parsed += _parses(METHODS[method], data)
    assert parsed > 100


def _parses(kind: Any, data: bytes) -> bool:
    try:
        kind.FromString(data)
    except Exception:
        return False
    return True
