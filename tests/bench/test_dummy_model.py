"""Model folders without weights: a server can serve them, a tokenizer speaks for them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from pensieve.model.folder import load_arch
from pensieve.tokenizer import ChatTokenizer
from support.replay.benches import load_bench


@pytest.mark.parametrize(
    ("shape", "kv_heads"), [("llama-2-13b-gqa10", 10), ("llama-3-8b", 8), ("opt-13b", 40)]
)
def test_they_can_be_served(
    shape: str, kv_heads: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = load_bench("dummy_model", monkeypatch).make(shape, tmp_path / shape)
    arch, tokenizer = load_arch(folder), ChatTokenizer.from_folder(folder)
    known = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))["model"]["vocab"]
    assert tokenizer.vocab_size == arch.vocab_size > len(known)
    assert (arch.num_kv_heads, arch.head_dim) == (kv_heads, 128)


def test_ids_that_the_tokenizer_does_not_know_have_no_text(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = load_bench("dummy_model", monkeypatch).make("llama-2-13b-gqa10", tmp_path)
    tokenizer = ChatTokenizer.from_folder(folder)
    stream = tokenizer.detokenizer()
    draw = np.random.default_rng(0)
    text = "".join(stream.push((int(token),)) for token in draw.integers(0, 32000, 5000)) + stream.finish()
    assert tokenizer.decode([31999, 20000]) == ""
    assert 0 < len(text) < 20000 and not stream.pending
