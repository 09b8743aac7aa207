"""Drafts on real answers: the index alone, an engine over a simulated device, and a real one that is made to give them.

    python bench/drafts.py sharegpt.json --tokenizer FOLDER
    python bench/drafts.py tokens.json.gz --batch 8 --host-ms 0.9 --host-ms 0.5
    python bench/drafts.py tokens.json.gz --device cuda --shape llama-2-13b-gqa10 --batch 1 --batch 64

DATASET is in ShareGPT's form, also ``.gz``, or what ``--save`` wrote: a list of pairs of token ids, context and answer.
A model with random weights repeats no text. So the tokens that its steps choose are replaced by those of the answers,
on the host. A GPU counts accepted drafts by its own tokens: its contexts are shorter by the drafts that it rejects.
All else is a served engine: the same plans, drafts, acceptance, overlap and prices. Contexts are cached; each answer
that ends is followed by the next; steps count that do nothing but decode, for as many requests as asked for. The last
line of stdout is one JSON document.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import click
import dummy_model
import numpy as np

from pensieve.config import BATCH_LIMITS, CacheConfig, EngineOptions, SchedulerConfig
from pensieve.core import Sampling, TokenArray, common_prefix, pack_tokens
from pensieve.engine.build import build_engine
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.messages import EngineReady, Finished, Submit
from pensieve.engine.plan import (
    PendingStep,
    Plan,
    Sampled,
    SampleSpec,
    Span,
    StepResult,
    StepWorker,
    decided,
)
from pensieve.engine.process.host import settle_collector
from pensieve.engine.scheduling.drafts import Drafter, Odds
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.simulate.full import Clock, LaunchedStep
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
        steps, odds = 0, Odds()
        drafted = accepted = tokens = 0
        started = time.process_time()
        for context, answer in turns:
            one = _Answer(
                Drafter(len(context), (), odds), np.array(context + answer, np.int32), len(context) + 1
            )
            while one.at < len(one.text):
                drafts = one.propose(one.at, price)[0]
                right = one.right(drafts)
                one.drafter.learn(one.drafter.match, right, len(drafts))
                steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
                one.at += right + 1
            tokens += len(answer)
        seconds = time.process_time() - started
        yield {
            "price": price, "tokens a step": round((steps + accepted) / steps, 3),
            "drafts a step": round(drafted / steps, 2), "us a step": round(seconds / steps * 1e6, 1),
            "us a token": round(seconds / tokens * 1e6, 1),
        }  # fmt: skip


@dataclass
class Seen:
    """The steps of one measurement. They are counted when it is over, so that counting takes none of their time."""

    batch: int
    steps: list[tuple[int, Plan, dict[str, float], float]] = field(default_factory=list)
    """Requests that ran, plan and timings of each step, and when its tokens were known."""

    def row(self, texts: Mapping[int, list[int]]) -> dict[str, Any]:
        """Return what the steps did while ``batch`` requests ran, and none but decoded. ``texts``: by request."""
        steps = tokens = drafted = drafting = 0
        seconds, parts = 0.0, defaultdict[str, float](float)
        for (*_, before), (running, plan, timings, now) in itertools.pairwise(self.steps):
            decodes = all(len(span.tokens) == span.num_chosen for span in plan.spans) and not plan.swap_in
            if not decodes or running != self.batch:
                continue
            new = plan.num_tokens - len(plan.spans)
            steps, drafted, drafting = steps + 1, drafted + new, drafting + (new > 0)
            tokens += len(plan.spans) + sum(
                _accepted(span, texts[span.request]) for span in plan.spans if span.drafts
            )
            seconds += now - before
            for part, spent in timings.items():
                parts[part] += spent
        count = max(1, steps)
        return {
            "tokens/s": round(tokens / max(seconds, 1e-9), 1), "steps": steps,
            "tokens a step": round(tokens / count / self.batch, 3),
            "drafts a step": round(drafted / count / self.batch, 2),
            "steps with drafts": round(drafting / count, 2),
            "step ms": round(1e3 * seconds / count, 2),
            **{f"{part} ms": round(1e3 * spent / count, 2) for part, spent in parts.items()},
        }  # fmt: skip


def _chosen(span: Span, text: Sequence[int]) -> list[int]:
    """Return the tokens that a step chooses after those of a span, for the request whose tokens are ``text``."""
    if span.undecided is not None:  # the step before has chosen the text, too
        span = decided(span, text[span.start :][: len(span.undecided) + 1])
    return list(text[span.end - span.drafts : span.end + 1])


def _accepted(span: Span, text: Sequence[int]) -> int:
    """Return how many of a span's drafts are ``text``."""
    return common_prefix(span.tokens[-span.drafts :], np.array(_chosen(span, text), np.int32))


