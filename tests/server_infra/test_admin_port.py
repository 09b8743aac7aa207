"""One port, two protocols; its limits; metrics as scraped."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1.health import aio as health_aio
from prometheus_client import generate_latest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from pensieve.core import Usage
from pensieve.engine.messages import Stats
from pensieve.server import admin_port
from pensieve.server.admin_port import AdminPort
from pensieve.server.links.engine_link import LinkState
from pensieve.server.operations.metrics import ENGINE_METRICS, Metrics
from pensieve.server.values import TurnEnd
from pensieve.store import Key


class Engine:
    state = LinkState.SERVING
    stats = Stats(
        gpu_cached_total=1,
        swapped_in_total=2,
        recomputed_total=3,
        new_total=4,
        device_free=5,
        device_reclaimable=6,
        device_used=7,
        host_free=8,
        host_used=9,
        swap_in_bytes_total=1000,
        swap_in_seconds_total=0.5,
        steps_total=11,
        last_batch_tokens=12,
        part_seconds_total={"plan": 0.25, "device": 4.0},
    )
    restarts_total = 2
    condemned_turns_total = 3
    condemned_sessions_total = 1


class HangingPage:
    """Answers nobody."""

    def __init__(self) -> None:
        self.asked, self.ended = asyncio.Event(), asyncio.Event()

    async def answer(self, path: str, request: Request) -> None:
        try:
            self.asked.set()
            await asyncio.sleep(600)
        finally:
            self.ended.set()


class LatePage:
    """Answers when the caller has long said that it says no more."""

    async def answer(self, path: str, request: Request) -> Response:
        await asyncio.sleep(0.2)
        return PlainTextResponse("late\n")


class BrokenPage:
    secret = "prompt"

    async def answer(self, path: str, request: Request) -> None:
        raise RuntimeError(f"what a {self.secret} says")


class Setup:
    page: HangingPage | LatePage | BrokenPage | None = None

    def __init__(self, folder: Path) -> None:
        self.metrics = Metrics()
        self.metrics.watch_engine(Engine())
        self.problem = ""
        self.socket = folder / "grpc"
        self.port = AdminPort(self.metrics.registry, self, self.socket, page=self)
        self.number = 0

    async def answer(self, path: str, request: Request) -> Response | None:
        return None if self.page is None else await self.page.answer(path, request)

    async def http(self, request: bytes) -> tuple[int, str]:
        reader, writer = await asyncio.open_connection("127.0.0.1", self.number)
        writer.write(request)
        answer = (await asyncio.wait_for(reader.read(), 20)).decode()
        writer.close()
        head, _, body = answer.partition("\r\n\r\n")
        return (int(head.split()[1]) if head else 0), body

    async def get(self, path: str) -> tuple[int, str]:
        return await self.http(f"GET {path} HTTP/1.1\r\nHost: x\r\nAccept: */*\r\n\r\n".encode())


@pytest.fixture
async def setup(tmp_path: Path) -> AsyncIterator[Setup]:
    made = Setup(tmp_path)
    made.number = await made.port.start("127.0.0.1", 0)
    yield made
    await made.port.close()


async def serve_health(socket: Path) -> aio.Server:
    server = aio.server()
    health_pb2_grpc.add_HealthServicer_to_server(health_aio.HealthServicer(), server)
    server.add_insecure_port(f"unix:{socket}")
    await server.start()
    return server


async def test_grpc_and_http_share_the_port(setup: Setup) -> None:
    server = await serve_health(setup.socket)
    async with aio.insecure_channel(f"127.0.0.1:{setup.number}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        calls = [stub.Check(health_pb2.HealthCheckRequest(), timeout=10) for _ in range(20)]
        answers = await asyncio.gather(*calls, setup.get("/healthz"), setup.get("/metrics"))
        assert {answer.status for answer in answers[:20]} == {health_pb2.HealthCheckResponse.SERVING}
        assert answers[20] == (200, "ok\n")
        assert answers[21][0] == 200
        stream = stub.Watch(health_pb2.HealthCheckRequest())
        assert (await stream.read()).status == health_pb2.HealthCheckResponse.SERVING
        stream.cancel()
    await server.stop(None)


async def test_http_answers_while_grpc_is_not_up_yet(setup: Setup) -> None:
    setup.problem = "engine starting"
    assert await setup.get("/healthz") == (200, "ok\n")
    assert await setup.get("/readyz") == (503, "engine starting\n")
    setup.problem = ""
    assert await setup.get("/readyz") == (200, "ok\n")
    async with aio.insecure_channel(f"127.0.0.1:{setup.number}") as channel:
        with pytest.raises(aio.AioRpcError) as caught:
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
        assert caught.value.code().name == "UNAVAILABLE"


async def test_other_requests_are_refused(setup: Setup) -> None:
    assert (await setup.get("/"))[0] == 404
    assert (await setup.get("/metrics/../etc"))[0] == 404
    assert (await setup.http(b"POST /metrics HTTP/1.1\r\n\r\n"))[0] == 405
    assert await setup.http(b"HEAD /healthz HTTP/1.0\r\n\r\n") == (200, "")
    assert (await setup.http(b"\x00\xff\x16\x03\r\n\r\n"))[0] == 400
    assert (await setup.http(b"PUT /metrics HTTP/1.1\r\n\r\n"))[0] == 405, "it only began as HTTP/2 does"


async def test_heads_without_end_are_cut_off(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admin_port, "HEAD_S", 600.0)
    assert (await setup.http(b"G" * 100_000))[0] == 400
    for head in (b"GET /" + b"a" * 100_000, b"GET / HTTP/1.1\r\n" + b"A: b\r\n" * 10_000):
        assert await setup.http(head) == (0, "")
    monkeypatch.setattr(admin_port, "HEAD_S", 0.05)
    for head in (b"", b"GET /healthz", b"PRI * HT"):
        assert await setup.http(head) == (0, "")
    assert (await setup.get("/healthz"))[0] == 200


async def test_a_caller_that_says_no_more_is_answered_and_one_that_is_dropped_is_not_worked_for(
    setup: Setup,
) -> None:
    setup.page = LatePage()
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.number)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    writer.write_eof()
    assert (await asyncio.wait_for(reader.read(), 20)).endswith(b"late\n")
    writer.close()
    page = setup.page = HangingPage()
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.number)
    writer.write(b"GET / HTTP/1.0\r\n\r\n")
    async with asyncio.timeout(20):
        await page.asked.wait()
        await setup.port.close()
        await page.ended.wait()
        assert await reader.read() == b""
    writer.close()


async def test_a_bug_is_answered_without_its_words(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.page = BrokenPage()
    status, body = await setup.get("/state.json")
    assert (status, body) == (500, "internal error\n")
    assert "RuntimeError" in caplog.text and "prompt" not in caplog.text


PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n\x00\x00\x00\x04\x00\x00\x00\x00\x00"
IDLE = {
    "nothing": [b""],
    "half a head": [b"GET /hea"],
    "half a preface": [b"PRI * HT"],
    "grpc": [PREFACE],
    "the beginning of grpc": [PREFACE[:16]],
    "all of them": [b"", b"GET /hea", b"PRI * HT", PREFACE, PREFACE[:16]],
}


@pytest.mark.parametrize("kind", IDLE)
async def test_idle_connections_shut_no_caller_out(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    """Far more of them than there are places, and no time limit that would free one."""
    monkeypatch.setattr(admin_port, "HEAD_S", 600.0)
    server = await serve_health(setup.socket)
    said = IDLE[kind]
    silent, over = [], []
    for number in range(300):
        reader, writer = await asyncio.open_connection("127.0.0.1", setup.number)
        writer.write(said[number % len(said)])
        silent.append(writer)
        over.append(asyncio.create_task(reader.read()))
    places = admin_port.MAX_HTTP + admin_port.MAX_GRPC if len(said) > 1 else admin_port.MAX_HTTP
    async with asyncio.timeout(30):  # the most silent ones have made way
        while sum(one.done() for one in over) < len(over) - places:
            await asyncio.sleep(0.01)
    async with aio.insecure_channel(f"127.0.0.1:{setup.number}") as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        for _ in range(20):
            assert (await setup.get("/healthz"))[0] == (await setup.get("/readyz"))[0] == 200
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=20)
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
    assert (await setup.get("/metrics"))[0] == 200
    for writer in silent:
        writer.transport.abort()
    await asyncio.gather(*over, return_exceptions=True)
    await server.stop(None)


async def test_what_is_passed_on_arrives_whole_and_is_not_heaped_up(setup: Setup) -> None:
    dropped = asyncio.Event()

    async def echo(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while data := await reader.read(1 << 16):
                writer.write(data)
                await writer.drain()
        except ConnectionError:
            dropped.set()
        writer.close()

    far = await asyncio.start_unix_server(echo, setup.socket)
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.number)
    sent = PREFACE + random.Random(1).randbytes(8 << 20)
    writer.write(sent)
    assert await asyncio.wait_for(reader.readexactly(len(sent)), 60) == sent
    # It reads no more: what it sends soon gets no further.
    writer.transport.set_write_buffer_limits(0)
    taken = 0
    with pytest.raises(TimeoutError):
        while taken < 256 << 20:
            writer.write(bytes(1 << 20))
            async with asyncio.timeout(1.0):
                await writer.drain()
            taken += 1 << 20
    writer.transport.abort()
    await asyncio.wait_for(dropped.wait(), 20)  # what was still to be passed on goes with its sender
    far.close()


def turn_end(tenant: str, outcome: str, usage: Usage) -> TurnEnd:
    """Return the end of a committed turn that took two seconds, and generated more than it kept."""
    generated = usage.output_tokens + 2
    return TurnEnd(
        Key(tenant, "s"), outcome, True, 12, 3, usage, 10.0, 11.0, 12.0, generated_tokens=generated
    )


async def test_metrics_names_labels_and_values(setup: Setup) -> None:
    setup.metrics.first_token(0.3, Usage())
    setup.metrics.first_token(0.1, Usage(swapped_in_tokens=32))
    setup.metrics.next_tokens(0.2, 4)
    setup.metrics.on_generation_end("length")
    setup.metrics.turn_ended(turn_end("acme", "committed", Usage(queue_s=0.25, prefill_s=0.5, decode_s=1.0)))
    setup.metrics.store_error()
    status, text = await setup.get("/metrics")
    assert status == 200
    families = {family.name: family for family in text_string_to_metric_families(text)}
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in families.values()
        for sample in family.samples
    }
    assert all(name.startswith(("pensieve_", "process_")) for name in families)
    assert all(family.documentation for family in families.values())
    for metric in ENGINE_METRICS:
        assert metric.name.removesuffix("_total") in families
    tokens = [
        samples["pensieve_context_tokens_total", source] for source in ("device", "host", "recomputed", "new")
    ]
    assert tokens == [1, 2, 3, 4]
    assert samples["pensieve_cache_tokens", "device", "reclaimable"] == 6
    assert samples["pensieve_cache_tokens", "host", "used"] == 9
    assert samples["pensieve_swap_bytes_per_second", "in"] == 2000
    assert samples["pensieve_swap_bytes_per_second", "out"] == 0
    assert samples["pensieve_batch_tokens",] == 12
    assert samples["pensieve_step_part_seconds_total", "plan"] == 0.25
    assert samples["pensieve_step_part_seconds_total", "device"] == 4
    assert samples["pensieve_engine_restarts_total",] == 2
    assert samples["pensieve_quarantined_turns_total",] == 3
    assert samples["pensieve_quarantined_sessions_total",] == 1
    assert samples["pensieve_engine_up",] == 1
    assert samples["pensieve_time_to_first_token_seconds_count", "cold"] == 1
    assert samples["pensieve_time_to_first_token_seconds_sum", "warm"] == 0.1
    assert samples["pensieve_inter_token_seconds_count",] == 4
    assert samples["pensieve_inter_token_seconds_sum",] == pytest.approx(0.2)
    assert samples["pensieve_generations_total", "length"] == 1
    assert samples["pensieve_turns_total", "committed"] == 1
    assert samples["pensieve_turn_seconds_count",] == 1
    assert samples["pensieve_turn_seconds_sum",] == 2
    stages = {
        name[1]: value for name, value in samples.items() if name[0] == "pensieve_turn_stage_seconds_total"
    }
    assert stages == {"queue": 0.25, "prefill": 0.5, "decode": 1.0, "other": 0.25}
    assert samples["pensieve_store_errors_total",] == 1
    labels = {name for family in families.values() for sample in family.samples for name in sample.labels}
    assert not labels & {"tenant", "session", "request"}


async def test_close_drops_open_connections(setup: Setup) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", setup.number)
    assert (await setup.get("/healthz"))[0] == 200
    await setup.port.close()
    assert await asyncio.wait_for(reader.read(), 10) == b""
    writer.close()


def test_tenants_are_named_only_when_asked_to() -> None:
    usage = Usage(context_tokens=12, new_tokens=3, recomputed_tokens=4, gpu_cached_tokens=5, output_tokens=6)
    for named in (False, True):
        metrics = Metrics(by_tenant=named)
        metrics.turn_ended(turn_end("acme", "eos", usage))
        metrics.turn_refused("acme", "QUOTA_EXCEEDED")
        text = generate_latest(metrics.registry).decode()
        assert 'pensieve_refusals_total{reason="quota_exceeded"} 1.0' in text
        assert ("acme" in text) is named
        for kind, count in (("computed", 7.0), ("cached", 5.0), ("output", 8.0)):
            line = f'pensieve_tenant_tokens_total{{kind="{kind}",tenant="acme"}} {count}'
            assert (line in text) is named
        assert ('pensieve_tenant_refusals_total{reason="quota_exceeded",tenant="acme"} 1.0' in text) is named
