"""Sessions as their clients know them, and what is written down of an answer."""

from __future__ import annotations

from dataclasses import dataclass, field

from pensieve.client import Item, Turn
from pensieve.core import Role
from support.robustness.history import ItemSeen, TurnSeen

LONGEST_CONTEXT = 260
MOST_OPERATIONS = 16


@dataclass(frozen=True)
class Said:
    """What a turn was sent with; the same again for every retry."""

    op: str
    text: str
    item: int | None
    outputs: int
    on_disconnect: str


@dataclass(eq=False)
class Talk:
    """A session that clients share."""

    name: str
    said: dict[str, Said] = field(default_factory=dict)
    acknowledged: set[str] = field(default_factory=set)
    """Of those with tokens."""
    numbers: list[int] = field(default_factory=list)
    """Item numbers as last read."""
    context: int = 0
    operations: int = 0
    deleted: bool = False

    @property
    def worn(self) -> bool:
        return self.deleted or self.operations >= MOST_OPERATIONS or self.context > LONGEST_CONTEXT


@dataclass
class Floor:
    """The sessions of one leg."""

    open: list[Talk] = field(default_factory=list)
    all: list[Talk] = field(default_factory=list)
    acknowledged: int = 0
    """Turns."""


def seen(item: Item) -> ItemSeen:
    role = Role(item.role).name.lower() if isinstance(item.role, int) else str(item.role)
    return item.item, role, item.text, item.token_ids, item.request_id


def turn_seen(turn: Turn) -> TurnSeen:
    return TurnSeen(
        state=turn.state.value,
        revision=turn.revision,
        base_revision=turn.base_revision,
        context_tokens=turn.usage.context_tokens,
        output_tokens=turn.usage.output_tokens,
        finish=str(turn.finish_reason),
        input=tuple(seen(item) for item in turn.input),
        output=seen(turn.output) if turn.output is not None else None,
    )
