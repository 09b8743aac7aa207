"""The load of structured and plain turns, on a real server behind the HTTP door."""

from __future__ import annotations

import dataclasses
import json
import time
from pathlib import Path
from typing import Any

import pytest

from support.engine.checkpoints import tiny_checkpoint
from support.http.http_rig import opened
from support.replay.benches import load_bench
from support.service.real_engine import TinyModel, really_serving
from support.tool_templates import STYLES, write_model


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_bench("structured_load", monkeypatch)


async def test_a_share_of_the_turns_is_structured(bench: Any, tmp_path: Path) -> None:
    folder = tiny_checkpoint("llama3", tmp_path / "models", vocab_size=480, max_position_embeddings=2048)
    write_model(folder, *STYLES["qwen"])
    bias = bench.blanks(folder)
    async with (
        really_serving(TinyModel(folder), device="8192tokens") as rig,
        opened(rig.target) as (url, _),
    ):
        sizes = bench.LoadSizes(clients=4, turns=2, system=20, message=8, seconds=1.0, settle_s=0.1)
        load = bench.ClosedLoop(url, sizes, 0.5, 20, "test", bias)
        await load.play()
    structured = [turn for turn in load.turns if turn.structured]
    assert structured and abs(2 * len(structured) - len(load.turns)) <= 1
    assert not any(turn.problem for turn in load.turns), "invalid or cut"
    assert {turn.tokens for turn in load.turns if not turn.structured} == {20}
    # A window that holds all turns, however slow this machine is.
    load.until, load.sizes = time.perf_counter(), dataclasses.replace(sizes, seconds=1e6)
    row = load.row()
    assert row["turns/s"] == len(load.turns) / 1e6 and row["structured"] == len(structured)
    assert row["tokens/turn"] > 20 and not row["invalid"]


def test_what_is_wrong_with_an_answer(bench: Any) -> None:
    wanted = bench.schema(3)
    names = list(wanted["properties"])
    values: list[Any] = ["eightchr", 1000, "low", True, ["red", "blue"]]
    good = dict(zip(names, [*values, *values], strict=True))
    assert bench._problem(json.dumps(good), 100, wanted) == ""
    assert "1000" in bench._problem(json.dumps(good | {names[1]: "1000"}), 100, wanted)
    assert bench._problem('{"', 100, wanted)
    assert bench._problem('{"', bench.MOST_TOKENS, wanted) == "cut"


def test_losses_are_against_the_servers_own_smallest_share(bench: Any) -> None:
    def row(server: str, share: float, turns: float) -> dict[str, Any]:
        values = dict.fromkeys(bench._MEDIANS, 1.0) | {"turns/s": turns}
        return {"server": server, "share": share, "cut": 0, "invalid": 0} | values

    rows = [row("a", 0.0, 10.0), row("a", 1.0, 8.0), row("b", 1.0, 3.0), row("b", 0.0, 4.0)]
    found = [(one["server"], one["structured"], one["turns/s lost"]) for one in bench.summary(rows)]
    assert found == [
        ("a", "0%", "0.0 %"),
        ("a", "100%", "20.0 %"),
        ("b", "0%", "0.0 %"),
        ("b", "100%", "25.0 %"),
    ]


def test_a_filled_vocabulary_has_text_for_every_id(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from tokenizers import Tokenizer

    folder = load_bench("dummy_model", monkeypatch).make("llama-3-8b", tmp_path, fill_vocabulary=True)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    assert tokenizer.get_vocab_size() == 128256
    assert all(tokenizer.decode([token]) for token in range(1536, 128256, 997))
    assert tokenizer.decode(tokenizer.encode("Words, as before.").ids) == "Words, as before."
