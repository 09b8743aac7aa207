"""A server's state as lines of text, for any width. Pure, so it is tested without a terminal.

``View`` selects the sessions to show, and keys change it. A session's chunks are a row of characters; shapes
and colours say the same.
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

CHUNK_STYLES: Final[dict[str, tuple[str, str, str]]] = {
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
ASCII_LETTERS: Final = {"█": "d", "▓": "b", "▒": "h", "·": "x"}
"""The feed's own letters, for terminals without block characters."""
_RUN: Final = re.compile(r"([a-zA-Z])(\d+)")


def strip_runs(strip: str) -> Iterator[tuple[str, int]]:
    """Parse ``x7h40B3`` into letters and counts of chunks."""
    for found in _RUN.finditer(strip):
        yield found[1], int(found[2])


@lru_cache(maxsize=1 << 15)
def count_chunks(strip: str, places: str) -> int:
    """Count the chunks at these places, shared ones included. Cached: most strips repeat at the next update."""
    wanted = places + places.upper()
    return sum(int(number) for letter, number in _RUN.findall(strip) if letter in wanted)


def draw_strip(strip: str, width: int, *, blocks: bool = True) -> Text:
    """Draw one character per chunk if they fit, otherwise one per group of chunks, by majority."""
    text = Text()
    for letter in _cells(strip, width):
        shape, style, _ = CHUNK_STYLES.get(letter.lower(), ("?", "", ""))
        text.append(
            shape if blocks else ASCII_LETTERS.get(shape, shape),
            f"{style} underline" if letter.isupper() else style,
        )
    return text


def legend(*, blocks: bool = True) -> list[Text]:
    words = []
    for shape, style, word in CHUNK_STYLES.values():
        words.append(Text.assemble((shape if blocks else ASCII_LETTERS.get(shape, shape), style), f" {word}"))
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
"""Name → sort key, smallest first. None: the server's order, running sessions first."""
_KEYS: Final = re.compile(r"\x1b(?:\[[0-9;]*[~A-Za-z]|O[A-Za-z])|[\s\S]")
_MOVES: Final = {
    "\x1b[A": "up", "\x1bOA": "up", "k": "up", "\x1b[B": "down", "\x1bOB": "down", "j": "down",
    "\x1b[5~": "page up", "\x1b[6~": "page down", " ": "page down",
    "\x1b[H": "home", "\x1bOH": "home", "\x1b[1~": "home", "g": "home",
}  # fmt: skip


@dataclass
class View:
    """Order, filter and scroll position of the list. Only the loop that reads keys writes it."""

    order: str = "activity"
    filter: str = ""
    first: int = 0
    """Number of sessions above the first one shown."""
    typing: bool = False
    page: int = 10
    """Rows of the list; set when drawing."""
    done: bool = False

    @property
    def wanted(self) -> int:
        """Number of sessions to request: all if the list is not in the server's order."""
        if self.order == "activity" and not self.filter:
            return min(self.first + 2 * self.page + 10, MAX_LISTED)
        return MAX_LISTED

    def select(self, rows: Sequence[SessionLine]) -> list[SessionLine]:
        """Return the rows to show. Moves ``first`` back if it is beyond the end."""
        found = [row for row in rows if self.filter.lower() in _searched(row)] if self.filter else list(rows)
        order = ORDERS[self.order]
        if order is not None:
            found.sort(key=order)
        self.first = max(min(self.first, len(found) - 1), 0)
        return found[self.first :]

    def on_keys(self, typed: str) -> None:
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
    """Split input into keys; a cursor key is one."""
    yield from _KEYS.findall(typed)


def _searched(row: SessionLine) -> str:
    labels = " ".join(f"{key}={value}" for key, value in (row.labels or {}).items())
    return f"{row.session} {row.state} {labels}".lower()


GAP = "   "
LABELS_FROM = 110
MIN_STRIP_WIDTH = 8
MAX_NAME_WIDTH = 40


@dataclass(frozen=True, slots=True)
class TopFrame:
    state: StateDocument
    width: int
    blocks: bool = True
    """Whether the terminal has block characters."""
    gone_s: float | None = None
    """Seconds since the server stopped answering; None while it answers."""
    trouble: str = ""
    whole: bool = False
    """Do not cut names and labels, for output that is searched rather than viewed; ``width`` applies to the rest."""


