"""What is measured: anything that holds conversations and answers turns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from pensieve.core import Hints, TokenArray, Usage

OnTokens = Callable[[int, float], None]
"""Called as output arrives: number of new tokens, time of their arrival on ``time.perf_counter``'s clock."""


class TurnFailed(Exception):
    """The target could not answer a turn. ``code`` groups failures in the report."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(f"{code}: {message}")
        self.code, self.message = code, message


@dataclass(frozen=True, slots=True)
class TargetInfo:
    """What a target says of itself before the replay."""

    vocab_size: int
    """0: it does not say."""
    context_limit: int
    """0: it does not say."""
    details: dict[str, str] = field(default_factory=dict)
    """What the report tells of the target: model, version, switches."""
    forces_lengths: bool = True
    """Whether answers of an exact length can be had."""
    takes_hints: bool = False
    """Whether it can be told what comes after a turn, and be asked to warm a session."""


@dataclass(frozen=True, slots=True)
class TurnRequest:
    """One turn to be answered, greedily."""

    input_ids: TokenArray
    output_tokens: int
    forced: bool
    """Exactly ``output_tokens`` of output, whatever the model wants; otherwise at most so many."""
    hints: Hints | None = None
    """What is told of the time after the turn, to targets that take it."""


class Target(Protocol):
    """A system under test. Turns of different sessions run at the same time."""

    @property
    def name(self) -> str: ...

    async def open(self) -> TargetInfo:
        """Connect. Raises TurnFailed when the target is not there."""
        ...

    async def start_session(self) -> str:
        """A new, empty conversation; returns what names it."""
        ...

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        """Answer one turn and keep it; returns the receipt, None from targets that give none. Raises TurnFailed."""
        ...

    async def end_session(self, session: str) -> None:
        """Forget a conversation; called after the measurement."""
        ...

    async def close(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Address:
    """The place of a server: all that another process needs to make a target of its own for it."""

    url: str
    """``pensieve://HOST:PORT`` or ``http://HOST:PORT``."""
    api_key: str | None


@runtime_checkable
class RemoteTarget(Protocol):
    """A target that other processes can connect to as well."""

    @property
    def name(self) -> str: ...

    def address(self) -> Address:
        """The address of this target, which is open."""
        ...


@runtime_checkable
class SupportsEvict(Protocol):
    """A target that can be asked to empty its prefix cache."""

    async def evict(self) -> str:
        """Says, for the report, what was done. Raises TurnFailed."""
        ...


@runtime_checkable
class SupportsWarm(Protocol):
    """A target that can be asked to bring a session's state where its next turn needs it."""

    async def warm(self, session: str) -> str:
        """Returns ``accepted``, or why it refused. Raises TurnFailed."""
        ...


async def empty_cache(target: Target) -> str:
    """Ask for an empty cache where a target can be asked; elsewhere the end of its sessions has to do."""
    return await target.evict() if isinstance(target, SupportsEvict) else "sessions deleted"
