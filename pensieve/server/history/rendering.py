"""Renders new input to history items, and history to the model's context. Only new text is tokenised."""

from __future__ import annotations

import datetime as dt
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise, product

import msgspec
import numpy as np

from pensieve.core import ContextLimit, Role, TokenArray, pack_tokens, packed_length, unpack_tokens
from pensieve.errors import ContextLimitExceeded, FailedPrecondition, InvalidArgument
from pensieve.server.history.cuts import renumbered_view, without_prompt
from pensieve.server.history.lanes import MESSAGE_WORK, TextLanes
from pensieve.server.values import InputEntry, RawEntry, ToolEntry
from pensieve.speech import CLOSE_THOUGHT, OPEN_THOUGHT, PLAIN, SpeechForm, read, render_answer
from pensieve.store.records import History, Item, Overflow, SessionConfig
from pensieve.tokenizer import (
    ChatTokenizer,
    HistoryItem,
    RawMessage,
    RenderContext,
    TextMessage,
    TokenMessage,
    Tools,
)


@dataclass(frozen=True, slots=True)
class ItemStamp:
    """The fields of new items other than their content."""

    first_number: int
    request_id: str
    time_ms: int


@dataclass(frozen=True, slots=True)
class PreparedTurn:
    history: History
    """The history that the turn continues, with the overflow view applied."""
    items: tuple[Item, ...]
    prompt: TokenArray
    """Generation prompt, int32 [n]: becomes the first tokens of the answer's item."""
    context: TokenArray
    """The whole context, int32 [n]: visible history, input, generation prompt."""
    num_new: int
    """Number of trailing tokens of ``context`` that are this turn's."""

    @property
    def num_fresh(self) -> int:
        """Trailing tokens that no earlier turn computed: ``num_new``, or all (prompt, import) before the
        first answer."""
        return self.num_new if self.history.was_generated else len(self.context)


@dataclass(frozen=True, slots=True)
class ContextRoom:
    """The size limit of a context, and the policy when a turn does not fit."""

    limit: int
    """Exclusive: one output token has to fit too."""
    overflow: Overflow
    wanted_output: int | None
    """Output tokens that the turn asks for, if it sets a number."""


