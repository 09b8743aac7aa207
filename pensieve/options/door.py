"""Options of the HTTP door: rows of the table of ``serve``; ``LIMITS`` are flags of ``gateway`` too, less ``http-``."""

from __future__ import annotations

import ipaddress
import re
from typing import Final
from urllib.parse import urlsplit

from pensieve.options import values
from pensieve.options.option import Option


def origins(value: object) -> str:
    """Origins of web pages, apart by spaces: scheme and host each, as browsers send them; or one star for all."""
    return _several(value, _is_origin, "origins such as https://chat.example.com")


def networks(value: object) -> str:
    """IP addresses and networks, apart by spaces."""
    return _several(value, _is_network, "addresses or networks such as 10.0.0.7 or 10.0.0.0/8")


def names(value: object) -> str:
    """Host names, apart by spaces, in small letters."""
    return _several(value, _is_name, "names such as chat.lan").lower()


def _several(value: object, is_one: values.Parser, wanted: str) -> str:
    listed = value if isinstance(value, list | tuple) else [value]
    words = [word for entry in listed for word in values.text(entry).split()]
    for word in words:
        if not is_one(word):
            raise ValueError(f"expected {wanted}, got {word!r}")
    return " ".join(words)


def _is_origin(word: object) -> bool:
    try:
        parts = urlsplit(str(word))
        return word == "*" or (
            word == f"{parts.scheme}://{parts.netloc}" and bool(parts.scheme and parts.hostname)
        )
    except ValueError:
        return False


def _is_network(word: object) -> bool:
    try:
        ipaddress.ip_network(str(word), strict=False)
    except ValueError:
        return False
    return True


def _is_name(word: object) -> bool:
    return re.fullmatch(r"[A-Za-z0-9_.-]+", str(word)) is not None


LIMITS: Final = (
    Option(
        "http-max-body",
        values.integer(1, 64),
        "Largest HTTP request, in MiB.",
        "a gRPC message may be no larger",
        "MIB",
    ),
    Option(
        "http-patience",
        values.duration(0, 3600),
        "How long an HTTP call waits for what is away or busy, before it is answered 503 or 429.",
        "a restart is over by then, and clients wait for longer",
        "TIME",
        unit="s",
    ),
    Option(
        "http-cors-origin",
        origins,
        "Let pages of these origins call over HTTP; several apart by spaces.",
        "no page of another origin calls unasked",
        "ORIGIN",
    ),
    Option(
        "http-host",
        names,
        "More names under which a door on loopback is called without keys; several apart by spaces.",
        "addresses, localhost and this machine's names are known",
        "NAME",
    ),
)
"""What every door has."""

DOOR_OPTIONS: Final = (
    Option(
        "http",
        values.address,
        "Address of the HTTP door, for OpenAI's clients (extra `http`); port 0 picks a free one.",
        "not opened unasked",
        "HOST:PORT",
    ),
    *LIMITS,
    Option(
        "http-trusted-proxy",
        networks,
        "Proxies whose X-Forwarded-For says who calls over HTTP: addresses or networks, apart by spaces.",
        "a header of anybody else says nothing",
        "ADDRESS",
    ),
)
"""Those of the server's own door."""
