"""Loads in which contexts have a common beginning, and what is measured of a server that meets them."""

from __future__ import annotations

import asyncio
import random
import resource
import statistics
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from sharing.clients import Answer, Client, Context, Draw

LOWEST_ID = 3
"""Of random tokens; those below mean something to tokenizers."""
POLL_S = 0.2
"""How often a server is asked how much memory it uses."""
Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens and numbers of all loads."""

    vocabulary: int = 32000
    system_prompt: int = 2048
    sessions: int = 256
    user_turn: tuple[int, int] = (64, 256)
    answer: int = 128
    rate: float = 24.0
    """Sessions per second of the stream."""
    parents: int = 16
    parent: int = 8192
    forks: int = 8
    fork_turn: int = 64
    requests: int = 32
    request_context: int = 2048
    candidates: int = 8


SMALL = Sizes(2000, 96, 6, (8, 20), 6, 8.0, 2, 160, 3, 8, 3, 64, 2)
"""For a CPU: only shows that it runs."""


@dataclass(slots=True)
class Trial:
    """One load on one server, while it is played."""

    client: Client
    sizes: Sizes
    dice: random.Random
    contexts: list[Context] = field(default_factory=list)
    turns: list[tuple[float, Answer, float]] = field(default_factory=list)
    """(arrival, answer, end)"""
    failures: list[str] = field(default_factory=list)
    begun: float = 0.0
    ended: float = 0.0
    used: list[float] = field(default_factory=list)
    client_cpu_s: float = 0.0
    unread: str = ""
    """Why memory in use could not be read, the last time that it could not."""

    def tokens(self, count: int) -> list[int]:
        """Fresh ids: no server has seen them."""
        return [self.dice.randrange(LOWEST_ID, self.sizes.vocabulary) for _ in range(count)]

    async def begin(self, history: Sequence[int], *, shared: bool = True) -> Context:
        context = await self.client.begin(history, shared=shared)
        self.contexts.append(context)
        return context

    async def fork(self, context: Context) -> Context:
        forked = await self.client.fork(context)
        self.contexts.append(forked)
        return forked

    async def timed(self, turn: Callable[[], Awaitable[Answer]]) -> None:
        """A turn that counts, from now on: sessions that it makes for itself are in its time."""
        arrival = time.perf_counter()
        try:
            answer = await turn()
        except Exception as failure:
            self.failures.append(f"{type(failure).__name__}: {str(failure)[:300]}")
        else:
            self.turns.append((arrival, answer, time.perf_counter()))

    @asynccontextmanager
    async def measured(self) -> AsyncIterator[None]:
        """What counts for turns/s, memory in use and the client's own processor time."""
        watcher = asyncio.create_task(self._watch())
        cpu, self.begun = _cpu_s(), time.perf_counter()
        try:
            yield
        finally:
            self.ended = time.perf_counter()
            self.client_cpu_s = _cpu_s() - cpu
            watcher.cancel()
            await asyncio.gather(watcher, return_exceptions=True)

    async def _watch(self) -> None:
        while True:
            try:
                self.used.append(await asyncio.to_thread(self.client.used_tokens))
            except (OSError, LookupError, ValueError) as failure:
                self.unread = repr(failure)[:300]
            await asyncio.sleep(POLL_S)

    def row(self) -> Row:
        """What came of it. Seconds; tokens."""
        wall = max(self.ended - self.begun, 1e-9)
        answers = [answer for _, answer, _ in self.turns]
        cached = [answer.cached for answer in answers if answer.cached is not None]
        return {
            "turns": len(self.turns), "failures": self.failures[:5], "failed": len(self.failures), "wall_s": wall,
            "turns_per_s": len(self.turns) / wall, "output_tokens_per_s": sum(a.tokens for a in answers) / wall,
            "first_token_s": spread([answer.first - arrival for arrival, answer, _ in self.turns]),
            "all_first_s": spread([answer.all_first - arrival for arrival, answer, _ in self.turns]),
            "turn_s": spread([end - arrival for arrival, _, end in self.turns]),
            "kv_peak_tokens": max(self.used, default=None), "kv_samples": len(self.used),
            "kv_unread": self.unread,
            "cached_tokens_mean": statistics.fmean(cached) if cached else None,
            "client_cpu": self.client_cpu_s / wall,
        }  # fmt: skip


def _cpu_s() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 95th percentile (of what was measured, not between); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered), "p50": ordered[(len(ordered) - 1) // 2],
        "p95": ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)],
    }  # fmt: skip


async def prompt_at_once(trial: Trial, *, warm: bool, shared: bool = True) -> None:
    """Sessions with one system prompt and a turn of their own each, all at the same moment. ``warm``: one had a turn
    before."""
    sizes = trial.sizes
    prompt, users = trial.tokens(sizes.system_prompt), _user_turns(trial)
    if warm:
        await _one_before(trial, prompt)
    async with trial.measured():
        await asyncio.gather(*(trial.timed(_new_session(trial, prompt, user, shared)) for user in users))


async def prompt_open(trial: Trial) -> None:
    """The same, one had a turn before and the sessions were made before: what a turn alone takes."""
    prompt, users = trial.tokens(trial.sizes.system_prompt), _user_turns(trial)
    await _one_before(trial, prompt)
    opened = [await trial.begin(prompt) for _ in users]

    def turn(context: Context, user: Sequence[int]) -> Callable[[], Awaitable[Answer]]:
        return lambda: trial.client.turn(context, user, Draw(trial.sizes.answer))

    async with trial.measured():
        await asyncio.gather(*(trial.timed(turn(*one)) for one in zip(opened, users, strict=True)))


