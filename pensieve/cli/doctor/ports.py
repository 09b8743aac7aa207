"""The check of ``pensieve doctor`` on addresses: whether they can be listened on, and who else does."""

from __future__ import annotations

import errno
import socket
from typing import Final
from urllib.error import URLError
from urllib.request import ProxyHandler, build_opener

from pensieve.cli.doctor.checks import Check
from pensieve.options.values import split_address

PATIENCE_S: Final = 2.0
OURS: Final = b"pensieve_build_info"
"""A metric that every server has."""


def port(name: str, address: str) -> Check:
    """Whether the address can be listened on now. A server of ours that is there already is nothing wrong."""
    host, number = split_address(address)
    try:
        family, kind, protocol, _, target = socket.getaddrinfo(
            host, number, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(target)
    except OSError as error:
        if error.errno == errno.EADDRINUSE and (_serves_metrics if name == "admin" else _serves)(address):
            fix = f"none needed; a second server wants another --{name}"
            return Check("ports", name, "note", f"{address}: a server of Pensieve is there", fix)
        fix = f"stop what uses it, or choose another --{name}"
        return Check("ports", name, "fail", f"{address}: {error.strerror or error}", fix)
    return Check("ports", name, "ok", f"{address}{': any free port' if number == 0 else ' is free'}")


def _serves(address: str) -> bool:
    """Whether it answers as Pensieve does, if only to say that it wants a key. One with TLS is not recognised."""
    from pensieve.client import Client
    from pensieve.errors import PensieveError

    try:
        with Client(address, timeout=PATIENCE_S, retry_for=0) as client:
            client.server_info()
    except PensieveError as error:
        return error.reason.startswith("CREDENTIAL_")
    return True


def _serves_metrics(address: str) -> bool:
    try:
        with build_opener(ProxyHandler({})).open(f"http://{address}/metrics", timeout=PATIENCE_S) as answer:
            return OURS in answer.read(1 << 20)
    except (URLError, OSError, ValueError):
        return False
