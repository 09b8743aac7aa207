"""Drafts on real answers: the index alone, and an engine that is made to give these answers.

    python bench/drafts.py sharegpt.json --tokenizer FOLDER
    python bench/drafts.py tokens.json.gz --device cuda --shape llama-2-13b-gqa10 --batch 1 --batch 64

DATASET is in ShareGPT's form, also ``.gz``, or what ``--save`` wrote: a list of pairs of token ids, context and answer.
A model with random weights repeats no text. So the tokens that its steps choose are replaced by those of the answers.
All else is a served engine: the same plans, drafts, acceptance, overlap and prices. The last line of stdout is one JSON
document.
"""

from __future__ import annotations

import gzip
import itertools
import json
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import click
import dummy_model
import msgspec
import numpy as np

from pensieve.config import EngineOptions
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.build import build_engine
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Submit
from pensieve.engine.plan import PendingStep, Plan, SampleSpec, StepResult, StepWorker
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


def index_rows(turns: Sequence[Turn], prices: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Replay answers against the index alone: at each step drafts are accepted as far as they are the answer."""
    for price in prices:
        steps = drafted = accepted = tokens = 0
        started = time.process_time()
        for context, answer in turns:
            drafter, text = Drafter(len(context), ()), np.array(context + answer, np.int32)
            at, end = len(context) + 1, len(text)
            while at < end:
                drafts = drafter.propose(text[:at], end - at - 1, price)[0]
                pairs = enumerate(zip(drafts, answer[at - len(context) :], strict=False))
                right = next((number for number, (one, other) in pairs if one != other), len(drafts))
                drafter.learn(right, len(drafts))
                steps, drafted, accepted = steps + 1, drafted + len(drafts), accepted + right
                at += right + 1
            tokens += len(answer)
        seconds = time.process_time() - started
        yield {
            "price": price, "tokens a step": round((steps + accepted) / steps, 3),
            "drafts a step": round(drafted / steps, 2), "us a step": round(seconds / steps * 1e6, 1),
            "us a token": round(seconds / tokens * 1e6, 1),
        }  # fmt: skip


@dataclass
class ForcedWorker:
    """A worker whose steps choose the tokens of given texts, by request."""

    worker: StepWorker
    texts: dict[int, list[int]]

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
        places = [
            (span.request, span.end - span.drafts + row)
            for span in self.plan.spans
            for row in range(span.num_chosen)
        ]
        result = self.step.result()
        sampled = tuple(
            msgspec.structs.replace(one, token_id=self.forced.texts[request][place])
            for one, (request, place) in zip(result.sampled, places, strict=True)
        )
        return replace(result, sampled=sampled)


def engine_rows(
    engine: Engine, turns: Sequence[Turn], batches: Sequence[int], want: int
) -> Iterator[dict[str, Any]]:
    """Measure ``engine`` with drafts and without, in turns: answers of ``want`` tokens whose contexts are cached, and
    one whose tokens are predicted, as after an engine's death."""
    vocabulary, scheduler = engine.ready().vocab_size, engine._scheduler
    forced = ForcedWorker(engine._worker, {})
    engine._worker = forced
    texts = [[token % vocabulary for token in context + answer] + [0] * 64 for context, answer in turns]
    drafting = scheduler.config
    numbers = itertools.count(1)

    def submit(place: int, tokens: int, *, predicted: bool = False) -> None:
        at, number = place % len(turns), next(numbers)
        length, forced.texts[number] = len(turns[at][0]), texts[at]
        sampling = Sampling(max_output_tokens=tokens, ignore_eos=True)
        guess = pack_tokens(texts[at][length : length + tokens] if predicted else ())
        context = pack_tokens(texts[at][:length])
        engine.handle(Submit(number, f"s{place}", context, length, sampling, predicted=guess))

    for batch in batches:
        for place in range(batch):
            submit(place, 1)
        _run(engine)  # fills the cache
        ways = [(drafts, False) for drafts in (False, True, False, True)]
        for drafts, predicted in ways + ([(True, True)] if batch == 1 else []):
            scheduler.config = drafting if drafts else replace(drafting, max_drafts=0)
            for place in range(batch):
                submit(place, want, predicted=predicted)
            before, started = engine.stats(), time.perf_counter()
            _run(engine)
            seconds, after = time.perf_counter() - started, engine.stats()
            steps = after.steps_total - before.steps_total
            parts = {
                name: round((spent - before.part_seconds_total.get(name, 0.0)) / steps * 1e3, 2)
                for name, spent in after.part_seconds_total.items()
            }
            yield {
                "batch": batch, "drafts": drafts, "predicted": predicted,
                "tokens/s": round(batch * want / seconds, 1), "seconds": round(seconds, 3), "steps": steps,
                "drafted": after.drafted_total - before.drafted_total,
                "accepted": after.accepted_total - before.accepted_total,
                "price": round(scheduler.costs.price(batch), 3), "ms a step": parts,
            }  # fmt: skip


def _run(engine: Engine) -> None:
    while engine.has_work:
        engine.step()


@click.command(context_settings={"show_default": True})
@click.argument("dataset", type=click.Path(exists=True, path_type=Path))
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Model folder or GGUF file.")
@click.option(
    "--save", type=click.Path(path_type=Path), help="Write the turns' tokens to this file, and end."
)
@click.option("--turns", default=300, help="Turns that the index replays.")
@click.option("--price", "prices", multiple=True, type=float, default=(0.02, 0.1, 0.2))
@click.option("--shape", default="", help="Also measure an engine of this shape.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--batch", "batches", multiple=True, type=int, default=(1, 8))
@click.option("--want", default=128, help="Tokens of each answer that the engine gives.")
@click.option("--context", default=2048, help="Longest context.")
def main(
    dataset: Path, tokenizer: Path | None, save: Path | None, turns: int, prices: tuple[float, ...], shape: str,
    device: str, batches: tuple[int, ...], want: int, context: int,
) -> None:  # fmt: skip
    """Measure drafts on real answers."""
    found = read_turns(dataset, tokenizer, context)
    if save is not None:
        save.write_bytes(gzip.compress(json.dumps(found).encode()))
        return
    step = max(1, len(found) // turns)
    report: dict[str, Any] = {"index": [], "engine": []}
    for row in index_rows(found[::step][:turns], prices):
        report["index"].append(row)
        click.echo(row, err=True)
    long_enough = [turn for turn in found if len(turn[1]) >= want]
    long_enough = long_enough[:: max(1, len(long_enough) // 256)]
    with tempfile.TemporaryDirectory() as folder:
        if shape:
            options = EngineOptions(
                model=str(dummy_model.make(shape, Path(folder))), load_format="dummy", speculation=True,
                device="cuda" if device == "cuda" else "cpu", cost_profile="estimate", max_running=max(batches),
            )  # fmt: skip
            with closing(build_engine(options)) as engine:
                for row in engine_rows(engine, long_enough, batches, want):
                    report["engine"].append(row)
                    click.echo(row, err=True)
    print(json.dumps(report))


if __name__ == "__main__":
    main()
