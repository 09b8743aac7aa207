"""Engines that hang, and requests that end engines, as clients of a real server see it."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pensieve.client import AsyncClient, Client
from pensieve.errors import Internal
from support.engine.fake_engine import Script
from support.faults.fault_client import calling, check_idle
from support.faults.fault_server import fault_server
from support.service.server_process import ServerProcess, launched
from support.service.service_rig import encode

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
(POISON,) = encode("Z")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    script = Script(step_s=0.01, poison=POISON)
    with launched(tmp_path_factory.mktemp("server"), script) as process:
        yield process


def becomes(server: ServerProcess, status: int, *, seconds: float = 30.0) -> float:
    """Wait for this verdict of health; how long that took."""
    began = time.monotonic()
    with grpc.insecure_channel(server.grpc) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while stub.Check(health_pb2.HealthCheckRequest(), timeout=5).status != status:
            assert time.monotonic() - began < seconds, f"health is not {status}"
            time.sleep(0.02)
    return time.monotonic() - began


@contextlib.contextmanager
def stopped(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextlib.contextmanager
def meanwhile(work: Callable[[], None]) -> Iterator[None]:
    """``work`` over and over in a thread; what it raises is raised at the end."""
    over, failures = threading.Event(), list[Exception]()

    def run() -> None:
        while not over.is_set() and not failures:
            try:
                work()
            except Exception as error:
                failures.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()
    assert not failures, failures


@pytest.mark.fault(28)
def test_a_stopped_engine_is_no_serving_one(server: ServerProcess) -> None:
    """Promised are 5 s; a machine that is busy with other tests may need longer."""
    with Client(server.grpc) as client:
        session = client.create_session()
        session.send("warm up", max_output_tokens=4)
        pid = server.engine_pid
        stream = session.stream("hello", max_output_tokens=200)
        next(stream)  # work is waiting from here on
        with stopped(pid):
            assert becomes(server, NOT_SERVING) < 10
        becomes(server, SERVING)
        assert stream.finish().usage.output_tokens == 200
        assert server.engine_pid == pid, "it was not given up: a pause is no death"


@pytest.mark.fault(28)
async def test_a_turn_outlives_the_engine_that_hangs_in_it(tmp_path: Path) -> None:
    """Its process lives and does not get on with a step. Promised are 5 s until health shows it."""
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with fault_server(tmp_path / "server", store, pace_s=0.005, stall_limit_s=4.0) as server:
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller, AsyncClient(server.grpc) as client:
            talk = await caller.talk()
            await caller.say(talk, "steps of this size are known then", 20)
            session, pid = client.session(talk.name), server.engine_pid
            stream = session.stream("hello", max_output_tokens=60, ignore_eos=True)
            pieces = aiter(stream)  # held, or the stream would be given up
            await anext(pieces)
            server.hold()
            await caller.becomes(NOT_SERVING)
            assert server.engine_pid == pid, "health says so long before the engine is given up"
            async with asyncio.timeout(30):
                while server.engine_pid in (pid, None):
                    await asyncio.sleep(0.01)
            server.release()
            turn = await stream.finish()
            assert (turn.usage.output_tokens, turn.revision) == (60, 3)
            assert stream.resumes > 0
            await caller.becomes(SERVING)
            assert await asyncio.to_thread(server.metric, "pensieve_engine_restarts_total") == 1
            await check_idle(caller)


def test_a_request_that_ends_engines_is_told_and_everybody_goes_on(server: ServerProcess) -> None:
    with Client(server.grpc) as client:
        bad, good = client.create_session(), client.create_session()
        bad.send("hello", max_output_tokens=4)

        def talk() -> None:
            good.send("hello", max_output_tokens=4)

        request_id = "6b1f7a3e-9d7d-4b0e-8f57-1a2b3c4d5e6f"
        with meanwhile(talk):
            for _ in range(2):  # the second time it is refused without an engine's death
                with pytest.raises(Internal) as caught:
                    bad.send("Z", request_id=request_id)
                assert caught.value.reason == "REQUEST_QUARANTINED"
                deaths = server.stderr.count("the engine is gone")
            assert bad.send("hello again", max_output_tokens=4).revision == 3, "its session goes on"
        assert deaths == 2
        assert good.items()
