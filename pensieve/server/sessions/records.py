"""The records of changes other than turns. Pure functions, except for rendering."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec

from pensieve.core import Role
from pensieve.errors import FailedPrecondition, NotFound
from pensieve.server.clock import now_ms
from pensieve.server.history.binding import ServedModel
from pensieve.server.history.cuts import renumbered_view, system_item, truncated_to, without_prompt
from pensieve.server.history.rendering import (
    ItemStamp,
    Renderer,
    check_tools,
    entry_of,
    turn_starts,
    with_prompt,
)
from pensieve.server.values import InputEntry
from pensieve.speech import PLAIN
from pensieve.store.records import (
    History,
    Item,
    Record,
    RecordKind,
    SessionConfig,
)


@dataclass(frozen=True, slots=True)
class NewSession:
    request_id: str = ""
    session_id: str = ""
    config: SessionConfig = field(default_factory=SessionConfig)
    labels: tuple[tuple[str, str], ...] = ()
    items: tuple[InputEntry, ...] = ()
    followed_by: tuple[Role, ...] = ()
    """Roles of messages that will follow the items."""


@dataclass(frozen=True, slots=True)
class NewFork:
    """A session with the live items of another one up to ``item``, the last of them possibly another ``candidate``
    of its turn."""

    item: int | None = None
    request_id: str = ""
    session_id: str = ""
    expected_revision: int | None = None
    """The source must be at this revision; None: at any."""
    candidate: int | None = None
    ttl_s: float | None = None
    """Its idle lifetime, 0 for none; None: the source's."""


@dataclass(frozen=True, slots=True)
class SessionChange:
    labels: dict[str, str] | None = None
    """None leaves them unchanged."""
    config: dict[str, Any] = field(default_factory=dict)
    """New values of fields of ``SessionConfig``."""
    rebind: bool = False
    """Move the session to the served model."""


async def create(renderer: Renderer, new: NewSession, served: ServedModel) -> Record:
    """First record of a session: system prompt and imported items, rendered and numbered from 1."""
    prompt = (InputEntry(Role.SYSTEM, new.config.prompt),) if new.config.prompt else ()
    now = now_ms()
    await check_tools(new.config, renderer)
    config = renderer.with_date(new.config, now)
    base = History(config=config)
    items, _ = await renderer.items(
        base, (*prompt, *new.items), ItemStamp(1, new.request_id, now), followed_by=new.followed_by
    )
    return Record(
        revision=1,
        kind=RecordKind.CREATE,
        time_ms=now,
        request_id=new.request_id,
        items=items,
        config=served.bound(config),
        labels=dict(new.labels),
    )


async def append(
    renderer: Renderer,
    base: History,
    entries: Sequence[InputEntry],
    request_id: str,
    served: ServedModel,
    followed_by: tuple[Role, ...] = (),
) -> Record:
    """The record that appends items to ``base``. Raises FailedPrecondition (MODEL_MISMATCH)."""
    served.check(base.config)
    now = now_ms()
    items, _ = await renderer.items(
        base, entries, ItemStamp(base.head_item + 1, request_id, now), followed_by=followed_by
    )
    return Record(
        revision=base.revision + 1,
        kind=RecordKind.UPDATE,
        time_ms=now,
        request_id=request_id,
        items=items,
        config=served.bound(base.config) if base.config.binding is None else None,
    )


def fork(source: History, item: int | None, request_id: str, ttl_s: float | None = None) -> Record:
    """First record of a copy of ``source`` up to ``item``. Items keep their numbers and tokens. ``ttl_s``: another
    idle lifetime than the source's."""
    config = source.config if ttl_s is None else msgspec.structs.replace(source.config, ttl_s=ttl_s)
    base = source if item is None else truncated_to(source, item)
    return Record(
        revision=1,
        kind=RecordKind.CREATE,
        time_ms=now_ms(),
        request_id=request_id,
        items=base.items,
        config=config,
        labels=dict(source.labels),
        hidden_before=base.hidden_before or None,
    )


def rewind(base: History, item: int, request_id: str) -> Record:
    """Supersede everything after ``item``, except the system prompt."""
    return Record(
        revision=base.revision + 1,
        kind=RecordKind.REWIND,
        time_ms=now_ms(),
        request_id=request_id,
        keep_items=max(item, system_item(base)),
        hidden_before=0 if base.hidden_before else None,
    )


