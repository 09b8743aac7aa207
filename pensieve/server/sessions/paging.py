"""Page tokens: opaque, authenticated, bound to tenant and query, of limited age. They grant nothing by themselves."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import time
from collections.abc import Callable
from typing import TypeVar

import msgspec

from pensieve.errors import InvalidArgument

_MAC_BYTES = 16
Cursor = TypeVar("Cursor")


class PageTokens:
    """Seals a cursor into a token and opens it again."""

    def __init__(self, secret: bytes, lifetime_s: float, clock: Callable[[], float] = time.time) -> None:
        self._secret = secret
        self._lifetime_s = lifetime_s
        self._clock = clock

    def seal(self, tenant: str, query: tuple[str, ...], cursor: object) -> str:
        """A token that only ``open`` with the same tenant and query takes."""
        payload = msgspec.msgpack.encode((int(self._clock() + self._lifetime_s), cursor))
        return (
            base64.urlsafe_b64encode(self._mac(tenant, query, payload) + payload).decode("ascii").rstrip("=")
        )

    def open(self, tenant: str, query: tuple[str, ...], token: str, kind: type[Cursor]) -> Cursor:
        """The sealed cursor. Raises InvalidArgument, in the same words whether forged, foreign or expired."""
        try:
            raw = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        except (binascii.Error, ValueError) as error:
            raise _refused() from error
        mac, payload = raw[:_MAC_BYTES], raw[_MAC_BYTES:]
        if not hmac.compare_digest(mac, self._mac(tenant, query, payload)):
            raise _refused()
        try:
            expires, raw_cursor = msgspec.msgpack.decode(payload, type=tuple[int, msgspec.Raw])
            cursor = msgspec.msgpack.decode(raw_cursor, type=kind)
        except msgspec.DecodeError as error:
            raise _refused() from error
        if self._clock() > expires:
            raise _refused()
        return cursor

    def _mac(self, tenant: str, query: tuple[str, ...], payload: bytes) -> bytes:
        signed = msgspec.msgpack.encode((tenant, query, payload))
        return hmac.new(self._secret, signed, hashlib.sha256).digest()[:_MAC_BYTES]


def _refused() -> InvalidArgument:
    return InvalidArgument.field("page_token", "is not a token of this listing, or has expired")
