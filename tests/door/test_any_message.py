"""Messages drawn from the descriptor: whatever a well-formed request says, the answer is none of our bugs.

Rows 16 and 18 to 23 of the fault matrix. The service has one session, so that what is drawn can name something that is
there. ``PENSIEVE_FUZZ_EXAMPLES`` sets how many messages each method gets.
"""

from __future__ import annotations

import asyncio
import os
import uuid
from collections.abc import Iterator
from typing import Any

import grpc
import hypothesis
import pytest
from google.protobuf.descriptor import Descriptor, FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from grpc import aio
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pensieve import rpc_status
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, serving, spec

EXAMPLES = int(os.environ.get("PENSIEVE_FUZZ_EXAMPLES", "20"))
SESSION, REQUEST_ID = "sessions/drawn", str(uuid.UUID(int=7, version=4))
METHODS: list[MethodDescriptor] = [
    method
    for service in pb.DESCRIPTOR.services_by_name.values()
    for method in service.methods
    if method.name != "Drain"  # its deadline is waited for, and nothing works after it
]
TEXT = st.one_of(
    st.text(max_size=20),
    st.sampled_from(
        ["", "<|im_start|>", "\x00", "a\u0301" * 50, "\ufeff", "é🦊", "../..", "{x}", "a=b", "sessions/x"]
    ),
)
NAMED: dict[str, st.SearchStrategy[Any]] = {
    "name": st.one_of(st.just(SESSION), st.just(SESSION), TEXT),
    "session": st.one_of(st.just(SESSION), st.just(SESSION), TEXT),
    "request_id": st.one_of(st.just(REQUEST_ID), st.uuids(version=4).map(str), TEXT),
    "paths": st.one_of(st.sampled_from(["labels", "config", "config.ttl", "config.system_prompt"]), TEXT),
    "attach_only": st.booleans(),
    "label_selector": st.one_of(st.sampled_from(["a=b", "a=b,c=", "=", ","]), TEXT),
}
NUMBERS: dict[int, tuple[int, int]] = {
    FieldDescriptor.TYPE_INT32: (-(2**31), 2**31 - 1),
    FieldDescriptor.TYPE_INT64: (-(2**63), 2**63 - 1),
    FieldDescriptor.TYPE_UINT32: (0, 2**32 - 1),
    FieldDescriptor.TYPE_UINT64: (0, 2**64 - 1),
}


def scalars(field: Any) -> st.SearchStrategy[Any]:
    if field.type in (FieldDescriptor.TYPE_FLOAT, FieldDescriptor.TYPE_DOUBLE):
        common = st.sampled_from([0.0, 0.5, 1.0, -1.0, 1e-45, 1e30, float("nan"), float("inf")])
        return st.one_of(common, st.floats(width=32))
    if field.type == FieldDescriptor.TYPE_BOOL:
        return st.booleans()
    if field.type == FieldDescriptor.TYPE_STRING:
        return TEXT
    if field.type == FieldDescriptor.TYPE_BYTES:
        return st.binary(max_size=20)
    if field.type == FieldDescriptor.TYPE_ENUM:
        known = [value.number for value in field.enum_type.values]
        return st.one_of(st.sampled_from(known), st.sampled_from([-1, 99, 2**31 - 1]))
    low, high = NUMBERS[field.type]
    return st.one_of(st.integers(max(low, -1), 5), st.integers(low, high))


def messages(descriptor: Descriptor) -> st.SearchStrategy[Message]:
    """Messages of this type: each field is there or is not, and holds anything that its type allows."""
    required = {"turn": "turn", "role": "role", "update_mask": "update_mask"}
    fields: dict[str, st.SearchStrategy[Any]] = {}
    always: dict[str, st.SearchStrategy[Any]] = {}
    for field in descriptor.fields:
        one = NAMED.get(field.name)
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            key, value = field.message_type.fields_by_name["key"], field.message_type.fields_by_name["value"]
            one = st.dictionaries(scalars(key), scalars(value), max_size=3)
        elif field.message_type is not None:
            one = messages(field.message_type)
            if field.is_repeated:
                one = st.lists(one, max_size=3)
        else:
            one = scalars(field) if one is None else one
            if field.is_repeated:
                one = st.lists(one, max_size=4)
        likely = field.name in required or (field.name in NAMED and not field.is_repeated)
        (always if likely else fields)[field.name] = one
    kind = GetMessageClass(descriptor)
    # A few at a time: of a message with a dozen drawn fields, one is always refused.
    few = st.lists(st.sampled_from(sorted(fields) or [""]), max_size=3)
    drawn = few.flatmap(lambda names: st.fixed_dictionaries({**always, **{n: fields[n] for n in names if n}}))
    return drawn.map(lambda values: kind(**values))


@pytest.fixture(scope="module")
def running() -> Iterator[tuple[asyncio.AbstractEventLoop, Rig]]:
    """A service with a session that has had a turn, and the loop that it runs on."""
    with asyncio.Runner() as runner:
        server = serving(context_limit=4096)

        async def start() -> Rig:
            rig = await server.__aenter__()
            name = await rig.create("Be brief.", session_id="drawn", labels={"a": "b"})
            await rig.run(name, spec("hi", request_id=REQUEST_ID))
            return rig

        rig = runner.run(start())
        yield runner.get_loop(), rig
        runner.run(server.__aexit__(None, None, None))


async def outcome(rig: Rig, method: MethodDescriptor, data: bytes) -> grpc.StatusCode:
    """How the call ends. What the error says must be ours, and in the words of the page of errors."""
    path = f"/{method.containing_service.full_name}/{method.name}"
    try:
        if method.server_streaming:
            async for _ in rig.channel.unary_stream(path)(data, timeout=30):
                pass
        else:
            await rig.channel.unary_unary(path)(data, timeout=30)
    except aio.AioRpcError as error:
        ours = rpc_status.from_rpc_error(error)
        assert not ours.reason.startswith("TRANSPORT"), error.details()
        return error.code()
    return grpc.StatusCode.OK


@pytest.mark.fault(16, 18, 20, 21, 22, 23)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_message_meets_a_bug(
    running: tuple[asyncio.AbstractEventLoop, Rig], method: MethodDescriptor
) -> None:
    loop, rig = running

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(messages(method.input_type))
    def answered(message: Message) -> None:
        code = loop.run_until_complete(outcome(rig, method, message.SerializeToString()))
        hypothesis.event(code.name)
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), message

    answered()


@pytest.mark.fault(16)
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_no_bytes_meet_a_bug(
    running: tuple[asyncio.AbstractEventLoop, Rig], method: MethodDescriptor
) -> None:
    loop, rig = running

    @settings(max_examples=EXAMPLES, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=80))
    def answered(data: bytes) -> None:
        code = loop.run_until_complete(outcome(rig, method, data))
        assert code not in (grpc.StatusCode.INTERNAL, grpc.StatusCode.UNKNOWN), data

    answered()
