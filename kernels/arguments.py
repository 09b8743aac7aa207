"""Kernel arguments other than tensors. The fast kernels and their oracle share them and do not import each other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F

Activation = Literal["silu", "relu", "relu2", "gelu", "gelu_tanh"]
"""``relu2``: the square of relu. ``gelu_tanh``: GELU with the tanh approximation."""


ACTIVATIONS: dict[Activation, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "relu": F.relu,
    "relu2": lambda x: F.relu(x).square(),
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
}


@dataclass(frozen=True, slots=True, eq=False)
class HeadPrep:
    """Preparation of the query and key heads of T tokens before attention: first the norms, then the rotation."""

    cos: torch.Tensor | None = None
    """[T, D/2]: cosine of each token's angles; pair i of a head is its values i and i + D/2. None: no rotation."""
    sin: torch.Tensor | None = None
    query_norm: torch.Tensor | None = None
    """[D]: weights of an RMS norm over each query head; set together with ``key_norm``. In the dtype of the heads,
    or float32."""
    key_norm: torch.Tensor | None = None
    eps: float = 0.0
    sinks: torch.Tensor | None = None
    """[Hq]: a score of each query head that takes part in its softmax and has no value. Attention needs it; the
    preparation itself does not."""


class Logits(NamedTuple):
    """How a layer's attention turns the products of queries and keys into the logits of its softmax."""

    scale: float
    softcap: float | None = None
    """Scores become ``softcap * tanh(score / softcap)``."""
    sinks: torch.Tensor | None = None
    """float [Hq]: one more logit per head in the denominator, which has no value and is neither scaled nor capped."""
