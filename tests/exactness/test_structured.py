"""Answers under grammars are those of transformers with a mask processor, over all that a schedule does to them: steps
that others share, suspensions, masks that come late. In float32, on tiny random checkpoints of each kind of model."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from support.engine.checkpoints import Family
from support.engine.exactness import Bench
from support.engine.structured_exactness import run_structured
from support.model import recurrent_models

KINDS: tuple[Family | recurrent_models.Family, ...] = ("llama3", "gemma3", "qwen3_next")


@pytest.mark.parametrize("family", KINDS)
def test_answers_are_those_of_transformers(family: Family | recurrent_models.Family, tmp_path: Path) -> None:
    run_structured(Bench(family, tmp_path), random.Random(family))
