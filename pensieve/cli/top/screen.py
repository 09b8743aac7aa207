"""One look at a server as lines of text, for any width. Pure: it is tested without a terminal.

``View`` says which sessions are shown, and what keys change of that. A session's chunks are a row of characters whose
shapes say what their colours say as well.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from rich.cells import cell_len, set_cell_size
from rich.text import Text

from pensieve.cli import output
from pensieve.cli.output import clean
from pensieve.feed import MAX_LISTED, Percentiles, SessionLine, StateDocument, TierState

PLACES: Final[dict[str, tuple[str, str, str]]] = {
    "d": ("█", "blue", "device"),
    "b": ("▓", "cyan", "both"),
    "h": ("▒", "yellow", "host"),
    "x": ("·", "bright_black", "dropped"),
    "i": (">", "bold green", "coming in"),
    "o": ("<", "bold yellow", "going out"),
    "r": ("r", "bold magenta", "recomputed"),
    "n": ("n", "bold bright_blue", "new"),
}
"""Letter of the feed → character, style, word."""
PLAIN: Final = {"█": "d", "▓": "b", "▒": "h", "·": "x"}
"""For terminals without block characters: the feed's own letters."""
_RUN: Final = re.compile(r"([a-zA-Z])(\d+)")


def strip_runs(strip: str) -> Iterator[tuple[str, int]]:
    """``x7h40B3`` → letters with counts of chunks."""
    for found in _RUN.finditer(strip):
        yield found[1], int(found[2])


@lru_cache(maxsize=1 << 15)
def count_chunks(strip: str, places: str) -> int:
    """How many chunks are at these places, shared ones as well. Kept: most strips are the same at the next look."""
    wanted = places + places.upper()
    return sum(int(number) for letter, number in _RUN.findall(strip) if letter in wanted)


def draw_strip(strip: str, width: int, *, blocks: bool = True) -> Text:
    """At most ``width`` characters. A chunk is one if they fit; else each is of what most of its chunks are."""
    text = Text()
    for letter in _cells(strip, width):
        shape, style, _ = PLACES.get(letter.lower(), ("?", "", ""))
        text.append(
            shape if blocks else PLAIN.get(shape, shape), f"{style} underline" if letter.isupper() else style
        )
    return text


def legend(*, blocks: bool = True) -> list[Text]:
    """What the characters mean."""
    words = []
    for shape, style, word in PLACES.values():
        words.append(Text.assemble((shape if blocks else PLAIN.get(shape, shape), style), f" {word}"))
    return [*words, Text.assemble(("shared", "underline"))]


def _cells(strip: str, width: int) -> Iterator[str]:
    total = sum(number for _, number in strip_runs(strip))
    if total <= width:
        for letter, number in strip_runs(strip):
            yield from letter * number
        return
    # Cell k stands for the chunks from k·total/width to (k+1)·total/width.
    share: Counter[str] = Counter()
    at, cell = 0, 0
    for letter, number in strip_runs(strip):
        end = at + number
        while at < end:
            border = (cell + 1) * total // width
            taken = min(end, border) - at
            share[letter] += taken
            at += taken
            if at == border:
                yield share.most_common(1)[0][0]
                share.clear()
                cell += 1


_Order = Callable[[SessionLine], float]
ORDERS: Final[dict[str, _Order | None]] = {
    "activity": None,
    "tokens": lambda row: -row.tokens,
    "device": lambda row: -count_chunks(row.strip, "dbi"),
    "host": lambda row: -count_chunks(row.strip, "hbo"),
    "dropped": lambda row: -count_chunks(row.strip, "xr"),
    "idle": lambda row: -row.idle_s,
}
"""Name → smallest first; None: as the server sends them, those that run first."""
_KEYS: Final = re.compile(r"\x1b(?:\[[0-9;]*[~A-Za-z]|O[A-Za-z])|[\s\S]")
_MOVES: Final = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home", "g": "home",
}  # fmt: skip


