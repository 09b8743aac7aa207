"""Failed logins, counted per address: after a handful, the answers to further ones are held back.

Nobody is locked out. A good credential is served at once, however often others at the same address guessed; only what
is wrong waits, so that whoever guesses has the pace of the bucket and, with it, the limit on streams of a connection.
"""

from __future__ import annotations

import asyncio
import ipaddress
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

BURST: Final = 10
PER_S: Final = 2.0
LONGEST_WAIT_S: Final = 5.0
_ADDRESSES: Final = 4096
"""Buckets that are kept; of more addresses, the one that failed longest ago starts afresh."""
_HELD_BACK: Final = 1024
"""Answers held back at once, of all addresses; more are given at once, since each takes memory."""


class FailedLogins:
    """One per server."""

    def __init__(
        self,
        on_held_back: Callable[[], None] = lambda: None,
        *,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self._on_held_back = on_held_back
        self._monotonic = monotonic
        self._buckets: OrderedDict[str, tuple[float, float]] = OrderedDict()
        """Address (the network of an IPv6 one) to tokens left, which may be negative, and when that was."""
        self._held_back = 0

    def failed(self, address: str) -> float:
        """Note a failure; seconds to hold its answer back."""
        network = _network(address)
        now = self._monotonic()
        tokens, then = self._buckets.pop(network, (float(BURST), now))
        tokens = min(BURST, tokens + (now - then) * PER_S) - 1
        tokens = max(tokens, -LONGEST_WAIT_S * PER_S)
        self._buckets[network] = tokens, now
        if len(self._buckets) > _ADDRESSES:
            self._buckets.popitem(last=False)
        if tokens >= 0 or self._held_back >= _HELD_BACK:
            return 0.0
        return -tokens / PER_S

    async def hold_back(self, seconds: float) -> None:
        """Wait before the answer to a failure is given."""
        self._on_held_back()
        self._held_back += 1
        try:
            await asyncio.sleep(seconds)
        finally:
            self._held_back -= 1


def _network(address: str) -> str:
    """Whoever has one IPv6 address has all of its /64."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((known, 64), strict=False)) if known.version == 6 else address
