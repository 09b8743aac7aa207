"""The cost of recomputing a chunk: ``Cost(l) = Cost_attention(l) + c`` (EuroSys §4.3.1). No torch.

``l`` is the context length at the chunk's end. ``Cost_attention`` is profiled at powers of two and interpolated
linearly; beyond the last point the line through the last two continues. ``c`` is everything but attention. Retention
values compare costs only with each other, so an estimate needs the right *shape*, not the right seconds.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from pensieve.core import Floats

FORMAT = 1
"""Version of the profile files."""
PRODUCT_FLOPS: Final = 1e12
ATTENTION_FLOPS: Final = 0.5e12
"""Nominal rates of an estimate: attention reaches a smaller fraction of the peak than matrix products do."""


class CostProfileError(ValueError):
    """A cost profile that cannot be used; the message says why."""


@dataclass(frozen=True, slots=True)
class CostModel:
    """Cost of one chunk, in seconds when profiled, in arbitrary but consistent units when estimated."""

    attention: tuple[tuple[int, float], ...]
    """(context tokens, cost) in ascending order, at least two points."""
    other: float
    """Cost of everything else in a chunk, the same at each context length."""
    chunk_tokens: int

    def __post_init__(self) -> None:
        lengths = [length for length, _ in self.attention]
        if len(lengths) < 2 or lengths != sorted(set(lengths)):
            raise CostProfileError("attention cost needs at least two points with ascending context lengths")
        if not all(np.isfinite(cost) and cost >= 0 for _, cost in self.attention):
            raise CostProfileError("attention costs must be finite and not negative")
        if not (np.isfinite(self.other) and self.other >= 0):
            raise CostProfileError("the cost of everything else must be finite and not negative")

    def attention_cost(self, context: npt.ArrayLike) -> Floats:
        """Return the attention cost of a chunk that ends at each context length."""
        lengths = np.array([length for length, _ in self.attention], dtype=np.float64)
        costs = np.array([cost for _, cost in self.attention], dtype=np.float64)
        x = np.asarray(context, dtype=np.float64)
        slope = (costs[-1] - costs[-2]) / (lengths[-1] - lengths[-2])
        beyond = costs[-1] + np.maximum(slope, 0.0) * (x - lengths[-1])
        return np.where(x > lengths[-1], beyond, np.interp(x, lengths, costs))

    def cost(self, context: npt.ArrayLike) -> Floats:
        return self.attention_cost(context) + self.other

    def chunk_costs(self, chunks: int) -> Floats:
        """Return the cost of chunk 0, 1, … of a session, float64 [chunks]."""
        return self.cost((np.arange(chunks) + 1) * self.chunk_tokens)

    @classmethod
    def from_json(cls, path: Path) -> CostModel:
        """Read a profile written by ``pensieve profile``. Raises CostProfileError."""
        try:
            data = json.loads(path.read_text())
            if data["format"] != FORMAT:
                raise CostProfileError(f"{path}: format {data['format']} is not {FORMAT}; profile again")
            points = tuple((int(length), float(cost)) for length, cost in data["attention"])
            return cls(points, float(data["other_seconds"]), int(data["chunk_tokens"]))
        except CostProfileError:
            raise
        except (OSError, KeyError, TypeError, ValueError, OverflowError) as error:
            raise CostProfileError(f"{path}: not a cost profile ({error!r})") from error

    @classmethod
    def estimate(
        cls,
        *,
        windows: Sequence[int | None],
        query_heads: int,
        head_dim: int,
        parameters: int,
        chunk_tokens: int,
        context_limit: int,
    ) -> CostModel:
        """Estimate costs from the architecture alone: floating point operations over nominal rates. ``windows``: of
        each layer that attends, in tokens; None: it sees the whole context."""
        per_token = 4.0 * query_heads * head_dim * chunk_tokens / ATTENTION_FLOPS
        points: list[tuple[int, float]] = [(0, 0.0)]
        length = chunk_tokens
        while length < 2 * max(context_limit, chunk_tokens):
            seen = sum(length if window is None else min(length, window) for window in windows)
            points.append((length, per_token * seen))
            length *= 2
        return cls(tuple(points), 2.0 * parameters * chunk_tokens / PRODUCT_FLOPS, chunk_tokens)
