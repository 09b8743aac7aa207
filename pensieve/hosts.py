"""Names and addresses of hosts: whether a ``Host`` header names this machine, and whose an address is."""

from __future__ import annotations

import functools
import ipaddress
import re
import socket
from collections.abc import Collection
from typing import Final

_LOCAL: Final = re.compile(r"(?:[a-z0-9-]+\.)*localhost|(?:[a-z0-9-]+\.)+internal")
"""Reserved names that cannot be registered. Containers reach their host under ``.internal`` names."""


def names_this_machine(host: str, more: Collection[str] = ()) -> bool:
    """Return whether this ``Host`` header names this machine, or a name in ``more``.

    This defends against DNS rebinding: a foreign page can make its own name resolve to this address and read the
    answers, but it cannot make a browser send an address, or ``localhost``, in place of that name.
    """
    name = host.lower()
    name = name[1:].partition("]")[0] if name.startswith("[") else name.partition(":")[0]
    name = name.removesuffix(".")
    if _LOCAL.fullmatch(name) or name in _own_names() or name in more:
        return True
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


@functools.cache
def _own_names() -> frozenset[str]:
    return frozenset({socket.gethostname().lower(), socket.getfqdn().lower()})


@functools.lru_cache(4096)
def owned_network(address: str) -> str:
    """Return an IPv6 address's /64, all of which its owner may use; any other address as it is."""
    try:
        known = ipaddress.ip_address(address)
    except ValueError:
        return address
    return str(ipaddress.ip_network((known, 64), strict=False)) if known.version == 6 else address
