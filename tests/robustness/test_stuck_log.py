"""Whoever reads the log of a server stands still: a log collector, a pager, a terminal that was paused."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from support.faults.fault_client import audit, calling
from support.faults.fault_server import fault_server
from support.faults.pipes import fill


@pytest.mark.fault(61)
async def test_a_server_serves_and_ends_while_nobody_reads_its_log(tmp_path: Path) -> None:
    """Its engine dies, which is logged, and what the next one says is passed on, too."""
    reading, writing = os.pipe()
    try:
        with fault_server(tmp_path / "server", f"sqlite:///{tmp_path / 'history.sqlite3'}") as server:
            await asyncio.to_thread(server.start, stderr=writing)
            async with calling(server.grpc, server.admin) as caller:
                talk = await caller.talk()
                await caller.say(talk, "before", 4)
                fill(writing)
                engine = server.engine_pid
                assert engine is not None
                os.kill(engine, signal.SIGKILL)
                await caller.say(talk, "while nobody reads", 4)
                await audit(caller, [talk])
            server.send(signal.SIGTERM)
            assert await asyncio.to_thread(server.wait) == 0
    finally:
        os.close(reading)
        os.close(writing)
