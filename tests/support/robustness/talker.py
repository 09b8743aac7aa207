"""A client that talks without end, and writes down what it asked and what it was told."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable
from random import Random
from typing import Any, TypeVar

import grpc.aio

from pensieve import AsyncClient
from pensieve.client import AsyncSession, RetryPolicy, Turn, TurnState, decode
from pensieve.client._retry import Verdict, verdict
from pensieve.client.arguments import Keep
from pensieve.errors import PensieveError
from pensieve.rpc_status import from_rpc_error
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as pb_grpc
from support.robustness.checker import CRASHED, GONE
from support.robustness.history import Operation, Recorder
from support.robustness.nursery import Replica
from support.robustness.talks import Floor, Said, Talk, seen, turn_seen

T = TypeVar("T")
OPERATION_LIMIT_S = 20.0
RETRY = RetryPolicy(max_attempts=40, initial_s=0.02, max_s=0.3, max_wait_s=8.0)
CHANNEL: tuple[tuple[str, Any], ...] = (
    ("grpc.initial_reconnect_backoff_ms", 30),
    ("grpc.min_reconnect_backoff_ms", 30),
    ("grpc.max_reconnect_backoff_ms", 200),
    ("grpc.use_local_subchannel_pool", 1),
)
DRAWS: dict[str, float] = {
    "send": 10, "again": 3, "edit": 1, "regenerate": 1, "rewind": 1, "fork": 0.4, "cancel": 1.5, "abandon": 1,
    "get_turn": 1, "attach": 1, "read": 1.5, "look": 1.5, "delete": 0.2,
}  # fmt: skip


class Talker:
    """One client of one replica."""

    def __init__(
        self, number: int, replica: Replica, floor: Floor, recorder: Recorder, random: Random
    ) -> None:
        self._number, self._replica, self._floor = number, replica, floor
        self._recorder, self._random = recorder, random
        self._client = AsyncClient(
            f"127.0.0.1:{replica.wires.port}", timeout=4.0, retry=RETRY, options=CHANNEL
        )
        self._channel = grpc.aio.insecure_channel(f"127.0.0.1:{replica.wires.port}", options=CHANNEL)
        self._stub: Any = pb_grpc.ConversationServiceStub(self._channel)
        self._count = 0

    async def close(self) -> None:
        await self._client.close()
        await self._channel.close()

    async def talk(self, going: Callable[[], bool]) -> None:
        """One operation after another."""
        names, weights = list(DRAWS), list(DRAWS.values())
        while going():
            talk = await self._pick()
            if talk is None:
                await asyncio.sleep(0.02)
                continue
            talk.operations += 1
            (name,) = self._random.choices(names, weights)
            await getattr(self, f"_{name}")(talk)

    async def _pick(self) -> Talk | None:
        """Mostly a session that few others talk in."""
        for worn in [talk for talk in self._floor.open if talk.worn]:
            self._floor.open.remove(worn)
        if len(self._floor.open) < 8 or self._random.random() < 0.03:
            return await self._new()
        if self._random.random() < 0.7:
            return self._floor.open[self._number % len(self._floor.open)]
        return self._random.choice(self._floor.open)

    # ---- operations

    def _uuid(self) -> str:
        return str(uuid.UUID(int=self._random.getrandbits(128), version=4))

    def _session(self, talk: Talk) -> AsyncSession:
        return self._client.session(talk.name)  # A fresh handle: it knows of no revision.

    async def _do(self, operation: Operation, call: Awaitable[T]) -> T | None:
        """The result; None when there was none, for whatever reason."""
        self._replica.working += 1
        try:
            async with asyncio.timeout(OPERATION_LIMIT_S):
                result = await call
            operation.ok = True
            return result
        except PensieveError as error:
            operation.error, operation.detail = error.reason, f"{error.metadata} {error.message}"
        except TimeoutError:
            operation.error = "TOOK TOO LONG"
        except Exception as error:
            operation.error = f"{CRASHED}{type(error).__name__}: {error}"
        finally:
            self._replica.working -= 1
            self._recorder.done(operation)
        return None

    def _operation(self, op: str, talk: Talk | None = None, request_id: str = "") -> Operation:
        return self._recorder.begin(self._number, op, talk.name if talk else "", request_id)

    async def _new(self) -> Talk | None:
        operation, request_id = self._operation("create"), self._uuid()

        async def create() -> str:
            made = await self._client.create_session(system_prompt="be brief", request_id=request_id)
            operation.session = made.name
            return made.name

        name = await self._do(operation, create())
        return None if name is None else await self._enter(Talk(name))

    async def _enter(self, talk: Talk) -> Talk | None:
        """Others may talk in it from now on; its first state is known."""
        if not await self._read(talk):
            return None
        self._floor.open.append(talk)
        self._floor.all.append(talk)
        return talk

    async def _send(self, talk: Talk) -> None:
        self._count += 1
        request_id = self._uuid()
        policy = self._random.choice(("cancel", "finish"))
        talk.said[request_id] = Said(
            "send", f"q{self._number}.{self._count}", None, self._random.randint(2, 10), policy
        )
        await self._say(talk, request_id)

    async def _say(self, talk: Talk, request_id: str) -> bool:
        operation, stream = self._turn(talk, request_id)
        turn = await self._do(operation, self._finished(operation, stream))
        if turn is not None:
            self._acknowledged(talk, request_id, turn)
        return turn is not None

    def _turn(self, talk: Talk, request_id: str) -> tuple[Operation, Any]:
        said = talk.said[request_id]
        operation = self._operation(said.op, talk, request_id)
        operation.text, operation.item = said.text, said.item
        options: dict[str, Any] = {} if said.item is None else {"replace_after_item": said.item}
        stream = self._session(talk).stream(
            said.text or None, request_id=request_id, max_output_tokens=said.outputs, ignore_eos=True,
            temperature=0.0, on_disconnect=said.on_disconnect, **options,
        )  # fmt: skip
        return operation, stream

    @staticmethod
    async def _finished(operation: Operation, stream: Any) -> Turn:
        turn: Turn = await stream.finish()
        operation.turn = turn_seen(turn)
        return turn

    def _acknowledged(self, talk: Talk, request_id: str, turn: Turn) -> None:
        if turn.output is not None and turn.output.token_ids:
            talk.acknowledged.add(request_id)
        talk.numbers = sorted({*talk.numbers, *(item.item for item in turn.items)})
        talk.context = max(talk.context, turn.usage.context_tokens)
        self._floor.acknowledged += 1

    async def _again(self, talk: Talk) -> None:
        """A retry of whatever was sent before, acknowledged or not, by whom it may be."""
        if not talk.said:
            return await self._send(talk)
        unknown = [one for one in talk.said if one not in talk.acknowledged]
        await self._say(talk, self._random.choice(unknown or list(talk.said)))
        return None

    async def _edit(self, talk: Talk, text: str | None = None) -> None:
        """Replace what is behind some item, by a new question or by another answer."""
        self._count += 1
        if len(talk.numbers) < 2:
            return
        request_id, item = self._uuid(), self._random.choice(talk.numbers[-4:])
        said = text if text is not None else f"e{self._number}.{self._count}"
        talk.said[request_id] = Said("edit", said, item, self._random.randint(2, 10), "cancel")
        await self._say(talk, request_id)

    async def _regenerate(self, talk: Talk) -> None:
        await self._edit(talk, "")

    async def _rewind(self, talk: Talk) -> None:
        if len(talk.numbers) < 2:
            return
        operation = self._operation("rewind", talk, self._uuid())
        operation.item = self._random.choice(talk.numbers[-4:])
        to, request_id = operation.item, operation.request_id

        async def rewind() -> None:
            info = await self._session(talk).rewind(to_item=to, request_id=request_id)
            operation.revision = info.revision

        await self._do(operation, rewind())

    async def _fork(self, talk: Talk) -> None:
        operation = self._operation("fork", None, self._uuid())
        operation.text = talk.name
        operation.item = self._random.choice([None, *talk.numbers])

        async def fork() -> str:
            made = await self._session(talk).fork(operation.item, request_id=operation.request_id)
            operation.session = made.name
            return made.name

        name = await self._do(operation, fork())
        if name is not None:
            await self._enter(Talk(name, context=talk.context))

    async def _cancel(self, talk: Talk) -> None:
        """Stop a turn in the middle, keeping what there is or nothing."""
        request_id = self._uuid()
        talk.said[request_id] = Said("send", f"c{self._number}.{self._count}", None, 24, "cancel")
        self._count += 1
        operation, stream = self._turn(talk, request_id)
        begun = await self._do(operation, self._begin(stream))
        stop = self._operation("cancel", talk, request_id)
        keep: Keep = self._random.choice(("partial", "nothing"))
        stop.text = keep
        if begun is not None:
            await self._do(stop, self._stopped(stop, self._session(talk), keep))
        stream.close()

    @staticmethod
    async def _stopped(operation: Operation, session: AsyncSession, keep: Keep) -> None:
        operation.turn = turn_seen(await session.cancel(operation.request_id, keep=keep))

    @staticmethod
    async def _begin(stream: Any) -> bool:
        await anext(stream, None)
        return True

    async def _abandon(self, talk: Talk) -> None:
        """Leave in the middle, without a word."""
        request_id = self._uuid()
        policy = self._random.choice(("cancel", "finish"))
        talk.said[request_id] = Said("send", f"a{self._number}.{self._count}", None, 16, policy)
        self._count += 1
        operation, stream = self._turn(talk, request_id)
        await self._do(operation, self._begin(stream))
        stream.close()

    async def _get_turn(self, talk: Talk) -> None:
        if talk.said:
            await self._ask(talk, self._random.choice(list(talk.said)))

    async def _ask(self, talk: Talk, request_id: str) -> Turn | None:
        operation = self._operation("get_turn", talk, request_id)

        async def ask() -> Turn:
            turn = await self._session(talk).get_turn(request_id)
            operation.turn = turn_seen(turn)
            return turn

        return await self._do(operation, ask())

    async def _attach(self, talk: Talk) -> None:
        if talk.said:
            operation = self._operation("attach", talk, self._random.choice(list(talk.said)))
            await self._do(
                operation, self._finished(operation, self._session(talk).attach(operation.request_id))
            )

    async def _read(self, talk: Talk) -> bool:
        """The items, all of one revision: there are fewer than fit on a page."""
        operation = self._operation("read", talk)

        async def read() -> bool:
            answer = await self._listed(
                pb.ListItemsRequest(name=talk.name, page_size=1000, include_tokens=True)
            )
            operation.revision = answer.revision
            operation.items = tuple(seen(decode.item(item)) for item in answer.items)
            talk.numbers = [item.item for item in answer.items]
            return True

        return await self._do(operation, read()) is True

    async def _listed(self, request: pb.ListItemsRequest) -> pb.ListItemsResponse:
        """By the bare stub: the SDK does not tell the revision of a listing."""
        while True:
            try:
                answer: pb.ListItemsResponse = await self._stub.ListItems(request, timeout=4)
                return answer
            except grpc.aio.AioRpcError as error:
                problem = from_rpc_error(error)
                if verdict(problem) is not Verdict.RESEND:
                    raise problem from error
            await asyncio.sleep(0.05)

    async def _look(self, talk: Talk) -> None:
        operation = self._operation("look", talk)

        async def look() -> None:
            info = await self._session(talk).refresh()
            operation.revision, operation.item_count = info.revision, info.item_count

        await self._do(operation, look())

    async def _delete(self, talk: Talk) -> None:
        talk.deleted = True
        await self._do(self._operation("delete", talk), self._session(talk).delete())

    # ---- in the end

    async def settle(self, talk: Talk) -> None:
        """With all faults over: no turn runs, each one's outcome is known, and so is the history."""
        if not await self._free(talk):
            return
        for request_id in talk.said:
            turn = await self._ask(talk, request_id)
            committed = turn is not None and turn.state is TurnState.COMMITTED
            if committed and request_id not in talk.acknowledged:
                await self._say(talk, request_id)  # for its tokens
        await self._read(talk)
        await self._look(talk)

    async def _free(self, talk: Talk) -> bool:
        """Whether the session is there, once nothing runs in it any more."""
        limit = asyncio.get_running_loop().time() + OPERATION_LIMIT_S
        while asyncio.get_running_loop().time() < limit:
            operation = self._operation("free", talk)
            info = await self._do(operation, self._session(talk).refresh())
            if info is None and operation.error in GONE:
                return False
            if info is not None and not info.active_request_id:
                return True
            await asyncio.sleep(0.05)
        return True