@dataclass
class View:
    """Order, filter and place in the list. One writer: the loop that reads keys."""

    order: str = "activity"
    filter: str = ""
    first: int = 0
    """Sessions above the first that is shown."""
    typing: bool = False
    """What is typed goes into the filter."""
    page: int = 10
    """Rows of the list; set by who draws."""
    done: bool = False

    @property
    def wanted(self) -> int:
        """How many sessions to ask for: all where the server's order is not the one to show."""
        if self.order == "activity" and not self.filter:
            return min(self.first + 2 * self.page + 10, MAX_LISTED)
        return MAX_LISTED

    def select(self, rows: Sequence[SessionLine]) -> list[SessionLine]:
        """The rows to show, from the first in order; ``first`` is brought back to where there are any."""
        found = [row for row in rows if self.filter.lower() in _searched(row)] if self.filter else list(rows)
        order = ORDERS[self.order]
        if order is not None:
            found.sort(key=order)
        self.first = max(min(self.first, len(found) - 1), 0)
        return found[self.first :]

    def on_keys(self, typed: str) -> None:
        """Take in what came from the keyboard."""
        for key in keys(typed):
            if self.typing:
                self._type(key)
            else:
                self._command(key)

    def _type(self, key: str) -> None:
        if key == "\x1b":
            self.typing, self.filter = False, ""
        elif key in "\r\n":
            self.typing = False
        elif key in "\x7f\b":
            self.filter = self.filter[:-1]
        elif key == "\x15":
            self.filter = ""
        elif key.isprintable():
            self.filter += key
        self.first = 0

    def _command(self, key: str) -> None:
        if key in "qQ":
            self.done = True
        elif key == "s":
            names = list(ORDERS)
            self.order = names[(names.index(self.order) + 1) % len(names)]
            self.first = 0
        elif key == "/":
            self.typing = True
        elif key == "\x1b":
            self.filter, self.first = "", 0
        elif key in _MOVES:
            steps = {"up": -1, "down": 1, "page up": -self.page, "page down": self.page, "home": -self.first}
            self.first = max(self.first + steps[_MOVES[key]], 0)


def keys(typed: str) -> Iterator[str]:
    """Single keys; a cursor key is one."""
    yield from _KEYS.findall(typed)


def _searched(row: SessionLine) -> str:
    labels = " ".join(f"{key}={value}" for key, value in (row.labels or {}).items())
    return f"{row.session} {row.state} {labels}".lower()


GAP = "   "
LABELS_FROM = 110
"""Columns from which there is room for labels."""
STRIP_LEAST = 8
NAME_MOST = 40


@dataclass(frozen=True, slots=True)
class TopFrame:
    """What is drawn, and how."""

    state: StateDocument
    width: int
    blocks: bool = True
    """Whether the terminal has block characters."""
    gone_s: float | None = None
    """For how long the server has not answered; None: it does."""
    trouble: str = ""
    """Why it does not."""
    whole: bool = False
    """Names and labels are not cut, for what is searched and not looked at; ``width`` is that of the rest."""


def render(look: TopFrame, view: View, height: int | None = None) -> list[Text]:
    """Lines of at most ``look.width`` columns, unless they are ``whole``.

    ``height``: exactly so many, with the keys last; None: a plain page with ``view.page`` sessions, which otherwise
    is set here.
    """
    head = [*_header(look), *_figures(look), *_tiers(look), Text()]
    foot = list(_flow(legend(blocks=look.blocks), look.width, "  "))
    rows = view.select(look.state.sessions.rows)
    if height is None:
        lines = [*head, *_list(look, view, rows[: view.page]), Text(), *foot]
    else:
        if height < len(head) + len(foot) + 9:
            foot = []  # sessions rather than what their letters mean
        view.page = max(height - len(head) - len(foot) - 3, 1)
        body = list(_list(look, view, rows[: view.page]))
        lines = [*head, *body][: max(height - len(foot) - 1, 0)]
        lines += [Text()] * (height - len(foot) - 1 - len(lines))
        lines += [*foot, _keys(view)]
    for line in lines:
        if not look.whole:
            line.truncate(look.width, overflow="ellipsis")
        if look.gone_s is not None and height is not None:
            line.stylize("dim")
    return lines


def _header(look: TopFrame) -> Iterator[Text]:
    server = look.state.server
    machine = " ".join(part for part in (server.device, server.dtype) if part)
    yield from _flow(
        [
            Text(clean(f"pensieve {server.version}", lines=False), "bold"),
            Text(clean(server.model, lines=False)),
            Text(clean(machine, lines=False)),
            Text(clean(f"replica {server.replica}", lines=False)),
            _health(look),
            _door(look),
            Text(time.strftime("%H:%M:%S", time.localtime(look.state.time_s)), "dim"),
        ],
        look.width,
    )
    if look.gone_s is not None:
        yield Text(f"reconnecting…  {look.trouble}, for {output.age(look.gone_s)}", "bold red")


