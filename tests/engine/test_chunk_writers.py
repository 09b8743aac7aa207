"""Each field of a chunk has one writer."""

from __future__ import annotations

import ast
import dataclasses

import pytest

from pensieve.engine.cache.chunk import Chunk, OtherSlice
from support.chunk_writers import OWNERS, foreign_writes
from support.sources import module_name, python_files, tree


def test_only_its_owner_writes_a_field_of_a_chunk() -> None:
    """The simulator's twin of the cache has no chunks; its runs have pins of their own."""
    found = {
        str(path): writes
        for path in python_files("pensieve", "kernels", "store")
        if path.parts[:2] != ("pensieve", "simulate")
        and (writes := list(foreign_writes(module_name(path), tree(path))))
    }
    assert not found, found


def test_every_field_but_the_position_has_an_owner() -> None:
    fields = {field.name for kind in (Chunk, OtherSlice) for field in dataclasses.fields(kind)}
    assert OWNERS.keys() == fields - {"index", "chunk"}


@pytest.mark.parametrize(
    "line",
    [
        "chunk.filled = 3",
        "chunk.pins += 1",
        "a, chunk.device = 1, 2",
        "session.chunks[-1].host: int = 4",
        "for chunk.digest in names: pass",
        "del chunk.holder",
        "setattr(chunk, 'saving', True)",
        "object.__setattr__(chunk, 'loading', True)",
        "Chunk(index=3, holder=session)",
    ],
)
def test_a_write_elsewhere_is_found(line: str) -> None:
    assert list(foreign_writes("pensieve.engine.cache.manager", ast.parse(line)))


def test_reads_and_the_fields_of_other_objects_are_not() -> None:
    text = "self.device = chunk.device + min(chunk.filled, 3)\nplan.host_pages = 3\nchunk.index\n"
    assert not list(foreign_writes("pensieve.engine.cache.manager", ast.parse(text)))
