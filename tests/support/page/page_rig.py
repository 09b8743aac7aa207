"""A server on the hashed engine with its admin port and page, in the test's process; and what is asked of it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from grpc import aio
from prometheus_client import CollectorRegistry

from pensieve.config import EngineOptions
from pensieve.engine.engine import Engine
from pensieve.engine.messages import SessionStrip, Stats
from pensieve.feed import HttpDoorState
from pensieve.server.conversations import Conversations, ServiceListeners
from pensieve.server.operations.metrics import Metrics
from pensieve.server.page.state import RecentTurns, StateView
from pensieve.server.page.web import WebPage
from pensieve.server.ports import AdminPort
from pensieve.server.rpc.grpc_server import make_server
from pensieve.server.rpc.interceptor import AccessControl, Interceptor
from pensieve.server.rpc.service import ConversationService
from pensieve.server.settings import TurnSettings
from pensieve.server.values import TurnEnd
from pensieve.store import HistoryStore
from pensieve.store.memory_store import MemoryStore
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2_grpc
from support.engine.hash_engine import build
from support.service.inprocess_link import InProcessLink
from support.service.server_process import model_folder
from support.service.service_rig import TenantHeader

OPTIONS = EngineOptions(
    model="",
    device_cache="512tokens",
    host_cache="256tokens",
    chunk_tokens=8,
    max_running=8,
    policy="lru",
    swap_watermark=0.0,
)


class Healthy:
    problem = ""


class ManyStrips(InProcessLink):
    """A link that tells of sessions and memory that are not there, when any are set."""

    strips: Sequence[SessionStrip] = ()
    memory_sizes: tuple[int, int, int, int] | None = None
    """Held, wanted, floor, ceiling."""

    @property
    def stats(self) -> Stats:
        if self.memory_sizes is None:
            return super().stats
        held, wanted, floor, ceiling = self.memory_sizes
        return msgspec.structs.replace(
            super().stats,
            device_held=held,
            device_wanted=wanted,
            device_floor=floor,
            device_ceiling=ceiling,
        )

    async def read_strips(self) -> list[SessionStrip]:
        return list(self.strips) or await super().read_strips()


@dataclass
class PageRig:
    address: str
    """Of the gRPC port."""
    url: str
    """Of the page, with the slash."""
    engine: Engine
    link: ManyStrips
    store: HistoryStore
    http: aiohttp.ClientSession
    door: HttpDoorState | None = None
    """What is told of the HTTP door."""

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.http.get(self.url + path, headers=headers) as answer:
            return answer.status, await answer.json()


@asynccontextmanager
async def page_rig(
    folder: Path,
    *,
    text: bool = False,
    keys: Path | None = None,
    store: HistoryStore | None = None,
    on_turn_ended: Callable[[TurnEnd], None] = lambda end: None,
) -> AsyncIterator[PageRig]:
    async with AsyncExitStack() as stack:
        store = store or MemoryStore()
        await store.open()
        stack.push_async_callback(store.close)
        engine = build(OPTIONS)
        link = ManyStrips(lambda: engine)
        await link.start()
        stack.push_async_callback(link.stop)
        recent = RecentTurns()
        tokenizer = ChatTokenizer.from_folder(model_folder(folder / "model"))

        def ended(end: TurnEnd) -> None:
            recent.turn_ended(end)
            on_turn_ended(end)

        conversations = Conversations(
            store,
            link,
            tokenizer,
            TurnSettings(replica="r", model="hashed", prefix_sharing=False),
            ServiceListeners(turn_ended=ended),
        )
        stack.push_async_callback(conversations.close)
        server: aio.Server = make_server([Interceptor(TenantHeader())])
        pensieve_pb2_grpc.add_ConversationServiceServicer_to_server(
            ConversationService(conversations), server
        )
        address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
        await server.start()
        stack.push_async_callback(server.stop, None)
        state = StateView(conversations, Healthy(), recent, lambda: rig.door, shows_text=text)
        door = AccessControl(keys, Metrics())
        page = WebPage(state, door.admit_operator)
        stack.push_async_callback(page.close)
        port = AdminPort(CollectorRegistry(), Healthy(), folder / "no grpc", page=page)
        number = await port.start("127.0.0.1", 0)
        stack.push_async_callback(port.close)
        http = await stack.enter_async_context(aiohttp.ClientSession())
        rig = PageRig(address, f"http://127.0.0.1:{number}/", engine, link, store, http)
        yield rig
