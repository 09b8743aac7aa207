"""Beams of a session give what ``generate(num_beams=…)`` gives over its whole history, candidates what turns of their
own would: on tiny random checkpoints, in float32, with evictions, suspensions and other turns in between."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable

import msgspec
import pytest

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.engine import Engine
from pensieve.engine.messages import CandidateFinished, Finished, Output, Submit
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.engine_driver import Clock, make_engine
from support.engine.exactness import Bench
from support.engine.hf_beams import BeamCase, HfBeams
from support.lengths import at_length, some

WIDTHS = (2, 4, 8)
CASES: tuple[tuple[Family, bool], ...] = (
    ("opt", False), ("opt", True), ("llama", True), ("llama", False), ("qwen3", False), ("qwen3", True)
)  # fmt: skip
"""Each family with a switch in either position. A short run has every second one."""


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Family], tuple[Bench, HfBeams]]:
    made: dict[Family, tuple[Bench, HfBeams]] = {}

    def model(family: Family) -> tuple[Bench, HfBeams]:
        if family not in made:
            folder = tmp_path_factory.mktemp("models")
            made[family] = Bench(family, folder), HfBeams.load(tiny_checkpoint(family, folder))
        return made[family]

    return model


def engine_of(bench: Bench, clock: Clock, *, chunks: int, overlapped: bool) -> Engine:
    cache = CacheConfig(device_chunks=chunks, host_chunks=chunks // 2, chunk_tokens=8)
    scheduler = SchedulerConfig(context_limit=160, max_batch_tokens=64, max_running=24)
    return make_engine(
        cache, scheduler, bench.worker(cache, scheduler), clock, bench.vocabulary, overlapped=overlapped
    )


def answers(engine: Engine, clock: Clock, requests: set[int]) -> dict[int, dict[int, list[int]]]:
    """The output of each candidate of each request, when all have ended."""
    found: dict[int, dict[int, list[int]]] = {request: {} for request in requests}
    ended: Counter[int] = Counter()
    while requests:
        assert engine.has_work, f"{requests} are waited for"
        clock.now += 1.0
        for event in engine.step():
            match event:
                case Output(request, tokens, _, candidate):
                    found[request].setdefault(candidate, []).extend(tokens)
                case CandidateFinished(request, _, _):
                    ended[request] += 1
                case Finished(request, _, _):
                    assert ended[request] in (0, len(found[request]))
                    requests.discard(request)
        engine.check()
    return found


@pytest.mark.parametrize(("family", "overlapped"), some(CASES, 3))
def test_beams_equal_transformers(
    family: Family, overlapped: bool, models: Callable[[Family], tuple[Bench, HfBeams]]
) -> None:
    bench, oracle = models(family)
    rng = random.Random(f"{family}{overlapped}")
    clock, ended = Clock(), Counter[bool]()
    engine = engine_of(bench, clock, chunks=44, overlapped=overlapped)
    history: dict[str, list[int]] = {}
    number = 0
    for width in WIDTHS:
        for penalty in (1.0, 0.5, 2.0):
            for early in rng.sample((False, True), at_length(1, 2)):
                cases: dict[int, BeamCase] = {}
                # Three searches at a time, which take each other's pages.
                for session in rng.sample(("a", "b", "c", "d"), 3):
                    number += 1
                    new = [rng.randrange(3, bench.vocabulary) for _ in range(rng.randint(1, 12))]
                    past = history.setdefault(session, [])
                    if len(past) > 60:
                        past.clear()
                    context = [*past, *new]
                    beams = width if len(cases) < 2 else 2
                    free = BeamCase(tuple(context), beams, rng.choice((3, 9)), (), penalty, early)
                    met = sorted(set(oracle.search(free).tokens))
                    ends = tuple(rng.sample(met, min(len(met), rng.choice((0, 1, 2)))))
                    cases[number] = case = with_ends(free, ends)
                    sampling = Sampling(
                        beam_width=case.width, max_output_tokens=case.max_output_tokens, stop_token_ids=ends,
                        length_penalty=penalty, early_stopping=early, ignore_eos=True,
                    )  # fmt: skip
                    engine.handle(Submit(number, session, pack_tokens(context), len(new), sampling, "tenant"))
                    history[session] = context
                found = answers(engine, clock, set(cases))
                for request, case in cases.items():
                    expected, _ = oracle.generate(case)
                    assert tuple(found[request][0]) == expected, case
                    ended[expected[-1] in case.end_tokens] += 1
                for session, context in history.items():
                    for request, case in cases.items():
                        if list(case.prompt) == context:
                            history[session] = [*context, *found[request][0]]
    assert min(ended[True], ended[False]) > 5, ended
    engine.close()


def with_ends(case: BeamCase, ends: tuple[int, ...]) -> BeamCase:
    return BeamCase(
        case.prompt, case.width, case.max_output_tokens, ends, case.length_penalty, case.early_stopping
    )


@pytest.mark.parametrize(("family", "tenant"), some(CASES, 2))
def test_candidates_equal_turns_of_their_own(
    family: Family, tenant: bool, models: Callable[[Family], tuple[Bench, HfBeams]]
) -> None:
    scope = "tenant" if tenant else ""
    bench, _ = models(family)
    rng = random.Random(f"{family}{scope}")
    clock = Clock()
    together = engine_of(bench, clock, chunks=30, overlapped=True)
    alone = engine_of(bench, clock, chunks=200, overlapped=False)
    different = 0
    for request in range(1, 13):
        context = [rng.randrange(3, bench.vocabulary) for _ in range(rng.randint(2, 60))]
        sampling = Sampling(
            temperature=1.0, seed=rng.randrange(1 << 64), candidates=rng.randint(2, 6),
            max_output_tokens=rng.randint(1, 20),
            top_p=rng.choice((0.8, 1.0)), presence_penalty=rng.choice((0.0, 0.5)), ignore_eos=True,
        )  # fmt: skip
        together.handle(
            Submit(request, f"s{request % 3}", pack_tokens(context), len(context), sampling, scope)
        )
        found = answers(together, clock, {request})[request]
        assert sorted(found) == list(range(sampling.candidates))
        for candidate, tokens in found.items():
            single = msgspec.structs.replace(
                sampling, candidates=1, seed=(sampling.seed + candidate) % (1 << 64)
            )
            key = 100 * request + candidate
            alone.handle(Submit(key, "own", pack_tokens(context), len(context), single))
            assert answers(alone, clock, {key})[key][0] == tokens
        different += len({tuple(tokens) for tokens in found.values()}) > 1
    assert different > 8
    together.close()
    alone.close()