@dataclass
class ForcedWorker:
    """A worker whose steps choose the tokens of given texts, by request."""

    worker: StepWorker
    texts: dict[int, list[int]]
    seen: Seen
    clock: Callable[[], float]
    running: Callable[[], int]
    """Number of requests in the batch."""

    def launch(self, plan: Plan) -> PendingStep:
        return _ForcedStep(self, self.running(), plan, self.worker.launch(plan))

    def close(self) -> None:
        self.worker.close()


@dataclass
class _ForcedStep:
    forced: ForcedWorker
    running: int
    plan: Plan
    step: PendingStep

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        self.step.choose(specs)

    def result(self) -> StepResult:
        result, texts = self.step.result(), self.forced.texts
        self.forced.seen.steps.append((self.running, self.plan, result.timings, self.forced.clock()))
        chosen = [
            Sampled(span.request, token)
            for span in self.plan.spans
            if span.sample is not None
            for token in _chosen(span, texts[span.request])
        ]
        return replace(result, sampled=tuple(chosen))


@dataclass
class VirtualDevice:
    """A worker without a model. The host takes ``host_s`` for each launch, and no time for anything else."""

    clock: Clock
    host_s: float
    step_s: float
    """Seconds of the device for a step without requests."""
    request_s: float
    draft_s: float
    first_draft_s: float
    """More for a step with drafts, however many."""
    free_at: float = 0.0
    """When the device will have done all that was launched."""

    def launch(self, plan: Plan) -> PendingStep:
        self.clock.now += self.host_s
        begin, before = max(self.clock.now, self.free_at), self.free_at
        requests = len(plan.spans)
        drafts = plan.num_tokens - requests
        seconds = self.step_s + self.request_s * requests + self.draft_s * drafts
        self.free_at = begin + seconds + self.first_draft_s * (drafts > 0)
        timings = {"device": self.free_at - begin, "gap": begin - before}
        return LaunchedStep(self.clock, self.free_at, StepResult(timings=timings))

    def close(self) -> None:
        pass


def virtual_engine(batch: int, host_s: float, device_s: tuple[float, ...]) -> tuple[Engine, Clock]:
    """Return an engine over a ``VirtualDevice``, which has room for all that it is given. ``device_s``: seconds of a
    step, and more for each request and each draft."""
    clock = Clock()
    tokens, running = BATCH_LIMITS["cuda"]
    running = max(running, batch)
    scheduler = SchedulerConfig(
        context_limit=1 << 15, max_batch_tokens=tokens, max_running=running, max_drafts=running
    )
    cache = CacheManager(
        CacheConfig(device_chunks=1 << 18, host_chunks=0), CostModel(((0, 0.0), (4096, 1e-6)), 1e-6, 32)
    )
    ready = EngineReady(1 << 15, 1 << 31, "virtual", "none", 1 << 23, 0, 32)
    device = VirtualDevice(clock, host_s, *device_s)
    return Engine(Scheduler(scheduler, cache), device, ready, clock, overlapped=True), clock


def virtual_row(
    turns: Sequence[Turn], batch: int, host_s: float, device_s: tuple[float, ...], count: int
) -> dict[str, Any]:
    """Return what drafts gain an engine whose host takes ``host_s`` to launch a step. Its scheduler is the real one."""
    engine, clock = virtual_engine(batch, host_s, device_s)
    loop = Loop(engine, turns, max(len(answer) for _, answer in turns), clock)
    drafting = engine._scheduler.drafting
    most, places, rows = drafting.most, _spread(len(turns), count), []
    for allowed in (0, most):
        drafting.most = allowed
        rows.append(loop.run(batch, places))
    return {
        "batch": batch, "host ms": 1e3 * host_s, "÷ without": round(rows[1]["tokens/s"] / rows[0]["tokens/s"], 3),
        **{
            name: rows[1][name]
            for name in ("tokens a step", "drafts a step", "steps with drafts", "gap ms")
        },
    }  # fmt: skip


