"""Arguments of the recurrent kernels: the chains of a step, the constants of a layer, the parts of a state page.

A recurrent layer keeps two things of a context. The *inputs* are the last W - 1 inputs of its convolution: [C, W - 1],
oldest first, in the model's dtype. The *state* is float32 [H, K, V]: H value heads, K values per key, V per value. Both
lie in one page, the inputs first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import numpy.typing as npt
import torch

Chains = npt.NDArray[np.int64]
"""[n, 6], one row per chain, with the columns below. A chain is the consecutive tokens of one context in a step: rows
``[FIRST, FIRST + ROWS)`` of the step's tensors. It starts from the state in page ``READ``, or from zeros if that is
``NO_PAGE``. Page ``BOUNDARY`` receives the state after the first ``BOUNDARY_ROWS`` tokens, page ``LIVE`` that after the
last; ``NO_PAGE``: not written. A chain of 0 rows that writes no page is padding."""
FIRST, ROWS, READ, BOUNDARY, BOUNDARY_ROWS, LIVE = range(6)
NO_PAGE = -1
PART_ALIGNMENT = 16
"""Bytes; each part of a page begins at a multiple."""


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


def make_chains(rows: Sequence[Sequence[int]] | Chains, tokens: int, pages: int) -> Chains:
    """Return chains [n, 6] for steps of ``tokens`` tokens and tiers of ``pages`` state pages. Raises ValueError when a
    chain leaves the step, two overlap, a page does not exist, one is written twice, or a last state is lost."""
    chains = np.asarray(rows, dtype=np.int64).reshape(-1, 6)
    used = chains[chains[:, ROWS] != 0]
    if not len(chains):
        return chains
    order = used[np.argsort(used[:, FIRST], kind="stable")]
    ends = order[:, FIRST] + order[:, ROWS]
    if (chains[:, ROWS] < 0).any() or (len(used) and (order[0, FIRST] < 0 or ends[-1] > tokens)):
        raise ValueError(f"a chain lies outside the step's {tokens} rows")
    if (order[1:, FIRST] < ends[:-1]).any():
        raise ValueError("two chains overlap")
    named = chains[:, [READ, BOUNDARY, LIVE]]
    if named.min() < NO_PAGE or named.max() >= pages:
        raise ValueError(f"a chain names a state page outside 0..{pages - 1}")
    written = named[:, 1:][named[:, 1:] != NO_PAGE]
    if len(np.unique(written)) < len(written):
        raise ValueError("two chains write one state page, or a chain writes one twice")
    at = chains[chains[:, BOUNDARY] != NO_PAGE]
    if ((at[:, BOUNDARY_ROWS] < 1) | (at[:, BOUNDARY_ROWS] > at[:, ROWS])).any():
        raise ValueError("a chain's boundary lies outside the chain")
    ends_at_boundary = (used[:, BOUNDARY] != NO_PAGE) & (used[:, BOUNDARY_ROWS] == used[:, ROWS])
    if ((used[:, LIVE] == NO_PAGE) & ~ends_at_boundary).any():
        raise ValueError("a chain's last state goes to no page")
    return chains


def inputs_bytes(channels: int, conv_width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page before its state: the inputs of the convolution, padded to ``PART_ALIGNMENT``."""
    size = channels * (conv_width - 1) * dtype.itemsize
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT


def page_bytes(channels: int, conv_width: int, state_shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Return the bytes of one layer's state page, a multiple of ``PART_ALIGNMENT``."""
    state = int(np.prod(state_shape)) * torch.float32.itemsize
    return inputs_bytes(channels, conv_width, dtype) + -(-state // PART_ALIGNMENT) * PART_ALIGNMENT


def page_parts(
    pages: torch.Tensor, channels: int, conv_width: int, state_shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of both parts of ``pages`` (uint8 [P, page_bytes], any page stride that is a multiple of
    ``PART_ALIGNMENT``): inputs ``dtype`` [P, C, W - 1] and states float32 [P, H, K, V]."""
    first, count = channels * (conv_width - 1) * dtype.itemsize, len(pages)
    inputs = pages[:, :first].view(dtype).view(count, channels, conv_width - 1)
    start = inputs_bytes(channels, conv_width, dtype)
    state = pages[:, start : start + int(np.prod(state_shape)) * torch.float32.itemsize]
    return inputs, state.view(torch.float32).view(count, *state_shape)
