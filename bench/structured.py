"""The cost of grammars: compiling, masks, and steps in which some or all answers follow one.

``masks`` needs no model. ``steps`` runs the whole engine on random weights, with none, half or all of the requests
under a grammar, and with all under penalties. The kinds alternate, and steps count while all requests decode.
``hostile`` runs plain requests beside plain ones, and beside ones whose grammars cost as much as the limits allow.

The vocabulary is made here: pieces of letters, digits and punctuation, as many as the model has. ``--tokenizer`` takes
that of a model folder for ``masks``.
"""

from __future__ import annotations

import itertools
import json
import statistics
import string
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any, Literal

import click
import dummy_model
import numpy as np
from common.engine_steps import CHUNK
from common.provenance import commit, gpu_name, portable, table, write_report
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pensieve.config import EngineOptions
from pensieve.core import Grammar, Sampling, pack_tokens
from pensieve.engine.build import MOST_MASK_THREADS, cache_config, scheduler_config
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel
from pensieve.engine.engine import Engine
from pensieve.engine.grammar import Prototypes, Structured
from pensieve.engine.messages import EngineReady, Failed, Finished, Output, Submit
from pensieve.engine.ranks.leader import build_workers
from pensieve.engine.scheduling.scheduler import Scheduler
from pensieve.engine.worker.torch_worker import Worker
from pensieve.machine import usable_cores
from pensieve.tokenizer.folder import read_folder
from pensieve.tokenizer.matching import grammar_tokenizer

SECTIONS = ("masks", "steps", "hostile")
WALKS = 20
"""Answers over which masks are measured."""
HOSTILE = 8
"""Requests with costly grammars that run at a time."""
PENALTIES = {"repetition_penalty": 1.1, "frequency_penalty": 0.1}


class Pieces:
    """A made-up vocabulary for ``TokenizerWrapper``: all bytes, then words by length, with and without a space."""

    eos_token_id = 1
    bos_token_id = None
    special_token_ids = (0, 1)

    def __init__(self, count: int) -> None:
        marks = ['":', '",', '":"', '","', '{"', '"}', "}}", "],", ": ", ", ", "\n", "  "]
        letters = string.ascii_lowercase
        words = (space + "".join(word) for size in (2, 3, 4) for word in itertools.product(letters, repeat=size)
                 for space in ("", " "))  # fmt: skip
        texts = itertools.chain(marks, map(str, range(10, 1000)), words)
        some = [text.encode() for text in itertools.islice(texts, max(0, count - 258))]
        self.tokens = [b"<|begin|>", b"<|end|>", *(bytes([byte]) for byte in range(256)), *some][:count]

    def __call__(self, text: str | bytes) -> list[int]:
        return [2 + byte for byte in (text if isinstance(text, bytes) else text.encode())]


def vocabulary(count: int) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(Pieces(count)), n_vocab=count, eos_token=[1])


