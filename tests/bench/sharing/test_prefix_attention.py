"""The benchmark of attention over a shared prefix: its ways agree, under the interpreter."""

from __future__ import annotations

import pytest

from support.kernels.under_interpreter import passed_under_interpreter
from support.lengths import LONG


@pytest.mark.skipif(not LONG, reason="of a benchmark: PENSIEVE_LONG_TESTS=1")
def test_the_ways_under_the_interpreter() -> None:
    assert passed_under_interpreter("interpreted_prefix_attention") >= 9
