"""Who may come in, and for how long: failed logins wait, and a key that is taken away ends what runs with it."""

from __future__ import annotations

import asyncio
import hashlib
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from grpc import aio

from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc.auth import FAILURES, FAILURES_PER_S, LONGEST_WAIT_S, LoginThrottle
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.service.server_process import launched
from support.service.service_rig import Rig, refusal, serving, spec, uid

Login = tuple[tuple[str, str]]


def entry(key_id: str, secret: str, extra: str = "", tenant: str = "acme") -> str:
    digest = hashlib.sha256(secret.encode()).hexdigest()
    return f'[[key]]\nid = "{key_id}"\nsha256 = "{digest}"\ntenant = "{tenant}"\n{extra}\n'


def login(key_id: str, secret: str) -> Login:
    return (("authorization", f"Bearer ck_{key_id}_{secret}"),)


GOOD, OTHER, WRONG = login("good", "s1"), login("other", "s2"), login("good", "guess")


@asynccontextmanager
async def guarded(
    folder: Path, extra: str = "", **options: Any
) -> AsyncIterator[tuple[Rig, AccessControl, Path]]:
    path = folder / "keys.toml"
    path.write_text(entry("good", "s1") + entry("other", "s2") + extra)
    door = AccessControl(path, Metrics())
    async with serving(door=door, **options) as rig:
        yield rig, door, path


async def session(rig: Rig, metadata: Login, **fields: Any) -> str:
    answer = await rig.api.CreateSession(pb.CreateSessionRequest(**fields), metadata=metadata)
    return str(answer.session.name)


@pytest.mark.fault(55)
@pytest.mark.parametrize(
    ("after", "reason"),
    [
        (entry("other", "s2"), "CREDENTIAL_INVALID"),
        (entry("good", "s1", "expires = 2020-01-01T00:00:00Z") + entry("other", "s2"), "CREDENTIAL_EXPIRED"),
    ],
    ids=["revoked", "expired"],
)
async def test_running_calls_of_a_key_end_with_it(tmp_path: Path, after: str, reason: str) -> None:
    async with guarded(tmp_path, answer=None) as (rig, door, path):
        names = [await session(rig, GOOD) for _ in range(2)]
        stream = rig.api.StreamTurn(pb.StreamTurnRequest(session=names[0], turn=spec("hi")), metadata=GOOD)
        assert (await anext(aiter(stream))).HasField("accepted")
        waiting = asyncio.create_task(
            refusal(rig.api.RunTurn(pb.RunTurnRequest(session=names[1], turn=spec("hi")), metadata=GOOD))
        )
        theirs = rig.api.StreamTurn(
            pb.StreamTurnRequest(session=await session(rig, OTHER), turn=spec("hi")), metadata=OTHER
        )
        assert (await anext(aiter(theirs))).HasField("accepted")
        async with asyncio.timeout(20):
            while len(rig.link.generations) < 3:
                await asyncio.sleep(0.01)
        path.write_text(after)
        door.reload_keys()
        for error in (await refusal(stream), await waiting):
            assert (error.code, error.reason) == ("UNAUTHENTICATED", reason)
        assert (
            await refusal(rig.api.GetServerInfo(pb.GetServerInfoRequest(), metadata=GOOD))
        ).reason == reason
        for generation in rig.link.generations:
            if not generation.cancelled:
                generation.finish()
        assert [event async for event in theirs][-1].HasField("completed")


async def test_a_key_file_is_watched_and_read_on_a_signal(tmp_path: Path) -> None:
    path = tmp_path / "keys.toml"
    path.write_text(entry("good", "s1"))
    with launched(tmp_path, api_keys=str(path)) as server:
        async with aio.insecure_channel(server.grpc) as channel:
            api = pensieve_pb2_grpc.ConversationServiceStub(channel)

            async def becomes(metadata: Login, wanted: str) -> None:
                async with asyncio.timeout(30):
                    while True:
                        try:
                            await api.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata)
                            found = ""
                        except aio.AioRpcError as error:
                            found = error.code().name
                        if found == wanted:
                            return
                        await asyncio.sleep(0.05)

            await becomes(GOOD, "")
            path.write_text(entry("other", "s2"))
            await becomes(OTHER, "")
            await becomes(GOOD, "UNAUTHENTICATED")
            # A change that the file's time and size do not show is read when the operator asks for it.
            status = path.stat()
            path.write_text(entry("other", "s3"))
            os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns))
            server.process.send_signal(signal.SIGHUP)
            await becomes(OTHER, "UNAUTHENTICATED")
            await becomes(login("other", "s3"), "")