def schema(fields: int, *, salt: int = 0) -> Grammar:
    """Return a grammar of an object with ``fields`` fields of several types. Another ``salt`` gives other names."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "maxLength": 24}, {"type": "integer"},
        {"type": "array", "items": {"type": "string", "maxLength": 8}}, 
        {"enum": ["low", "medium", "high"]}, {"type": "boolean"},
    ]  # fmt: skip
    names = [f"field_{salt}_{number}" for number in range(fields)]
    made = {
        "type": "object", "properties": {name: kinds[at % len(kinds)] for at, name in enumerate(names)},
        "required": names, "additionalProperties": False, "x-guidance": {"whitespace_pattern": "[ \\n]{0,8}"},
    }  # fmt: skip
    return Grammar(LLMatcher.grammar_from_lark("start: %json " + json.dumps(made)))


def mask_rows(tokenizer: LLTokenizer) -> Iterator[dict[str, Any]]:
    """Compile times, and times of masks along random answers; each answer is a copy of one prototype."""
    rng = np.random.default_rng(1)
    mask = np.zeros(-(-tokenizer.vocab_size // 32), np.int32)
    for fields in (10, 60):
        compiled, masks, states = [], [], 0
        for salt in range(8):
            started = time.perf_counter()
            limits = LLParserLimits(step_max_items=2000, verbose_errors=False)
            prototype = LLMatcher(tokenizer, schema(fields, salt=salt).text, log_level=0, limits=limits)
            prototype.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
            compiled.append(time.perf_counter() - started)
            assert not prototype.is_error(), prototype.get_error()
        for _ in range(WALKS):
            matcher = prototype.deep_copy()
            for _ in range(400):
                started = time.thread_time()
                matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
                masks.append(time.thread_time() - started)
                assert not matcher.is_error(), matcher.get_error()
                allowed = np.flatnonzero(np.unpackbits(mask.view(np.uint8), bitorder="little"))
                matcher.consume_token(int(rng.choice(allowed)))
                states += 1
                if matcher.is_stopped():
                    break
        yield {
            "fields": fields, "compile ms": round(1e3 * statistics.median(compiled), 2), "masks": states,
            "mask p50 µs": us(masks, 0.5), "p99 µs": us(masks, 0.99), "mean µs": round(1e6 * statistics.mean(masks), 1),
            "worst ms": round(1e3 * max(masks), 1),
        }  # fmt: skip


def us(seconds: list[float], quantile: float) -> float:
    return round(1e6 * float(np.quantile(seconds, quantile)), 1)


def step_rows(
    worker: Worker, options: EngineOptions, rows: int, context: int, repeats: int
) -> list[dict[str, Any]]:
    """Steps of ``rows`` requests with ``context`` tokens each, by how many follow a grammar or have penalties."""
    kinds: list[tuple[str, int, dict[str, Any]]] = [
        ("plain", 0, {}), ("half structured", rows // 2, {}), ("all structured", rows, {}), ("penalties", 0, PENALTIES),
    ]  # fmt: skip
    times: defaultdict[str, list[float]] = defaultdict(list)
    tokens: defaultdict[str, list[float]] = defaultdict(list)
    tokenizer = vocabulary(worker.arch.vocab_size)
    for _ in range(repeats):
        for name, structured, values in kinds:
            found, per_step = run_steps(worker, options, tokenizer, rows, context, structured, values)
            times[name].append(found)
            tokens[name].append(per_step)
    plain = statistics.median(times["plain"])
    return [
        {
            "kind": name, "step ms": round(1e3 * statistics.median(times[name]), 3),
            "÷ plain": round(statistics.median(times[name]) / plain, 3),
            "tokens/step": round(statistics.median(tokens[name]), 2),
            "of": rows,
        }
        for name, _, _ in kinds
    ]  # fmt: skip


def make_engine(worker: Worker, options: EngineOptions, tokenizer: LLTokenizer) -> Engine:
    info, vocab = worker.info, worker.arch.vocab_size
    scheduler = Scheduler(
        scheduler_config(options, worker.arch, info),
        CacheManager(cache_config(options, info), CostModel(((0, 0.0), (1024, 1.0)), 1.0, CHUNK)),
    )
    ready = EngineReady(scheduler.context_limit, vocab, info.device, info.dtype, 0, 0, CHUNK)
    threads = min(MOST_MASK_THREADS, max(1, usable_cores() // 2))
    grammars = Structured(Prototypes(lambda: tokenizer, vocab), threads)
    return Engine(scheduler, Unowned(worker), ready, overlapped=info.device == "cuda", structured=grammars)


def run_steps(
    worker: Worker, options: EngineOptions, tokenizer: LLTokenizer, rows: int, context: int, structured: int,
    values: dict[str, Any],
) -> tuple[float, float]:  # fmt: skip
    """Return the median time of a step, and the tokens that a step gives, from the 20th on."""
    engine = make_engine(worker, options, tokenizer)
    for request in range(rows):
        sampling = Sampling(
            grammar=schema(60, salt=request % 4) if request < structured else None,
            temperature=1.0, seed=request, max_output_tokens=140, ignore_eos=True, **values,
        )  # fmt: skip
        given = pack_tokens((np.arange(context) + request) % 1000)
        engine.handle(Submit(request + 1, f"s{request}", given, context, sampling))
    while engine.stats().output_total < 20 * rows:
        engine.step()
    taken, began, given_before = [], time.perf_counter(), engine.stats().output_total
    while len(taken) < 100 and engine.stats().running == rows:
        engine.step()
        taken.append(time.perf_counter() - began)
        began = time.perf_counter()
    per_step = (engine.stats().output_total - given_before) / max(1, len(taken))
    engine.close()
    return statistics.median(taken), per_step


def hostile(number: int) -> Grammar:
    """One of several grammars that cost as much as the limits allow, or more; each number is another grammar."""
    optional = {f"p{number}_{at}": {"type": "string"} for at in range(100)}
    schema = {"type": "object", "properties": optional, "additionalProperties": False}
    kinds = (
        (f'start: a\na: "x" a "y" | a a | "x" | "{number}"', 500),
        (f"start: /(a|b|ab)*c(a|b|ab)*d(.{{0,400}}{number}){{3}}/", 500),
        (f"start: (X|Y|Z)*\nX: /.{{0,300}}a.{{0,300}}/\nY: /.{{0,300}}{number}.{{0,300}}/\nZ: /[a-z ]{{0,500}}/", 500),
        ("start: %json " + json.dumps(schema), 2000),
    )  # fmt: skip
    text, step_items = kinds[number % len(kinds)]
    return Grammar(LLMatcher.grammar_from_lark(text), step_items)


def hostile_rows(
    worker: Worker, options: EngineOptions, rows: int, context: int, repeats: int
) -> list[dict[str, Any]]:
    """Times between two tokens of ``rows`` plain requests beside ``HOSTILE`` others, each replaced when it ends: plain
    ones, or ones with costly grammars."""
    tokenizer = vocabulary(worker.arch.vocab_size)
    found = []
    for repeat in range(repeats):
        plain, _ = token_gaps(worker, options, tokenizer, rows, context, costly=False)
        costly, ended = token_gaps(worker, options, tokenizer, rows, context, costly=True)
        p50, p99 = ([1e3 * float(np.quantile(gaps, q)) for gaps in (plain, costly)] for q in (0.5, 0.99))
        found.append(
            {
                "run": repeat + 1, "p50 beside plain ms": round(p50[0], 2), "p50 beside hostile ms": round(p50[1], 2),
                "p99 beside plain ms": round(p99[0], 2), "p99 beside hostile ms": round(p99[1], 2),
                "p99 ÷ beside plain": round(p99[1] / p99[0], 3), "hostile turns ended": ended,
            }
        )  # fmt: skip
    return found


def token_gaps(
    worker: Worker, options: EngineOptions, tokenizer: LLTokenizer, rows: int, context: int, *, costly: bool
) -> tuple[list[float], int]:
    """Return the times between tokens of the plain requests, and how many of the others ended meanwhile."""
    engine = make_engine(worker, options, tokenizer)
    given = pack_tokens(np.arange(context) % 1000)
    for request in range(1, rows + 1):
        sampling = Sampling(temperature=1.0, seed=request, max_output_tokens=200, ignore_eos=True)
        engine.handle(Submit(request, f"s{request}", given, context, sampling))
    number = ended = 0
    last: dict[int, float] = {}
    gaps: list[float] = []
    plain = rows
    while plain:
        while number - ended < HOSTILE:
            number += 1
            grammar = hostile(number) if costly else None
            sampling = Sampling(temperature=1.0, seed=number, max_output_tokens=100, grammar=grammar)
            engine.handle(Submit(rows + number, f"h{number}", given, context, sampling))
        events = engine.step()
        now = time.perf_counter()
        for event in events:
            if isinstance(event, Output) and event.request <= rows:
                if event.request in last:
                    gaps.append(now - last[event.request])
                last[event.request] = now
            elif isinstance(event, Failed | Finished):
                plain, ended = plain - (event.request <= rows), ended + (event.request > rows)
    engine.close()
    return gaps, ended


class Unowned:
    """A worker that outlives its engine."""

    def __init__(self, worker: Worker) -> None:
        self.launch = worker.launch

    def close(self) -> None: ...


@click.command(context_settings={"show_default": True})
@click.option("--section", "sections", multiple=True, type=click.Choice(SECTIONS), help="Default: all.")
@click.option("--tokenizer", type=click.Path(exists=True, path_type=Path), help="Model folder, for masks.")
@click.option("--vocab", default=131_072, help="Tokens of the made-up vocabulary, for masks.")
@click.option("--shape", default="llama-2-13b-gqa10", type=click.Choice(list(dummy_model.SHAPES)))
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cuda")
@click.option("--rows", default=64, help="Requests of a step.")
@click.option("--context", default=1024, help="Tokens of each request.")
@click.option("--repeats", default=5)
@click.option("--out", type=click.Path(path_type=Path), default=Path("bench/results"))
@click.option("--name", default="structured", help="Name of the report's files.")
def main(
    sections: tuple[str, ...], tokenizer: Path | None, vocab: int, shape: str, device: Literal["cpu", "cuda"],
    rows: int, context: int, repeats: int, out: Path, name: str,
) -> None:  # fmt: skip
    """Time grammars on this machine."""
    found: dict[str, list[dict[str, Any]]] = {}
    if not sections or "masks" in sections:
        if tokenizer is not None:
            folder = read_folder(tokenizer)
            made = grammar_tokenizer(folder, folder.eos_token_ids)
        else:
            made = vocabulary(vocab)
        found["masks"] = list(mask_rows(made))
    on_engine = {"steps": step_rows, "hostile": hostile_rows}
    if not sections or set(sections) & set(on_engine):
        with tempfile.TemporaryDirectory() as below:
            options = EngineOptions(
                model=str(dummy_model.make(shape, Path(below))), load_format="dummy", device=device,
                dtype="bfloat16" if device == "cuda" else "float32", host_cache="0", max_running=rows + HOSTILE,
                device_cache=f"{(rows + HOSTILE) * (context + 250)}tokens", max_batch_tokens=max(2048, rows),
                cost_profile="estimate", eos_token_ids=(1,),
            )  # fmt: skip
            with closing(build_workers(options)) as worker:
                for section, measure in on_engine.items():
                    if not sections or section in sections:
                        found[section] = measure(worker, options, rows, context, repeats)
    report = {
        "schema": "pensieve.structured/1", "command": portable(["python", *sys.argv]), "commit": commit(),
        "device": gpu_name(), "shape": shape, "sections": found,
    }  # fmt: skip
    lines = [f"`{report['command']}`", "", f"Commit {report['commit']}, {report['device'] or 'CPU'}."]
    for section, several in found.items():
        lines += ["", f"## {section}", "", *table(several)]
    write_report(out, name, report, lines)
    click.echo("\n".join(lines))


if __name__ == "__main__":
    main()
