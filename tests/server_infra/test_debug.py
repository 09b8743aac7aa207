"""Failpoints: parsing, each action, the N-th hit."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace

import pytest

from pensieve import debug
from pensieve.debug import FailpointError, arm, async_failpoint, child_environment, failpoint


@pytest.fixture(autouse=True)
def disarmed() -> Iterator[None]:
    yield
    arm("")


def test_unarmed_does_nothing() -> None:
    for name in debug.FAILPOINTS:
        failpoint(name)


def test_raise_strikes_its_own_name_each_time() -> None:
    arm("before_commit=raise")
    failpoint("after_begin")
    for _ in range(2):
        with pytest.raises(FailpointError, match="before_commit"):
            failpoint("before_commit")


def test_the_nth_hit_only() -> None:
    arm("mid_decode@3=raise, in_renew=raise")
    failpoint("mid_decode")
    failpoint("mid_decode")
    with pytest.raises(FailpointError):
        failpoint("mid_decode")
    failpoint("mid_decode")


def test_a_stall_blocks_for_its_time(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    monkeypatch.setattr(debug, "time", SimpleNamespace(sleep=slept.append))  # other threads sleep, too
    arm("before_begin=stall(2.5)")
    failpoint("before_begin")
    assert slept == [2.5]


async def test_an_async_stall_holds_up_only_its_task() -> None:
    arm("in_renew@1=stall(60)")
    stalled = asyncio.create_task(async_failpoint("in_renew"))
    await asyncio.sleep(0)
    await async_failpoint("in_renew")
    assert not stalled.done()
    stalled.cancel()


@pytest.mark.parametrize(
    "spec",
    ["before_commit", "before_commit=explode", "nowhere=crash", "before_commit@0=crash", "in_renew=stall"],
)
def test_a_bad_spec_is_an_error(spec: str) -> None:
    with pytest.raises(ValueError, match="failpoint"):
        arm(spec)


def test_crash_by_environment_ends_a_process_as_kill_does() -> None:
    code = "from pensieve.debug import failpoint; failpoint('after_begin'); failpoint('after_begin'); print('alive')"
    environment = {**child_environment(), "PENSIEVE_FAILPOINTS": "after_begin@2=crash"}
    done = subprocess.run(
        [sys.executable, "-P", "-c", code], env=environment, capture_output=True, check=False
    )
    assert done.returncode == 137
    assert done.stdout == b"" and b"after_begin: crash at hit 2" in done.stderr


def test_a_child_can_be_started_without_the_armed_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSIEVE_FAILPOINTS", "engine_mid_step=crash")
    assert "PENSIEVE_FAILPOINTS" in child_environment()
    assert "PENSIEVE_FAILPOINTS" not in child_environment(failpoints=False)
    assert "" not in child_environment()["PYTHONPATH"].split(":")
