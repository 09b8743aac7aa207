"""The whole server as a process: ready line, both ports, faults of the engine, drain, refusals to start."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
import time
import urllib.request
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from pensieve import rpc_status
from pensieve.errors import PensieveError
from pensieve.options.serve import ServeOptions
from pensieve.server.app import run
from pensieve.spawn import read_metric
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as pb_grpc
from support.engine.fake_engine import BUILDER, Script
from support.service.server_process import WITHOUT_UVLOOP, ServerProcess, launched, model_folder

SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SLOW = Script(step_s=0.02)


class Caller:
    """Stubs on one port."""

    def __init__(self, channel: aio.Channel, metadata: tuple[tuple[str, str], ...] = ()) -> None:
        self.data: Any = pb_grpc.ConversationServiceStub(channel)
        self.admin: Any = pb_grpc.AdminServiceStub(channel)
        self._health: Any = health_pb2_grpc.HealthStub(channel)
        self._reflection: Any = reflection_pb2_grpc.ServerReflectionStub(channel)
        self.metadata = metadata

    async def health(self) -> int:
        status: int = (await self._health.Check(health_pb2.HealthCheckRequest(), timeout=10)).status
        return status

    def watch(self) -> Any:
        """Every change of health from here on; the first message is the state now."""
        return self._health.Watch(health_pb2.HealthCheckRequest(), timeout=60)

    async def becomes(self, status: int) -> None:
        async with asyncio.timeout(60):
            while await self.health() != status:
                await asyncio.sleep(0.02)

    async def services(self) -> set[str]:
        """For a caller that may ask."""
        request = reflection_pb2.ServerReflectionRequest(list_services="")
        call = self._reflection.ServerReflectionInfo(iter([request]), metadata=self.metadata, timeout=10)
        answer = await call.read()
        call.cancel()
        return {service.name for service in answer.list_services_response.service}

    async def services_refused(self) -> grpc.StatusCode:
        """The status for a caller that may not. Nothing is sent: when a refusal comes before a message is on its way,
        grpc.aio says "Internal error from Core" in its place, and a second try would count as another refusal."""
        with pytest.raises(aio.AioRpcError) as caught:
            await self._reflection.ServerReflectionInfo(metadata=self.metadata, timeout=10).read()
        return caught.value.code()

    async def session(self) -> str:
        request = pb.CreateSessionRequest(request_id=str(uuid.uuid4()))
        answer = await self.data.CreateSession(request, timeout=10, metadata=self.metadata)
        name: str = answer.session.name
        return name

    def turn(self, session: str, tokens: int = 4) -> Any:
        spec = pb.TurnSpec(
            request_id=str(uuid.uuid4()),
            input=[pb.InputItem(role=pb.ROLE_USER, text="hello")],
            sampling=pb.SamplingParams(max_output_tokens=tokens),
        )
        request = pb.StreamTurnRequest(session=session, turn=spec)
        return self.data.StreamTurn(request, timeout=60, metadata=self.metadata)


@asynccontextmanager
async def calling(address: str, *metadata: tuple[str, str]) -> AsyncIterator[Caller]:
    # No retries by the library: these tests are about the first answer.
    async with aio.insecure_channel(address, options=(("grpc.enable_retries", 0),)) as channel:
        yield Caller(channel, metadata)


async def first_delta(stream: Any) -> None:
    async for event in stream:
        if event.WhichOneof("event") == "delta":
            return
    pytest.fail("the stream ended without a delta")


async def rest(stream: Any) -> Any:
    return [event async for event in stream][-1]


async def refused(call: Any) -> PensieveError:
    with pytest.raises(aio.AioRpcError) as caught:
        await call
    return rpc_status.from_rpc_error(caught.value)


def http(address: str, path: str) -> str:
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


async def test_one_line_two_ports_and_a_clean_end(tmp_path: Path) -> None:
    with launched(tmp_path) as server:
        async with calling(server.grpc) as caller, calling(server.admin) as admin:
            assert await caller.health() == await admin.health() == SERVING
            assert "pensieve.v1.ConversationService" in await caller.services()
            assert "pensieve.v1.AdminService" not in await caller.services()
            assert "pensieve.v1.AdminService" in await admin.services()
            with pytest.raises(aio.AioRpcError, match="UNIMPLEMENTED"):
                await caller.admin.GetStats(pb.GetStatsRequest())
            completed = await rest(caller.turn(await caller.session(), tokens=5))
            assert completed.completed.usage.output_tokens == 5
            stats = await admin.admin.GetStats(pb.GetStatsRequest(), timeout=10)
            assert stats.gpu_tokens_capacity == 4096
            text = await asyncio.to_thread(http, server.admin, "/metrics")
            assert 'pensieve_turns_total{outcome="length"} 1.0' in text
            assert "pensieve_output_tokens_total 5.0" in text
            assert await asyncio.to_thread(http, server.admin, "/readyz") == "ok\n"
        server.terminate()
        assert server.finish() == (0, "")
        assert "Traceback" not in server.stderr


@pytest.mark.fault(27)
async def test_kill_9_of_the_engine(tmp_path: Path) -> None:
    with launched(tmp_path, SLOW) as server:
        async with calling(server.grpc) as caller:
            session, health = await caller.session(), caller.watch()
            assert (await health.read()).status == SERVING
            stream = caller.turn(session, tokens=4000)
            await first_delta(stream)
            os.kill(server.engine_pid, signal.SIGKILL)
            error = await refused(rest(stream))
            assert (error.code, error.reason) == ("UNAVAILABLE", "ENGINE_RESTARTING")
            assert (await asyncio.wait_for(health.read(), 5)).status == NOT_SERVING
            assert (await health.read()).status == SERVING
            health.cancel()
            completed = await rest(caller.turn(session))
            assert completed.completed.revision == 2
        text = await asyncio.to_thread(http, server.admin, "/metrics")
        assert (
            "ended with signal 9 (killed from outside, or by the kernel for lack of memory)" in server.stderr
        )
        assert "pensieve_engine_restarts_total 1.0" in text
        assert 'pensieve_turns_total{outcome="engine_restarting"} 1.0' in text


async def test_an_engine_that_crashes_at_a_failpoint_comes_back_without_it(tmp_path: Path) -> None:
    armed = {"PENSIEVE_FAILPOINTS": "engine_mid_step@3=crash"}
    with launched(tmp_path, SLOW, environment=armed) as server:
        async with calling(server.grpc) as caller:
            session, health = await caller.session(), caller.watch()
            error = await refused(rest(caller.turn(session, tokens=50)))
            assert error.reason == "ENGINE_RESTARTING"
            assert [(await health.read()).status for _ in range(3)] == [SERVING, NOT_SERVING, SERVING]
            health.cancel()
            assert (await rest(caller.turn(session, tokens=50))).completed.usage.output_tokens == 50


@pytest.mark.fault(28)
async def test_a_stalled_engine_is_replaced(tmp_path: Path) -> None:
    script = Script(hang_at_step=3, only_in_life=str(tmp_path / "life"))
    with launched(tmp_path, script, stall_limit_s=1.0) as server:
        async with calling(server.grpc) as caller:
            session, health = await caller.session(), caller.watch()
            error = await refused(rest(caller.turn(session, tokens=50)))
            assert error.reason == "ENGINE_RESTARTING"
            assert [(await health.read()).status for _ in range(3)] == [SERVING, NOT_SERVING, SERVING]
            health.cancel()
            assert (await rest(caller.turn(session))).completed.revision == 2


@pytest.mark.fault(32)
@pytest.mark.parametrize("begin", ["", WITHOUT_UVLOOP], ids=["uvloop", "asyncio"])
async def test_sigterm_lets_the_running_turn_finish_and_refuses_new_ones(tmp_path: Path, begin: str) -> None:
    with launched(tmp_path, SLOW, begin=begin) as server:
        async with calling(server.grpc) as caller, calling(server.admin) as admin:
            session, other = await caller.session(), await caller.session()
            stream = caller.turn(session, tokens=150)
            await first_delta(stream)
            server.terminate()
            await caller.becomes(NOT_SERVING)
            assert await admin.health() == NOT_SERVING
            error = await refused(rest(caller.turn(other)))
            assert (error.code, error.reason) == ("UNAVAILABLE", "DRAINING")
            completed = await rest(stream)
            assert completed.completed.usage.output_tokens == 150
        assert server.finish()[0] == 0


async def test_the_grace_time_of_a_drain_ends(tmp_path: Path) -> None:
    with launched(tmp_path, SLOW, drain_grace_s=0.2) as server:
        async with calling(server.grpc) as caller:
            stream = caller.turn(await caller.session(), tokens=4000)
            await first_delta(stream)
            server.terminate()
            assert (await refused(rest(stream))).code == "UNAVAILABLE"
        assert server.finish()[0] == 0


async def test_a_second_signal_ends_at_once(tmp_path: Path) -> None:
    with launched(tmp_path, SLOW, drain_grace_s=1000.0) as server:
        async with calling(server.grpc) as caller:
            stream = caller.turn(await caller.session(), tokens=4000)
            await first_delta(stream)
            server.terminate()
            await caller.becomes(NOT_SERVING)
            server.process.send_signal(signal.SIGINT)
            assert (await refused(rest(stream))).code == "UNAVAILABLE"
        assert server.finish()[0] == 0


def test_sigterm_while_the_engine_loads_ends_quietly(tmp_path: Path) -> None:
    script = Script(chatter="loading\n", sleep_to_start_s=600)
    with launched(tmp_path, script, ready=False) as server:
        while "loading" not in server.stderr:
            assert server.process.poll() is None
            time.sleep(0.01)
        server.terminate()
        assert server.finish() == (0, "")


def ended(capfd: pytest.CaptureFixture[str], **options: Any) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a server that is run in this process and does not start."""
    options = {"listen": "127.0.0.1:0", "admin": "127.0.0.1:0", "store": "memory:", **options}
    status = run(
        msgspec.convert(options, ServeOptions, dec_hook=lambda kind, value: kind(value)), builder=BUILDER
    )
    return status, *capfd.readouterr()


