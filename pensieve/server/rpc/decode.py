"""Bytes of a request to a message: the one place where undecodable input is noticed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, TypeVar

from google.protobuf.message import DecodeError

from pensieve.errors import InvalidArgument

Decoded = TypeVar("Decoded")

MAX_FIELDS: Final = 16_384
"""Fields of one large request, nested ones included. An import with all that the limits allow has half of it."""
LARGE_BYTES: Final = 64 * 1024
"""Requests up to this size are decoded uncounted: whatever they hold, it takes little memory."""
_DEEPEST: Final = 100
"""The parser's own limit on nesting."""


def decode(parse: Callable[[bytes], Decoded], data: bytes) -> Decoded:
    """``parse(data)``. Raises InvalidArgument (REQUEST_MALFORMED), whose text never quotes the input.

    ``parse`` is ``FromString`` of a message class. Unknown fields are accepted; invalid UTF-8 in a string field and
    nesting beyond the parser's limit are not. A large message of very many fields is refused before it is decoded: an
    element of two bytes on the wire takes thirty times as much in memory.
    """
    if len(data) > LARGE_BYTES:
        kind: Any = getattr(parse, "__self__", None)
        if count_fields(data, None if kind is None else kind.DESCRIPTOR) > MAX_FIELDS:
            raise InvalidArgument(
                f"the request has more than {MAX_FIELDS} fields, nested ones included",
                reason="REQUEST_MALFORMED",
            )
    try:
        return parse(data)
    except (DecodeError, RecursionError, ValueError) as error:
        raise InvalidArgument(
            "the request does not decode as the message that this method takes", reason="REQUEST_MALFORMED"
        ) from error


def count_fields(data: bytes, descriptor: Any) -> int:
    """Fields of a message on the wire, nested ones included; of very many, a number above ``MAX_FIELDS``.

    ``descriptor`` (of the message; None: unknown) says which fields are messages themselves.
    """
    return _Counter(data).count(0, len(data), descriptor, 0)


class _Counter:
    """Counts the fields of a message by walking over the wire format. What is malformed is left to the parser."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._found = 0

    def count(self, at: int, end: int, descriptor: Any, depth: int) -> int:
        """Fields of ``data[at:end]`` and before; it stops soon after ``MAX_FIELDS``."""
        fields = {} if descriptor is None else descriptor.fields_by_number
        while at < end and self._found <= MAX_FIELDS:
            self._found += 1
            key, at = self._varint(at, end)
            wire = key & 7
            if wire == 0:
                _, at = self._varint(at, end)
            elif wire == 1:
                at += 8
            elif wire == 5:
                at += 4
            elif wire == 2:
                length, at = self._varint(at, end)
                inside = min(at + length, end)
                field = fields.get(key >> 3)
                if field is not None and field.message_type is not None and depth < _DEEPEST:
                    self.count(at, inside, field.message_type, depth + 1)
                at += length
            # The rest are the ends of groups, which nothing here has: one field each.
        return self._found

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80 or shift > 63:
                break
            shift += 7
        return value, at
