"""An engine of two ranks as a front end sees it: processes that answer, are killed and stopped, and leave nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pensieve.config import EngineOptions
from pensieve.core import Sampling, SessionKey
from pensieve.engine.messages import Output
from pensieve.errors import Unavailable
from pensieve.server.links.engine_link import LinkState
from pensieve.server.links.process_link import ProcessLink
from support.engine.hf_oracle import HfOracle
from support.processes import alive, children
from support.service.listener import Listened

PROMPT = list(range(10, 50))
STEP_S = 60.0
"""For anything that happens soon on an idle machine."""


def options(model: Path, device: Any = "cpu", **changes: Any) -> EngineOptions:
    """Of an engine of two ranks."""
    sizes = {"device_cache": "512tokens", "host_cache": "256tokens", "chunk_tokens": 8}
    return EngineOptions(
        model=str(model),
        device=device,
        dtype="float32",
        tensor_parallel=2,
        torch_threads=2,
        **(sizes | changes),
    )


@asynccontextmanager
async def running(model: Path, device: str) -> AsyncIterator[ProcessLink]:
    link = ProcessLink(options(model, device), stall_limit_s=STEP_S, log_level="WARNING")
    await link.start()
    try:
        yield link
    finally:
        await link.stop()


def started(link: ProcessLink, count: int) -> Listened:
    sampling = Sampling(max_output_tokens=count, ignore_eos=True)
    return Listened(link, SessionKey("a"), np.array(PROMPT, np.int32), sampling)


async def answer(link: ProcessLink) -> list[int]:
    events = [event async for event in started(link, 20)]
    return [token for event in events if isinstance(event, Output) for token in event.token_ids]


def ranks_of(link: ProcessLink) -> tuple[int, int]:
    """Process ids of ranks 0 and 1."""
    assert link.pid is not None
    (other,) = children(link.pid)
    return link.pid, other


def orphans() -> list[int]:
    """Rank processes whose engine is gone."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_bytes().split(b"\0")
        except OSError:
            continue
        if b"pensieve.engine.ranks.host" in words and alive(int(process.name)):
            found += [int(process.name)] if not alive(int(words[words.index(b"--parent") + 1])) else []
    return found


async def nothing_is_left() -> None:
    async with asyncio.timeout(STEP_S):
        while orphans():
            await asyncio.sleep(0.02)


async def until_gone(*pids: int) -> None:
    async with asyncio.timeout(STEP_S):
        while any(alive(pid) for pid in pids):
            await asyncio.sleep(0.02)


async def live_and_die_together(model: Path, device: str) -> None:
    """What a terminal sends to all ends nothing. A rank is killed in a generation, and stopped between two."""
    async with running(model, device) as link:
        lead, other = ranks_of(link)
        oracle = HfOracle(model)
        first = await answer(link)
        oracle.verify(PROMPT, first)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            os.kill(other, number)
            os.kill(lead, number)
        assert await answer(link) == first
        assert ranks_of(link) == (lead, other)

        # Killed in the middle of a generation: by a signal, so nobody's request is to blame.
        turn = started(link, 400)
        async for event in turn:
            if isinstance(event, Output):
                break
        os.kill(other, signal.SIGKILL)
        with pytest.raises(Unavailable) as caught:
            async for _ in turn:
                pass
        assert caught.value.reason == "ENGINE_RESTARTING"
        await until_gone(lead, other)
        async with asyncio.timeout(STEP_S):
            while link.state is not LinkState.SERVING:
                await asyncio.sleep(0.02)
        assert await answer(link) == first

        # Stopped while there is nothing to do: found as well.
        lead, other = ranks_of(link)
        os.kill(other, signal.SIGSTOP)
        await until_gone(lead, other)
    await nothing_is_left()
