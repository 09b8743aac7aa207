"""Bytes of a request to a message: the one place where undecodable input is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar

from google.protobuf.message import DecodeError

from pensieve.errors import InvalidArgument

Decoded = TypeVar("Decoded")


def decode(parse: Callable[[bytes], Decoded], data: bytes) -> Decoded:
    """``parse(data)``. Raises InvalidArgument (REQUEST_MALFORMED), whose text never quotes the input.

    Unknown fields are accepted; invalid UTF-8 in a string field and nesting beyond the parser's limit are not.
    """
    try:
        return parse(data)
    except (DecodeError, RecursionError, ValueError) as error:
        raise InvalidArgument(
            "the request does not decode as the message that this method takes", reason="REQUEST_MALFORMED"
        ) from error
