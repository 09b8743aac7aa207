"""What callers hand to kernels besides tensors: shared by the fast kernels and their oracle, which know nothing of
each other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Activation = Literal["silu", "relu", "gelu"]


@dataclass(frozen=True, slots=True, eq=False)
class HeadPrep:
    """What happens to the query and key heads of T tokens before they are attended: first the norms, then the turn."""

    cos: torch.Tensor | None = None
    """[T, D/2]: cosines of each token's angles; pair i of a head is its values i and i + D/2. None: nothing turns."""
    sin: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    """[D]: weights of an RMS norm over each query head; set together with ``key_norm``."""
    key_norm: torch.Tensor | None = None
    eps: float = 0.0
