"""kill -9 of a client with many streams: every turn of its ends when the grace time is over, and nothing is left."""

from __future__ import annotations

import asyncio
import subprocess
import sys

import pytest

from pensieve.debug import child_environment
from support.service.service_rig import encode, serving

STREAMS = 100
CLIENT = """
import asyncio, sys
from pensieve.client import AsyncClient

async def main(target, count):
    async with AsyncClient(target) as client:
        async def one():
            async for _ in (await client.create_session()).stream("hi"):
                pass
        await asyncio.gather(*(one() for _ in range(count)))

asyncio.run(main(sys.argv[1], int(sys.argv[2])))
"""


@pytest.mark.fault(3)
async def test_all_its_turns_end() -> None:
    async with serving(answer=None, disconnect_grace_s=0.2) as rig:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", CLIENT, rig.target, str(STREAMS)], env=child_environment()
        )
        try:
            async with asyncio.timeout(90):
                while rig.conversations.turns.running < STREAMS or len(rig.link.generations) < STREAMS:
                    await asyncio.sleep(0.02)
            for generation in rig.link.generations:
                generation.admit()
                generation.emit(*encode("the fox"))
        finally:
            process.kill()
            await asyncio.to_thread(process.wait)
        async with asyncio.timeout(60):
            while rig.conversations.turns.running:
                await asyncio.sleep(0.02)
        assert all(generation.cancelled for generation in rig.link.generations)
        page = await rig.store.list_sessions("acme", limit=2 * STREAMS)
        assert len(page.rows) == STREAMS
        assert all(row.running is None and row.revision == 1 for row in page.rows)