def _spread(among: int, count: int) -> list[int]:
    """Return ``count`` numbers below ``among``, or all of them, evenly spread."""
    count = min(among, count)
    return [at * among // count for at in range(count)]


class Loop:
    """Answers of turns that an engine is made to give, ``batch`` at a time. The turns' contexts are cached."""

    def __init__(
        self, engine: Engine, turns: Sequence[Turn], want: int, clock: Callable[[], float] = time.perf_counter
    ) -> None:
        vocabulary = engine.ready().vocab_size
        self.engine, self.turns, self.want = engine, turns, want
        self.texts = [
            [token % vocabulary for token in context + answer] + [0] * 64 for context, answer in turns
        ]
        scheduler = engine._scheduler
        self.forced = ForcedWorker(engine._worker, {}, Seen(0), clock, lambda: len(scheduler.running))
        engine._worker = self.forced
        self.numbers = itertools.count(1)
        self.cached = set[int]()

    def run(self, batch: int, places: Sequence[int], *, predicted: bool = False) -> dict[str, Any]:
        """Give the answers of the turns at ``places``; return what the steps did: see ``Seen.row``."""
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
        return seen.row(self.forced.texts)

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


def answers_for(batch: int) -> int:
    """Return how many answers measure ``batch`` requests. Answers differ much in how they repeat: few of them would
    measure which they are."""
    return max(24, min(8 * batch, 64), 4 * batch)


def engine_rows(
    engine: Engine, turns: Sequence[Turn], batches: Sequence[int], want: int, repeats: int
) -> Iterator[dict[str, Any]]:
    """Measure ``engine`` with drafts and without, in turns; and answers whose tokens are predicted, as after an
    engine's death."""
    drafting, loop = engine._scheduler.drafting, Loop(engine, turns, want)
    most = drafting.most
    for batch in batches:
        places = _spread(len(turns), answers_for(batch))
        for drafts in (False, True) * repeats:
            drafting.most = most if drafts else 0
            row = loop.run(batch, places)
            costs = {
                "price": round(drafting.costs.price(batch), 3),
                "first draft": round(drafting.costs.first_draft(batch), 2),
            }
            yield {"batch": batch, "drafts": drafts, **row, **(costs if drafts else {})}
    for predicted in (False, True):
        drafting.most = most if predicted else 0
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
@click.option("--host-ms", "hosts", multiple=True, type=float, help="Also run the scheduler over a device that takes "
              "--device-ms, with a host that takes so long to launch a step, with each batch.")  # fmt: skip
@click.option("--device-ms", nargs=4, type=float, default=(6.7, 0.04, 0.012, 0.0), help="Of a step, and more for "
              "each request, for each draft, and for a step with any.")  # fmt: skip
@click.option("--shape", default="", help="Also measure an engine of this shape.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8))
@click.option("--want", default=512, help="Most tokens of each answer that the engine gives.")
@click.option("--context", default=2048, help="Longest context.")
@click.option("--repeats", default=2, help="Measurements of each kind.")
def main(
    dataset: Path, tokenizer: Path | None, save: Path | None, turns: int, prices: tuple[float, ...],
    hosts: tuple[float, ...], device_ms: tuple[float, ...], shape: str, device: str, batches: tuple[int, ...],
    want: int, context: int, repeats: int,
) -> None:  # fmt: skip
    """Measure drafts on real answers."""
    found = read_turns(dataset, tokenizer, context)
    if save is not None:
        save.write_bytes(gzip.compress(json.dumps(found).encode()))
        return
    step = max(1, len(found) // turns)
    settle_collector()  # as the engine's own process does
    report: dict[str, Any] = {"index": [], "simulated": [], "engine": []}
    for row in index_rows(found[::step][:turns], prices):
        report["index"].append(row)
        click.echo(row, err=True)
    long_enough = [turn for turn in found if len(turn[1]) >= 16]
    long_enough = long_enough[:: max(1, len(long_enough) // 384)]
    device_s = tuple(part / 1e3 for part in device_ms)
    for batch, host in itertools.product(batches if hosts else (), hosts):
        row = virtual_row(long_enough, batch, host / 1e3, device_s, answers_for(batch))
        report["simulated"].append(row)
        click.echo(report["simulated"][-1], err=True)
    with tempfile.TemporaryDirectory() as folder:
        if shape:
            options = EngineOptions(
                model=str(dummy_model.make(shape, Path(folder))), load_format="dummy", speculation=True,
                device="cuda" if device == "cuda" else "cpu", cost_profile="estimate", max_running=max(batches),
            )  # fmt: skip
            with closing(build_engine(options)) as engine:
                settle_collector()
                for row in engine_rows(engine, long_enough, batches, want, repeats):
                    report["engine"].append(row)
                    click.echo(row, err=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
