"""An engine whose memory runs out in the middle of a step: it ends, another goes on, and the turn is answered."""

from __future__ import annotations

import resource
from pathlib import Path

import pytest

from pensieve.client import Client
from pensieve.spawn import ServerProcess
from support.processes import children

SPARE_BYTES = 4 << 20
"""What the engine may take beyond what it has: less than a step of many tokens needs."""


@pytest.mark.fault(30)
@pytest.mark.timeout(200)
def test_memory_that_runs_out_in_a_step_costs_neither_server_nor_turn() -> None:
    options = ("--model", "demo", "--store", "memory:", "--threads", "1", "--device-cache", "8192tokens")
    options += ("--max-batch-tokens", "4096")
    with ServerProcess(*options) as server, Client(server.target, retry_for=120) as client:
        chat = client.create_session()
        chat.send("My name is Ada.", temperature=0.0)
        (engine,) = children(server.pid)
        # Not RLIMIT_AS: malloc reserves address space for each thread, in which it then finds memory.
        status = (Path("/proc") / str(engine) / "status").read_text()
        limit = int(status.split("VmData:")[1].split()[0]) * 1024 + SPARE_BYTES
        resource.prlimit(engine, resource.RLIMIT_DATA, (limit, limit))

        turn = chat.send("I like walks. " * 300 + "What is my name?", temperature=0.0)
        assert turn.text.strip() == "Your name is Ada."
        assert turn.usage.reconciles and turn.usage.recomputed_tokens, (
            "the first turn was on the engine that ended"
        )
        assert server.metric("pensieve_engine_restarts_total") == 1
        assert [item.text for item in chat.items()].count(turn.text) == 1 and chat.revision == 3
