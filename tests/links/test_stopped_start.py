"""An engine that somebody stops while it starts."""

from __future__ import annotations

import asyncio
import os
import signal

import pytest

from pensieve.errors import Internal
from pensieve.server.links import process_link
from pensieve.server.links.process_link import ProcessLink
from support.engine.fake_engine import BUILDER, Script, options
from support.processes import alive, children


async def test_an_engine_that_is_stopped_while_it_starts_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves nobody yet, so the watchdog does not look at it."""
    monkeypatch.setattr(process_link, "LOOK_S", 0.05)
    link = ProcessLink(options(Script(sleep_to_start_s=60.0)), builder=BUILDER)
    others = set(children(os.getpid()))
    start = asyncio.create_task(link.start())
    async with asyncio.timeout(10):
        while not (started := set(children(os.getpid())) - others):
            await asyncio.sleep(0.005)
    (pid,) = started
    os.kill(pid, signal.SIGSTOP)
    try:
        async with asyncio.timeout(10):
            with pytest.raises(
                Internal, match="did not start: the engine process was stopped while it started"
            ):
                await start
        assert not alive(pid)
    finally:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)
        start.cancel()
