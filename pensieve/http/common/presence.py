"""Whether who asked is still there, for answers that come whole."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import Request

from pensieve.http.common.failures import HttpFailure

T = TypeVar("T")


async def while_there(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The outcome of ``work``, which is cancelled when the caller goes: to nobody nothing is said.

    Raises HttpFailure then, so that what is held for the call is let go. The body has to have been read.
    """
    working, leaving = asyncio.create_task(work), asyncio.create_task(_left(request))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise HttpFailure(400, "the caller left before the answer was whole", code="client_disconnected")
        return working.result()
    finally:
        for task in (working, leaving):
            task.cancel()
        await asyncio.wait((working, leaving))


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
