"""The end of background tasks."""

from __future__ import annotations

import asyncio


async def end_task(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait for its end. Raises what it ended with, unless that is its cancellation.

    ``asyncio.wait`` rather than ``await task``: the caller's own cancellation is then not taken for the task's.
    """
    task.cancel()
    await task_ended(task)


async def task_ended(task: asyncio.Task[None]) -> None:
    """Wait for a task that has been told to end. Raises what it ended with, unless that is a cancellation."""
    await asyncio.wait({task})
    if not task.cancelled():
        task.result()
