"""The products of mixtures of experts: under Triton's interpreter, and compiled for an H200."""

from __future__ import annotations

from support.kernels.under_interpreter import passed_under_interpreter


def test_kernels_under_the_interpreter() -> None:
    assert passed_under_interpreter("interpreted_experts") >= 6