def render(frame: TopFrame, view: View, height: int | None = None) -> list[Text]:
    """Return lines of at most ``frame.width`` columns, unless ``whole``.

    ``height``: return exactly this many lines, the keys last, and set ``view.page``. None: a plain page with
    ``view.page`` sessions.
    """
    head = [*_header(frame), *_figures(frame), *_tiers(frame), Text()]
    foot = list(_flow(legend(blocks=frame.blocks), frame.width, "  "))
    rows = view.select(frame.state.sessions.rows)
    if height is None:
        lines = [*head, *_list(frame, view, rows[: view.page]), Text(), *foot]
    else:
        if height < len(head) + len(foot) + 9:
            foot = []  # drop the legend in favour of sessions
        view.page = max(height - len(head) - len(foot) - 3, 1)
        body = list(_list(frame, view, rows[: view.page]))
        lines = [*head, *body][: max(height - len(foot) - 1, 0)]
        lines += [Text()] * (height - len(foot) - 1 - len(lines))
        lines += [*foot, _keys(view)]
    for line in lines:
        if not frame.whole:
            line.truncate(frame.width, overflow="ellipsis")
        if frame.gone_s is not None and height is not None:
            line.stylize("dim")
    return lines


def _header(frame: TopFrame) -> Iterator[Text]:
    server = frame.state.server
    forms = ((server.weights, "weights"), (server.kv, "KV"))
    others = [f"{form} {what}" for form, what in forms if form not in ("", server.dtype)]
    machine = ", ".join(filter(None, (f"{server.device} {server.dtype}".strip(), *others)))
    yield from _flow(
        [
            Text(clean(f"pensieve {server.version}", lines=False), "bold"),
            Text(clean(server.model, lines=False)),
            Text(clean(machine, lines=False)),
            Text(clean(f"replica {server.replica}", lines=False)),
            _health(frame),
            _http_state(frame),
            Text(time.strftime("%H:%M:%S", time.localtime(frame.state.time_s)), "dim"),
        ],
        frame.width,
    )
    if frame.gone_s is not None:
        yield Text(f"reconnecting…  {frame.trouble}, for {output.age(frame.gone_s)}", "bold red")


def _health(frame: TopFrame) -> Text:
    problem = frame.state.server.problem
    if problem:
        return Text(f"not serving: {clean(problem, lines=False)}", "bold red")
    return Text("serving", "green")


def _http_state(frame: TopFrame) -> Text:
    """The HTTP API's state, if it is on. A past restart stays visible, as for the engine."""
    door = frame.state.server.door
    if door is None:
        return Text()
    if door.state == "serving":
        line = Text(clean(f"http {door.address}", lines=False), "green")
    else:
        since = output.age(max(frame.state.time_s - door.since_s, 0.0))
        line = Text(clean(f"http {door.address} {door.state} for {since}", lines=False), "bold red")
    if door.restarts:
        line.append(f" ({door.restarts} restart{'s' if door.restarts > 1 else ''})", "red")
    return line


def _figures(frame: TopFrame) -> Iterator[Text]:
    state, lately, queue = frame.state, frame.state.lately, frame.state.queue
    received = lately.context.new / lately.over_s if lately.over_s else 0.0
    cells = [
        _pair("turns", f"{lately.turns_per_s:.1f}/s"),
        _pair("tokens in", f"{output.count(received)}/s"),
        _pair("out", f"{output.count(lately.output_tokens_per_s)}/s"),
        _pair("failed", str(lately.failed), "red" if lately.failed else ""),
    ]
    yield from _titled("last minute", cells, frame.width)
    yield from _titled(
        "latency",
        [
            _pair("first token", _latency(lately.first_token_s)),
            _pair("per token", _latency(lately.token_s)),
            _pair("in queue", _latency(lately.queue_s)),
        ],
        frame.width,
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
    yield from _titled("engine", cells, frame.width)


def _tiers(frame: TopFrame) -> Iterator[Text]:
    state = frame.state
    yield from _tier(frame, "device", state.device, "blue")
    memory = state.device_memory
    if memory.is_elastic:
        sizes = [
            ("held", memory.held),
            ("wanted", memory.wanted),
            ("floor", memory.floor),
            ("ceiling", memory.ceiling),
        ]
        yield from _titled(
            "memory", [_pair(name, output.binary_size(size)) for name, size in sizes], frame.width
        )
    yield from _tier(frame, "host", state.host, "yellow")
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
        frame.width,
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
            frame.width,
        )


def _tier(frame: TopFrame, name: str, tier: TierState, style: str) -> Iterator[Text]:
    length = max(min(frame.width - 60, 60), 6)
    full = round(length * tier.used / tier.capacity) if tier.capacity else 0
    shape, rest = ("█", "░") if frame.blocks else ("#", ".")
    numbers = f"{output.share(tier.used, tier.capacity):>5} of {output.count(tier.capacity)} tokens"
    spare = f"{output.count(tier.reclaimable)} reclaimable" if tier.reclaimable else ""
    bar = Text.assemble((shape * min(full, length), style), (rest * (length - full), "dim"))
    yield from _titled(name, [Text.assemble(bar, " ", numbers), Text(spare, "dim")], frame.width)


