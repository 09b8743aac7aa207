"""Several calls at once."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any


async def all_ended(*calls: Coroutine[Any, Any, Any]) -> list[Any]:
    """Their results, when all have ended. Raises the first error, in their order.

    ``asyncio.gather`` leaves the others running behind an error, and after the store is closed they would open
    connections that nobody closes.
    """

    async def outcome(call: Coroutine[Any, Any, Any]) -> Any:
        try:
            return await call
        except Exception as error:  # raised below, when all have ended
            return error

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(outcome(call)) for call in calls]
    results = []
    for task in tasks:
        result = task.result()
        if isinstance(result, Exception):
            raise result
        results.append(result)
    return results
