"""Two versions of a program, run in turns and compared."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from support.replay.benches import load_bench

PROGRAM = """
import json, pathlib, sys
print(json.dumps({"streams": 9, "cpu": %(value)s, "rows": [{"batch": 1, "ms": 2.0}, {"batch": 64, "ms": %(value)s}]}))
pathlib.Path(sys.argv[1], "more.json").write_text(json.dumps({"gap": 1}))
"""


@pytest.fixture
def checkouts(tmp_path: Path) -> tuple[Path, Path]:
    for name, value in (("old", 4.0), ("new", 3.0)):
        (tmp_path / name / "bench").mkdir(parents=True)
        (tmp_path / name / "bench/x.py").write_text(PROGRAM % {"value": value})
    return tmp_path / "old", tmp_path / "new"


def test_figures_of_the_same_name_are_compared(
    checkouts: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    old, new = checkouts
    main = load_bench("common/before_after", monkeypatch).main
    command = ["--before", old, "--after", new, "--rounds", "2", "--json", tmp_path / "all.json"]
    result = CliRunner().invoke(main, [*map(str, command), "--", "bench/x.py", "{folder}"])
    assert result.exit_code == 0, result.output
    assert "| streams=9 cpu | 4 | 3 | 0.750 | 0.750, 0.750 |" in result.stdout
    assert "| streams=9 rows batch=1 ms | 2 | 2 | 1.000 | 1.000, 1.000 |" in result.stdout
    assert "gap | 1 | 1 |" in result.stdout
    figures = json.loads((tmp_path / "all.json").read_text())["figures"]
    assert figures["before"]["streams=9 rows batch=64 ms"] == [4.0, 4.0]


def test_a_version_that_fails_is_named(checkouts: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    old, new = checkouts
    (new / "bench/x.py").write_text("import sys; sys.exit('no such section')")
    main = load_bench("common/before_after", monkeypatch).main
    result = CliRunner().invoke(main, ["--before", str(old), "--after", str(new), "bench/x.py", "{folder}"])
    assert (
        result.exit_code == 1 and "new: exit code 1" in result.output and "no such section" in result.output
    )
