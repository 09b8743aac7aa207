"""Swap traffic of servers that the replay starts, read from their metrics."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from pensieve.core import Usage
from pensieve.replay.runner import RunOptions
from pensieve.replay.schedule import Arrivals
from pensieve.replay.session import Plan, run
from pensieve.replay.shaping import Shape
from pensieve.replay.started_target import StartedTarget
from pensieve.replay.targets import OnTokens, TargetInfo, TurnSpec
from pensieve.replay.workload import Conversation, Dataset, Turn

PLAN = Plan(
    Dataset("d", (Conversation("a", (Turn(2, 1), Turn(2, 1))),), "0"), Shape(), Arrivals(),
    RunOptions(force_lengths=False),
)  # fmt: skip


class Counters:
    """What the metrics say; each turn adds to them."""

    swapped_in, swapped_out = 1000, 500


class Swapping:
    """The server behind the gRPC address."""

    name = "swapping"

    def __init__(self, counters: Counters) -> None:
        self._counters = counters

    async def open(self) -> TargetInfo:
        return TargetInfo(50, 100)

    async def start_session(self) -> str:
        return "s"

    async def turn(self, session: str, spec: TurnSpec, on_tokens: OnTokens) -> Usage | None:
        self._counters.swapped_in += 10
        self._counters.swapped_out += 4
        return None

    async def end_session(self, session: str) -> None:
        pass

    async def close(self) -> None:
        pass


@pytest.fixture
def metrics() -> Iterator[tuple[Counters, int]]:
    counters = Counters()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            text = (
                "# TYPE pensieve_swap_bytes counter\n"
                f'pensieve_swap_bytes_total{{direction="in"}} {counters.swapped_in}\n'
                f'pensieve_swap_bytes_total{{direction="out"}} {counters.swapped_out}\n'
            )
            self.send_response(200)
            self.end_headers()
            self.wfile.write(text.encode())

        def log_message(self, *args: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield counters, server.server_port
        server.shutdown()
        thread.join(30)


def started(counters: Counters, says: str, url: str | None = None) -> StartedTarget:
    code = f"import time; print({says!r}, flush=True); time.sleep(600)"
    command = f'{sys.executable} -c "{code}"'
    return StartedTarget(command, url, lambda address: Swapping(counters), name="x", timeout_s=60)


async def test_growth_over_the_run(metrics: tuple[Counters, int]) -> None:
    counters, port = metrics
    report = await run(PLAN, [started(counters, f"ready grpc=127.0.0.1:1 admin=127.0.0.1:{port}")])
    assert report["targets"][0]["swap"] == {"in_bytes": 20.0, "out_bytes": 8.0}


async def test_other_servers_tell_nothing(metrics: tuple[Counters, int]) -> None:
    counters, _ = metrics
    report = await run(PLAN, [started(counters, "up", "http://127.0.0.1:1")])
    assert "swap" not in report["targets"][0]
    report = await run(PLAN, [started(counters, "ready grpc=127.0.0.1:1 admin=127.0.0.1:1")])
    assert "swap" not in report["targets"][0], "nobody answers there"
    assert "swap" not in (await run(PLAN, [Swapping(counters)]))["targets"][0]
