"""A Pensieve server as a target. It uses the wire protocol directly, so that no SDK code hides time."""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from pensieve.client.decode import usage
from pensieve.core import Hints, Usage
from pensieve.replay.targets.base import Address, OnTokens, TargetInfo, TurnFailed, TurnRequest
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

_OPTIONS = (
    ("grpc.max_receive_message_length", 64 * 1024 * 1024),
    ("grpc.max_send_message_length", 64 * 1024 * 1024),
    ("grpc.use_local_subchannel_pool", 1),  # otherwise channels to one address share a connection
)
_MAX_CALLS = 200
"""Concurrent calls per connection. A server takes 256; more would wait, unseen, in the client."""


@dataclass(slots=True)
class _Connection:
    channel: grpc.aio.Channel
    stub: Any
    calls: int = 0


class PensieveTarget:
    """``pensieve://HOST:PORT``. Plaintext; ``api_key`` is sent as a bearer token."""

    def __init__(self, address: str, *, name: str | None = None, api_key: str | None = None) -> None:
        self._address = address
        self._name = name or f"pensieve://{address}"
        self._api_key = api_key
        self._metadata = [("authorization", f"Bearer {api_key}")] if api_key else []
        self._connections: list[_Connection] = []

    @property
    def name(self) -> str:
        return self._name

    def address(self) -> Address:
        return Address(f"pensieve://{self._address}", self._api_key)

    async def open(self) -> TargetInfo:
        info = await self._call("GetServerInfo", pb.GetServerInfoRequest(), timeout=30)
        details = {"model": info.model, "version": info.version, "features": " ".join(info.features)}
        return TargetInfo(info.vocab_size, info.context_limit, details, takes_hints=True)

    async def start_session(self) -> str:
        request = pb.CreateSessionRequest(request_id=str(uuid.uuid4()))
        created = await self._call("CreateSession", request)
        return str(created.session.name)

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        request = pb.StreamTurnRequest(session=session, turn=_turn_spec(spec))
        completed = None
        try:
            with self._stub() as stub:
                async for event in stub.StreamTurn(request, metadata=self._metadata):
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

    async def warm(self, session: str) -> str:
        answer = await self._call("WarmSession", pb.WarmSessionRequest(session=session))
        return "accepted" if answer.accepted else str(answer.refused)

    async def end_session(self, session: str) -> None:
        await self._call("DeleteSession", pb.DeleteSessionRequest(name=session, allow_missing=True))

    async def close(self) -> None:
        while self._connections:
            await self._connections.pop().channel.close()

    @contextmanager
    def _stub(self) -> Iterator[Any]:
        connection = next((entry for entry in self._connections if entry.calls < _MAX_CALLS), None)
        if connection is None:
            channel = grpc.aio.insecure_channel(self._address, options=_OPTIONS)
            connection = _Connection(channel, rpc.ConversationServiceStub(channel))
            self._connections.append(connection)
        connection.calls += 1
        try:
            yield connection.stub
        finally:
            connection.calls -= 1

    async def _call(self, method: str, request: Any, timeout: float = 60.0) -> Any:
        try:
            with self._stub() as stub:
                return await getattr(stub, method)(request, timeout=timeout, metadata=self._metadata)
        except grpc.aio.AioRpcError as error:
            raise _failure(error) from error


def _turn_spec(spec: TurnRequest) -> pb.TurnSpec:
    sampling = pb.SamplingParams(temperature=0.0, max_output_tokens=spec.output_tokens)
    if spec.forced:
        sampling.ignore_eos = True
        sampling.min_output_tokens = spec.output_tokens
    content = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=spec.input_ids.tolist()))
    hints = None if spec.hints is None else _hints(spec.hints)
    return pb.TurnSpec(request_id=str(uuid.uuid4()), input=[content], sampling=sampling, hints=hints)


def _hints(hints: Hints) -> pb.TurnHints:
    message = pb.TurnHints(session_finished=hints.finished)
    if hints.next_turn_s is not None:
        message.next_turn_in.FromNanoseconds(round(hints.next_turn_s * 1e9))
    return message


def _failure(error: grpc.aio.AioRpcError) -> TurnFailed:
    return TurnFailed(error.code().name, error.details() or "")
