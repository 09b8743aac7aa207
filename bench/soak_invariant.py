"""Turns of a busy ``serve --invariant`` with small tiers, each repeated by ``serve --stateless --invariant``.

    python bench/soak_invariant.py --device cuda --shape llama-2-13b-gqa10 --sessions 64 --clients 16 \\
        --longest 1500 --outputs 48 --device-cache 16384tokens --host-cache 12288tokens
    python bench/soak_invariant.py --minutes 1 --dtype float32 --longest 300 --outputs 5 --sessions 12 --clients 4 \\
        --device-cache 800tokens --host-cache 640tokens

The load is that of ``bench/soak/soak.py``, with edits, forks, candidates, and greedy and drawn answers. The stateless
server repeats each conversation from its beginning: the same texts, seeds and choices. The report counts the tokens and
log-probabilities that differ, and the tokens of context by the place in which the first server found them. The program
fails if anything differs, or if one of the ways to restore a context was never taken.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import click
import dummy_model
from common.provenance import commit, gpu_name, portable, table, write_report
from soak.soak import INPUT_WORDS, Soak

from pensieve import AsyncClient, PensieveError
from pensieve.client import AsyncSession, Turn
from pensieve.client.arguments import TurnOptions
from pensieve.core import TokenLogprob
from pensieve.spawn import ServerProcess, serving

PROGRESS_S = 10.0
EDITS, FORKS, CANDIDATES, DRAWN = 0.1, 0.1, 0.15, 0.6
"""Fractions of the turns."""
BEGINNINGS = 3
WORD_TOKENS = 3
"""Tokens of an average input word, with the demo model's tokenizer."""


@dataclass(frozen=True, slots=True)
class Step:
    """One turn: how to ask for it, and the answer of the first server."""

    text: str
    options: TurnOptions
    chosen: int
    """The candidate that becomes the answer."""
    turn: Turn

    @staticmethod
    async def run(session: AsyncSession, text: str, options: TurnOptions, chosen: int) -> Turn:
        turn = await session.send(text, **options)
        if chosen:
            await session.choose(turn, chosen)
        return turn


@dataclass(slots=True)
class Talk:
    """One conversation of the first server, and its steps that the stateless one has yet to repeat."""

    steps: asyncio.Queue[Step | tuple[Talk, int] | None] = field(default_factory=asyncio.Queue)
    """Turns, forks after an item, and None at the end."""
    answers: list[int] = field(default_factory=list)
    """Items of the live history that are answers."""


@dataclass(slots=True)
class Compared:
    """Values of the two servers, and how many of them are not the same."""

    turns: int = 0
    answers: int = 0
    tokens: int = 0
    logprobs: int = 0
    differing_turns: int = 0
    differing_tokens: int = 0
    differing_logprobs: int = 0
    not_comparable: int = 0
    """Later turns of a conversation in which something differs: their histories are not the same."""
    numerics: set[str] = field(default_factory=set)
    """Names of what computed the answers."""

    def compare(self, turn: Turn, again: Turn) -> bool:
        """Count the values of a turn; whether all are the same."""
        differing = 0
        for one, other in zip(_answers(turn), _answers(again), strict=True):
            self.answers += 1
            tokens, logprobs = _differing(one[0], other[0]), _differing(_values(one[1]), _values(other[1]))
            self.tokens += len(one[0])
            self.logprobs += len(_values(one[1]))
            self.differing_tokens += tokens
            self.differing_logprobs += logprobs
            differing += tokens + logprobs
        self.turns += 1
        self.numerics |= {turn.numerics, again.numerics}
        self.differing_turns += bool(differing)
        return not differing


def _answers(turn: Turn) -> list[tuple[tuple[int, ...], tuple[TokenLogprob, ...]]]:
    return [(one.token_ids, one.logprobs) for one in turn.candidates or (turn,)]


def _values(logprobs: Sequence[TokenLogprob]) -> list[tuple[int, float]]:
    return [pair for one in logprobs for pair in ((one.token_id, one.logprob), *one.top)]


def _differing(one: Sequence[object], other: Sequence[object]) -> int:
    return sum(a != b for a, b in zip(one, other, strict=False)) + abs(len(one) - len(other))


@dataclass
class Beginnings(Soak):
    """A soak whose conversations have one of a few beginnings in common."""

    def _system_prompt(self) -> str:
        self.begun += 1
        number = self.random.randrange(BEGINNINGS)
        words = Random(number).choices(
            INPUT_WORDS, k=self.longest * (number + 1) // (4 * BEGINNINGS * WORD_TOKENS)
        )
        return " ".join(words)