def _health(look: TopFrame) -> Text:
    problem = look.state.server.problem
    if problem:
        return Text(f"not serving: {clean(problem, lines=False)}", "bold red")
    return Text("serving", "green")


def _door(look: TopFrame) -> Text:
    """The HTTP door, where there is one. A restart in the past stays to be seen, as one of the engine does."""
    door = look.state.server.door
    if door is None:
        return Text()
    if door.state == "serving":
        line = Text(clean(f"http {door.address}", lines=False), "green")
    else:
        since = output.age(max(look.state.time_s - door.since_s, 0.0))
        line = Text(clean(f"http {door.address} {door.state} for {since}", lines=False), "bold red")
    if door.restarts:
        line.append(f" ({door.restarts} restart{'s' if door.restarts > 1 else ''})", "red")
    return line


def _figures(look: TopFrame) -> Iterator[Text]:
    state, lately, queue = look.state, look.state.lately, look.state.queue
    received = lately.context.new / lately.over_s if lately.over_s else 0.0
    cells = [
        _pair("turns", f"{lately.turns_per_s:.1f}/s"),
        _pair("tokens in", f"{output.count(received)}/s"),
        _pair("out", f"{output.count(lately.output_tokens_per_s)}/s"),
        _pair("failed", str(lately.failed), "red" if lately.failed else ""),
    ]
    yield from _titled("last minute", cells, look.width)
    yield from _titled(
        "latency",
        [
            _pair("first token", _latency(lately.first_token_s)),
            _pair("per token", _latency(lately.token_s)),
            _pair("in queue", _latency(lately.queue_s)),
        ],
        look.width,
    )
    wait = f" ({output.seconds(queue.expected_wait_s)})" if queue.waiting else ""
    cells = [
        _pair("running", str(queue.running)),
        _pair("queued", str(queue.queued)),
        _pair("turns waiting", f"{queue.waiting}{wait}", "yellow" if queue.waiting else ""),
        _pair("suspensions", output.count(state.totals.get("suspensions_total", 0))),
        _pair("engine restarts", str(state.engine_restarts), "red" if state.engine_restarts else ""),
    ]
    if state.rates is not None:
        cells.insert(3, _pair("steps", f"{output.count(state.rates.steps)}/s"))
    if state.sessions.age_s is None:
        cells.insert(0, Text("no engine", "bold red"))
    yield from _titled("engine", cells, look.width)


def _tiers(look: TopFrame) -> Iterator[Text]:
    state = look.state
    yield from _tier(look, "device", state.device, "blue")
    yield from _tier(look, "host", state.host, "yellow")
    context = state.lately.context
    whole = context.device + context.host + context.recomputed + context.new
    yield from _titled(
        "context",
        [
            Text.assemble((output.share(part, whole), style), f" {word}")
            for part, style, word in (
                (context.device, "blue", "from the device"),
                (context.host, "yellow", "from the host"),
                (context.recomputed, "magenta", "recomputed"),
                (context.new, "bright_blue", "new"),
            )
        ],
        look.width,
    )
    rates = state.rates
    if rates is not None:
        yield from _titled(
            "moved",
            [
                _pair("in", f"{output.byte_size(rates.swap_in_bytes)}/s"),
                _pair("out", f"{output.byte_size(rates.swap_out_bytes)}/s"),
                _pair("dropped", f"{output.count(rates.dropped_tokens)} tokens/s"),
            ],
            look.width,
        )


def _tier(look: TopFrame, name: str, tier: TierState, style: str) -> Iterator[Text]:
    length = max(min(look.width - 60, 60), 6)
    full = round(length * tier.used / tier.capacity) if tier.capacity else 0
    shape, rest = ("█", "░") if look.blocks else ("#", ".")
    numbers = f"{output.share(tier.used, tier.capacity):>5} of {output.count(tier.capacity)} tokens"
    spare = f"{output.count(tier.reclaimable)} reclaimable" if tier.reclaimable else ""
    bar = Text.assemble((shape * min(full, length), style), (rest * (length - full), "dim"))
    yield from _titled(name, [Text.assemble(bar, " ", numbers), Text(spare, "dim")], look.width)


