"""Interfaces of systems under test: they hold conversations and answer turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pensieve.core import Hints, TokenArray, Usage

OnTokens = Callable[[int, float], None]
"""Called as output arrives, with the number of new tokens and their time on ``time.perf_counter``'s clock."""


class TurnFailed(Exception):
    """The target could not answer a turn. ``code`` groups failures in the report."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class TargetInfo:
    vocab_size: int
    """0: unknown."""
    context_limit: int
    """0: unknown."""
    details: dict[str, str] = field(default_factory=dict)
    forces_lengths: bool = True
    takes_hints: bool = False


@dataclass(frozen=True, slots=True)
class TurnRequest:
    input_ids: TokenArray
    output_tokens: int
    forced: bool
    """Force exactly ``output_tokens`` tokens of output; otherwise they are the maximum."""
    hints: Hints | None = None


class Target(Protocol):
    """A system under test. Turns of different sessions run at the same time."""

    @property
    def name(self) -> str: ...

    async def open(self) -> TargetInfo:
        """Connect. Raises TurnFailed when the target cannot be reached."""
        ...

    async def start_session(self) -> str:
        """Start an empty conversation; return its name."""
        ...

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        """Answer one turn and keep it; return the receipt, or None if the target gives none. Raises TurnFailed."""
        ...

    async def end_session(self, session: str) -> None:
        """Delete a conversation; called after the measurement."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """The address of a server, from which another process can make its own target."""

    url: str
    """``pensieve://HOST:PORT`` or ``http://HOST:PORT``."""
    api_key: str | None


@runtime_checkable
class RemoteTarget(Protocol):
    @property
    def name(self) -> str: ...

    def address(self) -> Address: ...


@runtime_checkable
class SupportsEvict(Protocol):
    """A target that can empty its prefix cache."""

    async def evict(self) -> str:
        """Empty the cache; return a description for the report. Raises TurnFailed."""
        ...


@runtime_checkable
class SupportsWarm(Protocol):
    """A target that can move a session's state to where its next turn needs it."""

    async def warm(self, session: str) -> str:
        """Return ``accepted``, or why the request was refused. Raises TurnFailed."""
        ...


async def empty_cache(target: Target) -> str:
    """Empty the target's prefix cache if it supports that; otherwise deleted sessions must suffice."""
    return await target.evict() if isinstance(target, SupportsEvict) else "sessions deleted"