@dataclass
class Mirrored(Beginnings):
    """A soak whose turns a second server repeats."""

    stateless: AsyncClient = field(kw_only=True)
    repeaters: asyncio.TaskGroup = field(kw_only=True)
    ahead: asyncio.Semaphore = field(kw_only=True)
    """Steps that the first server may be ahead of the second."""
    compared: Compared = field(default_factory=Compared)
    kinds: Counter[str] = field(default_factory=Counter)
    talks: dict[str, Talk] = field(default_factory=dict)
    """By the name of the first server's session."""

    async def begin(self, system_prompt: str) -> AsyncSession:
        session = await super().begin(system_prompt)
        talk = self.talks[session.name] = Talk()
        again = await self.stateless.create_session(system_prompt=system_prompt)
        self.repeaters.create_task(self._repeat(talk, again))
        return session

    async def end(self, session: AsyncSession) -> None:
        self.talks.pop(session.name).steps.put_nowait(None)
        await super().end(session)

    def close(self) -> None:
        """The first server's load is over: let the second one come to its end."""
        for talk in self.talks.values():
            talk.steps.put_nowait(None)

    async def _turn(self, session: AsyncSession) -> int:
        talk, random = self.talks[session.name], self.random
        await self.ahead.acquire()
        options = TurnOptions(
            request_id=str(uuid.UUID(int=random.getrandbits(128))), top_logprobs=3, ignore_eos=True,
            max_output_tokens=random.randint(1, 2 * self.outputs), temperature=0.0,
        )  # fmt: skip
        if random.random() < DRAWN:
            options |= {"temperature": 0.9, "top_p": 0.95, "seed": random.getrandbits(31)}
            self.kinds["drawn"] += 1
        if talk.answers and random.random() < EDITS:
            del talk.answers[random.randrange(len(talk.answers)) + 1 :]
            options["replace_after_item"] = talk.answers[-1]
            self.kinds["edits"] += 1
        elif talk.answers and random.random() < FORKS and len(self.idle) < self.open_sessions:
            await self._fork(session, random.randrange(len(talk.answers)))
        chosen = 0
        if options["temperature"] and random.random() < CANDIDATES:
            options["candidates"] = 3
            chosen = random.randrange(3)
            self.kinds["with candidates"] += 1
        text = self._words()
        try:
            turn = await Step.run(session, text, options, chosen)
        except PensieveError:
            self.ahead.release()
            self.talks.pop(session.name).steps.put_nowait(None)
            raise
        assert turn.output is not None
        talk.answers.append(turn.output.item)
        talk.steps.put_nowait(Step(text, options, chosen, turn))
        return self._account(turn.usage)

    async def _fork(self, session: AsyncSession, answer: int) -> None:
        talk = self.talks[session.name]
        child = await session.fork(talk.answers[answer])
        items = [item.item for item in await child.items() if item.role == "assistant"]
        forked = self.talks[child.name] = Talk(answers=items)
        talk.steps.put_nowait((forked, talk.answers[answer]))
        self.idle.append(child)
        self.kinds["forks"] += 1

    async def _repeat(self, talk: Talk, session: AsyncSession) -> None:
        """Take the steps of a conversation on the stateless server, in order, and compare."""
        same = True
        while (step := await talk.steps.get()) is not None:
            if not isinstance(step, Step):
                forked, item = step
                self.repeaters.create_task(self._repeat(forked, await session.fork(item)))
                continue
            try:
                again = await Step.run(session, step.text, step.options, step.chosen)
            finally:
                self.ahead.release()
            if same:
                same = self.compared.compare(step.turn, again)
            else:
                self.compared.not_comparable += 1
        await session.delete()

    async def report_progress(self) -> None:
        began = time.monotonic()
        while True:
            await asyncio.sleep(PROGRESS_S)
            click.echo(
                f"[{time.monotonic() - began:5.0f} s] {self.turns} turns, {self.compared.turns} repeated, "
                f"{self.compared.differing_turns} differ, context {dict(self.sources)} {dict(self.errors) or ''}"
            )


