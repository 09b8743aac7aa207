"""Parsers of option values: each takes a flag's ``str`` or a TOML value (also numbers and booleans).

A parser returns the typed value, or raises ValueError with a text that fits after "--name: ". The only I/O is
looking at paths.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

from pensieve.config import device_range, is_tokens, parse_cache_size
from pensieve.machine import user_path

Parser = Callable[[object], object]

_HEADING = re.compile(r"\s*\[\[?([^\[\]]+)\]\]?\s*(?:#.*)?")
_FIELD = re.compile(r"\s*[\"']?([\w-]+)[\"']?\s*[=.]")
_DURATION = re.compile(r"(\d+(?:\.\d+)?)(ms|s|m|h)?")
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}
MAX_INT: Final = 2**31 - 1
"""Largest whole number: what C libraries accept."""
MAX_NAME_CHARS: Final = 256
STORE_FORMS = "memory:, sqlite:///PATH or redis://HOST:PORT/DB"
REDIS_SCHEMES = tuple(
    f"{protocol}{kind}" for protocol in ("redis", "rediss") for kind in ("", "+sentinel", "+cluster")
)


def text(value: object) -> str:
    if not isinstance(value, str) or not value:
        raise ValueError(f"expected a non-empty string, got {value!r}")
    return value


def display_name(value: object) -> str:
    """Parse a name that clients read and send: printable, on one line, without surrounding spaces."""
    name = text(value)
    if not name.isprintable() or name != name.strip() or len(name) > MAX_NAME_CHARS:
        raise ValueError(
            f"expected a printable name of at most {MAX_NAME_CHARS} characters without spaces around it, got {name!r}"
        )
    return name


def without_secrets(url: str) -> str:
    """Return a value to show: a URL without its password, passwords after ``?``, and all else there unless it is of a
    store."""
    if "://" not in url:
        return url
    # Up to the last "@": a password that was not encoded may hold any character.
    shown = re.sub(r"(?<=://)([^/@:]*):.*@", r"\1:***@", url)
    is_store = url.startswith(("redis", "sqlite"))
    return re.sub(r"(?<=password=)[^&]*" if is_store else r"(?<=\?).*", "***", shown)


def http_url(value: object) -> str:
    """Parse ``http://HOST…`` or ``https://HOST…``."""
    url = text(value)
    if urlsplit(url).scheme not in ("http", "https") or not urlsplit(url).hostname:
        raise ValueError(
            f"expected a URL such as http://127.0.0.1:4318/v1/traces, got {without_secrets(url)!r}"
        )
    return url


def boolean(value: object) -> bool:
    """Parse ``true`` or ``false`` of TOML, or a flag."""
    if not isinstance(value, bool):
        raise ValueError(f"expected true or false, got {value!r}")
    return value


def integer(low: int, high: int = MAX_INT) -> Parser:
    wanted = f"a whole number from {low} to {high}"

    def parse(value: object) -> int:
        if isinstance(value, str) and re.fullmatch(r"-?\d+", value):
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool):
            raise ValueError(f"expected {wanted}, got {value!r}")
        if not low <= value <= high:
            raise ValueError(f"expected {wanted}, got {value}")
        return value

    return parse


def power_of_two(high: int) -> Parser:
    """Return a parser of 1, 2, 4, … up to ``high``."""
    whole = integer(1, high)

    def parse(value: object) -> int:
        number = whole(value)
        assert isinstance(number, int)
        if number & (number - 1):
            raise ValueError(f"expected a power of two from 1 to {high}, got {number}")
        return number

    return parse


def fraction(value: object) -> float:
    """Parse a share: 0 ≤ x < 1."""
    try:
        number = (
            float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else None
        )
    except ValueError:
        number = None
    if number is None or not 0 <= number < 1:
        raise ValueError(f"expected a share of at least 0 and below 1, such as 0.25, got {value!r}")
    return number


def duration(low_s: float, high_s: float) -> Parser:
    """Return a parser of durations in seconds: ``15s``, ``500ms``, ``2m``, ``1h`` or a plain number of seconds."""

    def parse(value: object) -> float:
        match = None if isinstance(value, bool) else _DURATION.fullmatch(str(value))
        if match is None:
            raise ValueError(f"expected a duration such as 15s, 500ms or 2m, got {value!r}")
        seconds = float(match[1]) * _SECONDS[match[2]]
        if not low_s <= seconds <= high_s:
            raise ValueError(f"expected {low_s:g}s to {high_s:g}s, got {value}")
        return seconds

    return parse


def size(low: int) -> Parser:
    """Return a parser of cache sizes, kept as written: ``auto``, ``40GiB``, ``4096tokens``; at least ``low``."""

    def parse(value: object) -> str:
        if not isinstance(value, str):
            raise ValueError(f"expected auto or a size such as 40GiB, 512MiB or 4096tokens, got {value!r}")
        if value == "auto":
            return value
        if parse_cache_size(value, bytes_per_token=1) < low:
            raise ValueError(f"must be at least {low}, got {value}")
        return value

    return parse


def size_or_range(low: int) -> Parser:
    """Return a parser of one size as in ``size``, or of ``FLOOR..CEILING``. Kept as written. Sides in different units
    can only be compared with a model."""
    one = size(low)

    def parse(value: object) -> str:
        sides = device_range(value) if isinstance(value, str) else None
        if sides is None:
            return str(one(value))
        try:
            floor, ceiling = (parse_cache_size(side, bytes_per_token=1) for side in sides)
        except ValueError as error:
            raise ValueError(f"expected a range such as 8GiB..60GiB, got {value!r}: {error}") from None
        if floor < low:
            raise ValueError(f"the floor must be at least {low}, got {sides[0]}")
        if is_tokens(sides[0]) == is_tokens(sides[1]) and floor > ceiling:
            raise ValueError(f"the floor {sides[0]} is above the ceiling {sides[1]}")
        return str(value)

    return parse


