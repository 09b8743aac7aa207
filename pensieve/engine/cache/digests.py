"""Addresses of full chunks: a chain of hashes over token ids, so that one address names a chunk and all before it.

``digest(chunk i) = H(digest(chunk i - 1), its token ids)``; the chain begins with H(model, scope), keyed with a secret
that the process makes for itself. So no client can compute, probe or hit an address of another scope (a tenant), and an
address says nothing about how KV is stored.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Final

import numpy as np

from pensieve.core import TokenArray

_BYTES: Final = 16
"""128 bits: a collision is less likely than an error of the memory that it would be found in."""


@dataclass(frozen=True, slots=True)
class Path:
    """The addresses of a context's leading full chunks within a scope."""

    scope: str
    digests: tuple[bytes, ...]


class Digests:
    """Makes the addresses of one engine's chunks. ``model`` names the weights that the KV is computed with."""

    def __init__(self, model: str, chunk_tokens: int) -> None:
        self._size = chunk_tokens
        self._model = model.encode()
        self._secret = secrets.token_bytes(32)
        self._roots: dict[str, bytes] = {}

    def root(self, scope: str) -> bytes:
        """Where the chain of a scope begins."""
        found = self._roots.get(scope)
        if found is None:
            salted = blake2b(self._model, digest_size=_BYTES, key=self._secret)
            salted.update(b"\0" + scope.encode())
            found = self._roots[scope] = salted.digest()
        return found

    def extended(self, scope: str, known: Sequence[bytes], tokens: TokenArray, chunks: int) -> list[bytes]:
        """The addresses of the first ``chunks`` chunks of ``tokens``, of which those in ``known`` are known already."""
        found = list(known)
        width = self._size * 4
        start = len(found) * self._size
        data = np.ascontiguousarray(tokens[start : chunks * self._size], dtype="<i4").tobytes()
        last = found[-1] if found else self.root(scope)
        for at in range(0, len(data), width):
            last = blake2b(last + data[at : at + width], digest_size=_BYTES).digest()
            found.append(last)
        return found
