"""Hostile messages: refused, cheaply, and nothing of them stays in memory. Row 17 of the fault matrix."""

from __future__ import annotations

import asyncio
import gc
import re
import weakref
from pathlib import Path
from typing import Any

import pytest
from grpc import aio
from hypothesis import given
from hypothesis import strategies as st

from pensieve.errors import InvalidArgument
from pensieve.server.rpc.interceptor import LARGE_BYTES, MAX_FIELDS, count_fields, decode
from pensieve.server.rpc.validation import validate
from pensieve.v1 import pensieve_pb2 as pb
from support.service.server_process import launched
from support.service.service_rig import refusal, serving

SERVICE = "/pensieve.v1.ConversationService/"


def field(number: int, content: bytes) -> bytes:
    """A length-delimited field."""
    return varint(number << 3 | 2) + varint(len(content)) + content


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


EMPTY_ITEMS = b"\x32\x00" * 2_000_000  # initial_items
# Lengths below 128 take one byte.
LABELS = b"".join(b"\x2a%c\x0a%ck%06d" % (9, 7, i) for i in range(280_000))
SPEC = field(1, b"3d6f0b0e-0000-4000-8000-000000000000")
BOMBS: dict[str, tuple[str, bytes]] = {
    "empty items": ("CreateSession", EMPTY_ITEMS),
    "labels": ("CreateSession", LABELS),
    "stops": ("RunTurn", field(2, SPEC + field(5, b"\x5a\x00" * 1_900_000))),
    "items of a turn": ("RunTurn", field(2, SPEC + b"\x12\x00" * 1_900_000)),
    "token ids one by one": ("CountTokens", field(2, field(3, b"\x08\x01" * 1_900_000))),
    "biases": ("RunTurn", field(2, SPEC + field(5, field(14, b"\x08\x01") * 900_000))),
    "fields nobody knows": ("GetSession", b"\xf8\x07\x01" * 1_300_000),
    "groups nobody knows": ("GetSession", b"\xfb\x07\xfc\x07" * 900_000),
}


@pytest.mark.fault(17)
@pytest.mark.parametrize("case", BOMBS)
def test_bombs_are_not_decoded(case: str) -> None:
    method, data = BOMBS[case]
    kind = getattr(pb, f"{method}Request")
    assert len(data) < 4 << 20

    class Parser:
        """Stands where the message class does."""

        DESCRIPTOR = kind.DESCRIPTOR

        def parse(self, _data: bytes) -> Any:
            pytest.fail("decoded")

    with pytest.raises(InvalidArgument, match="fields") as caught:
        decode(Parser().parse, data)
    assert caught.value.reason == "REQUEST_MALFORMED"


def test_the_largest_import_is_no_bomb() -> None:
    items = [pb.InputItem(role=pb.ROLE_USER, text="x" * 900) for _ in range(1024)]
    request = pb.CreateSessionRequest(initial_items=items, labels={f"k{i}": "v" for i in range(64)})
    request.config.default_sampling.logit_bias.update({i: 1.0 for i in range(1024)})
    data = request.SerializeToString()
    assert len(data) > LARGE_BYTES
    assert decode(pb.CreateSessionRequest.FromString, data) == request


def test_a_long_list_of_token_ids_is_one_field() -> None:
    request = pb.CountTokensRequest(input=[pb.InputItem(role=2, tokens=pb.TokenIds(ids=range(1_000_000)))])
    assert decode(pb.CountTokensRequest.FromString, request.SerializeToString()) == request


@given(st.binary(max_size=200), st.sampled_from([pb.CreateSessionRequest, pb.RunTurnRequest]))
def test_counting_takes_any_bytes(data: bytes, kind: Any) -> None:
    """However often they are repeated: it ends, and counts no less than what the parser finds at the top."""
    counted = count_fields(data * 40, kind.DESCRIPTOR)
    assert 0 <= counted <= MAX_FIELDS + 101


@pytest.mark.fault(17)
@pytest.mark.parametrize("bad", ["invalid", "malformed", "too many fields"])
async def test_a_refused_request_is_freed_at_once(bad: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not at the next full collection, which may be minutes away: what is refused is often large."""
    seen: list[weakref.ref[Any]] = []

    class Local:
        """Lives as long as the frame that holds the request."""

    def watched(check: Any) -> Any:
        def call(*args: Any) -> Any:
            local = Local()
            seen.append(weakref.ref(local))
            return check(*args)

        return call

    monkeypatch.setattr("pensieve.server.rpc.interceptor.decode", watched(decode))
    monkeypatch.setattr("pensieve.server.rpc.service.validate", watched(validate))
    bodies = {
        "invalid": pb.CreateSessionRequest(session_id="A b").SerializeToString(),
        "malformed": b"\xff" * 100,
        "too many fields": EMPTY_ITEMS,
    }
    async with serving() as rig:
        gc.collect()
        gc.disable()
        try:
            error = await refusal(rig.channel.unary_unary(SERVICE + "CreateSession")(bodies[bad]))
            assert error.code == "INVALID_ARGUMENT"
            await asyncio.sleep(0.01)
            assert seen and not any(ref() is not None for ref in seen)
        finally:
            gc.enable()


def resident(pid: int, name: str) -> int:
    """MiB: ``VmRSS`` now, ``VmHWM`` at most so far."""
    found = re.search(rf"{name}:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text())
    assert found
    return int(found[1]) // 1024


@pytest.mark.fault(17)
async def test_fifty_bombs_at_once_take_the_memory_of_a_few(tmp_path: Path) -> None:
    method, data = BOMBS["empty items"]
    with launched(tmp_path) as server:
        before = resident(server.process.pid, "VmRSS")
        async with aio.insecure_channel(server.grpc) as channel:
            call = channel.unary_unary(SERVICE + method)
            errors = await asyncio.gather(*(refusal(call(data, timeout=120)) for _ in range(50)))
        assert {error.code for error in errors} <= {"INVALID_ARGUMENT", "RESOURCE_EXHAUSTED"}
        # 16 bodies of 4 MiB are received at once, each is copied once on its way.
        assert resident(server.process.pid, "VmHWM") < before + 250