def _list(look: TopFrame, view: View, rows: Sequence[SessionLine]) -> Iterator[Text]:
    sessions = look.state.sessions
    told = f"{sessions.total:,} session{'s' * (sessions.total != 1)}, {sessions.running:,} running, by {view.order}"
    if view.filter:
        told += f", with “{clean(view.filter, lines=False)}”"
    if view.first:
        told += f", from {view.first + 1:,}"
    yield Text(told, "bold")
    if not rows:
        yield Text("none has anything cached" if not view.filter else "none of them", "dim")
        return
    one_tenant = len({row.tenant for row in sessions.rows}) == 1
    names = [_name(row, one_tenant) for row in rows]
    wide = look.whole or look.width >= LABELS_FROM
    name_width = max(cell_len("SESSION"), *map(cell_len, names))
    if not look.whole:
        name_width = min(name_width, NAME_MOST, look.width - STRIP_LEAST - 20)
    beside = look.width - min(name_width, NAME_MOST)
    label_width = beside // 4 if wide else 0
    strip_width = beside - 20 - (label_width + 2 if wide else 0)
    heading = (
        f"{set_cell_size('SESSION', name_width)}  STATE   TOKENS  {set_cell_size('CHUNKS', strip_width)}"
    )
    yield Text(f"{heading}  LABELS" if wide else heading.rstrip(), "dim")
    for row, name in zip(rows, names, strict=True):
        told = clean(row.state, lines=False) if row.state != "idle" else output.age(row.idle_s)
        line = Text(_cut(name, name_width))
        line.append(f"  {told:<7.7}", "" if row.state == "idle" else "green")
        line.append(f"{output.count(row.tokens):>7}  ")
        strip = draw_strip(row.strip, strip_width, blocks=look.blocks)
        line.append_text(strip)
        if wide and row.labels:
            line.append(" " * (strip_width - strip.cell_len + 2))
            line.append(output.labels(row.labels), "dim")
        yield line


def _name(row: SessionLine, one_tenant: bool) -> str:
    name = row.session.removeprefix(f"{row.tenant}/") if one_tenant else row.session
    return clean(name, lines=False)


def _cut(name: str, width: int) -> str:
    """In exactly so many columns; it says so where something is left out."""
    return set_cell_size(name, width) if cell_len(name) <= width else f"{set_cell_size(name, width - 1)}…"


def _keys(view: View) -> Text:
    if view.typing:
        return Text(f"filter: {view.filter}▏ Enter keeps it, Esc drops it", "reverse")
    return Text.assemble(
        ("q", "bold"), " quit  ", ("s", "bold"), f" sort ({view.order})  ", ("/", "bold"), " filter  ",
        ("j k", "bold"), " scroll", style="dim",
    )  # fmt: skip


def _latency(told: Percentiles | None) -> str:
    """The median, and the last percentile that the server tells."""
    if told is None:
        return "–"
    name, high = ("p99", told.p99) if told.p99 is not None else ("p95", told.p95)
    return f"p50 {output.seconds(told.p50)}, {name} {output.seconds(high)}"


def _pair(word: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{word} ", "dim"), (value, style or "bold"))


def _titled(title: str, cells: Iterable[Text], width: int) -> Iterator[Text]:
    """Cells behind a title, and below each other where they do not fit."""
    indent = 13
    cells = [cell for cell in cells if cell.plain]
    if any(indent + cell.cell_len > width for cell in cells):
        # A narrow terminal: rather a line more than a figure that is cut and reads as another.
        yield Text(title, "dim")
        title, indent = "", 2
    for number, line in enumerate(_flow(cells, width - indent)):
        yield Text.assemble((f"{title if number == 0 else '':<{indent}}", "dim"), line)


def _flow(cells: Iterable[Text], width: int, gap: str = GAP) -> Iterator[Text]:
    """Cells beside each other as far as they fit."""
    line = Text()
    for cell in cells:
        if not cell.plain:
            continue
        if line.plain and line.cell_len + len(gap) + cell.cell_len > width:
            yield line
            line = Text()
        if line.plain:
            line.append(gap)
        line.append_text(cell)
    if line.plain:
        yield line