def refused_start(server: ServerProcess) -> tuple[int, str]:
    status, out = server.finish()
    assert out == ""
    return status, server.stderr.strip().splitlines()[-1]


@pytest.mark.fault(33)
def test_a_second_server_on_the_same_port_is_refused(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    with launched(tmp_path / "one") as one:
        for option, address in (("listen", one.grpc), ("admin", one.admin)):
            status, out, err = ended(capfd, model=str(tmp_path / "one" / "model"), **{option: address})
            assert (status, out) == (2, "")
            line = f"pensieve serve: --{option}: cannot listen on {address}: Address already in use\n"
            assert err == line, "said before anything is started"


@pytest.mark.fault(33)
def test_a_second_server_on_the_same_file_is_refused(tmp_path: Path) -> None:
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with launched(tmp_path / "one", store=store), launched(tmp_path / "two", ready=False, store=store) as two:
        status, line = refused_start(two)
        assert status == 1
        assert line.startswith("pensieve serve: ") and "history.sqlite3" in line


def test_an_engine_that_cannot_start_says_why(tmp_path: Path) -> None:
    script = Script(fail_to_start="the device has room for 12 chunks, 100 are needed")
    with launched(tmp_path, script, ready=False) as server:
        status, line = refused_start(server)
        assert status == 2
        assert line.endswith("the engine did not start: the device has room for 12 chunks, 100 are needed")
        assert server.stderr.count("12 chunks") == 1, "said once"


def test_bad_options_are_refused_in_one_line(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text("")
    model = str(model_folder(tmp_path / "model"))
    for name, options, status, words in (
        ("store", {"store": "mysql://x"}, 2, "unknown store"),
        ("model", {"model": str(tmp_path / "nowhere")}, 2, "nowhere"),
        ("keys", {"api_keys": str(keys)}, 2, "holds no [[key]]"),
    ):
        got, out, err = ended(capfd, **{"model": model, **options})
        assert (got, out) == (status, "") and words in err.splitlines()[-1], (name, err)
        assert "Traceback" not in err


async def test_keys_guard_both_ports(tmp_path: Path) -> None:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = tmp_path / "keys.toml"
    keys.write_text(
        f'[[key]]\nid = "u"\nsha256 = "{digest}"\ntenant = "acme"\n'
        f'[[key]]\nid = "ops"\nsha256 = "{digest}"\ntenant = "ops"\nscopes = ["admin"]\n'
    )
    user, ops = ("authorization", "Bearer ck_u_secret"), ("authorization", "Bearer ck_ops_secret")
    with launched(tmp_path, api_keys=str(keys)) as server:
        async with calling(server.grpc) as nobody, calling(server.grpc, user) as caller:
            assert await nobody.health() == SERVING
            assert (await refused(nobody.session())).reason == "CREDENTIAL_MISSING"
            assert (await rest(caller.turn(await caller.session()))).completed.revision == 2
            assert await caller.services_refused() is grpc.StatusCode.UNIMPLEMENTED
            # The admin service is here too, for the scope that it takes on its own port.
            stats = pb.GetStatsRequest()
            assert (await refused(nobody.admin.GetStats(stats))).reason == "CREDENTIAL_MISSING"
            missing = await refused(nobody.admin.GetStats(stats, metadata=(user,)))
            assert (missing.code, missing.reason) == ("PERMISSION_DENIED", "SCOPE_MISSING")
            answer = await nobody.admin.GetStats(stats, metadata=(ops,), timeout=10)
            assert answer.gpu_tokens_capacity == 4096
            evict = await nobody.admin.EvictCache(pb.EvictCacheRequest(), metadata=(ops,), timeout=10)
            assert evict.tokens_evicted > 0
        async with calling(server.admin) as admin, calling(server.admin, user) as known:
            assert await admin.services_refused() is grpc.StatusCode.UNAUTHENTICATED
            assert "pensieve.v1.AdminService" in await known.services()
            drain = pb.DrainRequest(deadline=Duration(seconds=1))
            assert (await refused(admin.admin.Drain(drain))).code == "UNAUTHENTICATED"
            assert (await refused(admin.admin.Drain(drain, metadata=(user,)))).reason == "SCOPE_MISSING"
            await admin.admin.Drain(drain, metadata=(ops,), timeout=10)
            await admin.becomes(NOT_SERVING)
        assert await asyncio.to_thread(read_metric, server.admin, "pensieve_auth_failures_total") == 6
