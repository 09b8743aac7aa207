"""Drafts on real answers: the index alone, a simulated engine, and a real one that is made to give these answers.

    python bench/drafts.py sharegpt.json --tokenizer FOLDER
    python bench/drafts.py tokens.json.gz --batch 8 --price 0.016 --lost 0.26 --lost 0.1
    python bench/drafts.py tokens.json.gz --device cuda --shape llama-2-13b-gqa10 --batch 1 --batch 64

DATASET is in ShareGPT's form, also ``.gz``, or what ``--save`` wrote: a list of pairs of token ids, context and answer.
A model with random weights repeats no text. So the tokens that its steps choose are replaced by those of the answers.
All else is a served engine: the same plans, drafts, acceptance, overlap and prices. Contexts are cached; each answer
that ends is followed by the next; steps count that do nothing but decode, for as many requests as asked for. The last
line of stdout is one JSON document.
"""

from __future__ import annotations

import gzip
import itertools
import json
import math
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import dummy_model
import numpy as np

from pensieve.config import EngineOptions
from pensieve.core import Sampling, TokenArray, pack_tokens
from pensieve.engine.build import build_engine
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Finished, Submit
from pensieve.engine.plan import PendingStep, Plan, Sampled, SampleSpec, StepResult, StepWorker
from pensieve.engine.scheduling.drafts import Drafter
from pensieve.tokenizer import ChatTokenizer

Turn = tuple[list[int], list[int]]
"""Token ids of a context and of its answer."""


def read_turns(path: Path, tokenizer: Path | None, most_tokens: int) -> list[Turn]:
    """Return the turns of a dataset whose context has at most ``most_tokens`` tokens."""
    found = json.loads(gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes())
    if found and isinstance(found[0], list):
        turns = [(context, answer) for context, answer in found]
    else:
        turns = list(_tokenised(found, tokenizer))
    return [turn for turn in turns if len(turn[0]) <= most_tokens]


def _tokenised(conversations: Sequence[Any], tokenizer: Path | None) -> Iterator[Turn]:
    if tokenizer is None:
        raise click.UsageError("a dataset of texts needs --tokenizer")
    encode = ChatTokenizer.from_folder(tokenizer).encode_text
    for conversation in conversations:
        context: list[int] = []
        for message in conversation["conversations"]:
            tokens = encode(message["value"] + "\n") or []
            if message["from"] == "gpt" and context and tokens:
                yield list(context), tokens
            context += tokens


@dataclass
class _Answer:
    """An answer under way: the first ``at`` tokens of context and answer are chosen."""

    drafter: Drafter
    text: TokenArray
    at: int

    def propose(self, known: int, price: float) -> tuple[list[int], list[float]]:
        return self.drafter.propose(self.text[:known], len(self.text) - known - 1, price)

    def right(self, drafts: Sequence[int]) -> int:
        """Return how many of ``drafts`` are right."""
        pairs = enumerate(zip(drafts, self.text[self.at : self.at + len(drafts)].tolist(), strict=False))
        return next((number for number, (one, other) in pairs if one != other), len(drafts))


