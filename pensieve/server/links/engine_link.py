"""The front end's view of an engine, the same for an engine in this process and one in another.

``EngineLink`` hands commands over and deals reports out to the generations they belong to. It never blocks the event
loop and has no queue that a slow reader could fill: a generation's undelivered events are merged by its reader.
"""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator
from typing import Protocol

from pensieve.core import RequestKey, Sampling, SessionKey, TokenArray
from pensieve.engine.messages import (
    EngineReady,
    Finished,
    Output,
    RequestProgress,
    ResidentTokens,
    Started,
    Stats,
)


class LinkState(enum.StrEnum):
    STARTING = "starting"
    SERVING = "serving"
    RESTARTING = "restarting"
    STOPPED = "stopped"


GenerationEvent = Started | Output | RequestProgress | Finished


class Generation(Protocol):
    """One running generation. Iteration ends after ``Finished``.

    Raises Unavailable (ENGINE_RESTARTING) when the engine died, Internal (ENGINE_FAILED) when it could not serve
    this request, ContextLimitExceeded when the context can never fit, ResourceExhausted when its queue is full.
    """

    @property
    def request(self) -> RequestKey: ...

    def __aiter__(self) -> AsyncIterator[GenerationEvent]: ...

    async def __anext__(self) -> GenerationEvent: ...

    def cancel(self) -> None:
        """Stop within one step. Idempotent; iteration ends."""
        ...


class EngineLink(Protocol):
    """One engine."""

    @property
    def info(self) -> EngineReady:
        """What the engine said when it came up. Raises Unavailable (STARTING) before that."""
        ...

    @property
    def state(self) -> LinkState: ...

    @property
    def stats(self) -> Stats:
        """Of the latest report."""
        ...

    @property
    def stalled(self) -> bool:
        """Work is waiting and no step has ended for longer than the stall limit; heartbeats do not count as steps."""
        ...

    async def start(self) -> None:
        """Bring the engine up; returns when it is ready. Raises Internal with the engine's own words if it cannot."""
        ...

    def submit(self, session: SessionKey, tokens: TokenArray, num_new: int, sampling: Sampling) -> Generation:
        """Raises Unavailable (STARTING, ENGINE_RESTARTING, DRAINING) when no engine takes work."""
        ...

    async def evict(self, session: SessionKey | None = None) -> int:
        """Drop cached KV of one session or of all idle ones; returns the number of tokens dropped."""
        ...

    async def residency(self, session: SessionKey) -> ResidentTokens: ...

    async def stop(self) -> None:
        """End the engine; running generations end with Unavailable (DRAINING)."""
        ...
