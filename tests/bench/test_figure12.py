"""Figure 12's benchmark: its four ways agree, under the interpreter, and its report says what was measured."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from support.kernels.under_interpreter import passed_under_interpreter
from support.lengths import LONG
from support.replay.benches import load_bench


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("figure12", monkeypatch)


def row(context: int, heads: tuple[int, int], us: dict[str, float]) -> dict[str, Any]:
    return {
        "context": context, "heads": heads[0], "kv_heads": heads[1], "batch": 32, "new": 8, "floor_us": 8.0, "us": us,
        "copy_tb_per_s": 4.0,
    }  # fmt: skip


@pytest.mark.skipif(not LONG, reason="of a benchmark: PENSIEVE_LONG_TESTS=1")
def test_the_ways_under_the_interpreter() -> None:
    assert passed_under_interpreter("interpreted_figure12") >= 11


def test_least_bytes_and_operations(bench: Any) -> None:
    shape = bench.Shape(512, 40, 10)
    assert shape.kv_bytes == 32 * 512 * 10 * 128 * 2 * 2
    assert shape.flops == 4 * 32 * 40 * 128 * sum(range(505, 513))
    assert shape.num_pages == 32 * 16


@pytest.mark.parametrize("context", [500, 0])
def test_contexts_are_whole_pages(bench: Any, context: int) -> None:
    with pytest.raises(ValueError, match="whole pages"):
        bench.Shape(context, 40, 10)


def test_the_table_has_a_part_for_each_model(bench: Any) -> None:
    us = {"pensieve": 10.0, "copy out": 40.0, "multi-round": 80.0, "ideal": 20.0}
    rows = [row(context, heads, us) for heads in bench.MODELS.values() for context in (512, 1024)]
    table = bench.as_markdown(rows)
    assert table.count("| 512 | 8.0 | 10.0 | 40.0 | 80.0 | 20.0 | 4.0 | 0.50 | 2.00 | 4.00 |") == 2
    assert [line for line in table.splitlines() if line.startswith("OPT")] == [
        "OPT-13B: 40 heads, 40 KV heads"
    ]
    columns = {line.count("|") for line in table.splitlines() if line.startswith("|")}
    assert columns == {11}


def test_the_picture(bench: Any, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    us = {way: 10.0 * (number + 1) for number, way in enumerate(bench.WAYS)}
    rows = [row(context, heads, us) for heads in bench.MODELS.values() for context in bench.CONTEXTS]
    bench.draw(rows, tmp_path / "figure12.png")
    assert (tmp_path / "figure12.png").read_bytes().startswith(b"\x89PNG")
