"""Jenga's allocator as the paper has it, and the comparison of allocators on a small tier."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest

from support.replay.benches import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return load_bench("allocators", monkeypatch)


def small(bench: ModuleType) -> Any:
    """Pages of 2 and of 3 bytes: a large page has 6 bytes."""
    return bench.Shape(1, 2, 1, 3, window=64, tokens=1024)


def taken(memory: Any, session: Any, group: int, key: int) -> tuple[int, int]:
    """Number of the large page, and the small page in it."""
    session.running = True
    memory.take(session, group, key)
    page: tuple[int, int] = session.pages[group][key]
    return page


@pytest.mark.parametrize("free_first", [False, True])
def test_jenga_takes_small_pages_in_the_order_of_the_paper(bench: ModuleType, free_first: bool) -> None:
    memory = bench.Jenga(small(bench), 19, free_first=free_first)
    a, b = bench.Session(0, 9), bench.Session(0, 9)
    first, second = taken(memory, a, 0, 0), taken(memory, b, 0, 0)
    assert first[0] != second[0], "an empty large page before one of another session"
    assert taken(memory, a, 0, 1)[0] == first[0], "its own large page first"
    third = taken(memory, a, 1, 0)
    assert taken(memory, b, 1, 0)[0] == third[0], "another session's, as nothing can be evicted"
    memory.stop(a)
    c = bench.Session(0, 9)
    assert taken(memory, c, 0, 0)[0] == first[0]
    assert bool(a.pages[0]) == free_first, "the large page of an idle session was evicted as a whole"
    assert memory.used == 2 * sum(len(s.pages[0]) for s in (a, b, c)) + 3 * 2


def test_jenga_evicts_a_small_page_at_last(bench: ModuleType) -> None:
    memory = bench.Jenga(small(bench), 6)
    a, b = bench.Session(0, 9), bench.Session(0, 9)
    kept, page = taken(memory, b, 0, 0), taken(memory, a, 0, 1)
    taken(memory, a, 0, 2)
    memory.stop(a)
    assert taken(memory, b, 0, 1) != page, "the longest prefix goes first"
    assert list(a.pages[0]) == [1] and b.pages[0][0] == kept


def test_all_allocators_on_a_small_tier(bench: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    shapes = {
        "window": bench.Shape(2, 4096, 3, 4096, window=256, tokens=1024),
        "states": bench.Shape(2, 1024, 3, 16_384, window=0, tokens=1024),
    }
    monkeypatch.setattr(bench, "SHAPES", shapes)
    for name, shape in shapes.items():
        sessions = 12
        size = sessions * shape.session_bytes(shape.tokens // 32)
        rows = {row["allocator"]: row for row in bench.compare(name, False, size, 8)}
        counted = rows["bytes"]["sessions that hit"]
        assert counted == pytest.approx(sessions, abs=3)
        for kind in (kind for kind in rows if kind.startswith("two ends")):
            assert 0.8 * counted <= rows[kind]["sessions that hit"] <= counted + 1
        assert 0.8 * rows["bytes"]["computed"] < rows["bytes"]["times whole"] < rows["bytes"]["computed"]
        assert rows["jenga"]["MiB moved a turn"] == 0
