"""Choosing tokens: as the slow reference does, filters as transformers has them, and nothing ever NaN."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.generation import logits_process as hf

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import SampleSpec, TokenMask
from pensieve.engine.sampling.rows import MAX_TOP_K, DrawGroup, prepare, uniform
from pensieve.engine.sampling.sampler import Parameters, choose, draw, sample, sanitize, token_weights
from support.engine.slow_sampler import slow_sample, slow_uniform

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


def mask_of(tokens: set[int], vocab: int = VOCAB) -> TokenMask:
    """The mask that allows these tokens. Bits past the vocabulary are set, as they may be."""
    bits = np.ones(32 * -(-vocab // 32), dtype=np.uint8)
    bits[:vocab] = 0
    bits[list(tokens)] = 1
    return np.packbits(bits, bitorder="little").view(np.int32)


@st.composite
def specs(draw: st.DrawFn) -> SampleSpec:
    sampling = draw(samplings)
    index = draw(st.integers(0, 6))
    some = st.lists(st.integers(0, VOCAB - 1), min_size=index, max_size=index)
    allowed = draw(st.one_of(st.none(), st.sets(st.integers(0, VOCAB - 1), min_size=1)))
    return SampleSpec(
        sampling,
        output_index=index,
        eos_token_ids=(2, 7),
        prompt=np.array([1, 2, 3], dtype=np.int32) if sampling.needs_context else None,
        output=np.array(draw(some), dtype=np.int32) if sampling.needs_context else None,
        mask=None if allowed is None else mask_of(allowed),
    )


def weights(rows: torch.Tensor, samplings: list[Sampling]) -> torch.Tensor:
    """What the tokens of all ``rows`` weigh after temperature and filters; the rows must need the same filters."""
    draws = prepare([SampleSpec(sampling, 0) for sampling in samplings], rows.shape[1]).draws
    assert draws is not None and len(draws.groups) == 1
    arrays = (draws.temperature, draws.uniform, draws.floor, draws.top_k, draws.top_p)
    columns = (torch.from_numpy(array)[:, None] for array in arrays)
    return token_weights(rows, rows.amax(dim=1, keepdim=True), Parameters(*columns), draws.groups[0])


@given(st.lists(specs(), min_size=1, max_size=6), st.integers(0, 100), st.sampled_from([0.1, 1.0, 10.0]))
def test_as_the_slow_reference_row_by_row(batch: list[SampleSpec], seed: int, spread: float) -> None:
    rows = logits(len(batch), seed) * spread
    for row, one, (token, logprob) in zip(rows, batch, sample(rows, batch), strict=True):
        expected, expected_logprob = slow_sample(row, one)
        assert token == expected
        assert (logprob is None) == (expected_logprob is None)
        if logprob is not None and expected_logprob is not None:
            assert logprob.logprob == pytest.approx(expected_logprob.logprob, abs=1e-5)
            assert [token for token, _ in logprob.top] == [token for token, _ in expected_logprob.top]


CHANGED: dict[str, Any] = {
    "temperature": 3.0, "top_p": 0.3, "top_k": 2, "min_p": 0.5, "repetition_penalty": 5.0, "frequency_penalty": 2.0,
    "presence_penalty": 2.0, "seed": 8, "logit_bias": {5: 9.0}, "min_output_tokens": 9, "top_logprobs": 3,
}  # fmt: skip
"""A value of each field of ``Sampling`` that changes what is chosen."""
NOT_OF_ONE_TOKEN = {
    "max_output_tokens", "stop", "stop_token_ids", "ignore_eos", "candidates", "beam_width", "length_penalty",
    "early_stopping", "grammar",
}  # fmt: skip
"""Fields that end answers or make several of them; of a grammar a step has the mask."""


def test_every_sampling_parameter_has_its_mathematics() -> None:
    """A new field of ``Sampling`` belongs into one of the two."""
    assert {*CHANGED, *NOT_OF_ONE_TOKEN} == set(Sampling.__struct_fields__)
    rows, context = logits(200), np.arange(VOCAB, dtype=np.int32)[::3].copy()

    def chosen(sampling: Sampling) -> list[Any]:
        one = SampleSpec(sampling, 4, eos_token_ids=(2, 7), prompt=context, output=context)
        return sample(rows, [one] * len(rows))

    plain = Sampling(temperature=1.0, seed=7)
    for name, value in CHANGED.items():
        assert chosen(msgspec.structs.replace(plain, **{name: value})) != chosen(plain), name


@pytest.mark.parametrize("vocab", [MAX_TOP_K, 2 * MAX_TOP_K + 1])
@given(data=st.data())
def test_large_vocabularies_select_or_sort(vocab: int, data: st.DataObject) -> None:
    """Rows that need a selection, a whole order or none at all share a batch; ties are common."""
    some = st.builds(
        Sampling,
        temperature=st.sampled_from([0.0, 0.7, 3.0]),
        top_k=st.sampled_from([0, 1, 40, MAX_TOP_K, MAX_TOP_K + 1, 2 * MAX_TOP_K]),
        top_p=st.sampled_from([0.0, 0.3, 0.95, 0.9999, 1.0]),
        min_p=st.sampled_from([0.0, 0.0, 0.01]),
        seed=st.integers(0, 1000),
    )
    batch = [SampleSpec(sampling, 3) for sampling in data.draw(st.lists(some, min_size=1, max_size=8))]
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 100)))
    rows = torch.randn(len(batch), vocab, generator=generator) * data.draw(st.sampled_from([0.3, 3.0]))
    if data.draw(st.booleans()):
        rows = rows.round()
    got = [token for token, _ in sample(rows, batch)]
    assert got == [slow_sample(row, one)[0] for row, one in zip(rows, batch, strict=True)]


@given(
    st.sampled_from([1, 7, 50, 163, 509, 1003, 32001]),
    st.integers(1, 70),
    st.sampled_from([0.1, 3.0, 40.0]),
    st.integers(0, 1000),
)
def test_log_probabilities_have_the_same_bits_in_any_batch(
    vocab: int, rows: int, spread: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randn(rows, vocab, generator=generator) * spread
    asked = [spec(row, temperature=row % 2, seed=row, top_logprobs=row % 7) for row in range(rows)]
    together = sample(values, asked)
    for first, last in ((0, 1), (rows - 1, rows), (rows // 3, rows // 2 + 1), (rows // 2, rows)):
        assert sample(values[first:last], asked[first:last]) == together[first:last]


def test_the_two_ways_to_a_nucleus_agree_to_the_last_bit() -> None:
    """One row that needs its whole order for top-k sends its whole group through the sort that a GPU uses."""
    vocab = MAX_TOP_K + 500
    rows = torch.randn(4, vocab, generator=torch.Generator().manual_seed(3)) * 2
    nuclei = [Sampling(temperature=0.8, top_p=top_p) for top_p in (0.0, 0.5, 0.999)]
    compact = weights(rows[:3], nuclei)
    sorted_whole = weights(rows, [*nuclei, Sampling(temperature=0.8, top_p=0.9, top_k=MAX_TOP_K + 1)])
    assert torch.equal(compact, sorted_whole[:3])
    assert int(compact[0].count_nonzero()) == 1


@given(st.lists(samplings, min_size=2, max_size=5), st.integers(0, 100))
def test_weights_never_depend_on_the_batch(batch: list[Sampling], seed: int) -> None:
    """To the last bit, whatever else is in the batch: only so can no token ever change."""
    batch = [msgspec.structs.replace(one, temperature=max(one.temperature, 0.1), top_k=5) for one in batch]
    rows = logits(len(batch), seed)
    together = weights(rows, batch)
    for index, one in enumerate(batch):
        assert torch.equal(weights(rows[index : index + 1], [one])[0], together[index])


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


@pytest.mark.fault(21)
@given(specs(), st.sampled_from([math.nan, math.inf, -math.inf, 1e38, -1e38]), st.integers(0, VOCAB))
def test_never_nan(one: SampleSpec, bad: float, count: int) -> None:
    row = logits(1)
    row[0, :count] = bad
    ((token, logprob),) = sample(row, [one])
    assert 0 <= token < VOCAB
    assert logprob is None or not any(
        math.isnan(value) for value in (logprob.logprob, *dict(logprob.top).values())
    )


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_not_a_number_is_impossible_and_infinity_certain(temperature: float) -> None:
    rows = logits(2)
    rows[:, 4] = math.nan
    rows[1, 6] = math.inf
    batch = [spec(index, temperature=temperature) for index in range(2)]
    tokens = [token for token, _ in sample(rows, batch)]
    assert tokens == [slow_sample(row, one)[0] for row, one in zip(rows, batch, strict=True)]
    assert tokens[0] != 4 and tokens[1] == 6


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
        got = weights(rows, [msgspec.structs.replace(sampling, temperature=1.0)])
        assert torch.equal(got == 0, torch.isneginf(want))


def test_filters_apply_in_the_order_of_transformers() -> None:
    rows = logits(1)
    want = rows.clone()
    for warper in (hf.TopKLogitsWarper(9), hf.TopPLogitsWarper(0.9), hf.MinPLogitsWarper(0.1)):
        want = warper(torch.zeros(1, 1, dtype=torch.long), want)
    got = weights(rows, [Sampling(temperature=1.0, top_k=9, top_p=0.9, min_p=0.1)])
    assert torch.equal(got == 0, torch.isneginf(want))


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
    chosen = sample(row.expand(count, 5), [spec(index, temperature=1.0, seed=5) for index in range(count)])
    share = {token: seen / count for token, seen in Counter(token for token, _ in chosen).items()}
    assert share == pytest.approx({0: 0.5, 1: 0.3, 3: 0.15, 4: 0.05}, abs=0.03)


def test_a_number_of_zero_takes_the_first_token_that_is_left() -> None:
    rows = torch.tensor([[0.0, -torch.inf, 1.0, 3.0, 2.0]])
    parameters = Parameters(
        temperature=torch.ones(1, 1, dtype=torch.float64),
        uniform=torch.zeros(1, 1, dtype=torch.float64),
        floor=torch.full((1, 1), -math.inf, dtype=torch.float64),
        top_k=torch.tensor([[2]]),
        top_p=torch.ones(1, 1, dtype=torch.float64),
    )
    group = DrawGroup(0, 1, min_p=False, top_p=False, top_k=True, max_top_k=2)
    assert draw(rows, rows.amax(dim=1, keepdim=True), parameters, group).tolist() == [3]


def test_temperature_sharpens() -> None:
    rows = torch.tensor([[1.0, 0.0]]).expand(2000, 2)
    chosen = sample(rows, [spec(index, temperature=0.5) for index in range(2000)])
    cold = sum(token for token, _ in chosen) / 2000
    assert cold == pytest.approx(1 / (1 + math.exp(2)), abs=0.03)


def test_uniform_is_a_function_of_seed_and_index() -> None:
    values = [uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)]
    assert len(set(values)) == 300 and all(0.0 <= value < 1.0 for value in values)
    assert uniform(1, 7) == values[107]
    assert values == [slow_uniform(seed, index) for seed in (0, 1, 2**64 - 1) for index in range(100)]


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


def test_greedy_rows_need_nothing_beyond_the_largest() -> None:
    plain = [Sampling(), Sampling(top_k=3, top_p=0.5, max_output_tokens=4, seed=9, stop_token_ids=(3,))]
    more = [
        Sampling(temperature=0.5),
        Sampling(logit_bias={1: 1.0}),
        Sampling(top_logprobs=0),
        Sampling(presence_penalty=0.1),
        Sampling(min_output_tokens=5),
    ]
    context = np.array([1], dtype=np.int32)
    assert prepare([SampleSpec(sampling, 0) for sampling in plain], VOCAB).plain
    for sampling in more:
        one = SampleSpec(sampling, 1, (2,), context, context)
        assert not prepare([*(SampleSpec(sampling, 0) for sampling in plain), one], VOCAB).plain
    assert prepare([SampleSpec(Sampling(min_output_tokens=5), 5, (2,))], VOCAB).plain


def test_rows_without_a_spec_change_nothing() -> None:
    """A captured graph has rows to spare; what they hold is of no interest."""
    rows = logits(4)
    batch = [spec(temperature=0.7, top_p=0.9, top_logprobs=1), spec(logit_bias={3: 9.0})]
    padded = torch.cat((rows[:2], torch.full((2, VOCAB), math.nan)))
    chosen = choose(padded, prepare(batch, VOCAB))
    assert len(chosen.tokens) == 4
    assert chosen.fetch().resolve() == sample(rows[:2], batch)


def test_logits_that_are_not_finite_are_reported_per_row(caplog: pytest.LogCaptureFixture) -> None:
    rows = logits(3)
    rows[1, 4] = math.inf
    cleaned, finite = sanitize(rows)
    assert finite.tolist() == [True, False, True]
    assert bool(torch.isfinite(cleaned).all()) and math.isinf(float(rows[1, 4]))
    chosen = choose(cleaned, prepare([spec(), spec()], VOCAB), finite)
    assert chosen.fetch().resolve([RequestKey(7), RequestKey(8)])[1] == (4, None)
    assert "not finite" in caplog.text and caplog.records[0].__dict__["requests"] == [RequestKey(8)]
    caplog.clear()
    choose(rows[2:], prepare([spec()], VOCAB)).fetch().resolve()
    assert "not finite" not in caplog.text


@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_context_from_another_vocabulary_is_refused(token: int) -> None:
    context = np.array([3, token], dtype=np.int32)
    with pytest.raises(ValueError, match="vocabulary of 50"):
        prepare([SampleSpec(Sampling(repetition_penalty=1.1), 1, prompt=context)], VOCAB)
