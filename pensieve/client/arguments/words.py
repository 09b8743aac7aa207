"""Enumerations as words. ``FinishReason.LENGTH == "length"``; it prints and goes into JSON as that.

The contract has numbers, and programs that compare with those go on working: ``FinishReason.LENGTH == 4``. Only as keys
of a dict, or in a set, words and numbers are not the same. A number that this SDK has no word for stays an ``int``.
"""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Self, TypeVar

from pensieve import core


class Word(enum.StrEnum):
    """A word for a number of the contract. Made from either, a word in any case; ValueError lists the words."""

    if TYPE_CHECKING:  # ``StrEnum`` takes words alone

        def __new__(cls, value: str | int) -> Self: ...

    @property
    def number(self) -> int:
        return _NUMBERS[type(self)][self.name].value

    def __eq__(self, other: object) -> bool:
        return self.number == other if isinstance(other, int) else str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __int__(self) -> int:
        return self.number

    @classmethod
    def _missing_(cls, value: object) -> Self:
        for one in cls:
            if one == (value.lower() if isinstance(value, str) else value):
                return one
        raise ValueError(f"{value!r} is not one of {', '.join(cls)}")


class FinishReason(Word):
    """Why a turn ended."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


class Role(Word):
    """Who an item speaks for."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Phase(Word):
    """Where a turn is."""

    QUEUED = "queued"
    RESTORING = "restoring"
    PREFILL = "prefill"
    DECODE = "decode"
    COMMIT = "commit"


_NUMBERS: dict[type[Word], type[core.FinishReason] | type[core.Role] | type[core.Phase]] = {
    FinishReason: core.FinishReason,
    Role: core.Role,
    Phase: core.Phase,
}

W = TypeVar("W", bound=Word)


def word(kind: type[W], number: int) -> W | int:
    """The word for this number, or the number itself when a newer server knows more."""
    return next((one for one in kind if one.number == number), number)