def _list(frame: TopFrame, view: View, rows: Sequence[SessionLine]) -> Iterator[Text]:
    sessions = frame.state.sessions
    heading = f"{sessions.total:,} session{'s' * (sessions.total != 1)}, {sessions.running:,} running, by {view.order}"
    if view.filter:
        heading += f", with “{clean(view.filter, lines=False)}”"
    if view.first:
        heading += f", from {view.first + 1:,}"
    yield Text(heading, "bold")
    if not rows:
        yield Text("no session has cached chunks" if not view.filter else "no session matches", "dim")
        return
    one_tenant = len({row.tenant for row in sessions.rows}) == 1
    names = [_name(row, one_tenant) for row in rows]
    wide = frame.whole or frame.width >= LABELS_FROM
    name_width = max(cell_len("SESSION"), *map(cell_len, names))
    if not frame.whole:
        name_width = min(name_width, MAX_NAME_WIDTH, frame.width - MIN_STRIP_WIDTH - 20)
    beside = frame.width - min(name_width, MAX_NAME_WIDTH)
    label_width = beside // 4 if wide else 0
    strip_width = beside - 20 - (label_width + 2 if wide else 0)
    heading = (
        f"{set_cell_size('SESSION', name_width)}  STATE   TOKENS  {set_cell_size('CHUNKS', strip_width)}"
    )
    yield Text(f"{heading}  LABELS" if wide else heading.rstrip(), "dim")
    for row, name in zip(rows, names, strict=True):
        state = clean(row.state, lines=False) if row.state != "idle" else output.age(row.idle_s)
        line = Text(_cut(name, name_width))
        line.append(f"  {state:<7.7}", "" if row.state == "idle" else "green")
        line.append(f"{output.count(row.tokens):>7}  ")
        tail = _tail(row.tail)
        strip = draw_strip(row.strip, strip_width - len(tail), blocks=frame.blocks)
        line.append_text(strip)
        line.append(tail, "dim")
        if wide and row.labels:
            line.append(" " * (strip_width - strip.cell_len - len(tail) + 2))
            line.append(output.labels(row.labels), "dim")
        yield line


def _tail(tail: str) -> str:
    """Return the numbers of slices of windows or states on the device and on the host: `` +33/2``; "" without any."""
    device, host = count_chunks(tail, "db"), count_chunks(tail, "h")
    return f" +{device}/{host}" if device or host else ""


def _name(row: SessionLine, one_tenant: bool) -> str:
    name = row.session.removeprefix(f"{row.tenant}/") if one_tenant else row.session
    return clean(name, lines=False)


def _cut(name: str, width: int) -> str:
    """Fit a name into exactly ``width`` columns; an ellipsis marks a cut."""
    return set_cell_size(name, width) if cell_len(name) <= width else f"{set_cell_size(name, width - 1)}…"


def _keys(view: View) -> Text:
    if view.typing:
        return Text(f"filter: {view.filter}▏ Enter keeps it, Esc clears it", "reverse")
    return Text.assemble(
        ("q", "bold"), " quit  ", ("s", "bold"), f" sort ({view.order})  ", ("/", "bold"), " filter  ",
        ("j k", "bold"), " scroll", style="dim",
    )  # fmt: skip


def _latency(times: Percentiles | None) -> str:
    """Format the median and the highest percentile that the server reports."""
    if times is None:
        return "–"
    name, high = ("p99", times.p99) if times.p99 is not None else ("p95", times.p95)
    return f"p50 {output.seconds(times.p50)}, {name} {output.seconds(high)}"


def _pair(word: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{word} ", "dim"), (value, style or "bold"))


def _titled(title: str, cells: Iterable[Text], width: int) -> Iterator[Text]:
    """Lay out cells after a title, wrapped to several lines if needed."""
    indent = 13
    cells = [cell for cell in cells if cell.plain]
    if any(indent + cell.cell_len > width for cell in cells):
        # A narrow terminal: use another line rather than cut a figure, which would then read as a smaller one.
        yield Text(title, "dim")
        title, indent = "", 2
    for number, line in enumerate(_flow(cells, width - indent)):
        yield Text.assemble((f"{title if number == 0 else '':<{indent}}", "dim"), line)


def _flow(cells: Iterable[Text], width: int, gap: str = GAP) -> Iterator[Text]:
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
