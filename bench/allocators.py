"""Jenga's allocator beside ours for models whose layers differ: memory in use, and sessions that hit.

    python bench/allocators.py --gib 40 --rounds 12

Sessions return at random, grow by about 1/16 of the mean length a turn, and are replaced at the end. A few run at a
time and take pages by turns. There are 1.6 times as many sessions as have room; the least recently used lose pages.
``drifting``: the mean length of new sessions swings between 2/3 and 3/2 of the given one, three times in a run. The
turns of all allocators are drawn from one seed:

* ``bytes``: only counts bytes, so nothing is wasted.
* ``jenga``: the paper's allocator, sections 4.3 and 5.4. Large pages are the least common multiple of both page
  sizes. Each is associated with a session (the paper: with a request, which would waste more).
* ``jenga, free first``: takes any free small page before it evicts a large page: steps 1, 2, 4, 3, 5.
* ``two ends``: ``PagePool`` with units of 2 MiB of each layer, and moves. ``running stay``: only idle sessions' pages
  move. ``host``: units of one page, no moves.

All free at once what a window has left, and keep one state of an idle session. A session *hits* if it has all pages
that it needs; a running one counts by the share of its context that is computed. *Times whole* divides the sessions
that hit by those that would exactly fill the tier if all layers were kept whole, or a state every 512 tokens;
*computed* is the same if sessions that hit filled the tier. The last line of stdout is one JSON document.
"""

from __future__ import annotations

import heapq
import json
import math
import platform
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Final

import click
from common.provenance import table

from pensieve.engine.cache.pages import PagePool, PageSize, unit_pages_for

CHUNK: Final = 32


