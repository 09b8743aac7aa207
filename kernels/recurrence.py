"""Arguments of the recurrent kernels: the chains of a step, the constants of a layer, and what a state page holds.

A recurrent layer keeps two things of a context. The *inputs* are the last W - 1 inputs of its convolution: [C, W - 1],
oldest first, in the model's dtype. The *state* is float32 [H, K, V]: H value heads, K values per key, V per value. Both
lie in one page, the inputs first; a kernel gets a view of each over all pages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

Chains = npt.NDArray[np.int64]
"""[n, 6], one row per chain, with the columns below. A chain is the consecutive tokens of one context in a step: rows
``[FIRST, FIRST + ROWS)`` of the step's tensors. It starts from the state in page ``READ``, or from zeros if that is
``NO_PAGE``. Page ``BOUNDARY`` receives the state after the first ``BOUNDARY_ROWS`` tokens, page ``LIVE`` that after the
last; ``NO_PAGE``: not written. No two chains overlap or write one page, and the state after a chain's last token goes
to a page. A chain of 0 rows that writes no page is padding."""
FIRST, ROWS, READ, BOUNDARY, BOUNDARY_ROWS, LIVE = range(6)
NO_PAGE = -1


@dataclass(frozen=True, slots=True, eq=False)
class Recurrence:
    """Constants of one recurrent layer.

    The convolution has C = 2 * G * K + H * V channels, with G key heads. Their order is values, keys (Mamba-2's B),
    queries (its C) for ``ssd``, and queries, keys, values for ``gated_delta`` (gated DeltaNet). Key head g serves the
    H / G consecutive value heads from g * H / G on.
    """

    kind: Literal["ssd", "gated_delta"]
    conv_weight: torch.Tensor
    """[C, W], the oldest input's weight first."""
    conv_bias: torch.Tensor | None
    """[C]"""
    key_heads: int
    decay: torch.Tensor
    """float32 [H], negative: the logarithm of a state's decay per unit of time, Mamba-2's A."""
    step_bias: torch.Tensor
    """float32 [H], added to the step size before its softplus."""
    skip: torch.Tensor | None = None
    """float32 [H], ``ssd`` only: the share of its value that is added to a head's output, Mamba-2's D."""
    step_limit: tuple[float, float] = (0.0, float("inf"))
    """``ssd`` only: bounds of the step size after its softplus."""

    @property
    def gates(self) -> int:
        """Gates of each value head: ``ssd`` has a step size, ``gated_delta`` a write strength, then a step size."""
        return 1 if self.kind == "ssd" else 2
