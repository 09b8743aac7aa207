"""A Pensieve server as a target, on the wire protocol itself so that nothing of ours hides time."""

from __future__ import annotations

import time
import uuid
from typing import Any

import grpc
import grpc.aio

from pensieve.client._decode import usage
from pensieve.core import Usage
from pensieve.replay.targets import Address, OnTokens, TargetInfo, TurnFailed, TurnSpec
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
)


class PensieveTarget:
    """``pensieve://HOST:PORT``. Plaintext; ``api_key`` goes out as a bearer token."""

    def __init__(self, address: str, *, name: str | None = None, api_key: str | None = None) -> None:
        self._address = address
        self._name = name or f"pensieve://{address}"
        self._api_key = api_key
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None

    @property
    def name(self) -> str:
        return self._name

    def address(self) -> Address:
        return Address(f"pensieve://{self._address}", self._api_key)

    async def open(self) -> TargetInfo:
        self._channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
        self._stub = rpc.ConversationServiceStub(self._channel)
        info = await self._call("GetServerInfo", pb.GetServerInfoRequest(), timeout=30)
        details = {"model": info.model, "version": info.version, "features": " ".join(info.features)}
        return TargetInfo(info.vocab_size, info.context_limit, details)

    async def start_session(self) -> str:
        request = pb.CreateSessionRequest(request_id=str(uuid.uuid4()))
        created = await self._call("CreateSession", request)
        return str(created.session.name)

    async def turn(self, session: str, spec: TurnSpec, on_tokens: OnTokens) -> Usage | None:
        request = pb.StreamTurnRequest(session=session, turn=_turn_spec(spec))
        completed = None
        try:
            async for event in self._stub.StreamTurn(request, metadata=self._metadata):
                kind = event.WhichOneof("event")
                if kind == "delta" and event.delta.token_count:
                    on_tokens(event.delta.token_count, time.perf_counter())
                elif kind == "completed":
                    completed = event.completed
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error
        if completed is None:
            raise TurnFailed("INCOMPLETE", "the stream ended without `completed`")
        if completed.state != pb.Turn.STATE_COMMITTED:
            raise TurnFailed("NOT_COMMITTED", completed.discard_reason or "the turn was not committed")
        return usage(completed.usage)

    async def end_session(self, session: str) -> None:
        await self._call("DeleteSession", pb.DeleteSessionRequest(name=session, allow_missing=True))

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    async def _call(self, method: str, request: Any, timeout: float = 60.0) -> Any:
        try:
            return await getattr(self._stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error


def _turn_spec(spec: TurnSpec) -> pb.TurnSpec:
    sampling = pb.SamplingParams(temperature=0.0, max_output_tokens=spec.output_tokens)
    if spec.forced:
        sampling.ignore_eos = True
        sampling.min_output_tokens = spec.output_tokens
    content = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=spec.input_ids.tolist()))
    return pb.TurnSpec(request_id=str(uuid.uuid4()), input=[content], sampling=sampling)


def _failure(error: grpc.aio.AioRpcError) -> TurnFailed:
    return TurnFailed(error.code().name, error.details() or "")