@dataclass(frozen=True)
class Shape:
    """Layers and the bytes of a layer's page in both groups. ``window`` 0: the second group has states."""

    full: int
    full_page: int
    other: int
    other_page: int
    window: int
    tokens: int
    every: int = 0
    """Chunks between the states of an idle session; 0: only the newest is kept."""

    @property
    def page_bytes(self) -> tuple[int, int]:
        return self.full * self.full_page, self.other * self.other_page

    def needed(self, chunks: int) -> range:
        """Keys of the second group's slices that a hit needs: chunks, or the number of a state."""
        if not self.other:
            return range(0)
        if self.window:
            return range(max(chunks - self.window // CHUNK - 1, 0), chunks)
        return range(0, chunks, self.every) if self.every else range(1)

    def session_bytes(self, chunks: int) -> int:
        return chunks * self.page_bytes[0] + len(self.needed(chunks)) * self.page_bytes[1]

    def whole(self) -> Shape:
        if self.window:
            return replace(self, full=self.full + self.other, other=0)
        return replace(self, every=512 // CHUNK)


STATE = 32 * 128 * 128 * 4 + 3 * 8192 * 2
SHAPES: Final = {
    "Gemma-3-27B, 8k": Shape(10, 32 * 8192, 52, 32 * 8192, 1024, 8192),
    "Gemma-3-27B, 32k": Shape(10, 32 * 8192, 52, 32 * 8192, 1024, 32768),
    "Ministral-8B, 92k": Shape(9, 32 * 4096, 27, 32 * 4096, 32768, 92 << 10),
    "gpt-oss-120b, 8k": Shape(18, 32 * 2048, 18, 32 * 2048, 128, 8192),
    "Gemma-2-27B, 8k": Shape(23, 32 * 8192, 23, 32 * 8192, 4096, 8192),
    "Qwen3-Next, 8k": Shape(12, 32 * 2048, 36, STATE, 0, 8192),
    "Jamba-52B, 8k": Shape(4, 32 * 4096, 28, 8192 * (16 * 4 + 3 * 2), 0, 8192),
}


class Session:
    def __init__(self, first: int, end: int) -> None:
        self.first, self.chunks, self.end = first, 0, end
        self.pages: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        self.last, self.running = 0, False


class Memory:
    """The sessions by last use, and the pages of each. This allocator only counts bytes."""

    def __init__(self, shape: Shape, size: int) -> None:
        self.shape, self.size, self.used = shape, size, 0
        self.moved = self.most_moved = 0
        """Bytes moved, in all and for one page."""
        self.idle: dict[Session, None] = {}
        """Idle sessions with pages, the least recently used first."""

    def take(self, session: Session, group: int, key: int) -> None:
        session.pages[group][key] = self.place(session, group, key)
        self.used += self.shape.page_bytes[group]

    def drop(self, session: Session, group: int, key: int) -> None:
        self.free(group, session.pages[group].pop(key))
        self.used -= self.shape.page_bytes[group]

    def evict(self) -> None:
        """Take the least recently used session's first chunk or, after the last chunk, all that it has left."""
        session = next(iter(self.idle))
        if session.pages[0]:
            self.drop(session, 0, next(reversed(session.pages[0])))
        else:
            self.close(session)

    def stop(self, session: Session) -> None:
        """Make a session idle. Its first chunk comes last in its dict, where ``evict`` finds it at once."""
        session.running, self.idle[session] = False, None
        ordered = sorted(session.pages[0].items(), reverse=True)
        session.pages[0].clear()
        session.pages[0].update(ordered)

    def close(self, session: Session) -> None:
        """Free all pages of an idle session."""
        for group, pages in enumerate(session.pages):
            for key in list(pages):
                self.drop(session, group, key)
        self.idle.pop(session, None)

    def place(self, session: Session, group: int, key: int) -> Any:
        while self.used + self.shape.page_bytes[group] > self.size:
            self.evict()

    def free(self, group: int, page: Any) -> None:
        pass


class TwoEnds(Memory):
    def __init__(self, shape: Shape, size: int, *, move: str = "any", host: bool = False) -> None:
        super().__init__(shape, size)
        self.move = move
        layers = ((shape.full, shape.full_page), (shape.other, shape.other_page))
        units = [1 if host else unit_pages_for(*layer, size, on_gpu=True) for layer in layers]
        self.pool = PagePool(size, [PageSize(*one, unit) for one, unit in zip(layers, units, strict=True)])
        self.owners: tuple[dict[int, tuple[Session, int]], ...] = ({}, {})

    def place(self, session: Session, group: int, key: int) -> int:
        need, owners, moved = (1 - group, group), self.owners[1 - group], 0
        while not self.pool.fits(*need):
            moves = self.pool.shrink(1 - group, *need, lambda page: self.may_move(owners[page][0]))
            for source, target in moves:
                owner, name = owners[target] = owners.pop(source)
                owner.pages[1 - group][name] = target
            moved += len(moves) * self.shape.page_bytes[1 - group]
            if not moves:
                self.evict()
        self.moved, self.most_moved = self.moved + moved, max(self.most_moved, moved)
        page = self.pool.take(group)
        self.owners[group][page] = session, key
        return page

    def may_move(self, session: Session) -> bool:
        return self.move == "any" or (self.move == "idle" and not session.running)

    def free(self, group: int, page: int) -> None:
        self.pool.put_back(page, group)
        del self.owners[group][page]


class Large:
    """A large page: cut into small pages of one group, and associated with the session that took it."""

    def __init__(self, group: int, session: Session, slots: int) -> None:
        self.group, self.session = group, session
        self.free = list(reversed(range(slots)))
        self.used: dict[int, tuple[Session, int]] = {}

    def rank(self) -> tuple[int, int] | None:
        """The lowest is evicted first: latest use, then longest prefix. None: a running session has a part of it."""
        if any(session.running for session, _ in self.used.values()):
            return None
        return max((session.last, -key) for session, key in self.used.values())


class Jenga(Memory):
    def __init__(self, shape: Shape, size: int, *, free_first: bool = False) -> None:
        super().__init__(shape, size)
        self.large_bytes = math.lcm(*shape.page_bytes)
        self.empty = list(range(size // self.large_bytes, 0, -1))
        """Numbers from 1. Each step of ``place`` returns 0 if it finds nothing."""
        self.larges: dict[int, Large] = {}
        self.holes: defaultdict[tuple[Session | None, int], dict[int, None]] = defaultdict(dict)
        """Large pages with free small pages, by session and group, and by group with None."""
        self.order: list[tuple[tuple[int, int], int]] = []
        """A heap of evictable large pages by rank. Some entries are out of date."""
        self.changed: set[int] = set()
        """Large pages whose rank may not be in ``order``."""
        self.free_first = free_first

    def place(self, session: Session, group: int, key: int) -> tuple[int, int]:
        number = self.hole(session, group) or self.empty_page(session, group)
        if self.free_first:
            number = number or self.hole(None, group)
        number = number or self.evicted_large(session, group) or self.hole(None, group)
        number = number or self.evicted_small(session, group)
        large = self.larges[number]
        slot = large.free.pop()
        large.used[slot] = session, key
        if not large.free:
            del self.holes[large.session, group][number], self.holes[None, group][number]
        return number, slot

    def hole(self, session: Session | None, group: int) -> int:
        return next(iter(self.holes[session, group]), 0)

    def empty_page(self, session: Session, group: int) -> int:
        if not self.empty:
            return 0
        number = self.empty.pop()
        self.larges[number] = Large(group, session, self.large_bytes // self.shape.page_bytes[group])
        self.holes[session, group][number] = self.holes[None, group][number] = None
        return number

    def evicted_large(self, session: Session, group: int) -> int:
        for number in self.changed & self.larges.keys():
            if rank := self.larges[number].rank():
                heapq.heappush(self.order, (rank, number))
        self.changed.clear()
        while self.order and not self.empty:
            rank, number = heapq.heappop(self.order)
            large = self.larges.get(number)
            if large and large.rank() == rank:
                for owner, key in list(large.used.values()):
                    self.drop(owner, large.group, key)
        return self.empty_page(session, group)

    def evicted_small(self, session: Session, group: int) -> int:
        victim = next(one for one in self.idle if one.pages[group])
        key = max(victim.pages[group])
        number = victim.pages[group][key][0]
        self.drop(victim, group, key)
        return number if number in self.larges else self.empty_page(session, group)

    def free(self, group: int, page: tuple[int, int]) -> None:
        number, slot = page
        large = self.larges[number]
        del large.used[slot]
        large.free.append(slot)
        self.holes[large.session, group][number] = self.holes[None, group][number] = None
        self.changed.add(number)
        if not large.used:
            del self.holes[large.session, group][number], self.holes[None, group][number], self.larges[number]
            self.empty.append(number)

    def stop(self, session: Session) -> None:
        super().stop(session)
        self.changed.update(page[0] for pages in session.pages for page in pages.values())


def turn(memory: Memory, session: Session, growth: int) -> Iterator[None]:
    """Compute what is missing and ``growth`` chunks more; yields after every four chunks."""
    shape, (full, other) = memory.shape, session.pages
    memory.idle.pop(session, None)
    session.running = True
    session.chunks = min(session.chunks + growth, session.end)
    if shape.other and not shape.window:
        memory.take(session, 1, -1)  # the state that the turn updates in place
    for count, chunk in enumerate(chunk for chunk in range(session.chunks) if chunk not in full):
        memory.take(session, 0, chunk)
        if shape.window and shape.other and chunk not in other:
            memory.take(session, 1, chunk)
            if (behind := chunk - shape.window // CHUNK - 1) in other:
                memory.drop(session, 1, behind)
        if count % 4 == 3:
            yield
    needed = shape.needed(session.chunks)
    for key in [key for key in other if key not in needed]:
        memory.drop(session, 1, key)
    for key in needed:
        if key not in other:
            memory.take(session, 1, key)


def hits(shape: Shape, session: Session) -> bool:
    full, other = session.pages
    return 0 < len(full) == session.chunks and all(key in other for key in shape.needed(session.chunks))


def new_session(rng: random.Random, tokens: float) -> Session:
    """A session that will have about ``tokens`` tokens on average."""
    first = int(tokens / CHUNK * rng.uniform(0.5, 1.0))
    return Session(first, int(2 * tokens / CHUNK) - first)


def simulate(memory: Memory, rounds: int, *, drift: bool) -> dict[str, float]:
    """Return sums over the second half of ``rounds`` turns of each session."""
    rng, shape = random.Random(1), memory.shape
    fit = memory.size / shape.session_bytes(shape.tokens // CHUNK)
    at_once = max(1, min(4, int(fit / 6)))
    sessions = [new_session(rng, shape.tokens) for _ in range(int(1.6 * fit) + at_once)]
    turns, every = rounds * len(sessions), max(1, len(sessions) // 8)
    running: dict[Session, Iterator[None]] = {}
    done = 0
    sums: defaultdict[str, float] = defaultdict(float)
    while done < turns:
        while len(running) < at_once:
            place = rng.randrange(len(sessions))
            session, growth = sessions[place], max(1, round(rng.expovariate(16 * CHUNK / shape.tokens)))
            if session in running:
                continue
            if session.chunks == session.end:
                memory.close(session)
                swing = 1.5 ** math.sin(done / turns * 6 * math.pi) if drift else 1
                session = sessions[place] = new_session(rng, shape.tokens * swing)
            elif session.chunks and done > turns / 2:
                sums["returned"] += 1
                sums["hit"] += hits(shape, session)
            running[session] = turn(memory, session, growth if session.chunks else session.first)
        for session, steps in list(running.items()):
            if next(steps, steps) is not steps:
                continue
            del running[session]
            done += 1
            session.last = done
            memory.stop(session)
            if done > turns / 2 and done % every == 0:
                sums["samples"] += 1
                sums["in use"] += memory.used / memory.size
                for one in sessions:
                    share = len(one.pages[0]) / max(one.chunks, 1) if one in running else hits(shape, one)
                    sums["hits"] += share
                    sums["whole"] += share * shape.whole().session_bytes(one.chunks) / memory.size
                    sums["needed"] += share * shape.session_bytes(one.chunks) / memory.size
    return {**sums, "turns": turns}


ALLOCATORS: Final[dict[str, Callable[[Shape, int], Memory]]] = {
    "bytes": Memory,
    "jenga": Jenga,
    "jenga, free first": partial(Jenga, free_first=True),
    "two ends": TwoEnds,
    "two ends, running stay": partial(TwoEnds, move="idle"),
    "two ends, no moves": partial(TwoEnds, move=""),
    "two ends, host": partial(TwoEnds, move="", host=True),
}


def compare(name: str, drift: bool, size: int, rounds: int) -> list[dict[str, Any]]:
    """Return a row for each allocator."""
    shape, rows = SHAPES[name], []
    for kind, make in ALLOCATORS.items():
        memory = make(shape, size)
        sums = simulate(memory, rounds, drift=drift)
        row: dict[str, Any] = {"model": name, "lengths": "drifting" if drift else "steady", "allocator": kind}
        row["in use %"] = round(100 * sums["in use"] / sums["samples"], 1)
        row["sessions that hit"] = round(sums["hits"] / sums["samples"], 1)
        row["times whole"] = round(sums["whole"] / sums["samples"], 2)
        row["computed"] = round(sums["whole"] / sums["needed"], 2)
        row["returns that hit %"] = round(100 * sums["hit"] / sums["returned"], 1)
        row["MiB moved a turn"] = round(memory.moved / sums["turns"] / 2**20, 1)
        row["most at once"] = round(memory.most_moved / 2**20)
        rows.append(row)
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--gib", default=40, help="Size of the tier.")
@click.option("--rounds", default=12, help="Turns of each session on average; the second half counts.")
@click.option("--model", "models", multiple=True, type=click.Choice(list(SHAPES)), default=list(SHAPES))
@click.option("--processes", default=2)
def main(gib: int, rounds: int, models: tuple[str, ...], processes: int) -> None:
    """Print a table in Markdown and one JSON document."""
    with ProcessPoolExecutor(processes) as executor:
        tasks = [(name, drift) for name in models for drift in (False, True)]
        runs = [executor.submit(compare, *task, gib << 30, rounds) for task in tasks]
        rows = [row for run in runs for row in run.result()]
    print("\n".join(table(rows)))
    print(json.dumps({"gib": gib, "rounds": rounds, "python": platform.python_version(), "rows": rows}))


if __name__ == "__main__":
    main()
