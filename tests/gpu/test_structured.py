"""Answers under grammars on a GPU, where a step is launched before the tokens of the one before it are known."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from support.engine.checkpoints import Family
from support.engine.exactness import Bench
from support.engine.structured_exactness import run_structured
from support.model import recurrent_models

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("family", ["llama3", "qwen3", "gemma3", "qwen3_next"])
def test_answers_equal_transformers(family: Family | recurrent_models.Family, tmp_path: Path) -> None:
    torch.backends.cuda.matmul.allow_tf32 = False
    run_structured(Bench(family, tmp_path, "cuda"), random.Random(family))
