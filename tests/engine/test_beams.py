"""Beam search gives what ``generate(num_beams=…)`` of transformers gives, token for token; and what is around it."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections import Counter
from collections.abc import Sequence

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.core import Sampling
from pensieve.engine.beams import BeamSearch, BeamStep, Hypothesis, end_tokens, max_pages, place_beams
from support.engine.checkpoints import Family, tiny_checkpoint
from support.engine.hf_beams import BeamCase, HfBeams, TableConfig, TableModel
from support.lengths import seeds

PENALTIES = (0.0, 0.6, 1.0, 2.0, -1.0)


def shares(found: Sequence[Hypothesis]) -> tuple[float, float]:
    """Which part of the outputs ended by an end token, and which by length."""
    ended = sum(one.has_end_token for one in found) / len(found)
    return ended, 1.0 - ended


@pytest.mark.parametrize("family", ["opt", "llama", "qwen3"])
def test_equals_transformers(family: Family, tmp_path_factory: pytest.TempPathFactory) -> None:
    model = HfBeams.load(tiny_checkpoint(family, tmp_path_factory.mktemp("models")))
    rng = random.Random(family)
    combinations = [
        *itertools.product((2, 4, 8), PENALTIES, (False, True)),
        (16, 1.0, False),
        (16, 0.6, True),
    ]
    found: list[Hypothesis] = []
    several = 0
    for number, (width, penalty, early) in enumerate(combinations):
        prompt = tuple(rng.randrange(3, 160) for _ in range(rng.randint(1, 30)))
        free = BeamCase(prompt, width, rng.choice((1, 4, 9, 16)), (), penalty, early)
        # Tokens that beams meet: an output with an end token in its middle is one that should have ended there.
        met = sorted(set(model.search(free).tokens))
        ends = tuple(rng.sample(met, min(len(met), rng.choice((0, 0, 1, 2, 3)))))
        case = dataclasses.replace(free, end_tokens=ends)
        ours = model.search(case)
        tokens, score = model.generate(case, use_cache=number % 3 == 0)
        assert ours.tokens == tokens, case
        assert ours.score == pytest.approx(score, rel=1e-5), case
        assert ours.has_end_token == (ours.tokens[-1] in ends)
        assert ours.has_end_token or len(ours.tokens) == case.max_output_tokens
        found.append(ours)
        several += ours.has_end_token and len(ends) > 1
    assert min(shares(found)) > 0.2 and several >= 3, (shares(found), several)


def test_equals_transformers_bit_for_bit() -> None:
    """Many more cases, on logits that cost nothing. Scores too are equal, to the last bit: no sum rounds otherwise."""
    rng = random.Random(7)
    found: list[Hypothesis] = []
    seen: Counter[str] = Counter()
    for seed in seeds(120, 600):
        vocab = rng.choice((8, 16, 40))
        spread = rng.choice((0.3, 1.0, 3.0))
        model = HfBeams(TableModel(TableConfig(vocab_size=vocab, rows=9973, spread=spread, seed=seed)))
        case = BeamCase(
            prompt=tuple(rng.randrange(vocab) for _ in range(rng.randint(1, 4))),
            width=rng.choice((2, 3, 4, 8)),
            max_output_tokens=rng.choice((1, 2, 6, 12, 20)),
            end_tokens=tuple(rng.sample(range(vocab), rng.choice((0, 1, 1, 2, 3)))),
            length_penalty=rng.choice(PENALTIES),
            early_stopping=rng.random() < 0.5,
        )
        ours = model.search(case, more=rng.choice((0, 7)))
        assert (ours.tokens, ours.score) == model.generate(case), case
        found.append(ours)
        seen["stopped early"] += not ours.has_end_token and len(ours.tokens) < case.max_output_tokens
        for name, other in {
            "early stopping": {"early_stopping": not case.early_stopping},
            "length penalty": {"length_penalty": 1.0 if case.length_penalty != 1.0 else 0.0},
            "width": {"width": case.width + 1},
        }.items():
            seen[name] += model.search(dataclasses.replace(case, **other)).tokens != ours.tokens
    assert min(shares(found)) > 0.25, shares(found)
    assert seen["stopped early"] == 0
    assert min(seen[name] for name in ("early stopping", "length penalty", "width")) > 10, seen


def row(*probabilities: float) -> list[tuple[int, float]]:
    """Tokens 0, 1, … with these probabilities, best first."""
    pairs = [(token, math.log(each)) for token, each in enumerate(probabilities)]
    return sorted(pairs, key=lambda pair: -pair[1])


def test_first_step_continues_one_beam_only() -> None:
    step = BeamSearch(3, max_output_tokens=4).step([row(0.1, 0.4, 0.2, 0.3)])
    assert step == BeamStep(parents=(0, 0, 0), tokens=(1, 3, 2))


def test_end_tokens_below_the_first_beams_are_passed_over() -> None:
    search = BeamSearch(2, max_output_tokens=2, end_tokens=(2,))
    assert search.candidates == 3
    assert search.step([row(0.5, 0.3, 0.2)]) == BeamStep((0, 0), (0, 1))
    finished = search.step([row(0.4, 0.3, 0.3), row(0.4, 0.3, 0.3)]).finished
    assert finished is not None and finished.tokens == (0, 0) and not finished.has_end_token


def test_equal_sums_keep_the_order_of_beams_and_rows() -> None:
    search = BeamSearch(2, max_output_tokens=9)
    assert search.step([[(5, -1.0), (4, -1.0), (3, -1.0)]]) == BeamStep((0, 0), (5, 4))
    assert search.step([[(7, -1.0), (6, -1.0)], [(9, -1.0), (8, -1.0)]]) == BeamStep((0, 0), (7, 6))


def test_of_equal_scores_the_older_hypothesis_wins() -> None:
    search = BeamSearch(2, max_output_tokens=2, end_tokens=(2,), length_penalty=0.0)
    search.step([[(0, -0.5), (2, -1.0), (1, -1.5)]])
    finished = search.step([[(2, -0.5), (3, -9.0), (4, -9.0)], [(2, -9.0), (3, -9.0), (4, -9.0)]]).finished
    assert finished == Hypothesis((2,), -1.0, True)


def test_scores_below_those_that_count() -> None:
    """What transformers begins with in place of hypotheses, -1e9, is better: the search ends."""
    search = BeamSearch(2, max_output_tokens=9, end_tokens=(2,), length_penalty=-40.0)
    assert search.step([[(0, -0.1), (2, -0.2), (1, -0.3)]]).finished is None
    finished = search.step([[(0, -0.1), (2, -0.2), (1, -0.3)]] * 2).finished
    assert finished is not None and finished.tokens == (2,) and finished.has_end_token


def test_a_vocabulary_smaller_than_the_width() -> None:
    """Beams that cannot be filled stand beside the others with a sum that never counts."""
    search = BeamSearch(8, max_output_tokens=3, end_tokens=(2,))
    step = search.step([row(0.5, 0.3, 0.2)])
    assert step.parents == (0,) * 8 and step.tokens[:2] == (0, 1)
    while step.finished is None:
        step = search.step([row(0.5, 0.3, 0.2)] * 8)
    assert step.finished.tokens == (0, 0, 0)


def test_nothing_but_end_tokens() -> None:
    finished = BeamSearch(2, max_output_tokens=5, end_tokens=range(3)).step([row(0.2, 0.5, 0.3)]).finished
    assert finished is not None and (finished.tokens, finished.has_end_token) == ((1,), True)


@pytest.mark.parametrize("penalty", [-300.0, -40.0, 40.0, 300.0, 1e9, math.inf, -math.inf, math.nan])
def test_an_absurd_length_penalty_ends_with_an_output(penalty: float) -> None:
    search = BeamSearch(2, max_output_tokens=20, end_tokens=(2,), length_penalty=penalty)
    step = search.step([row(0.5, 0.3, 0.2)])
    for _ in range(20):
        if step.finished is not None:
            break
        step = search.step([row(0.5, 0.3, 0.2)] * 2)
    assert step.finished is not None and step.finished.tokens


@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_values_that_are_not_finite_end_with_an_output(value: float) -> None:
    search = BeamSearch(2, max_output_tokens=3, end_tokens=(2,))
    step = search.step([[(token, value) for token in range(4)]])
    for _ in range(3):
        if step.finished is None:
            step = search.step([[(token, value) for token in range(4)]] * 2)
    assert step.finished is not None and step.finished.tokens


def test_misuse_is_refused() -> None:
    with pytest.raises(ValueError, match="0 beams"):
        BeamSearch(0, max_output_tokens=1)
    with pytest.raises(ValueError, match="at most 0 tokens"):
        BeamSearch(2, max_output_tokens=0)
    search = BeamSearch(2, max_output_tokens=2, end_tokens=(0,))
    with pytest.raises(ValueError, match="2 rows"):
        search.step([row(0.5, 0.5)] * 2)
    search.step([row(0.2, 0.3, 0.5)])
    with pytest.raises(ValueError, match="1 rows"):
        search.step([row(0.2, 0.3, 0.5)])
    assert search.step([row(0.2, 0.3, 0.5)] * 2).finished is not None
    with pytest.raises(ValueError, match="2 rows"):
        search.step([row(0.2, 0.3, 0.5)] * 2)
    with pytest.raises(ValueError, match="3 are needed"):
        short = BeamSearch(2, max_output_tokens=5, end_tokens=(0,))
        short.step([row(0.2, 0.3, 0.5)])
        short.step([row(0.9), [(1, -9.0)]])


def test_of_takes_what_sampling_asks_for() -> None:
    sampling = Sampling(
        beam_width=3, max_output_tokens=5, stop_token_ids=(7, 2), length_penalty=0.5, early_stopping=True
    )
    assert end_tokens(sampling, (2, 3)) == {2, 3, 7}
    assert end_tokens(msgspec.structs.replace(sampling, ignore_eos=True), (2, 3)) == {2, 7}
    search = BeamSearch.from_sampling(sampling, 10, 100, (2, 3))
    assert (search.width, search.max_output_tokens, search.candidates) == (3, 5, 6)
    assert BeamSearch.from_sampling(sampling, 97, 100, ()).max_output_tokens == 3, "the context ends first"
    endless = msgspec.structs.replace(sampling, max_output_tokens=None)
    assert BeamSearch.from_sampling(endless, 10, 100, ()).max_output_tokens == 90
    assert (
        BeamSearch.from_sampling(Sampling(beam_width=2, max_output_tokens=0), 1, 9, ()).max_output_tokens == 1
    )
    # Three hypotheses after the second step: the search ends with early stopping, with the penalty in the score.
    search.step([row(0.1, 0.4, 0.05, 0.05, 0.2, 0.2)])
    finished = search.step([[(2, -0.1), (3, -0.2), (7, -0.3), (4, -9.0), (5, -9.0), (6, -9.0)]] * 3).finished
    assert finished is not None and finished.tokens == (1, 2)
    assert finished.score == pytest.approx((math.log(0.4) - 0.1) / math.sqrt(2))


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, int, int, list[list[int]]]:
    """Context, chunk size, width, and the parents of each step after the first."""
    width = draw(st.integers(1, 5))
    parents = st.lists(st.integers(0, width - 1), min_size=width, max_size=width)
    return (
        draw(st.integers(1, 12)), draw(st.integers(1, 5)), width, draw(st.lists(parents, max_size=14)),
    )  # fmt: skip


@given(groups())
def test_groups_stay_together_and_within_their_pages(group: tuple[int, int, int, list[list[int]]]) -> None:
    """Members that branch as ``place`` says hold what their beams should, on no more pages than was said."""
    context, chunk, width, steps = group
    bound = max_pages(context, width, len(steps) + 1, chunk)
    fresh = itertools.count()
    pages: list[list[int]] = [[] for _ in range(width)]
    """Of each member: its pages, by chunk."""
    pages[0] = [next(fresh) for _ in range(math.ceil(context / chunk))]
    held: list[list[int]] = [[] for _ in range(width)]
    """Of each member: which tokens it has seen, numbered as they come."""
    beams: list[list[int]] = [[]]
    members: tuple[int, ...] = (0,)
    token = itertools.count()
    for length, parents in enumerate([[0] * width, *steps], context):
        placed = place_beams(parents, members, width)
        assert sorted(placed.members) == list(range(width))
        sources, targets = (
            {source for source, _ in placed.branches},
            [target for _, target in placed.branches],
        )
        assert not sources & set(targets) and len(set(targets)) == len(targets)
        assert len(targets) == width - len(set(parents)), (
            "one branch for each beam but its parent's first child"
        )
        for source, target in placed.branches:
            held[target] = list(held[source])
            full, tail = pages[source][: length // chunk], pages[source][length // chunk :]
            pages[target] = full + [next(fresh) for _ in tail]
        newest = [next(token) for _ in parents]
        beams = [[*beams[parent], new] for parent, new in zip(parents, newest, strict=True)]
        members = placed.members
        for member, new in zip(members, newest, strict=True):
            held[member].append(new)
            if length % chunk == 0:
                pages[member] = [*pages[member], next(fresh)]
        assert [held[member] for member in members] == beams
        assert len({page for one in pages for page in one}) <= bound
    straight = all(sorted(parents) == list(range(width)) for parents in steps)
    if straight:
        assert len({page for one in pages for page in one}) == bound, (
            "no more than needed if beams never meet"
        )


def test_long_searches_are_linear() -> None:
    """A step of a search does not grow with the output before it."""
    search = BeamSearch(2, max_output_tokens=20_000)
    rows = [row(0.5, 0.3, 0.2)]
    step = search.step(rows)
    while step.finished is None:
        step = search.step(rows * 2)
    assert step.finished.tokens == (0,) * 20_000
