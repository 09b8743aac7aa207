"""The asyncio shell: performs the steps of flows and of the turn machine on a ``grpc.aio`` channel."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Generator
from types import TracebackType
from typing import Any, Self, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import Message

from pensieve.client._exports import LineJoiner
from pensieve.client._flows import SessionCore
from pensieve.client._steps import Flow, Invoke, Sleep, discard
from pensieve.client._transport import ClientSettings, open_channel
from pensieve.client._turn_machine import TurnMachine
from pensieve.client._values import Piece, Turn
from pensieve.client._view import StreamView
from pensieve.client.arguments import Keep
from pensieve.errors import Cancelled, PensieveError
from pensieve.rpc_status import from_rpc_error
from pensieve.v1 import pensieve_pb2 as pb

T = TypeVar("T")

CLOSE_TIMEOUT_S = 1.0


class AsyncLink:
    """Channel and stub. The first call opens them in the running loop, to which they belong."""

    def __init__(self, settings: ClientSettings) -> None:
        self.settings = settings
        self.closed = False
        self._channel: Any = None
        self._stub: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._discards: set[asyncio.Task[None]] = set()

    @property
    def stub(self) -> Any:
        if self.closed:
            raise Cancelled("the client is closed", reason="CLIENT_CLOSED")
        loop = asyncio.get_running_loop()
        if self._stub is None:
            self._channel, self._stub = open_channel(self.settings, grpc.aio)
            self._loop = loop
        elif self._loop is not loop:
            raise RuntimeError(
                "this AsyncClient belongs to another event loop: create one per loop, and close it there"
            )
        return self._stub

    async def run(self, flow: Flow[T]) -> T:
        try:
            step = next(flow)
            while True:
                if isinstance(step, Sleep):
                    await asyncio.sleep(step.seconds)
                    step = flow.send(None)
                    continue
                try:
                    response = await self._invoke(step)
                except grpc.RpcError as error:
                    step = flow.throw(from_rpc_error(error))
                else:
                    step = flow.send(response)
        except StopIteration as stop:
            value: T = stop.value
            return value

    async def _invoke(self, step: Invoke) -> Any:
        metadata = self.settings.metadata(step.session)
        call = getattr(self.stub, step.method)(step.request, timeout=step.timeout, metadata=metadata)
        try:
            return await call
        finally:
            call.cancel()  # No-op when done. gRPC never collects a call that is dropped without it.

    async def stream(self, method: str, request: Message, session: str = "") -> AsyncIterator[Any]:
        """Make one call and yield its responses. Neither retried nor limited in time. Leaving early cancels it."""
        call = getattr(self.stub, method)(request, metadata=self.settings.metadata(session))
        try:
            async for message in call:
                yield message
        except grpc.RpcError as error:
            raise from_rpc_error(error) from None
        finally:
            call.cancel()

    async def lines(self, method: str, request: Message, session: str = "") -> AsyncIterator[bytes]:
        """As ``stream``, for an export: yield its lines, each with its line feed."""
        joiner = LineJoiner()
        async for message in self.stream(method, request, session):
            for line in joiner.feed(message.data):
                yield line

    def discard(self, session: str, request_id: str, stream_id: str) -> asyncio.Task[None] | None:
        """Tell the server in the background that the client has left the turn. Otherwise the session stays busy."""
        if self.closed:
            return None
        task = asyncio.get_running_loop().create_task(self._discard(session, request_id, stream_id))
        self._discards.add(task)
        task.add_done_callback(self._discards.discard)
        return task

    async def _discard(self, session: str, request_id: str, stream_id: str) -> None:
        try:
            await self.run(discard(self.settings, session, request_id, stream_id))
        except PensieveError:
            return  # Optional: the server's grace time ends the turn as well.

    async def close(self) -> None:
        if self.closed:
            return
        discards = list(self._discards)
        if discards:
            await asyncio.wait(discards, timeout=CLOSE_TIMEOUT_S)
        self.closed = True
        for task in discards:
            task.cancel()
        if self._channel is not None:
            await self._channel.close()


class AwaitableClose:
    """A closed stream. Awaiting it waits, at most a second, until the server knows.

    Not a coroutine, so that ``close`` works without ``await`` and without a warning.
    """

    def __init__(self, discard_task: asyncio.Task[None] | None) -> None:
        self._discard_task = discard_task

    def __await__(self) -> Generator[Any, None, None]:
        if self._discard_task is not None:
            yield from asyncio.wait({self._discard_task}, timeout=CLOSE_TIMEOUT_S).__await__()


class AsyncTurnStream(StreamView):
    """The pieces of one turn. Iterate over it, leaving the loop at any time, or await ``finish``."""

    def __init__(self, link: AsyncLink, core: SessionCore, machine: TurnMachine) -> None:
        super().__init__(core, machine)
        self._link = link
        self._call: Any = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def __aiter__(self) -> AsyncIterator[Piece]:
        # asyncio closes a generator that is dropped in mid-loop, which ends the turn.
        try:
            while (piece := await self._next()) is not None:
                yield piece
        finally:
            self.close()

    async def __anext__(self) -> Piece:
        piece = await self._next()
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def accepted(self) -> None:
        """Wait until the server has accepted the turn. Raises the error if it refuses."""
        await self._advance_until(lambda: self._machine.base_revision is not None)

    async def finish(self) -> Turn:
        """Read to the end and return the turn."""
        try:
            while await self._next() is not None:
                pass
        finally:
            self.close()
        return self.turn

    async def cancel(self, *, keep: Keep = "partial", keep_output_tokens: int | None = None) -> Turn:
        """Stop the turn and close the stream. Return the turn as history has it now, also available as ``turn``."""
        turn = await self._link.run(
            self._core.cancel(self.request_id, keep, keep_output_tokens, self._machine.stream_id)
        )
        self._machine.on_cancelled(turn)
        self.close()
        return turn

    def close(self) -> AwaitableClose:
        """Leave the stream. A turn that is not complete is discarded (see ``AsyncSession.stream``). Idempotent.

        Takes effect at once; ``await`` the result to wait until the server knows.
        """
        discard = self._mark_closed()
        self._drop_call()
        return AwaitableClose(
            self._link.discard(self._core.name, self.request_id, self._machine.stream_id) if discard else None
        )

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        # May run in another thread, or after the loop has ended: the queued work must not hold the stream.
        call, link, loop = self._call, self._link, self._loop
        discard = self._mark_closed()
        if loop is None or loop.is_closed():
            return
        if call is not None:
            loop.call_soon_threadsafe(call.cancel)
        if discard:
            loop.call_soon_threadsafe(link.discard, self._core.name, self.request_id, self._machine.stream_id)

    async def _advance_until(self, reached: Callable[[], object]) -> None:
        try:
            while not reached() and not self._machine.done and not self._closed:
                await self._advance()
        except PensieveError:
            self._discard_on_close = False  # The server has refused the turn or is unreachable.
            self.close()
            raise

    async def _next(self) -> Piece | None:
        pending = self._machine.pending
        await self._advance_until(lambda: pending)
        if pending:
            return pending.popleft()
        self.close()
        return None

    async def _advance(self) -> None:
        try:
            self._machine.on_message(await self._read())
            return
        except grpc.RpcError as error:
            failure = from_rpc_error(error)
        except TimeoutError:
            failure = self._machine.silence_error()
        except PensieveError as error:
            failure = error
        except asyncio.CancelledError:
            # grpc.aio reports a call that this client cancelled like a cancelled task.
            task = asyncio.current_task()
            if (task is not None and task.cancelling()) or not (self._closed or self._link.closed):
                raise
            failure = Cancelled("the client is closed", reason="CLIENT_CLOSED")
        self._drop_call()
        if not (self._machine.done or self._closed):
            await asyncio.sleep(self._machine.on_error(failure))

    async def _read(self) -> pb.StreamTurnResponse:
        if self._call is None:
            self._open()
        async with asyncio.timeout(self._machine.silence_limit_s):
            message: pb.StreamTurnResponse = await self._call.read()
        if message is grpc.aio.EOF:
            raise self._machine.early_end_error()
        return message

    def _open(self) -> None:
        remaining = self._machine.remaining_s()
        stub = self._link.stub
        self._start()
        self._loop = asyncio.get_running_loop()
        self._call = stub.StreamTurn(
            self._machine.next_request(),
            timeout=remaining,
            metadata=self._link.settings.metadata(self._core.name, self._span.header),
        )

    def _drop_call(self) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
