"""Where the query tokens of a step stand. A ``SpanTable`` is made once per step on the CPU and shared by all layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import torch

Ints = npt.NDArray[np.int64]
HostSpans = Ints
"""[S, 4]: the columns of ``SpanTable.host``."""
T = TypeVar("T")


@dataclass(frozen=True, slots=True, eq=False)
class SpanTable:
    """S spans of consecutive query tokens; each tensor is int32 [S] on the device of the queries.

    Span ``i`` holds query rows ``[q_start, q_start + q_len)`` at context positions ``[position, position + q_len)`` of
    the context that row ``row`` of the page tables describes. Any number of spans may share a row. A span of length
    0 is padding.
    """

    q_start: torch.Tensor
    q_len: torch.Tensor
    position: torch.Tensor
    row: torch.Tensor
    host: HostSpans
    """The same four columns on the CPU, int64 [S, 4]: planning never waits for the device."""
    num_tokens: int
    """Query rows covered by the spans."""
    max_q_len: int
    max_context: int
    """Largest number of KV-tokens that a query sees."""
    plans: dict[str, Any] = field(default_factory=dict, repr=False)
    """What kernels derive from the table: the first layer of a step puts it here, and the others read it."""

    @classmethod
    def build(
        cls,
        q_len: Sequence[int] | HostSpans,
        position: Sequence[int] | HostSpans,
        row: Sequence[int] | HostSpans,
        device: torch.device | str = "cpu",
    ) -> SpanTable:
        """Spans whose query rows follow each other without a gap. Raises ValueError on negative entries."""
        lengths = np.asarray(q_len, dtype=np.int64)
        starts = np.cumsum(lengths) - lengths
        host = np.stack([starts, lengths, np.asarray(position, np.int64), np.asarray(row, np.int64)], axis=1)
        if host.size and host.min() < 0:
            raise ValueError("span lengths, positions and rows cannot be negative")
        columns = torch.from_numpy(np.ascontiguousarray(host.T, dtype=np.int32)).to(device)
        return cls(
            q_start=columns[0],
            q_len=columns[1],
            position=columns[2],
            row=columns[3],
            host=host,
            num_tokens=int(lengths.sum()),
            max_q_len=int(lengths.max(initial=0)),
            max_context=int((host[:, 1] + host[:, 2]).max(initial=0)),
        )

    def __len__(self) -> int:
        return len(self.host)

    def plan(self, key: str, make: Callable[[], T]) -> T:
        """The value stored under ``key``, made on first use."""
        if key not in self.plans:
            self.plans[key] = make()
        value: T = self.plans[key]
        return value
