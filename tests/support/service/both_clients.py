"""One way to write a test for both clients: the async one behind a face that blocks, in the loop of its server."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from pensieve.client import AsyncClient, AsyncSession, AsyncTurnStream, Client
from support.service.fake_conversations import FakeConversations
from support.service.fake_server import FakeServerThread, start_fake

KINDS = ("sync", "async")


class Blocking:
    """Forwards to an async object; awaits what has to be awaited, and wraps what is async again."""

    def __init__(self, runner: asyncio.Runner, inner: Any) -> None:
        self._runner = runner
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._inner, name)
        return self._call(value) if inspect.ismethod(value) else value

    def _call(self, method: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            # Inside the loop: `close` of a stream and the first call of a client look for it.
            async def run() -> Any:
                result = method(*args, **kwargs)
                return await result if inspect.isawaitable(result) else result

            return self._wrap(self._runner.run(run()))

        return call

    def _wrap(self, value: Any) -> Any:
        wrapped = isinstance(value, AsyncSession | AsyncTurnStream)
        return Blocking(self._runner, value) if wrapped else value

    def __iter__(self) -> Iterator[Any]:
        pieces = self._inner.__aiter__()
        try:
            while True:
                try:
                    yield self._runner.run(_coroutine(pieces.__anext__()))
                except StopAsyncIteration:
                    return
        finally:
            self._runner.run(pieces.aclose())

    def __next__(self) -> Any:
        try:
            return self._runner.run(self._inner.__anext__())
        except StopAsyncIteration:
            raise StopIteration from None

    def settle(self) -> None:
        """Let the loop run, so that the server sees what the client has sent."""
        self._runner.run(asyncio.sleep(0.05))


async def _coroutine(awaitable: Any) -> Any:
    return await awaitable


@contextmanager
def connected(kind: str, **options: Any) -> Iterator[tuple[Any, FakeConversations]]:
    """A client of this kind on a fake of its own."""
    if kind == "sync":
        with FakeServerThread() as server, Client(server.target, **options) as client:
            yield client, server.fake
        return
    with asyncio.Runner() as runner:
        fake = FakeConversations()
        server, target = runner.run(start_fake(fake))
        awaited = AsyncClient(target, **options)
        try:
            yield Blocking(runner, awaited), fake
        finally:
            runner.run(awaited.close())
            runner.run(server.stop(grace=None))
