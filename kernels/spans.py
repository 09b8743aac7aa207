"""Query spans of a step, as rows of one array on the CPU.

Planning reads spans on the CPU and never waits for the device. Kernels see only the work lists made from
them.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

Ints = npt.NDArray[np.int64]
Spans = Ints
"""[S, 4], one row per span, with the columns below. Rows ``[Q_START, Q_START + Q_LEN)`` of q are at positions
``[POSITION, POSITION + Q_LEN)`` of the context of page table ``TABLE``. Any number of spans may share a
table. A span of length 0 is padding."""
Q_START, Q_LEN, POSITION, TABLE = range(4)


def num_tokens(spans: Spans) -> int:
    return int(spans[:, Q_LEN].sum())


def make_spans(
    q_len: Sequence[int] | Ints, position: Sequence[int] | Ints, table: Sequence[int] | Ints
) -> Spans:
    """Return spans with adjacent query rows. Raises ValueError on negative entries."""
    lengths = np.asarray(q_len, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    spans = np.stack([starts, lengths, np.asarray(position, np.int64), np.asarray(table, np.int64)], axis=1)
    if spans.size and spans.min() < 0:
        raise ValueError("span lengths, positions and tables cannot be negative")
    return spans
