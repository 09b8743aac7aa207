"""What the tiers tell others: copies that a plan must make, and how full they are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from pensieve.engine.plan import Copy


class PlannedCopies(NamedTuple):
    """Copies that one plan must make, under the names that they have in ``Plan``."""

    swap_out: tuple[Copy, ...]
    copies: tuple[Copy, ...]
    swap_in: tuple[Copy, ...]


@dataclass(frozen=True, slots=True)
class Occupancy:
    """How full both tiers are: KV-tokens that their pages have room for, whatever part of a page is filled.

    ``dropped`` is what was dropped for want of room since start: KV-tokens that were there.
    """

    device_free: int
    device_reclaimable: int
    """In pages that are used, but can be taken at once."""
    device_used: int
    host_free: int
    host_used: int
    dropped: int
