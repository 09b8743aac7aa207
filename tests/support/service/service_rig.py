"""The conversation service on a real gRPC server, with the memory store, a tiny tokenizer and a scripted engine."""

from __future__ import annotations

import functools
import tempfile
import uuid
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
from grpc import aio
from tokenizers import Tokenizer

from pensieve import rpc_status
from pensieve.errors import PensieveError
from pensieve.server.conversations import Conversations
from pensieve.server.keys import TenantTable
from pensieve.server.rpc.auth import ALL_SCOPES, Identity
from pensieve.server.rpc.calls import BodyGate
from pensieve.server.rpc.grpc_server import bind
from pensieve.server.rpc.interceptor import AccessControl, Interceptor
from pensieve.server.rpc.service import AdminService, ConversationService
from pensieve.server.settings import TurnSettings
from pensieve.store import HistoryStore
from pensieve.store.memory_store import MemoryStore
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc
from support.service.scripted_link import ScriptedGeneration, ScriptedLink
from support.tokenizers_ import CHATML, byte_level, write_folder

ANSWER = "hello world, the fox"


@functools.cache
def tokenizer() -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = write_folder(Path(folder) / "model", byte_level(), CHATML, bos=None, eos="<|im_end|>")
        return ChatTokenizer.from_folder(path)


@functools.cache
def _backend() -> Tokenizer:
    return Tokenizer.from_str(byte_level())


def encode(text: str) -> list[int]:
    """Ids of plain text."""
    return list(_backend().encode(text, add_special_tokens=False).ids)


def eos() -> int:
    return tokenizer().eos_token_ids[0]


def says(text: str) -> list[int]:
    """Ids of a whole answer."""
    return [*encode(text), eos()]


class TenantHeader:
    """Takes the tenant from a header: a stand-in for credentials."""

    def check(self, method: str, metadata: Any, _shown: Any = None) -> Identity:
        tenant = dict(metadata or ()).get("tenant", "acme")
        return Identity(tenant=str(tenant), key_id="", scopes=ALL_SCOPES)


def uid() -> str:
    return str(uuid.uuid4())


def user(text: str) -> pb.InputItem:
    return pb.InputItem(role=pb.ROLE_USER, text=text)


@dataclass
class Streamed:
    """The events of one stream."""

    events: list[pb.StreamTurnResponse]

    @property
    def accepted(self) -> pb.TurnAccepted:
        return self.events[0].accepted

    @property
    def deltas(self) -> list[pb.TurnDelta]:
        return [event.delta for event in self.events if event.HasField("delta")]

    @property
    def text(self) -> str:
        return "".join(delta.text for delta in self.deltas)

    @property
    def tokens(self) -> int:
        return sum(delta.token_count for delta in self.deltas)

    @property
    def completed(self) -> pb.Turn:
        assert self.events[-1].HasField("completed")
        return self.events[-1].completed