def byte_size(value: object) -> str:
    """Parse a size in bytes, kept as written: ``2GiB``, ``512MiB``, ``0``."""
    if not isinstance(value, str) or is_tokens(value):
        raise ValueError(f"expected a size such as 2GiB or 512MiB, got {value!r}")
    try:
        parse_cache_size(value, bytes_per_token=1)
    except ValueError:
        raise ValueError(f"expected a size such as 2GiB or 512MiB, got {value!r}") from None
    return value


@dataclass(frozen=True, slots=True)
class OneOf:
    """A parser of a fixed set of words."""

    words: tuple[str, ...]

    def __call__(self, value: object) -> str:
        if not isinstance(value, str) or value not in self.words:
            raise ValueError(f"expected one of {', '.join(self.words)}, got {value!r}")
        return value


def choice(*allowed: str) -> OneOf:
    return OneOf(allowed)


def split_address(value: str) -> tuple[str, int]:
    """Split ``HOST:PORT`` or ``[IPV6]:PORT`` into host, without brackets, and port. Raises ValueError."""
    host, colon, port = value.rpartition(":")
    bare = host[1:-1] if host.startswith("[") and host.endswith("]") else host
    if not colon or not bare or not port.isascii() or not port.isdigit() or int(port) > 65535:
        raise ValueError(f"expected HOST:PORT with a port from 0 to 65535, got {value!r}")
    if "//" in bare:
        raise ValueError(f"expected HOST:PORT without a scheme, got {value!r}")
    if ":" in bare and bare == host:
        raise ValueError(f"expected brackets around an IPv6 address, as in [::1]:50051, got {value!r}")
    return bare, int(port)


def address(value: object) -> str:
    split_address(text(value))
    return str(value)


def is_loopback(value: str) -> bool:
    """Whether ``HOST:PORT`` is reachable from this machine only."""
    host, _ = split_address(value)
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def store_url(value: object) -> str:
    """Parse the URL of a history store: see ``STORE_FORMS``."""
    url = text(value)
    if url == "memory:":
        return url
    try:
        parts = urlsplit(url)
        complete = (
            url.startswith("sqlite:///") and not url.endswith("/")
            if parts.scheme == "sqlite"
            else parts.scheme in REDIS_SCHEMES
            and all(map(_is_node, parts.netloc.rpartition("@")[2].split(",")))
        )
    except ValueError:  # a port that is not a number
        complete = False
    if not complete:
        raise ValueError(f"expected {STORE_FORMS}, got {without_secrets(url)!r}")
    return url


def _is_node(text: str) -> bool:
    """Whether the text is ``HOST[:PORT]``."""
    parts = urlsplit(f"//{text}")
    return bool(parts.hostname) and parts.port != 0


def existing_file(value: object) -> Path:
    """Parse the path of a readable file. Absolute, so that a later change of directory does not matter.

    Links stay in it: a renewal may replace a link on the way and remove the old file, as Kubernetes does.
    """
    path = user_path(text(value))
    try:
        if path.exists() and not (path.is_file() or path.is_dir()):
            # A pipe would be waited for, and can be read once.
            raise ValueError(f"{path} is not a regular file")
        with path.open("rb"):
            return path.absolute()
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}") from None


def file_to_write(value: object) -> Path:
    """Parse the path of a file that exists or can be created, because its folder exists. Absolute."""
    path = user_path(text(value))
    try:
        if path.is_dir():
            raise ValueError(f"{path} is a folder")
        if not path.parent.is_dir():
            raise ValueError(f"there is no folder {path.parent}")
        return path.resolve()
    except OSError as error:
        raise ValueError(f"cannot write {path}: {error.strerror}") from None


def word_or_file(*words: str) -> Parser:
    """Return a parser of these words, or of a readable file as in ``existing_file``."""

    def parse(value: object) -> str:
        return str(value) if value in words else str(existing_file(value))

    return parse


def origins(value: object) -> str:
    """Parse origins of web pages, separated by spaces: scheme and host, as browsers send them, or ``*`` for all."""
    return _parse_words(value, _is_origin, "origins such as https://chat.example.com")


def networks(value: object) -> str:
    """Parse IP addresses and networks, separated by spaces."""
    return _parse_words(value, _is_network, "addresses or networks such as 10.0.0.7 or 10.0.0.0/8")


def names(value: object) -> str:
    """Parse host names, separated by spaces, into lower case."""
    return _parse_words(value, _is_name, "names such as chat.lan").lower()


def _parse_words(value: object, is_one: Parser, wanted: str) -> str:
    listed = value if isinstance(value, list | tuple) else [value]
    words = [word for entry in listed for word in text(entry).split()]
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


def toml_line_number(text: str, heading: str, number: int = 0, field: str = "") -> int | None:
    """Return the line number, from 1, of a field below the ``number``-th such heading, from 0, or of the
    heading.

    ``heading`` has no brackets (``key``, ``tenants.acme``); "" stands for the part before the first one. None
    if the file writes it otherwise, such as in an inline table.
    """
    inside, found = heading == "", 1 if heading == "" else None
    for at, line in enumerate(text.splitlines(), 1):
        if title := _HEADING.fullmatch(line):
            if inside:
                break
            if re.sub(r"[\"'\s]", "", title[1]) == heading:
                inside, found = number == 0, at if number == 0 else None
                number -= 1
        elif inside and field and (name := _FIELD.match(line)) and name[1] == field:
            return at
    return found