async def update(renderer: Renderer, base: History, change: SessionChange, served: ServedModel) -> Record:
    """Set fields of the session. A new system prompt, or new tools, change the beginning of the context, so
    every live item is appended again under a new number, with its old tokens. A rebound session with another
    or an unknown tokenizer gets new tokens."""
    config = msgspec.structs.replace(base.config, **change.config)
    if (config.tools, config.overflow) != (base.config.tools, base.config.overflow):
        await check_tools(config, renderer)
    begins_alike = (config.system_prompt, config.tools) == (base.config.system_prompt, base.config.tools)
    anew = False
    if change.rebind:
        anew = config.binding is None or config.binding.tokenizer != served.binding.tokenizer
        config = served.bound(config)
    elif not begins_alike:
        served.check(config)
    record = Record(
        revision=base.revision + 1,
        kind=RecordKind.UPDATE,
        time_ms=now_ms(),
        config=config if config != base.config else None,
        labels=change.labels,
    )
    if begins_alike and not anew:
        return record
    make = _from_texts if anew else with_prompt
    head, moved = await make(renderer, base, config, record.time_ms)
    hidden = renumbered_view(base, moved)
    return msgspec.structs.replace(record, keep_items=0, items=(*head, *moved), hidden_before=hidden)


def check_compactable(base: History, keep_turns: int) -> list[int]:
    """Return the numbers of the items that begin turns. Raises FailedPrecondition (NOTHING_TO_COMPACT)."""
    starts = turn_starts(base)
    if len(starts) <= keep_turns:
        raise FailedPrecondition(
            f"the context has {len(starts)} turns and {keep_turns} are to stay", reason="NOTHING_TO_COMPACT"
        )
    return starts


async def compact(
    renderer: Renderer, base: History, summary: str, keep_turns: int, request_id: str, served: ServedModel
) -> Record:
    """Put ``summary`` in the place of all visible turns but the last ``keep_turns``, which keep their tokens. Raises
    FailedPrecondition (NOTHING_TO_COMPACT, MODEL_MISMATCH, TOOLS_NOT_CHANGEABLE)."""
    served.check(base.config)
    starts = check_compactable(base, keep_turns)
    first = starts[-keep_turns] if keep_turns else base.head_item + 1
    config, now = msgspec.structs.replace(base.config, summary=summary), now_ms()
    head, moved = await with_prompt(renderer, base, config, now, keep_from=first)
    return Record(
        revision=base.revision + 1,
        kind=RecordKind.UPDATE,
        time_ms=now,
        request_id=request_id,
        keep_items=0,
        items=(*head, *moved),
        config=config,
        hidden_before=0 if base.hidden_before else None,
    )


def check_item(history: History, item: int) -> None:
    """Raises NotFound unless ``item`` is 0 or the number of a live item."""
    if item and all(live.number != item for live in history.items):
        raise NotFound("no such item in the session's live history", reason="ITEM_NOT_FOUND")


async def _from_texts(
    renderer: Renderer, base: History, config: SessionConfig, time_ms: int
) -> tuple[tuple[Item, ...], list[Item]]:
    """The system prompt (nothing if "") and the other live items, tokenised anew. Raises FailedPrecondition
    (MODEL_MISMATCH) for an item given as token ids, which has no text."""
    rest = without_prompt(base)
    verbatim = next((item.number for item in rest if item.verbatim), None)
    if verbatim is not None:
        raise FailedPrecondition(
            f"item {verbatim} was given as token ids, which have no meaning for another tokenizer: the session cannot "
            "be moved; export its texts and import them into a new session",
            reason="MODEL_MISMATCH",
            metadata={"item": str(verbatim)},
        )
    head = (InputEntry(Role.SYSTEM, config.prompt),) if config.prompt else ()
    entries = [*head, *(entry_of(item, PLAIN) for item in rest)]
    stamp = ItemStamp(base.head_item + 1, "", time_ms)
    # Rendered as if the conversation goes on: the last answer ends with its end-of-sequence token, like a
    # generated one.
    made, _ = await renderer.items(History(config=config), entries, stamp, followed_by=(Role.USER,))
    moved = [
        msgspec.structs.replace(old, number=new.number, tokens=new.tokens, prefix_tokens=0)
        for old, new in zip(rest, made[len(head) :], strict=True)
    ]
    return made[: len(head)], moved
