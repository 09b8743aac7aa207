"""What a report says of a started server's engine, from the server's own metrics."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import msgspec
import prometheus_client
import pytest
from rich.console import Console

from pensieve.core import Usage
from pensieve.engine.messages import Stats
from pensieve.replay.load.schedule import Arrivals
from pensieve.replay.load.workload import Conversation, Dataset, Shaping, TurnLengths
from pensieve.replay.presentation.table import print_report
from pensieve.replay.records import RunOptions
from pensieve.replay.session import ReplayPlan, run
from pensieve.replay.targets.base import OnTokens, TargetInfo, TurnRequest
from pensieve.replay.targets.started_target import StartedTarget, counter_growth
from pensieve.server.links.engine_link import LinkState
from pensieve.server.operations.metrics import Metrics

PLAN = ReplayPlan(
    Dataset("d", (Conversation("a", (TurnLengths(2, 1), TurnLengths(2, 1))),), "0"), Shaping(), Arrivals(),
    RunOptions(force_lengths=False, max_lag_s=60.0),
)  # fmt: skip


class Engine:
    """Each turn takes it ten steps of 2 ms: a quarter of it planning, the rest waiting; before the run it made one."""

    state = LinkState.SERVING
    restarts_total = condemned_turns_total = condemned_sessions_total = 0

    def __init__(self) -> None:
        self.stats = Stats(
            steps_total=1, step_seconds_total=5.0, part_seconds_total={"plan": 5.0}, swap_in_bytes_total=9
        )

    def work(self) -> None:
        now = self.stats
        parts = {"plan": now.part_seconds_total["plan"] + 0.005}
        parts["wait"] = now.part_seconds_total.get("wait", 0.0) + 0.015
        self.stats = msgspec.structs.replace(
            now, steps_total=now.steps_total + 10, step_seconds_total=now.step_seconds_total + 0.02,
            part_seconds_total=parts, swap_in_bytes_total=now.swap_in_bytes_total + 32,
            swap_out_bytes_total=now.swap_out_bytes_total + 8,
        )  # fmt: skip


class Working:
    """The server behind the gRPC address."""

    name = "working"

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    async def open(self) -> TargetInfo:
        return TargetInfo(50, 100)

    async def start_session(self) -> str:
        return "s"

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        self._engine.work()
        return None

    async def end_session(self, session: str) -> None: ...

    async def close(self) -> None: ...


@pytest.fixture
def admin() -> Iterator[tuple[Engine, int]]:
    """The metrics of a real server, and their port."""
    engine, metrics = Engine(), Metrics()
    metrics.watch_engine(engine)
    server, thread = prometheus_client.start_http_server(0, "127.0.0.1", metrics.registry)
    yield engine, server.server_port
    server.shutdown()
    server.server_close()
    thread.join(30)


def started(engine: Engine, says: str, url: str | None = None) -> StartedTarget:
    code = f"import time; print({says!r}, flush=True); time.sleep(600)"
    command = f'{sys.executable} -c "{code}"'
    return StartedTarget(command, url, lambda address: Working(engine), name="x", timeout_s=60)


async def test_steps_of_the_run(admin: tuple[Engine, int]) -> None:
    engine, port = admin
    target = started(engine, f"ready grpc=127.0.0.1:1 admin=127.0.0.1:{port}")
    report = await run(PLAN, [target])
    (summary,) = report["targets"]
    assert summary["step_s"] == {
        "count": 20, "mean": pytest.approx(0.002), "share": pytest.approx({"plan": 0.25, "wait": 0.75})
    }  # fmt: skip
    assert summary["swap"] == {"in_bytes": 64.0, "out_bytes": 16.0}
    console = Console(record=True, width=140)
    print_report(report, console)
    said = [[cell.strip() for cell in line.split("│")[1:3]] for line in console.export_text().splitlines()]
    assert ["engine step ms, mean", "2.0"] in said
    assert ["share of step time: plan", "25.0%"] in said and ["share of step time: wait", "75.0%"] in said


async def test_other_servers_tell_nothing() -> None:
    engine = Engine()
    for target in (
        started(engine, "up", "http://127.0.0.1:1"),
        started(engine, "ready grpc=127.0.0.1:1 admin=127.0.0.1:1"),  # nobody answers there
        Working(engine),
    ):
        (summary,) = (await run(PLAN, [target]))["targets"]
        assert not {"swap", "step_s"} & set(summary)


def test_an_engine_that_made_no_step() -> None:
    idle = {"pensieve_steps_total": 7.0, "pensieve_step_seconds_total": 1.0}
    assert counter_growth(idle, idle)["step_s"] == {"count": 0, "mean": None, "share": {}}
