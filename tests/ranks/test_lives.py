"""An engine of two processes, from start to end: exact answers, and no rank lives without the others."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from pensieve.config import EngineOptions
from pensieve.engine.ranks import collectives, host
from pensieve.engine.ranks.leader import build_workers, check_gpus
from pensieve.engine.ranks.supervisor import FAILURE_GRACE_S
from pensieve.errors import InvalidArgument
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
async def test_ranks_live_and_die_together(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the environment says how the ranks of another program are to meet."""
    outside = {
        "MASTER_ADDR": "192.0.2.1",
        "MASTER_PORT": "1",
        "RANK": "7",
        "WORLD_SIZE": "8",
        "GLOO_SOCKET_IFNAME": "none0",
        "GLOO_DEVICE_TRANSPORT": "TCP_TLS",
    }
    for name, value in outside.items():
        monkeypatch.setenv(name, value)
    await live_and_die_together(model, "cpu")


@pytest.mark.fault(30)
async def test_a_start_that_fails_says_why_and_leaves_nothing(model: Path) -> None:
    link = ProcessLink(options(model, device_cache="4000TiB"), log_level="WARNING")
    with pytest.raises(InvalidArgument, match=r"device cache 4000TiB: .* do not fit .*: give at most \d+MiB"):
        await link.start()
    await nothing_is_left()


def test_a_loopback_interface_that_is_down_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(collectives, "SETTINGS", collectives.SETTINGS | {"GLOO_SOCKET_IFNAME": "none0"})
    for name in collectives.SETTINGS:
        monkeypatch.setenv(name, "")
    meeting = os.memfd_create("meeting")
    with pytest.raises(ValueError, match="the ranks cannot meet on the loopback interface, is it up"):
        collectives.join("cpu", 0, meeting, EngineOptions(model=""))
    os.close(meeting)


LEAVES = """
import os, sys
from pensieve.config import EngineOptions
from pensieve.engine.ranks import collectives, host
collective = collectives.join("cpu", 1, int(sys.argv[1]), EngineOptions(model="", tensor_parallel=2))
collective.all_reduce_min([1])
os._exit(1)
"""


def test_who_loses_another_rank_leaves_the_last_words_to_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in collectives.SETTINGS:
        monkeypatch.setenv(name, "")
    meeting, waited = os.memfd_create("meeting"), list[float]()
    command = [sys.executable, "-P", "-c", LEAVES, str(meeting)]
    with subprocess.Popen(command, pass_fds=(meeting,)):
        together = collectives.join("cpu", 0, meeting, EngineOptions(model="", tensor_parallel=2))
        assert together.all_reduce_min([3]) == [1]

        def join(*_: object, **__: object) -> None:
            together.all_reduce(torch.ones(8))

        monkeypatch.setattr(collectives, "join", join)
        # Not the module's own: threads of other tests may sleep, too.
        monkeypatch.setattr(host, "time", SimpleNamespace(**vars(time) | {"sleep": waited.append}))
        with pytest.raises(collectives.RankLost):
            host.serve(1, "cpu", 0, 0, EngineOptions(model="/nowhere", tensor_parallel=2))
    assert waited == [FAILURE_GRACE_S]
    os.close(meeting)


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
