"""What stands before the messages of a history, its system prompt and tools, replaced by others."""

from __future__ import annotations

from dataclasses import replace

import msgspec

from pensieve.core import Role
from pensieve.errors import FailedPrecondition, InvalidArgument
from pensieve.server.history.cache import system_item
from pensieve.server.history.rendering import Renderer, Stamp
from pensieve.server.values import InputEntry
from pensieve.store.records import History, Item, Overflow, SessionConfig


async def framed(renderer: Renderer, base: History, config: SessionConfig, time_ms: int) -> History:
    """``base`` as it would be had the session been given this configuration; nothing of it is stored.

    Raises InvalidArgument for tools that such a session cannot have, and what ``behind_prompt`` raises.
    """
    if config.tools != base.config.tools:
        await check_tools(config, renderer)
    head, moved = await behind_prompt(renderer, base, config, time_ms)
    return replace(
        base,
        items=(*head, *moved),
        config=config,
        head_item=moved[-1].number if moved else base.head_item + len(head),
        hidden_before=moved_view(base, moved) or 0,
    )


async def check_tools(config: SessionConfig, renderer: Renderer) -> None:
    """Raises InvalidArgument for tools that a session with this configuration cannot have."""
    await renderer.check_tools(config.tools)
    if config.tools and config.overflow is Overflow.DROP_OLDEST_TURNS:
        # Many templates show them in the first user's message.
        raise InvalidArgument.field(
            "config.overflow_policy", "must be REJECT with tools: they would be dropped with the oldest turn"
        )


async def behind_prompt(
    renderer: Renderer, base: History, config: SessionConfig, time_ms: int
) -> tuple[tuple[Item, ...], list[Item]]:
    """A new system prompt (nothing if "") and the other live items, renumbered behind it.

    Of the reused tokens only the glue that introduces the first item can be wrong (beginning of sequence, role header,
    tools). It is rendered anew when rendering gives the stored tokens back in the old place, and else left alone.
    Raises FailedPrecondition (TOOLS_NOT_CHANGEABLE) when that leaves other tools unshown.
    """
    number = base.head_item + 1
    rest = without_prompt(base)
    head: tuple[Item, ...] = ()
    changed = History(config=config)
    if config.system_prompt:
        head, _ = await renderer.items(
            changed, (InputEntry(Role.SYSTEM, config.system_prompt),), Stamp(number, "", time_ms)
        )
        number += 1
    moved = [msgspec.structs.replace(item, number=number + i) for i, item in enumerate(rest)]
    shown = not moved or config.tools == base.config.tools
    if moved and not moved[0].verbatim:
        first, old = moved[0], replace(base, items=base.items[: len(base.items) - len(rest)], hidden_before=0)
        entry = (InputEntry(first.role, first.text),)
        stamp = Stamp(first.number, first.request_id, first.create_ms)
        (again,), _ = await renderer.items(old, entry, stamp)
        if again.tokens == first.tokens:
            (here,), _ = await renderer.items(replace(changed, items=head), entry, stamp)
            moved[0] = msgspec.structs.replace(first, tokens=here.tokens)
            shown = True
    if not shown:
        raise FailedPrecondition(
            "the session does not begin with a text that could be rendered again with other tools: give them to a new "
            "session",
            reason="TOOLS_NOT_CHANGEABLE",
        )
    return head, moved


def moved_view(base: History, moved: list[Item]) -> int | None:
    """The overflow view of ``base`` over its items as they are numbered in ``moved``; None: it has none."""
    if not base.hidden_before:
        return None
    seen = [
        new.number
        for old, new in zip(without_prompt(base), moved, strict=True)
        if old.number >= base.hidden_before
    ]
    return min(seen, default=moved[-1].number + 1 if moved else 0)


def without_prompt(history: History) -> tuple[Item, ...]:
    """The live items but for the system prompt's."""
    return history.items[1:] if system_item(history) else history.items
