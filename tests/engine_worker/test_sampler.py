"""Choosing tokens: filters as transformers has them, randomness by counter, and nothing ever NaN."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from pensieve.core import Sampling
from pensieve.engine.plan import SampleSpec
from pensieve.engine.sampler import _draw, _filter, sample, uniform

VOCAB = 50


def spec(index: int = 0, *, eos: tuple[int, ...] = (), **values: Any) -> SampleSpec:
    return SampleSpec(Sampling(**values), output_index=index, eos_token_ids=eos)


def logits(rows: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 3


samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 1e-40, 0.3, 1.0, 5.0]),
    top_k=st.integers(0, VOCAB + 5),
    top_p=st.floats(0.0, 1.0),
    min_p=st.floats(0.0, 1.0),
    repetition_penalty=st.sampled_from([0.5, 1.0, 1.7]),
    frequency_penalty=st.sampled_from([-2.0, 0.0, 1.0]),
    presence_penalty=st.sampled_from([0.0, 2.0]),
    seed=st.integers(0, 2**64 - 1),
    min_output_tokens=st.integers(0, 4),
    logit_bias=st.dictionaries(st.integers(0, VOCAB + 3), st.sampled_from([-100.0, 1.0, 100.0]), max_size=3),
    top_logprobs=st.one_of(st.none(), st.integers(0, VOCAB + 2)),
)


@st.composite
def specs(draw: st.DrawFn) -> SampleSpec:
    sampling = draw(samplings)
    index = draw(st.integers(0, 6))
    some = st.lists(st.integers(0, VOCAB - 1), min_size=index, max_size=index)
    return SampleSpec(
        sampling,
        output_index=index,
        eos_token_ids=(2, 7),
        prompt=np.array([1, 2, 3], dtype=np.int32) if sampling.needs_context else None,
        output=np.array(draw(some), dtype=np.int32) if sampling.needs_context else None,
    )


@given(st.lists(specs(), min_size=1, max_size=6), st.integers(0, 100))
def test_a_token_never_depends_on_the_batch(batch: list[SampleSpec], seed: int) -> None:
    rows = logits(len(batch), seed)
    before = rows.clone()
    together = sample(rows, batch)
    alone = [sample(rows[index : index + 1], [one])[0] for index, one in enumerate(batch)]
    backwards = sample(rows.flip(0), batch[::-1])[::-1]
    assert [token for token, _ in together] == [token for token, _ in alone] == [t for t, _ in backwards]
    for (_, first), (_, second) in zip(together, alone, strict=True):
        assert (first is None) == (second is None)
        if first is not None and second is not None:
            assert first.logprob == pytest.approx(second.logprob, abs=1e-5)
            assert [token for token, _ in first.top] == [token for token, _ in second.top]
    assert torch.equal(rows, before)


@given(specs(), st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38]), st.integers(0, VOCAB))
def test_never_nan(one: SampleSpec, bad: float, count: int) -> None:
    row = logits(1)
    row[0, :count] = bad
    ((token, logprob),) = sample(row, [one])
    assert 0 <= token < VOCAB
    assert logprob is None or not any(
        math.isnan(value) for value in (logprob.logprob, *dict(logprob.top).values())
    )


def test_greedy_takes_the_lowest_id_on_a_tie() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, [9, 30]] = 2.0
    assert sample(row, [spec()])[0][0] == 9


@pytest.mark.parametrize(
    ("sampling", "warper"),
    [
        (Sampling(top_k=7), hf.TopKLogitsWarper(7)),
        (Sampling(top_k=1), hf.TopKLogitsWarper(1)),
        (Sampling(top_p=0.8), hf.TopPLogitsWarper(0.8)),
        (Sampling(top_p=0.01), hf.TopPLogitsWarper(0.01)),
        (Sampling(min_p=0.05), hf.MinPLogitsWarper(0.05)),
        (Sampling(min_p=1.0), hf.MinPLogitsWarper(1.0)),
    ],
)
def test_filters_keep_what_transformers_keeps(sampling: Sampling, warper: hf.LogitsProcessor) -> None:
    for seed in range(20):
        rows = logits(1, seed)
        want = warper(torch.zeros(1, 1, dtype=torch.long), rows.clone())
        got = _filter((rows - rows.max()).double(), [sampling])
        assert torch.equal(torch.isneginf(got), torch.isneginf(want))


def test_filters_apply_in_the_order_of_transformers() -> None:
    rows = logits(1)
    want = rows.clone()
    for warper in (hf.TopKLogitsWarper(9), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.1)):
        want = warper(torch.zeros(1, 1, dtype=torch.long), want)
    got = _filter((rows - rows.max()).double(), [Sampling(top_k=9, top_p=0.9, min_p=0.1)])
    assert torch.equal(torch.isneginf(got), torch.isneginf(want))


def test_repetition_penalty_is_that_of_transformers() -> None:
    rows = logits(1)
    prompt, output = np.array([4, 9, 4], dtype=np.int32), np.array([11, 9], dtype=np.int32)
    seen = torch.tensor([[4, 9, 4, 11, 9]])
    want = hf.RepetitionPenaltyLogitsProcessor(30.0)(seen, rows.clone())
    one = SampleSpec(Sampling(repetition_penalty=30.0), 2, prompt=prompt, output=output)
    for token in range(VOCAB):  # push each token up in turn: greedy shows where the penalised maximum lies
        bias = {token: 8.0}
        biased = SampleSpec(Sampling(repetition_penalty=30.0, logit_bias=bias), 2, (), prompt, output)
        expected = want.clone()
        expected[0, token] += 8.0
        assert sample(rows, [biased])[0][0] == int(expected.argmax())
    assert sample(rows, [one])[0][0] == int(want.argmax())


def test_frequency_and_presence_penalties_count_the_output_only() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 5], row[0, 6], row[0, 7] = 3.0, 2.5, 1.9
    prompt, output = np.array([6, 6, 6, 6], dtype=np.int32), np.array([5, 5], dtype=np.int32)

    def chosen(**values: Any) -> int:
        return sample(row, [SampleSpec(Sampling(**values), 2, prompt=prompt, output=output)])[0][0]

    assert chosen(frequency_penalty=0.2) == 5  # 3 - 2 * 0.2 = 2.6
    assert chosen(frequency_penalty=0.3) == 6
    assert chosen(presence_penalty=0.4) == 5
    assert chosen(presence_penalty=0.6) == 6


def test_draws_follow_the_distribution() -> None:
    row = torch.log(torch.tensor([[0.5, 0.3, 0.0, 0.15, 0.05]]))
    count = 4000
    tokens = _draw(row.expand(count, 5), [spec(index, temperature=1.0, seed=5) for index in range(count)])
    share = {token: seen / count for token, seen in Counter(tokens.tolist()).items()}
    assert share == pytest.approx({0: 0.5, 1: 0.3, 3: 0.15, 4: 0.05}, abs=0.03)


def test_temperature_sharpens() -> None:
    rows = torch.tensor([[1.0, 0.0]]).expand(2000, 2)
    cold = _draw(rows, [spec(index, temperature=0.5) for index in range(2000)]).double().mean()
    assert float(cold) == pytest.approx(1 / (1 + math.exp(2)), abs=0.03)


def test_uniform_is_a_function_of_seed_and_index() -> None:
    values = [uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)]
    assert len(set(values)) == 300 and all(0.0 <= value < 1.0 for value in values)
    assert uniform(1, 7) == values[107]


def test_end_tokens_are_banned_until_the_minimum() -> None:
    row = torch.zeros(1, VOCAB)
    row[0, 2], row[0, 8], row[0, 3] = 9.0, 8.0, 1.0
    early = spec(1, eos=(2,), min_output_tokens=2, stop_token_ids=(8,))
    late = spec(2, eos=(2,), min_output_tokens=2, stop_token_ids=(8,))
    assert [token for token, _ in sample(row.expand(2, VOCAB), [early, late])] == [3, 2]


def test_banning_everything_leaves_the_row_as_it_was() -> None:
    everything = spec(0, eos=tuple(range(VOCAB)), min_output_tokens=1)
    row = logits(1)
    assert sample(row, [everything])[0][0] == int(row.argmax())


def test_logprobs_are_those_of_the_raw_logits() -> None:
    rows = logits(3)
    want = torch.log_softmax(rows, dim=-1)
    got = sample(
        rows,
        [
            spec(temperature=0.7, top_k=3, logit_bias={4: 50.0}, top_logprobs=2),
            spec(),
            spec(top_logprobs=0),
        ],
    )
    first, second, third = (logprob for _, logprob in got)
    assert second is None and first is not None and third is not None
    assert (first.token_id, third.token_id) == (4, int(rows[2].argmax()))
    assert first.logprob == pytest.approx(float(want[0, 4]), abs=1e-5)
    best = want[0].topk(2)
    assert [token for token, _ in first.top] == best.indices.tolist()
    assert [value for _, value in first.top] == pytest.approx(best.values.tolist(), abs=1e-5)
    assert third.top == ()


def test_nothing_to_sample() -> None:
    assert sample(torch.empty(0, VOCAB), []) == []