async def prompt_stream(trial: Trial) -> None:
    """The same, one had a turn before, and they arrive as a Poisson process."""
    sizes = trial.sizes
    prompt, users = trial.tokens(sizes.system_prompt), _user_turns(trial)
    pauses = [trial.dice.expovariate(sizes.rate) for _ in users]
    await _one_before(trial, prompt)

    async def arrive(at: float, user: Sequence[int]) -> None:
        await asyncio.sleep(max(0.0, at - time.perf_counter()))
        await trial.timed(_new_session(trial, prompt, user, True))

    async with trial.measured():
        at, tasks = time.perf_counter(), []
        for pause, user in zip(pauses, users, strict=True):
            at += pause
            tasks.append(asyncio.create_task(arrive(at, user)))
        await asyncio.gather(*tasks)


async def agents(trial: Trial) -> None:
    """Long sessions, each forked many ways at the same moment, with a turn on every fork."""
    sizes = trial.sizes
    parents = await _had_a_turn(trial, sizes.parents, sizes.parent)
    asked = [(parent, trial.tokens(sizes.fork_turn)) for parent in parents for _ in range(sizes.forks)]

    def branch(parent: Context, new: Sequence[int]) -> Callable[[], Awaitable[Answer]]:
        async def turn() -> Answer:
            return await trial.client.turn(await trial.fork(parent), new, Draw(sizes.answer))

        return turn

    async with trial.measured():
        await asyncio.gather(*(trial.timed(branch(parent, new)) for parent, new in asked))


async def candidates(trial: Trial, *, seeded: bool) -> None:
    """Sessions whose next turn draws many answers, all at the same moment."""
    sizes = trial.sizes
    contexts = await _had_a_turn(trial, sizes.requests, sizes.request_context)
    asked = [(context, trial.tokens(sizes.fork_turn)) for context in contexts]

    def many(number: int, context: Context, new: Sequence[int]) -> Callable[[], Awaitable[Answer]]:
        seed = 1000 * number if seeded else None
        return lambda: trial.client.turn(context, new, Draw(sizes.answer, sizes.candidates, 1.0, seed))

    async with trial.measured():
        await asyncio.gather(*(trial.timed(many(number, *one)) for number, one in enumerate(asked)))


async def warm_up(trial: Trial) -> None:
    """A little of everything, so that no kernel is compiled while it is measured."""
    sizes = trial.sizes
    prompt = trial.tokens(sizes.system_prompt)
    async with trial.measured():
        for count in (1, min(48, sizes.sessions)):
            users = [trial.tokens(number) for number in (*sizes.user_turn, sizes.fork_turn)]
            await asyncio.gather(
                *(trial.timed(_new_session(trial, prompt, users[n % 3], True)) for n in range(count))
            )
        (parent,) = await _had_a_turn(trial, 1, sizes.request_context)
        child = await trial.fork(parent)
        for draw in (Draw(sizes.answer), Draw(sizes.answer, sizes.candidates, 1.0, 5)):
            new = trial.tokens(sizes.fork_turn)
            await trial.timed(
                lambda draw=draw, new=new: trial.client.turn(child, new, draw, goes_on=draw.count == 1)
            )


LOADS: dict[str, Callable[[Trial], Awaitable[None]]] = {
    "prompt, cold": lambda trial: prompt_at_once(trial, warm=False),
    "prompt, warm": lambda trial: prompt_at_once(trial, warm=True),
    "prompt, open": prompt_open,
    "prompt, stream": prompt_stream,
    "agents": agents,
    "candidates, seeded": lambda trial: candidates(trial, seeded=True),
    "candidates, unseeded": lambda trial: candidates(trial, seeded=False),
    "prompt, cold, sharing off": lambda trial: prompt_at_once(trial, warm=False, shared=False),
}
"""By name; the last one is for Pensieve alone."""


def _user_turns(trial: Trial) -> list[list[int]]:
    return [trial.tokens(trial.dice.randint(*trial.sizes.user_turn)) for _ in range(trial.sizes.sessions)]


async def _one_before(trial: Trial, prompt: Sequence[int]) -> None:
    first = await trial.begin(prompt)
    await trial.client.turn(first, trial.tokens(trial.sizes.user_turn[0]), Draw(trial.sizes.answer))


def _new_session(
    trial: Trial, prompt: Sequence[int], user: Sequence[int], shared: bool
) -> Callable[[], Awaitable[Answer]]:
    async def turn() -> Answer:
        context = await trial.begin(prompt, shared=shared)
        return await trial.client.turn(context, user, Draw(trial.sizes.answer))

    return turn


async def _had_a_turn(trial: Trial, count: int, tokens: int) -> list[Context]:
    """Contexts of so many tokens, the last 16 of them an answer."""
    asked = [(await trial.begin(trial.tokens(tokens - 32)), trial.tokens(16)) for _ in range(count)]
    await asyncio.gather(*(trial.client.turn(context, new, Draw(16), goes_on=True) for context, new in asked))
    return [context for context, _ in asked]
