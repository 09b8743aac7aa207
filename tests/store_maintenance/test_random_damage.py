"""Damage to a history file costs what it hits: no sound record, no turn twice, and nothing erased comes back."""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from support.lengths import at_length
from support.store import damage


@pytest.mark.fault(43)
def test_no_sound_record_is_lost(tmp_path: Path) -> None:
    problems: list[str] = []
    seeds = range(at_length(3, 200))
    total = damage.play(iter(seeds), tmp_path, problems.append)
    assert problems == []
    assert total["damages"] == len(seeds) and total["whole_sessions"] > 0


@pytest.mark.fault(43)
async def test_damage_to_any_part_costs_no_sound_record(tmp_path: Path) -> None:
    """A page of each table and index, the beginning of the file, and its log of changes."""
    plain = await damage.make(tmp_path / "plain", with_log=False, sessions=6)
    logged = await damage.make(tmp_path / "logged", with_log=True, sessions=6)

    def flipped(base: Path, at: int) -> None:
        """Flip a bit at ``at`` of the log's first frame: SQLite then believes no frame after it."""
        path = base / "h.db-wal"
        written = bytearray(path.read_bytes())
        written[32 + at] ^= 1
        path.write_bytes(written)

    cases: dict[str, tuple[Any, Callable[[Path], object]]] = {
        name: (plain, partial(damage.part_zeroed, name=name)) for name in damage.parts(plain.folder)
    }
    assert {"sessions", "records", "requests", "marks", "sessions_newest"} <= set(cases)
    cases["cut"] = logged, lambda base: os.truncate(base / "h.db", 0)
    cases["log"] = logged, partial(flipped, at=24 + 2000)
    cases["salt"] = logged, partial(flipped, at=8)
    lost = {
        name: (await damage.one_of(made, ruin, tmp_path / name)).what for name, (made, ruin) in cases.items()
    }
    assert {name: what for name, what in lost.items() if what} == {}
