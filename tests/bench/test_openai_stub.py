"""The stateless server of the tests ends its answers as ``generate`` of transformers does."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from support.checkpoints import tiny_checkpoint
from support.openai_stub import Model

PROMPT, LIMIT = list(range(5, 25)), 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of a model whose own greedy answer to the prompt has its end of sequence in the middle."""
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))
    answer = list(Model(path).answer(PROMPT, LIMIT))
    model = AutoModelForCausalLM.from_pretrained(path)
    model.generation_config.eos_token_id = next(t for t in answer[3:] if t not in answer[:3])
    model.save_pretrained(path.parent / "ending")
    return path.parent / "ending"


@pytest.mark.parametrize("least", [0, 4, LIMIT])
def test_min_tokens_and_the_end_of_sequence(folder: Path, least: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LIMIT, min_new_tokens=least,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert list(Model(folder).answer(PROMPT, LIMIT, least=least, ignore_eos=False)) == expected
    assert least or len(expected) < LIMIT, "the answer ends by itself"


def test_ignore_eos(folder: Path) -> None:
    stub = Model(folder)
    assert len(list(stub.answer(PROMPT, LIMIT, ignore_eos=False))) < LIMIT
    assert len(list(stub.answer(PROMPT, LIMIT, ignore_eos=True))) == LIMIT