class Rig:
    """One server and a client's view of it."""

    def __init__(
        self, conversations: Conversations, link: ScriptedLink, store: Any, channel: aio.Channel
    ) -> None:
        self.conversations = conversations
        self.link = link
        self.store = store
        self.channel = channel
        self.api = pensieve_pb2_grpc.ConversationServiceStub(channel)
        self.admin = pensieve_pb2_grpc.AdminServiceStub(channel)
        self.target = ""
        """HOST:PORT of the server."""

    async def create(self, system: str = "", **fields: Any) -> str:
        config = fields.pop("config", pb.SessionConfig(system_prompt=system))
        answer = await self.api.CreateSession(pb.CreateSessionRequest(config=config, **fields))
        return str(answer.session.name)

    async def session(self, name: str) -> pb.Session:
        return (await self.api.GetSession(pb.GetSessionRequest(name=name))).session

    async def items(self, name: str, *, tokens: bool = False) -> list[pb.Item]:
        request = pb.ListItemsRequest(name=name, include_tokens=tokens, page_size=1000)
        return list((await self.api.ListItems(request)).items)

    def call(self, name: str, turn: pb.TurnSpec, **fields: Any) -> Any:
        return self.api.StreamTurn(pb.StreamTurnRequest(session=name, turn=turn, **fields))

    async def stream(self, name: str, turn: pb.TurnSpec | str, **fields: Any) -> Streamed:
        """A whole stream. A text is a turn of its own."""
        if isinstance(turn, str):
            turn = spec(turn)
        return Streamed([event async for event in self.call(name, turn, **fields)])

    async def run(self, name: str, turn: pb.TurnSpec | str) -> pb.Turn:
        if isinstance(turn, str):
            turn = spec(turn)
        return (await self.api.RunTurn(pb.RunTurnRequest(session=name, turn=turn))).turn

    async def get_turn(self, name: str, request_id: str) -> pb.Turn:
        return (await self.api.GetTurn(pb.GetTurnRequest(session=name, request_id=request_id))).turn

    async def cancel(self, name: str, request_id: str, **fields: Any) -> pb.Turn:
        request = pb.CancelTurnRequest(session=name, request_id=request_id, **fields)
        return (await self.api.CancelTurn(request)).turn


def spec(text: str | None = None, **fields: Any) -> pb.TurnSpec:
    fields.setdefault("request_id", uid())
    return pb.TurnSpec(input=[user(text)] if text is not None else [], **fields)


async def refusal(call: Any) -> PensieveError:
    """The error that a call ends with."""
    try:
        if hasattr(call, "__await__") and not hasattr(call, "read"):
            await call
        else:
            async for _ in call:
                pass
    except grpc.RpcError as error:
        return rpc_status.from_rpc_error(error)
    raise AssertionError("the call succeeded")


@asynccontextmanager
async def serving(
    *,
    answer: str | None = ANSWER,
    store: HistoryStore | None = None,
    context_limit: int = 256,
    authorizer: Any = None,
    max_in_flight: int = 1024,
    speaks: ChatTokenizer | None = None,
    vocab_size: int = 420,
    tenants: TenantTable | None = None,
    bodies: BodyGate | None = None,
    door: AccessControl | None = None,
    credentials: grpc.ServerCredentials | None = None,
    link: Any = None,
    **settings: Any,
) -> AsyncIterator[Rig]:
    """``answer``: what the engine says to everything; None: the test plays the engine. ``speaks``: its tokenizer.

    ``link``: another engine than the scripted one.
    With a ``door``, that is who lets calls in. With ``credentials`` the rig's own channel is of no use.
    """

    def script(_: ScriptedGeneration) -> Sequence[int]:
        return says(answer or "")

    link = link or ScriptedLink(
        script if answer is not None else None, context_limit=context_limit, vocab_size=vocab_size
    )
    held = store or MemoryStore()
    options = {"replica": "r1", "model": "tiny", "heartbeat_s": 5.0, "disconnect_grace_s": 0.2, **settings}
    conversations = Conversations(held, link, speaks or tokenizer(), TurnSettings(**options), tenants=tenants)
    if door is not None:
        server = door.make_server(max_in_flight)
    else:
        server = aio.server(
            interceptors=(
                Interceptor(authorizer or TenantHeader(), max_in_flight=max_in_flight, bodies=bodies),
            ),
            options=(("grpc.so_reuseport", 0), ("grpc.max_receive_message_length", 4 * 1024 * 1024)),
        )
    pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(ConversationService(conversations), server)
    pensieve_pb2_grpc.add_AdminServiceServicer_to_server(AdminService(link, conversations), server)
    port = bind(server, "127.0.0.1:0", credentials)
    await server.start()
    try:
        async with aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            rig = Rig(conversations, link, held, channel)
            rig.target = f"127.0.0.1:{port}"
            yield rig
    finally:
        await conversations.close()
        await server.stop(None)