async def mirror(servers: Sequence[ServerProcess], load: Load, minutes: float) -> dict[str, Any]:
    """Play the load on the first server while the second repeats it."""
    async with AsyncClient(servers[0].target) as client, AsyncClient(servers[1].target) as stateless:
        progress = None
        try:
            async with asyncio.TaskGroup() as repeaters:
                soak = Mirrored(
                    client, Random(load.seed), load.sessions, load.longest, load.outputs, stateless=stateless,
                    repeaters=repeaters, ahead=asyncio.Semaphore(4 * load.clients),
                )  # fmt: skip
                progress = asyncio.create_task(soak.report_progress())
                until = time.monotonic() + 60 * minutes
                await asyncio.gather(*(soak.talk(until) for _ in range(load.clients)))
                soak.close()
        finally:
            if progress is not None:
                progress.cancel()
    compared = soak.compared
    return {
        "numerics": sorted(compared.numerics),
        "compared": {
            "turns": compared.turns, "answers": compared.answers, "tokens": compared.tokens,
            "log-probabilities": compared.logprobs, "differing turns": compared.differing_turns,
            "differing tokens": compared.differing_tokens,
            "differing log-probabilities": compared.differing_logprobs,
            "turns after a difference": compared.not_comparable,
        },
        "turns": {"all": soak.turns, **soak.kinds},
        "context tokens": {
            **{way: soak.sources[way] for way in ("device", "host", "recomputed", "new")},
            "dropped": servers[0].metric("pensieve_dropped_tokens_total"),
        },
        "suspensions": servers[0].metric("pensieve_suspensions_total"),
        "engine restarts": sum(server.metric("pensieve_engine_restarts_total") for server in servers),
        "errors": dict(soak.errors),
        "wrong receipts": soak.wrong_receipts,
    }  # fmt: skip


def problems(found: Mapping[str, Any]) -> list[str]:
    """Everything that a run must not show."""
    compared, context = found["compared"], found["context tokens"]
    wrong = [
        f"{compared[name]} {name}" for name in compared if name.startswith("differing") and compared[name]
    ]
    wrong += [f"no context was {way}" for way in ("device", "host", "recomputed") if not context[way]]
    wrong += [
        f"{found[name]} {name}" for name in ("errors", "wrong receipts", "engine restarts") if found[name]
    ]
    if len(found["numerics"]) != 1:
        wrong.append(f"the servers compute by {' and '.join(found['numerics'])}")
    if not compared["turns"]:
        wrong.append("nothing was compared")
    return wrong


@dataclass(frozen=True, slots=True)
class Load:
    """The conversations of every run."""

    sessions: int
    clients: int
    longest: int
    outputs: int
    seed: int


@click.command(context_settings={"show_default": True})
@click.option("--minutes", default=5.0, help="Of the load.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--dtype", default="bfloat16", type=click.Choice(["float32", "bfloat16", "float16"]))
@click.option("--shape", default="tiny-llama-gqa8", help="A shape of bench/dummy_model.py.")
@click.option("--device-cache", default="2560tokens")
@click.option("--host-cache", default="2560tokens")
@click.option("--sessions", default=32, help="Conversations held at once.")
@click.option("--clients", default=8, help="Turns under way at once.")
@click.option("--longest", default=600, help="Tokens of context after which a conversation ends.")
@click.option("--outputs", default=24, help="Tokens of an answer, on average.")
@click.option("--threads", default=1)
@click.option("--seed", default=1)
@click.option("--out", type=click.Path(path_type=Path), default=Path("build"))
@click.option("--name", default="soak_invariant")
def main(
    minutes: float, device: str, dtype: str, shape: str, device_cache: str, host_cache: str, sessions: int,
    clients: int, longest: int, outputs: int, threads: int, seed: int, out: Path, name: str,
) -> None:  # fmt: skip
    """Repeat the turns of an invariant server on a stateless one."""
    load = Load(sessions, clients, longest, outputs, seed)
    with tempfile.TemporaryDirectory() as folder:
        ordinary = [
            *("--model", str(dummy_model.make(shape, Path(folder))), "--load-format", "dummy"),
            *("--device", device, "--dtype", dtype, "--store", "memory:", "--threads", str(threads)),
            *("--device-cache", device_cache, "--max-wait", "0", "--cost-profile", "estimate"),
        ]
        report: dict[str, Any] = {
            "schema": "pensieve.soak-invariant/1", "command": portable(["python", *sys.argv]), "commit": commit(),
            "device": gpu_name() if device == "cuda" else device, "shape": shape, "dtype": dtype,
        }  # fmt: skip
        lines = [
            f"`{report['command']}`", "", f"{shape}, {dtype}, {report['device']}, commit {report['commit']}.",
        ]  # fmt: skip
        busy = [*ordinary, "--host-cache", host_cache, "--invariant", "--verify-swap"]
        with serving(busy, [*ordinary, "--stateless", "--invariant"]) as pair:
            report["soak"] = found = asyncio.run(mirror(pair, load, minutes))
    wrong = problems(found)
    for title in ("compared", "turns", "context tokens"):
        lines += ["", f"## {title.capitalize()}", "", *table([found[title]])]
    lines += ["", *(wrong or ["Nothing differs, and every way to restore a context was taken."])]
    report["problems"] = wrong
    write_report(out, name, report, lines)
    click.echo("\n".join(lines))
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