def test_failures_of_an_address_wait_ever_longer_and_recover() -> None:
    now = 0.0
    logins = LoginThrottle(monotonic=lambda: now)
    waits = [logins.record_failure("10.0.0.1") for _ in range(200)]
    assert waits[:FAILURES] == [0.0] * FAILURES
    assert waits[FAILURES : FAILURES + 3] == [1 / FAILURES_PER_S, 2 / FAILURES_PER_S, 3 / FAILURES_PER_S]
    assert max(waits) == LONGEST_WAIT_S
    assert logins.record_failure("10.0.0.2") == 0.0
    now += LONGEST_WAIT_S + FAILURES / FAILURES_PER_S
    assert logins.record_failure("10.0.0.1") == 0.0


def test_one_ipv6_network_is_one_guesser() -> None:
    logins = LoginThrottle(monotonic=lambda: 0.0)
    waits = [logins.record_failure(f"2001:db8::{number:x}") for number in range(FAILURES + 1)]
    assert waits[-1] > 0
    assert logins.record_failure("2001:db8:0:1::1") == 0.0


def test_addresses_without_end_take_no_memory_without_end() -> None:
    logins = LoginThrottle(monotonic=lambda: 0.0)
    for number in range(10_000):
        logins.record_failure(f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}")
    assert len(logins._buckets) <= 4096


async def test_guesses_are_held_back_and_good_keys_are_not(tmp_path: Path) -> None:
    async with guarded(tmp_path) as (rig, _, _):
        info = pb.GetServerInfoRequest()
        guesses = [
            asyncio.create_task(refusal(rig.api.GetServerInfo(info, metadata=WRONG))) for _ in range(60)
        ]
        await asyncio.wait(guesses, timeout=60, return_when=asyncio.FIRST_COMPLETED)
        for _ in range(5):
            await rig.api.GetServerInfo(info, metadata=GOOD)
        # With the burst answered and seconds of waiting ahead for the rest, the good calls came first.
        assert not all(guess.done() for guess in guesses)
        first = [guess.result() for guess in guesses if guess.done()]
        assert {(error.reason, error.message) for error in first} == {
            ("CREDENTIAL_INVALID", "the credential is not valid")
        }
        for guess in guesses:
            guess.cancel()
        await asyncio.gather(*guesses, return_exceptions=True)


async def test_request_sizes_of_a_tenant(tmp_path: Path) -> None:
    limits = "[tenants.acme]\nmax_request_bytes = 1000\n" + entry("big", "s3", tenant="big")
    async with guarded(tmp_path, limits) as (rig, _, _):
        request = pb.CreateSessionRequest(config=pb.SessionConfig(system_prompt="x" * 1100))
        error = await refusal(rig.api.CreateSession(request, metadata=GOOD))
        assert (error.code, error.reason) == ("RESOURCE_EXHAUSTED", "QUOTA_EXCEEDED")
        assert error.metadata == {"subject": "acme", "limit": "max_request_bytes"}
        theirs = await refusal(rig.api.CreateSession(request, metadata=login("big", "s3")))
        assert theirs.reason == "CONTEXT_LIMIT_EXCEEDED" or theirs.code == "OUT_OF_RANGE"


@pytest.mark.fault(58)
async def test_names_that_exist_take_as_long_as_names_that_do_not(tmp_path: Path) -> None:
    """Row 58. The same work is done for both, so the same time: compared by the statements of the store."""
    async with guarded(tmp_path, entry("them", "s4", tenant="them")) as (rig, _, _):
        await session(rig, login("them", "s4"), session_id="theirs")
        asked: list[list[str]] = []
        plain = rig.store.load

        async def load(key: Any) -> Any:
            asked[-1].append("load")
            return await plain(key)

        rig.store.load = load
        begin, find = rig.store.begin, rig.store.find_request

        async def begin_(*args: Any) -> Any:
            asked[-1].append("begin")
            return await begin(*args)

        async def find_(*args: Any) -> Any:
            asked[-1].append("find")
            return await find(*args)

        rig.store.begin, rig.store.find_request = begin_, find_
        calls = [
            lambda name: rig.api.GetSession(pb.GetSessionRequest(name=name), metadata=GOOD),
            lambda name: rig.api.ListItems(pb.ListItemsRequest(name=name), metadata=GOOD),
            lambda name: rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hi")), metadata=GOOD),
            lambda name: rig.api.GetTurn(pb.GetTurnRequest(session=name, request_id=uid()), metadata=GOOD),
        ]
        for call in calls:
            errors = []
            for name in ("sessions/theirs", "sessions/nobodys"):
                asked.append([])
                errors.append(await refusal(call(name)))
            assert asked[-1] == asked[-2]
            assert str(errors[0]) == str(errors[1])
