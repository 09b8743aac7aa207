"""Recurrent layers read and write the state pages that the plan names: the logits are those of a stateless run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import EngineOptions
from pensieve.engine.worker import cuda_worker
from pensieve.engine.worker.cuda_worker import long_run
from pensieve.engine.worker.torch_worker import build_worker
from support.engine.state_cases import CASES
from support.model.recurrent_models import Family, make_model

LONG = 64
"""Fewest tokens of a run by blocks here: contexts of these models are short."""


@pytest.fixture(scope="module", params=["mamba2", "falcon_h1", "qwen3_next"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """States alone, states and attention in one layer, and in different layers."""
    family: Family = request.param
    made = tmp_path_factory.mktemp(family)
    make_model(family, made)
    return made


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.__name__)
def test_states(case: Callable[[Path, str], None], folder: Path) -> None:
    case(folder, "cpu")


@pytest.mark.parametrize("device_cache", ["400tokens", "1MiB..4MiB"])
def test_a_worker_can_run_the_step_that_compiles(
    folder: Path, device_cache: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both runs of it are long enough for blocks, whatever the chunks; where it does not fit there is none."""
    monkeypatch.setattr(cuda_worker, "LONG", LONG)
    options: dict[str, Any] = {"model": str(folder), "device": "cpu", "device_cache": device_cache}
    for chunk, most in ((4, 200), (32, 200), (48, 160), (4, 127)):
        worker = build_worker(
            EngineOptions(**options, chunk_tokens=chunk, max_batch_tokens=most, max_running=1)
        )
        plan = long_run(worker.info)
        if most == 127:
            assert plan is None
        else:
            assert plan is not None
            (span,), (chain,) = plan.spans, plan.chains
            assert LONG <= chain.boundary_at <= len(span.tokens) - LONG
            assert worker.run(plan).memory == plan.memory
        worker.close()
