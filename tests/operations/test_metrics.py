"""What a server tells of itself: calls, turns, processes, its build; and the page that lists it all."""

from __future__ import annotations

import asyncio
import time
import types
from collections.abc import Mapping
from pathlib import Path

import grpc
import pytest
from grpc import aio
from prometheus_client import CollectorRegistry

from pensieve import __version__
from pensieve.client import AsyncClient
from pensieve.server.operations.housekeeping import watch_lag
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.calls import count_calls
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.server.tasks import cancel_and_wait
from pensieve.spawn import read_metric, read_metrics
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as stubs
from support import metrics_page
from support.service.server_process import launched
from support.service.service_rig import refusal, serving, spec


def value(registry: CollectorRegistry, name: str, labels: Mapping[str, str]) -> float:
    found = registry.get_sample_value(name, dict(labels))
    return 0.0 if found is None else found


def test_the_page_lists_every_metric_and_no_other() -> None:
    assert metrics_page.PAGE.read_text() == metrics_page.render(), (
        "run: python tests/support/metrics_page.py --write"
    )


@pytest.mark.timeout(120)
async def test_what_a_real_server_tells_is_on_the_page(tmp_path: Path) -> None:
    """With every option that adds metrics, after a turn: nothing that the page lacks, and all that was due."""
    documented = metrics_page.all_families()
    series = {name for family in documented.values() for name in family.series}
    with launched(tmp_path, http="127.0.0.1:0", tenant_metrics=True) as server:
        async with AsyncClient(server.grpc) as client:
            chat = await client.create_session()
            await chat.send("hello", max_output_tokens=4)
        samples = await asyncio.to_thread(read_metrics, server.admin)
        told = {sample.name for sample in samples if not sample.name.endswith("_created")}
        assert told - series == set()
        rare = {"pensieve_refusals_total", "pensieve_tenant_refusals_total", "pensieve_warm_calls_total"}
        rare |= {"pensieve_compactions_total"}
        # Seen every so often, and of the cache when the engine has said.
        rare |= {f"pensieve_tenant_{what}" for what in ("cache_tokens", "sessions", "stored_bytes")}
        rare |= {
            name for name in series if name.startswith(("pensieve_http_calls", "pensieve_http_first_byte"))
        }
        # The fake engine says nothing of the parts of its steps.
        assert series - told <= rare | {"pensieve_step_part_seconds_total"}

        [build] = [sample.labels for sample in samples if sample.name == "pensieve_build_info"]
        assert build["version"] == __version__ and build["model"] and build["device"]
        assert all(build[name] for name in ("python", "torch", "grpcio", "dtype"))
        for process in ("process", "pensieve_engine_process", "pensieve_http_process"):
            assert read_metric(server.admin, f"{process}_resident_memory_bytes") > 1e6
        assert read_metric(server.admin, "pensieve_turn_seconds_count") == 1
        assert read_metric(server.admin, "pensieve_rpc_handled_total", method="CreateSession", code="OK") == 1


async def test_calls_are_counted_by_method_and_status() -> None:
    metrics = Metrics()
    registry = metrics.registry
    async with serving(answer=None, door=AccessControl(None, metrics)) as rig:
        session = await rig.create()
        await refusal(rig.api.GetSession(pb.GetSessionRequest(name="sessions/none"), timeout=10))
        turn = spec("hi")
        stream = rig.call(session, turn)
        await stream.read()
        assert value(registry, "pensieve_rpc_started_total", {"method": "StreamTurn"}) == 1
        stream.cancel()

        def handled(method: str, code: grpc.StatusCode) -> float:
            return value(registry, "pensieve_rpc_handled_total", {"method": method, "code": code.name})

        while not handled("StreamTurn", grpc.StatusCode.CANCELLED):
            await asyncio.sleep(0.01)
        assert handled("CreateSession", grpc.StatusCode.OK) == 1
        assert handled("GetSession", grpc.StatusCode.NOT_FOUND) == 1
        assert value(registry, "pensieve_rpc_seconds_count", {"method": "StreamTurn"}) == 1
        # What does not exist is no label: whoever calls it cannot make the page grow.
        with pytest.raises(aio.AioRpcError):
            await rig.channel.unary_unary("/pensieve.v1.ConversationService/Bogus")(b"")
        methods = {sample.labels.get("method") for metric in registry.collect() for sample in metric.samples}
        assert "Bogus" not in methods


@pytest.mark.parametrize(
    ("left", "code"),
    [(None, "CANCELLED"), (9.0, "CANCELLED"), (0.05, "DEADLINE_EXCEEDED"), (0.0, "DEADLINE_EXCEEDED")],
)
async def test_a_call_that_was_cut_is_told_from_one_whose_time_was_over(
    left: float | None, code: str
) -> None:
    """``left``: seconds to the deadline that the caller set."""
    metrics = Metrics()

    async def handler(_requests: object, _context: object) -> None:
        raise asyncio.CancelledError

    context = types.SimpleNamespace(time_remaining=lambda: left)
    with pytest.raises(asyncio.CancelledError):
        await count_calls(handler, "/pensieve.v1.ConversationService/StreamTurn", metrics.calls)(
            None, context
        )
    labels = {"method": "StreamTurn", "code": code}
    assert value(metrics.registry, "pensieve_rpc_handled_total", labels) == 1


async def test_a_blocked_event_loop_shows_as_lag() -> None:
    heard: list[float] = []
    task = asyncio.create_task(watch_lag(heard.append, interval_s=0.01))
    while len(heard) < 3:
        await asyncio.sleep(0.005)
    before = len(heard)
    time.sleep(0.3)
    while len(heard) == before:
        await asyncio.sleep(0.005)
    await cancel_and_wait(task)
    assert max(heard[before:]) >= 0.28
    assert all(lag >= 0 for lag in heard)


def test_the_stubs_name_each_method_once() -> None:
    """The label is the bare name of a method, so two services may not share one."""
    names = [
        name
        for service in (stubs.ConversationServiceServicer, stubs.AdminServiceServicer)
        for name in vars(service)
        if name[0].isupper()
    ]
    assert len(names) == len(set(names)) > 15
