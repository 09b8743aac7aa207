"""Clients talk while servers, engines, stores and connections fail; every history must be a legal one.

The short version of ``python tests/robustness/run.py``: each kind of fault strikes once, on SQLite and on Redis with
two servers. Real processes, real gRPC. The same checker has to find each of five bugs that are planted in a server.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.faults.io_errors import IoErrors
from support.robustness.arena import Outcome, Plan, ground, run
from support.robustness.nursery import Nursery
from support.robustness.planted import BUGS

Ground = tuple[Path, Nursery, IoErrors]
SCRIPTS = {
    "ack before commit": ("server kill", "server kill"),
    "retry appended twice": ("cut",) * 8,
    "commit drops input": ("cut",),
    "older state at restart": ("server kill", "server kill", "server kill"),
    "stale context": ("cut", "engine kill", "cut"),
}
KINDS = {
    "ack before commit": {"lost", "stale"},
    "retry appended twice": {"doubled"},
    "commit drops input": {"torn", "doubled", "answer"},
    "older state at restart": {"lost", "order", "stale"},
    "stale context": {"answer"},
}
"""What the checker may call each of them; it need not find all."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ground]:
    folder = tmp_path_factory.mktemp("ground")
    with ground(folder) as (nest, disk):
        yield folder, nest, disk


async def carried_out(shared: Ground, plan: Plan) -> Outcome:
    folder, nest, disk = shared
    return await run(plan, folder / f"run{len(list(folder.iterdir()))}", nest, disk)


@pytest.mark.fault(5, 13, 15, 25, 26, 27, 37, 39, 41, 47, 52)
@pytest.mark.redis
async def test_histories_are_legal(shared: Ground) -> None:
    outcome = await carried_out(shared, Plan(seed=13))
    for name, verdict in outcome.verdicts.items():
        assert verdict.violations == []
        assert verdict.turns == verdict.acknowledged, f"{name}: the last look did not find all turns"
        assert verdict.answers > verdict.turns // 2 > 5, f"{name}: hardly any answer was checked"
    faults = outcome.faults["sqlite"] + outcome.faults["redis"]
    assert set(faults) == set(Plan(seed=0).script), "not every kind of fault has hit"


@pytest.mark.parametrize("bug", BUGS)
async def test_a_planted_bug_is_found(shared: Ground, bug: str) -> None:
    script = SCRIPTS[bug]
    outcome = await carried_out(shared, Plan(seed=7, legs=("sqlite",), bug=bug, script=script, between=6))
    found = {violation.kind for violation in outcome.verdicts["sqlite"].violations}
    assert found & KINDS[bug], f"{found}; faults: {outcome.faults}"
