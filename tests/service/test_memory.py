"""GetMemory and SetMemory: which sizes are set, and what is said of the others."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from pensieve.config import parse_cache_size
from pensieve.engine.messages import EngineReady
from pensieve.errors import FailedPrecondition, InvalidArgument
from pensieve.server.failures import restarting
from pensieve.server.links.engine_link import LinkState
from pensieve.server.rpc.service import format_size, wanted_bytes
from pensieve.v1 import pensieve_pb2 as pb
from support.service.scripted_link import ScriptedLink
from support.service.service_rig import refusal, serving

MIB = 1 << 20


def tier(
    floor: int, ceiling: int, *, capacity: int = 1 << 20, chunk: int = 32, **fields: object
) -> EngineReady:
    base = EngineReady(256, 420, "cpu", "float32", capacity, 1 << 20, chunk)
    return msgspec.structs.replace(base, device_floor=floor, device_ceiling=ceiling, **fields)


def elastic(link: ScriptedLink, **fields: object) -> None:
    link.info = msgspec.structs.replace(
        link.info, **{"device_floor": 4 * MIB, "device_ceiling": 16 * MIB, **fields}
    )


def setting(size: str) -> pb.SetMemoryRequest:
    return pb.SetMemoryRequest(device=size)


async def test_a_size_is_asked_and_set() -> None:
    async with serving() as rig:
        elastic(rig.link)
        asked = (await rig.admin.GetMemory(pb.GetMemoryRequest())).device
        assert (asked.held, asked.wanted, asked.floor, asked.ceiling) == (
            16 * MIB,
            16 * MIB,
            4 * MIB,
            16 * MIB,
        )
        answer = (await rig.admin.SetMemory(setting("6MiB"))).device
        assert (answer.held, answer.wanted) == (16 * MIB, 6 * MIB), "held follows later"
        for size in ("4MiB", "16MiB", "4194305B", "0.0078125GiB", "524288tokens"):
            await rig.admin.SetMemory(setting(size))
        assert rig.link.memory_calls == [
            None,
            6 * MIB,
            4 * MIB,
            16 * MIB,
            4 * MIB + 1,
            8 * MIB,
            8 * MIB,
        ]


async def test_sizes_that_are_refused_reach_no_engine() -> None:
    async with serving() as rig:
        elastic(rig.link)
        for size, said in (
            ("3MiB", "must be from 4MiB to 16MiB"),
            ("0", "must be from 4MiB to 16MiB"),
            ("16777217B", "must be from 4MiB to 16MiB"),
            ("31tokens", "must be from 4MiB to 16MiB"),
            ("999999999999999999TiB", "must be from 4MiB to 16MiB"),
            ("auto", "must be a size such as"),
            ("6MB", "must be a size such as"),
            ("4MiB..6MiB", "must be a size such as"),
            ("nan", "must be a size such as"),
            ("9" * 5000 + "MiB", "must be a size such as"),
            ("", "must be a size such as"),
        ):
            error = await refusal(rig.admin.SetMemory(setting(size)))
            assert isinstance(error, InvalidArgument), size
            ((path, problem),) = error.violations
            assert path == "device" and said in problem, (size, problem)
        elastic(rig.link, device_bytes=16 * MIB)
        error = await refusal(rig.admin.SetMemory(setting("4096tokens")))
        assert isinstance(error, InvalidArgument) and "must be in bytes" in error.violations[0][1]
        assert rig.link.memory_calls == []


async def test_the_engine_may_refuse_and_may_be_away() -> None:
    async with serving() as rig:
        elastic(rig.link)
        rig.link.memory_refusal = "no memory is left"
        error = await refusal(rig.admin.SetMemory(setting("6MiB")))
        assert isinstance(error, InvalidArgument) and error.violations == (("device", "no memory is left"),)
        rig.link.state = LinkState.RESTARTING

        async def away(wanted: int | None = None) -> None:
            raise restarting()

        rig.link.memory = away  # type: ignore[method-assign, assignment]
        for call in (rig.admin.GetMemory(pb.GetMemoryRequest()), rig.admin.SetMemory(setting("6MiB"))):
            assert (await refusal(call)).reason == "ENGINE_RESTARTING"


@pytest.mark.parametrize("why", ["", "this driver has no cuMemAddressReserve"])
async def test_a_tier_of_one_size_says_why_it_is_fixed(why: str) -> None:
    async with serving() as rig:
        elastic(rig.link, device_floor=16 * MIB, elastic_refusal=why)
        error = await refusal(rig.admin.SetMemory(setting("6MiB")))
        assert isinstance(error, FailedPrecondition) and error.reason == "DEVICE_CACHE_FIXED"
        assert error.message == why or (not why and "--device-cache 8GiB..60GiB" in error.message)
        device = (await rig.admin.GetMemory(pb.GetMemoryRequest())).device
        assert {device.held, device.wanted, device.floor, device.ceiling} == {16 * MIB}
        assert rig.link.memory_calls == [None]


@given(st.integers(1, 1 << 62), st.integers(1, 1 << 62), st.integers(0, 1 << 53))
def test_every_size_of_the_range_and_no_other_is_set(first: int, second: int, size: int) -> None:
    floor, ceiling = sorted((first % (1 << 53), second % (1 << 53)))
    assume(0 < floor < ceiling)
    info = tier(floor, ceiling)
    for wanted in (size, floor - 1, floor, ceiling, ceiling + 1):
        if floor <= wanted <= ceiling:
            assert wanted_bytes(f"{wanted}B", "auto", info) == wanted
        else:
            with pytest.raises(InvalidArgument):
                wanted_bytes(f"{wanted}B", "auto", info)


@given(st.integers(0, 1 << 53))
def test_a_size_is_written_as_it_can_be_read(size: int) -> None:
    assert parse_cache_size(format_size(size), 1) == size


@given(st.integers(1, 50), st.integers(1, 50), st.integers(1, 4000), st.integers(0, 2000))
def test_tokens_are_whole_chunks_of_the_ceiling(low: int, more: int, chunk_bytes: int, tokens: int) -> None:
    """Counted chunk by chunk: a size in tokens holds as many whole chunks as fit it."""
    chunk = 16
    info = tier(low * chunk_bytes, (low + more) * chunk_bytes, capacity=(low + more) * chunk, chunk=chunk)
    chunks = len(range(chunk, tokens + 1, chunk))
    if low <= chunks <= low + more:
        assert wanted_bytes(f"{tokens}tokens", "auto", info) == chunks * chunk_bytes
    else:
        with pytest.raises(InvalidArgument):
            wanted_bytes(f"{tokens}tokens", "auto", info)


def test_the_sides_as_written_stand_for_what_the_engine_made_of_them() -> None:
    """It rounds them to whole units, so the written floor may lie below its floor."""
    info = tier(5 * MIB, 15 * MIB)
    assert wanted_bytes("4MiB", "4096KiB..16MiB", info) == 5 * MIB
    assert wanted_bytes("16MiB", "4096KiB..16MiB", info) == 15 * MIB
    assert wanted_bytes("64 tokens", "64tokens..16MiB", info) == 5 * MIB
    for size in ("4.5MiB", "64B", "17MiB"):
        with pytest.raises(InvalidArgument, match=r"5MiB to 15MiB"):
            wanted_bytes(size, "64tokens..16MiB", info)
