"""Layers of a swap-in that arrive, and are called for, together. No torch."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

LARGEST_GROUP = 8
CALL_BYTES = 4 << 20
"""About 80 µs on the wire: twice what a call takes of CPU time."""


def layer_groups(num_layers: int) -> tuple[range, ...]:
    """Layers that arrive together: 1, 1, 2, 4, 8, … and back to 1.

    The first groups are small so that the model can begin, the last ones so that it has little left to do when they
    have come; those between are larger so that there are few calls.
    """
    head: list[int] = []
    tail: list[int] = []
    left, size = num_layers, 1
    while left:
        for sizes in (head, tail):
            if left:
                sizes.append(min(size, left))
                left -= sizes[-1]
        size = 1 if len(head) == 1 else min(LARGEST_GROUP, 2 * size)
    ends = list(itertools.accumulate(head + tail[::-1]))
    return tuple(range(*bounds) for bounds in itertools.pairwise([0, *ends]))


def calls_for(groups: Sequence[range], layer_bytes: int) -> Iterator[tuple[range, list[range]]]:
    """The layers that each call brings in, and the groups that they are.

    A group that takes less time on the wire than the call for it takes on the CPU shares its call with the next ones.
    ``layer_bytes``: bytes of all chunks in one layer.
    """
    together: list[range] = []
    for group in groups:
        together.append(group)
        layers = range(together[0].start, group.stop)
        if len(layers) * layer_bytes >= CALL_BYTES or group is groups[-1]:
            yield layers, together
            together = []
