"""Random damage to a history file costs what it hits: no sound record, no turn twice, and nothing erased comes back."""

from __future__ import annotations

from pathlib import Path

import pytest

from support.lengths import at_length
from support.replay.benches import load_bench


@pytest.mark.fault(43)
def test_no_sound_record_is_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    damage = load_bench("stores/damage", monkeypatch)
    problems: list[str] = []
    seeds = range(at_length(6, 200))
    total = damage.play(iter(seeds), tmp_path, problems.append)
    assert problems == []
    assert total["damages"] == len(seeds) and total["whole_sessions"] > 0
