"""The kernels of recurrent layers, in Triton's interpreter."""

from __future__ import annotations

from support.kernels.under_interpreter import passed_under_interpreter


def test_kernels_equal_the_reference() -> None:
    assert passed_under_interpreter("interpreted_recurrence") == 17
