"""An engine of two processes, from start to end: exact answers, and no rank lives without the others."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from pensieve.config import EngineOptions
from pensieve.engine.ranks.build import build_workers, check_gpus
from pensieve.errors import Internal
from pensieve.model.arch import ModelError
from pensieve.server.links.process_link import ProcessLink
from support.engine.checkpoints import tiny_checkpoint
from support.processes import children
from support.ranks.lives import live_and_die_together, nothing_is_left, options

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_checkpoint("llama3", tmp_path_factory.getbasetemp(), vocab_size=163)


@pytest.mark.fault(27)
async def test_ranks_live_and_die_together(model: Path) -> None:
    await live_and_die_together(model, "cpu")


@pytest.mark.fault(30)
async def test_a_start_that_fails_says_why_and_leaves_nothing(model: Path) -> None:
    link = ProcessLink(options(model, device_cache="4000TiB"), log_level="WARNING")
    with pytest.raises(Internal, match=r"device cache 4000TiB: .* do not fit .*: give at most \d+MiB"):
        await link.start()
    await nothing_is_left()


def test_what_cannot_be_divided_starts_nothing(model: Path) -> None:
    before = children(os.getpid())
    with pytest.raises(ModelError, match=r"6 attention heads do not divide over 4 ranks; .* 1, 2"):
        build_workers(EngineOptions(model=str(model), device="cpu", tensor_parallel=4))
    assert children(os.getpid()) == before


@pytest.mark.parametrize(
    ("names", "said"),
    [
        ([], "there are only 0 GPUs here"),
        (["A"] * 3, "there are only 3 GPUs here"),
        (["A", "A", "A", "B"], r"the first 4 GPUs are of different kinds \(A, B\)"),
    ],
)
def test_gpus_that_will_not_do(names: list[str], said: str) -> None:
    with pytest.raises(ValueError, match=f"tensor parallel 4: {said}"):
        check_gpus(names, 4)
    check_gpus(["A"] * 5, 4)