class Renderer:
    """Renders with one tokenizer, in threads beside the event loop."""

    def __init__(self, tokenizer: ChatTokenizer, lanes: TextLanes | None = None, tenant: str = "") -> None:
        self.tokenizer = self._tokenizer = tokenizer
        self._lanes = lanes or TextLanes()
        self._tenant = tenant

    async def predicted_tokens(self, text: str) -> list[int]:
        """Return the token ids of a prediction; none if it cannot do without control tokens."""
        return await self._lanes.run(
            self._tenant, len(text), lambda _: self._tokenizer.encode_text(text) or []
        )

    def for_tenant(self, tenant: str) -> Renderer:
        """The same renderer; its work is queued as this tenant's."""
        return Renderer(self._tokenizer, self._lanes, tenant)

    def close(self) -> None:
        self._lanes.close()

    async def items(
        self,
        history: History,
        entries: Sequence[InputEntry],
        stamp: ItemStamp,
        *,
        generation_prompt: bool = False,
        followed_by: tuple[Role, ...] = (),
    ) -> tuple[tuple[Item, ...], TokenArray]:
        """Items for ``entries`` after ``history``, and the generation prompt after them (int32 [n], possibly
        empty). ``followed_by``: roles of the messages after them, as far as known."""
        work = functools.partial(self._render, history, tuple(entries), stamp, generation_prompt, followed_by)
        return await self._lanes.run(self._tenant, _size(history, entries), work)

    def with_date(self, config: SessionConfig, time_ms: int) -> SessionConfig:
        """``config`` of a new session; fixes the date, if the chat template writes one, to ``time_ms``."""
        if not self._tokenizer.writes_date or config.begun_ms:
            return config
        return msgspec.structs.replace(config, begun_ms=time_ms)

    async def prepare(
        self, history: History, entries: Sequence[InputEntry], stamp: ItemStamp, room: ContextRoom
    ) -> PreparedTurn:
        """Render a turn that fits. Raises ContextLimitExceeded (metadata ``context_tokens``, ``limit``),
        InvalidArgument when the template refuses the input or the context is empty."""
        self.check_size(entries, room.limit)
        work = functools.partial(self._prepare, history, tuple(entries), stamp, room)
        return await self._lanes.run(self._tenant, _size(history, entries), work)

    async def check_tools(self, tools: str) -> None:
        """Raises InvalidArgument unless a session with these tool definitions can be rendered."""
        if tools:

            def work(_check: Callable[[], None]) -> None:
                self._tokenizer.check_tools(tools)

            await self._lanes.run(self._tenant, len(tools), work)

    def check_size(self, entries: Sequence[InputEntry], limit: int) -> None:
        """Raises ContextLimitExceeded for input that is too long however it is tokenised. Costs nothing."""
        chars = sum(len(entry.text) for entry in entries if entry.tokens is None)
        verbatim = sum(packed_length(entry.tokens) for entry in entries if entry.tokens is not None)
        fewest = verbatim + self._tokenizer.fewest_tokens(
            sum(entry.tokens is None and not isinstance(entry, RawEntry) for entry in entries)
        )
        if fewest >= limit or chars > self._tokenizer.max_chars(limit):
            raise context_too_long(fewest if fewest >= limit else limit + 1, limit)

    def context(self, history: History) -> TokenArray:
        """Token ids of the visible items, int32 [n]. Starts with the beginning-of-sequence token even if the
        overflow view hides its item: models are trained with it."""
        return np.concatenate([self._hidden_bos(history), history.tokens()])

    def length(self, history: History) -> int:
        """``len(context(history))``, without building it."""
        return len(self._hidden_bos(history)) + sum(packed_length(item.tokens) for item in history.visible())

    def _hidden_bos(self, history: History) -> TokenArray:
        """The beginning-of-sequence token if the view hides it, else nothing; int32 [0 or 1]."""
        if self._tokenizer.bos_token_id is None or not history.hidden_before:
            return np.empty(0, dtype=np.int32)
        return self._bos_if_hidden(history.items[:1], history.visible()[:1])

    def _bos_if_hidden(self, first: tuple[Item, ...], first_shown: tuple[Item, ...]) -> TokenArray:
        """The beginning-of-sequence token if ``first`` begins with it and ``first_shown`` does not; else nothing."""
        bos = self._tokenizer.bos_token_id
        starts = [unpack_tokens(item.tokens[:4]) for item in (*first, *first_shown)]
        if bos is not None and len(starts) == 2 and starts[0].tolist() == [bos] != starts[1].tolist():
            return starts[0]
        return np.empty(0, dtype=np.int32)

    def _render(
        self,
        history: History,
        entries: tuple[InputEntry, ...],
        stamp: ItemStamp,
        generation_prompt: bool,
        follow: tuple[Role, ...],
        check: Callable[[], None],
    ) -> tuple[tuple[Item, ...], TokenArray]:
        before = history.visible()
        begun_ms = history.config.begun_ms
        when = dt.datetime.fromtimestamp(begun_ms / 1000) if begun_ms else dt.datetime.now()
        rendered = self._tokenizer.render(
            [
                self._history_item(before[index])
                for index in self._tokenizer.window([one.role for one in before])
            ],
            [_message(entry) for entry in entries],
            generation_prompt=generation_prompt,
            followed_by=follow,
            context=RenderContext(Tools(history.config.tools), when, check),
        )
        items = tuple(
            Item(
                number=stamp.first_number + index,
                role=entry.role,
                text=self._text(entry) if entry.tokens is None else self._tokenizer.decode(tokens),
                tokens=pack_tokens(tokens),
                request_id=stamp.request_id,
                create_ms=stamp.time_ms,
                verbatim=entry.tokens is not None or isinstance(entry, RawEntry),
                call_id=entry.call_id if isinstance(entry, ToolEntry) else "",
            )
            for index, (entry, tokens) in enumerate(zip(entries, rendered.item_tokens, strict=True))
        )
        return items, rendered.generation_prompt

    def _text(self, entry: InputEntry) -> str:
        """The text of an entry without token ids, with its calls as the model would have written them."""
        if not isinstance(entry, ToolEntry) or not entry.calls:
            return entry.text
        if self._tokenizer.call_form is None:
            raise InvalidArgument.field("input", "has function calls, which the chat template does not take")
        return render_answer(entry.text, entry.calls, self._tokenizer.call_form)

    def _prepare(
        self,
        history: History,
        entries: tuple[InputEntry, ...],
        stamp: ItemStamp,
        room: ContextRoom,
        check: Callable[[], None],
    ) -> PreparedTurn:
        prepared = self._assemble(history, entries, stamp, check)
        if len(prepared.context) < room.limit:
            return prepared
        if room.overflow is Overflow.DROP_OLDEST_TURNS:
            for shorter in self._shorter_views(prepared, room, keep_last=not entries):
                # Rendered again: the glue of the first input item depends on the item before it.
                prepared = self._assemble(shorter, entries, stamp, check)
                if len(prepared.context) < room.limit:
                    return prepared
        raise context_too_long(len(prepared.context), room.limit)

    def _assemble(
        self,
        history: History,
        entries: tuple[InputEntry, ...],
        stamp: ItemStamp,
        check: Callable[[], None],
    ) -> PreparedTurn:
        items, prompt = self._render(history, entries, stamp, True, (), check)
        new = [*(unpack_tokens(item.tokens) for item in items), prompt]
        context = np.concatenate([self.context(history), *new])
        if not len(context):
            raise InvalidArgument.field("turn.input", "gives the model no token to start from")
        return PreparedTurn(history, items, prompt, context, sum(map(len, new)))

    def _shorter_views(self, prepared: PreparedTurn, room: ContextRoom, *, keep_last: bool) -> list[History]:
        """Views that drop more and more of the oldest turns. First the one that leaves room for the wanted
        output (at most a quarter of the limit; an eighth if unknown): dropping moves all later tokens, so it
        should be rare."""
        history, new = prepared.history, len(prepared.context) - self.length(prepared.history)
        cuts = turn_starts(history)[1:] + ([] if keep_last else [history.head_item + 1])
        reserve = min(room.wanted_output or room.limit // 8, room.limit // 4)
        fitting: list[History] = []
        lengths = self._lengths_from(history, cuts)
        for cut in cuts:
            view = replace(history, hidden_before=cut)
            left = room.limit - new - lengths[cut]
            if left >= reserve:
                fitting.insert(0, view)
                break
            if left > 0:
                fitting.append(view)
        # The last cut as well: glue that is rendered anew may be shorter than before.
        return fitting + [replace(history, hidden_before=cut) for cut in cuts[-1:]]

    def _lengths_from(self, history: History, cuts: Sequence[int]) -> dict[int, int]:
        """``length`` of the view of each cut, in one pass; ``cuts`` in order."""
        lengths: dict[int, int] = {}
        left = sum(packed_length(item.tokens) for item in history.items)
        items = history.items
        at, shown = 0, items[:0]
        for cut in cuts:
            while at < len(items) and items[at].number < cut:
                if items[at].role is Role.SYSTEM:
                    shown = shown or items[at : at + 1]
                else:
                    left -= packed_length(items[at].tokens)
                at += 1
            lengths[cut] = left + len(self._bos_if_hidden(items[:1], shown or items[at : at + 1]))
        return lengths

    def _history_item(self, item: Item) -> HistoryItem:
        last = unpack_tokens(item.tokens[-4 * self._tokenizer.tail_tokens :])
        return self._tokenizer.seen(item.role, last, verbatim=item.verbatim, text=item.text)


def turn_starts(history: History) -> list[int]:
    """Numbers of the visible items that start a turn: the first, and those after an answer except tool results."""
    items = [item for item in history.visible() if item.role is not Role.SYSTEM]
    starts = [items[0].number] if items else []
    starts += [
        after.number
        for before, after in pairwise(items)
        # Never separate a call from its results.
        if before.role is Role.ASSISTANT and after.role not in (Role.ASSISTANT, Role.TOOL)
    ]
    return starts


def context_too_long(context_tokens: int, limit: int) -> ContextLimitExceeded:
    # The engine's limit carries a note on what sets it.
    note = f" ({limit.note})" if isinstance(limit, ContextLimit) and limit.note else ""
    return ContextLimitExceeded(
        f"the context would have {context_tokens} tokens or more; it must stay below {limit}{note}",
        metadata={"context_tokens": str(context_tokens), "limit": str(limit)},
    )


def _size(history: History, entries: Sequence[InputEntry]) -> int:
    """Work: characters and token ids, a fixed amount per message, and the tools until the first user message."""
    shows_tools = all(item.role is not Role.USER for item in history.items)
    tools = len(history.config.tools) if shows_tools else 0
    return tools + sum(
        MESSAGE_WORK
        + (len(entry.text) if entry.tokens is None else packed_length(entry.tokens))
        + (sum(len(call.arguments) for call in entry.calls) if isinstance(entry, ToolEntry) else 0)
        for entry in entries
    )


def _message(entry: InputEntry) -> TextMessage | RawMessage | TokenMessage:
    if isinstance(entry, RawEntry):
        return RawMessage(entry.role, entry.text)
    if isinstance(entry, ToolEntry):
        return TextMessage(entry.role, entry.text, entry.calls, entry.call_id)
    if entry.tokens is None:
        return TextMessage(entry.role, entry.text)
    return TokenMessage(entry.role, unpack_tokens(entry.tokens))


async def with_frame(renderer: Renderer, base: History, config: SessionConfig, time_ms: int) -> History:
    """``base`` as it would be with this configuration. Raises InvalidArgument for tools that such a session
    cannot have, and the errors of ``with_prompt``."""
    if config.tools != base.config.tools:
        await check_tools(config, renderer)
    head, moved = await with_prompt(renderer, base, config, time_ms)
    return replace(
        base,
        items=(*head, *moved),
        config=config,
        head_item=moved[-1].number if moved else base.head_item + len(head),
        hidden_before=renumbered_view(base, moved) or 0,
    )


async def check_tools(config: SessionConfig, renderer: Renderer) -> None:
    """Raises InvalidArgument for tools that a session with this configuration cannot have."""
    await renderer.check_tools(config.tools)
    if config.tools and config.overflow is Overflow.DROP_OLDEST_TURNS:
        # Many templates show tools in the first user message.
        raise InvalidArgument.field(
            "config.overflow_policy", "must be REJECT with tools: they would be dropped with the oldest turn"
        )


async def with_prompt(
    renderer: Renderer, base: History, config: SessionConfig, time_ms: int, *, keep_from: int = 0
) -> tuple[tuple[Item, ...], list[Item]]:
    """A new system prompt (nothing if "") and the other live items from ``keep_from`` on, renumbered after it.

    Of the reused tokens, only those of the first items can be wrong: up to the first that is no system message, or
    the first of the user (beginning of sequence, role header, tools). They are rendered anew if rendering them in the
    old place reproduces the stored tokens. Raises FailedPrecondition (TOOLS_NOT_CHANGEABLE) when changed tools would
    not appear in the context.
    """
    number = base.head_item + 1
    whole = without_prompt(base)
    rest = tuple(item for item in whole if item.number >= keep_from)
    head: tuple[Item, ...] = ()
    changed = History(config=config)
    if config.prompt:
        head, _ = await renderer.items(
            changed, (InputEntry(Role.SYSTEM, config.prompt),), ItemStamp(number, "", time_ms)
        )
        number += 1
    moved = [msgspec.structs.replace(item, number=number + i) for i, item in enumerate(rest)]
    # Many templates show tools in the first user message, which may be among the items that are dropped.
    shown = not moved or (config.tools == base.config.tools and not (config.tools and len(rest) < len(whole)))
    old = replace(base, items=base.items[: len(base.items) - len(rest)], hidden_before=0)
    here = replace(changed, items=head)
    made = await _rendered_elsewhere(renderer, rest, old, here)
    moved[: len(made)] = [
        _with_tokens(item, new.tokens) for item, new in zip(moved[: len(made)], made, strict=True)
    ]
    if not (shown or made):
        raise FailedPrecondition(
            "the session's first message cannot be rendered again with other tools: create a new session with them",
            reason="TOOLS_NOT_CHANGEABLE",
        )
    return head, moved


async def _rendered_elsewhere(
    renderer: Renderer, items: Sequence[Item], there: History, here: History
) -> Sequence[Item]:
    """Render the first items, which stand behind ``there``, behind ``here``. Empty if rendering them ``there`` does not
    give their tokens."""
    for count, speech in product(_beginnings(items), (renderer.tokenizer.speech, PLAIN)):
        first, entries = items[:count], tuple(entry_of(item, speech) for item in items[:count])
        stamp = ItemStamp(first[0].number, "", first[0].create_ms)
        # Only the last answer of a conversation has all of its closing.
        after = items[count].role if count < len(items) else Role.USER
        follow = (after,) if first[-1].role is Role.ASSISTANT else ()
        try:
            again, _ = await renderer.items(there, entries, stamp, followed_by=follow)
        except InvalidArgument:
            continue
        if [item.tokens for item in again] == [item.tokens for item in first]:
            made, _ = await renderer.items(here, entries, stamp, followed_by=follow)
            return made
    return ()


def _beginnings(items: Sequence[Item]) -> list[int]:
    """How many items may have to be rendered anew, the larger number first. They must have been given as text."""
    roles = [item.role for item in items]
    user = roles.index(Role.USER) + 1 if Role.USER in roles else len(roles)
    first = next((n for n, role in enumerate(roles, 1) if role is not Role.SYSTEM), len(roles))
    counts = dict.fromkeys((user, first))
    return [count for count in counts if count and not any(item.verbatim for item in items[:count])]


def _with_tokens(item: Item, tokens: bytes) -> Item:
    """``item`` with another beginning. A generated answer's generation prompt is part of that."""
    more = packed_length(tokens) - packed_length(item.tokens)
    prefix = item.prefix_tokens + more if item.prefix_tokens else 0
    return msgspec.structs.replace(item, tokens=tokens, prefix_tokens=prefix)


def entry_of(item: Item, speech: SpeechForm) -> InputEntry:
    """The input that gives this item again. ``speech``: how calls are found in its text."""
    answer = read(item.text, speech) if item.role is Role.ASSISTANT else None
    if answer is not None and answer.calls:
        thought = f"{OPEN_THOUGHT}\n{answer.thoughts}\n{CLOSE_THOUGHT}\n\n" if answer.thoughts else ""
        return ToolEntry(item.role, f"{thought}{answer.words}", calls=answer.calls)
    if item.role is Role.TOOL:
        return ToolEntry(item.role, item.text, call_id=item.call_id)
    return InputEntry(item.role, item.text)