def index_rows(turns: Sequence[Turn], prices: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Replay answers against the index alone: at each step drafts are accepted as far as they are the answer."""
    for price in prices:
        steps = drafted = accepted = tokens = 0
        started = time.process_time()
        for context, answer in turns:
            one = _Answer(Drafter(len(context), ()), np.array(context + answer, np.int32), len(context) + 1)
            while one.at < len(one.text):
                drafts = one.propose(one.at, price)[0]
                right = one.right(drafts)
                one.drafter.learn(right, len(drafts))
                steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
                one.at += right + 1
            tokens += len(answer)
        seconds = time.process_time() - started
        yield {
            "price": price, "tokens a step": round((steps + accepted) / steps, 3),
            "drafts a step": round(drafted / steps, 2), "us a step": round(seconds / steps * 1e6, 1),
            "us a token": round(seconds / tokens * 1e6, 1),
        }  # fmt: skip


def gated_row(turns: Sequence[Turn], batch: int, lost: float, price: float, steps: int) -> dict[str, Any]:
    """Return the tokens that ``batch`` requests would get in a time, divided by those without drafts, by an engine that
    drafts when it expects to gain more than it loses.

    In units of a step without drafts: a draft takes ``price`` ÷ ``batch`` more, and a step with drafts loses ``lost``.
    The engine decides before it knows the newest tokens, as it does on a GPU.
    """
    waiting = itertools.cycle(turns)

    def begin() -> _Answer:
        context, answer = next(waiting)
        return _Answer(Drafter(len(context), ()), np.array(context + answer, np.int32), len(context) + 1)

    answers, spent, tokens, drafted, drafting = [begin() for _ in range(batch)], 0.0, 0, 0, 0
    for _ in range(steps):
        drafts: list[list[int]] = [[] for _ in answers]
        guessed = (chance - price for one in answers for chance in one.propose(one.at - 1, price)[1][1:])
        if sum(guessed) > batch * lost:
            spent += lost
            found = [one.propose(one.at, price) for one in answers]
            if sum(chance - price for _, chances in found for chance in chances) > batch * lost:
                drafts = [some for some, _ in found]
        for number, (one, some) in enumerate(zip(answers, drafts, strict=True)):
            right = one.right(some)
            if some:
                one.drafter.learn(right, len(some))
            one.at, tokens = one.at + right + 1, tokens + right + 1
            if one.at >= len(one.text):
                answers[number] = begin()
        new = sum(map(len, drafts))
        spent, drafted, drafting = spent + 1 + price * new / batch, drafted + new, drafting + (new > 0)
    return {
        "batch": batch, "lost": lost, "÷ without": round(tokens / spent / batch, 3),
        "tokens a step": round(tokens / steps / batch, 3), "drafts a step": round(drafted / steps / batch, 2),
        "steps with drafts": round(drafting / steps, 2),
    }  # fmt: skip


@dataclass
class Seen:
    """What the steps of one measurement did that had ``batch`` requests and did nothing but decode."""

    batch: int
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    seconds: float = 0.0
    parts: defaultdict[str, float] = field(default_factory=lambda: defaultdict(float))
    last: float = math.inf
    """When the step before ended."""

    def on_step(self, plan: Plan, result: StepResult, accepted: int) -> None:
        before, self.last = self.last, time.perf_counter()
        decodes = all(len(span.tokens) == span.num_chosen for span in plan.spans) and not plan.swap_in
        if not decodes or len(plan.spans) != self.batch or math.isinf(before):
            return
        self.steps, self.tokens = self.steps + 1, self.tokens + self.batch + accepted
        self.drafted, self.seconds = (
            self.drafted + plan.num_tokens - self.batch,
            self.seconds + self.last - before,
        )
        for part, seconds in result.timings.items():
            self.parts[part] += seconds

    def row(self) -> dict[str, Any]:
        steps = max(1, self.steps)
        return {
            "tokens/s": round(self.tokens / max(self.seconds, 1e-9), 1), "steps": self.steps,
            "tokens a step": round(self.tokens / steps / self.batch, 3),
            "drafts a step": round(self.drafted / steps / self.batch, 2),
            "step ms": round(1e3 * self.seconds / steps, 2),
            **{f"{part} ms": round(1e3 * seconds / steps, 2) for part, seconds in self.parts.items()},
        }  # fmt: skip


@dataclass
class ForcedWorker:
    """A worker whose steps choose the tokens of given texts, by request."""

    worker: StepWorker
    texts: dict[int, list[int]]
    seen: Seen

    def launch(self, plan: Plan) -> PendingStep:
        return _ForcedStep(self, plan, self.worker.launch(plan))

    def close(self) -> None:
        self.worker.close()


@dataclass
class _ForcedStep:
    forced: ForcedWorker
    plan: Plan
    step: PendingStep

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        self.step.choose(specs)

    def result(self) -> StepResult:
        result, texts = self.step.result(), self.forced.texts
        sampled, accepted = iter(result.sampled), 0
        chosen = list[Sampled]()
        for span in self.plan.spans:
            right = texts[span.request][span.end - span.drafts : span.end + 1]
            for token, one in zip(right[: span.num_chosen], sampled, strict=False):
                chosen.append(Sampled(one.request, token, one.logprob))
            if span.drafts:
                drafts = span.tokens[-span.drafts :].tolist()
                accepted += next((at for at, one in enumerate(drafts) if one != right[at]), span.drafts)
        result = replace(result, sampled=tuple(chosen))
        self.forced.seen.on_step(self.plan, result, accepted)
        return result


class Loop:
    """Answers of turns that an engine is made to give, ``batch`` at a time. The turns' contexts are cached."""

    def __init__(self, engine: Engine, turns: Sequence[Turn], want: int) -> None:
        vocabulary = engine.ready().vocab_size
        self.engine, self.turns, self.want = engine, turns, want
        self.texts = [
            [token % vocabulary for token in context + answer] + [0] * 64 for context, answer in turns
        ]
        self.forced = ForcedWorker(engine._worker, {}, Seen(0))
        engine._worker = self.forced
        self.numbers = itertools.count(1)
        self.cached = set[int]()

    def run(self, batch: int, places: Sequence[int], *, predicted: bool = False) -> Seen:
        """Give the answers of the turns at ``places``; return what the steps did that had ``batch`` requests."""
        for place in places:
            if place not in self.cached:
                self._submit(place, 1, predicted=False)
                self.cached.add(place)
        while self.engine.has_work:
            self.engine.step()
        seen = self.forced.seen = Seen(batch)
        waiting = iter(places)
        for place in itertools.islice(waiting, batch):
            self._submit(place, self.want, predicted=predicted)
        while self.engine.has_work:
            for event in self.engine.step():
                place = next(waiting, None) if isinstance(event, Finished) else None
                if place is not None:
                    self._submit(place, self.want, predicted=predicted)
        return seen

    def _submit(self, place: int, tokens: int, *, predicted: bool) -> None:
        number, length = next(self.numbers), len(self.turns[place][0])
        tokens = min(tokens, len(self.turns[place][1]))
        text = self.forced.texts[number] = self.texts[place]
        sampling = Sampling(max_output_tokens=tokens, ignore_eos=True)
        guess = pack_tokens(text[length : length + tokens] if predicted else ())
        new = length if place not in self.cached else 1
        self.engine.handle(
            Submit(number, f"s{place}", pack_tokens(text[:length]), new, sampling, predicted=guess)
        )


def engine_rows(
    engine: Engine, turns: Sequence[Turn], batches: Sequence[int], want: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Measure ``engine`` with drafts and without, in turns; and answers whose tokens are predicted, as after an
    engine's death."""
    scheduler, loop = engine._scheduler, Loop(engine, turns, want)
    drafting = scheduler.config
    for batch in batches:
        # Answers differ much in how they repeat: few of them would measure which they are.
        count = min(len(turns), max(24, min(8 * batch, 64), 4 * batch))
        places = [at * len(turns) // count for at in range(count)]
        for drafts in (False, True) * repeats:
            scheduler.config = drafting if drafts else replace(drafting, max_drafts=0)
            row = loop.run(batch, places).row()
            costs = {
                "price": round(scheduler.costs.price(batch), 3),
                "lost share": round(scheduler.costs.lost_share(scheduler.sync_share), 3),
            }
            yield {"batch": batch, "drafts": drafts, **row, **(costs if drafts else {})}
    for predicted in (False, True):
        scheduler.config = drafting if predicted else replace(drafting, max_drafts=0)
        before, started = engine.stats().steps_total, time.perf_counter()
        loop.run(1, [0], predicted=predicted)
        seconds = time.perf_counter() - started
        yield {
            "predicted": predicted, "tokens": min(want, len(turns[0][1])), "steps": engine.stats().steps_total - before,
            "seconds": round(seconds, 3),
        }  # fmt: skip


@click.command(context_settings={"show_default": True})
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Model folder or GGUF file.")
@click.option(
    "--save", type=click.Path(path_type=Path), help="Write the turns' tokens to this file, and end."
)
@click.option("--turns", default=300, help="Turns that the index replays.")
@click.option("--price", "prices", multiple=True, type=float, default=(0.02, 0.1, 0.2))
@click.option("--lost", "losses", multiple=True, type=float, help="Part of a step that one with drafts loses: also "
              "simulate an engine that loses as much, with each batch and the first price.")  # fmt: skip
@click.option("--steps", default=2000, help="Steps of each simulation.")
@click.option("--shape", default="", help="Also measure an engine of this shape.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8))
@click.option("--want", default=512, help="Most tokens of each answer that the engine gives.")
@click.option("--context", default=2048, help="Longest context.")
@click.option("--repeats", default=2, help="Measurements of each kind.")
def main(
    dataset: Path, tokenizer: Path | None, save: Path | None, turns: int, prices: tuple[float, ...],
    losses: tuple[float, ...], steps: int, shape: str, device: str, batches: tuple[int, ...], want: int, context: int,
    repeats: int,
) -> None:  # fmt: skip
    """Measure drafts on real answers."""
    found = read_turns(dataset, tokenizer, context)
    if save is not None:
        save.write_bytes(gzip.compress(json.dumps(found).encode()))
        return
    step = max(1, len(found) // turns)
    report: dict[str, Any] = {"index": [], "simulated": [], "engine": []}
    for row in index_rows(found[::step][:turns], prices):
        report["index"].append(row)
        click.echo(row, err=True)
    long_enough = [turn for turn in found if len(turn[1]) >= 16]
    long_enough = long_enough[:: max(1, len(long_enough) // 384)]
    for batch, lost in itertools.product(batches if losses else (), losses):
        report["simulated"].append(gated_row(long_enough, batch, lost, prices[0], steps))
        click.echo(report["simulated"][-1], err=True)
    with tempfile.TemporaryDirectory() as folder:
        if shape:
            options = EngineOptions(
                model=str(dummy_model.make(shape, Path(folder))), load_format="dummy", speculation=True,
                device="cuda" if device == "cuda" else "cpu", cost_profile="estimate", max_running=max(batches),
            )  # fmt: skip
            with closing(build_engine(options)) as engine:
                for row in engine_rows(engine, long_enough, batches, want, repeats):
                    report["engine"].append(row)
                    click.echo(row, err=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
