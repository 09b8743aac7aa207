"""Which module writes which fields of a chunk, and a search for any other that does."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from typing import Final

TIERS: Final = "pensieve.engine.cache.tiers"
SHARING: Final = "pensieve.engine.cache.sharing"
OWNERS: Final[Mapping[str, str]] = {
    "device": TIERS,
    "host": TIERS,
    "filled": TIERS,
    "pins": TIERS,
    "saving": TIERS,
    "loading": TIERS,
    "holder": SHARING,
    "digest": SHARING,
    "other": SHARING,
    "leftover": TIERS,
}
"""Field of a ``Chunk`` → the one module that assigns it after the chunk was made."""
MAKER: Final = SHARING
"""The one module that makes chunks."""


def foreign_writes(module: str, source: ast.Module, owners: Mapping[str, str] = OWNERS) -> Iterator[str]:
    """Every place where a module does to a chunk what another owns: ``line: what``.

    Types are not known here, so every attribute of such a name counts as a chunk's, but for those of ``self``: a chunk
    has no methods that write. Also found are ``setattr`` with such a name, and the making of chunks.
    """
    for node in ast.walk(source):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del):
            of_self = isinstance(node.value, ast.Name) and node.value.id == "self"
            if owners.get(node.attr, module) != module and not of_self:
                yield f"{node.lineno}: {ast.unparse(node)} is written"
        elif isinstance(node, ast.Call):
            called = getattr(node.func, "attr", None) or getattr(node.func, "id", "")
            names = {argument.value for argument in node.args if isinstance(argument, ast.Constant)}
            if called in ("setattr", "__setattr__", "delattr") and any(
                owners.get(str(name), module) != module for name in names
            ):
                yield f"{node.lineno}: {ast.unparse(node)}"
            elif called in ("Chunk", "OtherSlice") and module != MAKER:
                yield f"{node.lineno}: a chunk is made"
