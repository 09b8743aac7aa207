"""Tables of sessions and turns, for any width."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pensieve.cli import figures
from pensieve.cli.sessions.found import name_of, place
from pensieve.cli.untrusted import clean
from pensieve.client import Item, SessionInfo, Turn

MIDDLE = 80
"""Columns from which there is room for most."""
WIDE = 100
"""Columns from which there is room for labels, too."""


def listing(infos: Sequence[SessionInfo], now: datetime, width: int) -> Iterator[Text]:
    """One line for each session. What is narrow has less of it, but an id is never cut: it is there to be copied."""
    columns: dict[str, list[str]] = {"SESSION": [info.id for info in infos]}
    if width >= MIDDLE:
        columns["AGE"] = [_ago(info.create_time, now) for info in infos]
    columns["USED"] = [_ago(info.update_time, now) for info in infos]
    if width >= MIDDLE:
        columns["ITEMS"] = [figures.count(info.item_count) for info in infos]
    columns["TOKENS"] = [figures.count(info.context_tokens) for info in infos]
    columns["STATE"] = [state(info) for info in infos]
    columns["CONTEXT"] = [places(place(info.residency), short=width < WIDE) for info in infos]
    if width >= WIDE:
        columns["LABELS"] = [figures.labels(info.labels) for info in infos]
    yield from _table(columns, width)


def facts(info: SessionInfo, now: datetime) -> Iterator[tuple[str, str]]:
    """What there is to say of one session, by lines."""
    yield "session", info.id
    yield "state", state(info)
    if info.model:
        yield "model", clean(info.model, lines=False)
    yield "context", f"{info.context_tokens:,} of {info.context_limit:,} tokens, {info.item_count:,} items"
    if info.residency is not None:
        yield "lies", f"{places(place(info.residency))} at {clean(info.residency.replica, lines=False)}"
    yield "created", f"{_ago(info.create_time, now)} ago, used {_ago(info.update_time, now)} ago"
    if info.expire_time is not None:
        yield "expires", f"in {figures.age((info.expire_time - now).total_seconds())}"
    if info.labels:
        yield "labels", figures.labels(info.labels)
    if info.forked_from:
        yield "fork of", f"{info.forked_from.removeprefix('sessions/')}, up to item {info.forked_from_item}"


def receipts(turns: Sequence[Turn], width: int) -> Iterator[Text]:
    """Where each turn's context came from and, where there is room, how its first token came and how it ended."""
    usages = [turn.usage for turn in turns]
    columns = {
        "REV": [str(turn.revision) for turn in turns],
        "CONTEXT": [figures.count(usage.context_tokens) for usage in usages],
        "DEVICE": [figures.count(usage.gpu_cached_tokens) for usage in usages],
        "HOST": [figures.count(usage.swapped_in_tokens) for usage in usages],
        "RECOMP": [figures.count(usage.recomputed_tokens) for usage in usages],
        "NEW": [figures.count(usage.new_tokens) for usage in usages],
        "ANSWER": [figures.count(usage.output_tokens) for usage in usages],
    }
    if width >= MIDDLE:
        columns["FIRST"] = [
            figures.seconds(usage.queue_s + usage.restore_s + usage.prefill_s) for usage in usages
        ]
        columns["END"] = [name_of(turn.finish_reason) for turn in turns]
    yield from _table(columns, width, left=("END",))


def said(items: Sequence[Item]) -> Iterator[Text]:
    """The history as text."""
    for item in items:
        yield Text.assemble((f"{item.item} {name_of(item.role)}: ", "bold"), clean(item.text))


def state(info: SessionInfo) -> str:
    """``running`` where a turn runs."""
    return "running" if info.active_request_id else str(info.state)


def places(tokens: Mapping[str, int], *, short: bool = False) -> str:
    """Shares of a context by where they lie: ``device 80 %, dropped 20 %``; ``short``: ``d80 x20``, as in strips."""
    whole = sum(tokens.values())
    if not whole:
        return "–"
    if short:
        letters = {"device": "d", "host": "h", "dropped": "x"}
        return " ".join(f"{letters[at]}{100 * part / whole:.0f}" for at, part in tokens.items() if part)
    return ", ".join(f"{where} {figures.share(part, whole)}" for where, part in tokens.items() if part)


def _table(
    columns: Mapping[str, Sequence[str]],
    width: int,
    left: Sequence[str] = ("SESSION", "STATE", "CONTEXT", "LABELS"),
) -> Iterator[Text]:
    """Headings and cells below each other, numbers to the right; what is too wide loses its end, and no column else."""
    sizes = {name: max(map(cell_len, (name, *cells))) for name, cells in columns.items()}

    def line(cells: Sequence[str], style: str = "") -> Text:
        padded = (
            set_cell_size(cell, size) if name in left else " " * (size - cell_len(cell)) + cell
            for cell, (name, size) in zip(cells, sizes.items(), strict=True)
        )
        text = Text("  ".join(padded).rstrip(), style)
        text.truncate(width, overflow="ellipsis")
        return text

    yield line(tuple(columns), "dim")
    for row in zip(*columns.values(), strict=True):
        yield line(row)


def _ago(when: datetime | None, now: datetime) -> str:
    return figures.age((now - when.astimezone(UTC)).total_seconds()) if when is not None else "–"
