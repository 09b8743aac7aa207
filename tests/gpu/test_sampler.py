"""Sampling on a GPU: the tokens of the slow reference, rows that never see their batch, no waiting for the device."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest
import torch

from pensieve.core import Sampling
from pensieve.engine.plan import SampleSpec
from pensieve.engine.sampling.rows import prepare
from pensieve.engine.sampling.sampler import (
    SampledTokens,
    choose,
    greedy_tokens,
    sample,
    sanitize,
    workspace_bytes,
)
from support.engine.slow_sampler import slow_sample

pytestmark = pytest.mark.gpu

VOCABULARIES = [509, 32000, 50257, 128256]
"""Odd ones too: their rows do not begin at aligned addresses."""
ROWS = 40
KINDS = [
    Sampling(),
    Sampling(temperature=0.7),
    Sampling(temperature=1.0, top_p=0.9),
    Sampling(temperature=1.0, top_p=0.0),
    Sampling(temperature=0.6, top_k=20, top_p=0.8),
    Sampling(temperature=1.3, top_k=400),
    Sampling(temperature=1.0, top_k=2000, top_p=0.99),
    Sampling(temperature=1.0, min_p=0.05),
    Sampling(temperature=1e-40, top_p=0.5, min_p=0.5),
    Sampling(repetition_penalty=1.3),
    Sampling(temperature=0.8, repetition_penalty=0.8, frequency_penalty=0.5, presence_penalty=-0.7),
    Sampling(logit_bias={3: 100.0, 7: -100.0}, top_logprobs=3),
    Sampling(temperature=0.9, min_output_tokens=9, top_logprobs=0),
]


@contextmanager
def no_waiting() -> Iterator[None]:
    """Whatever waits for the device raises."""
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def make_specs(rows: int, vocab: int, seed: int = 0) -> list[SampleSpec]:
    random = np.random.default_rng(seed)
    specs = []
    for row in range(rows):
        kind = KINDS[row % len(KINDS)]
        values = {name: getattr(kind, name) for name in kind.__struct_fields__} | {"seed": row}
        prompt, output = (random.integers(0, vocab, count).astype(np.int32) for count in (70 + row, 5))
        context = (prompt, output) if kind.needs_context else (None, None)
        # Masks of one token, of some, and none at all. In some no token is left that other changes do not ban.
        mask = None
        if row % 3:
            allowed = random.random(32 * -(-vocab // 32)) < (0.2 if row % 3 == 1 else 0.0)
            allowed[[2, 5] if row % 2 else random.integers(0, vocab)] = True
            mask = np.packbits(allowed, bitorder="little").view(np.int32)
        specs.append(SampleSpec(Sampling(**values), 5, (2, 5), *context, mask))
    return specs


def make_logits(rows: int, vocab: int, *, ties: bool = False, seed: int = 0) -> torch.Tensor:
    values = torch.randn(rows, vocab, generator=torch.Generator().manual_seed(seed)) * 2.5
    return values.round() if ties else values


def tokens_of(logits: torch.Tensor, specs: list[SampleSpec]) -> list[int]:
    return [token for token, _ in sample(logits, specs)]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_as_the_slow_reference(vocab: int, ties: bool) -> None:
    logits, specs = make_logits(ROWS, vocab, ties=ties), make_specs(ROWS, vocab)
    for row, spec, (token, logprob) in zip(logits, specs, sample(logits.cuda(), specs), strict=True):
        expected, expected_logprob = slow_sample(row, spec)
        assert token == expected, spec.sampling
        assert (logprob is None) == (expected_logprob is None)
        if logprob is not None and expected_logprob is not None:
            assert logprob.logprob == pytest.approx(expected_logprob.logprob, abs=1e-4)
            assert [value for _, value in logprob.top] == pytest.approx(
                [value for _, value in expected_logprob.top], abs=1e-4
            )


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_a_row_never_sees_its_batch(vocab: int) -> None:
    logits, specs = make_logits(ROWS, vocab).cuda(), make_specs(ROWS, vocab)
    together = tokens_of(logits, specs)
    order = np.random.default_rng(1).permutation(ROWS).tolist()
    shuffled = tokens_of(logits[order], [specs[row] for row in order])
    assert [together[row] for row in order] == shuffled
    assert [tokens_of(logits[row : row + 1], [spec])[0] for row, spec in enumerate(specs)] == together
    doubled = tokens_of(torch.cat((logits, logits)), specs + specs)
    assert doubled == together + together


@pytest.mark.parametrize("vocab", VOCABULARIES)
def test_nothing_waits_for_the_device(vocab: int) -> None:
    logits, specs = make_logits(ROWS, vocab).cuda(), make_specs(ROWS, vocab)
    expected = sample(logits, specs)  # the first call may load libraries and allocate
    busy = torch.randn(4096, 4096, device="cuda")
    with no_waiting():
        for _ in range(20):
            busy = busy @ busy
            busy = busy / busy.abs().amax()
        fetched = choose(logits, prepare(specs, vocab)).fetch()
    assert fetched.resolve() == expected


def test_the_check_for_waiting_sees_a_wait() -> None:
    value = torch.ones(1, device="cuda")
    with no_waiting(), pytest.raises(RuntimeError, match="synchroniz"):
        value.item()


def test_greedy_steps_take_what_a_graph_has_chosen(caplog: pytest.LogCaptureFixture) -> None:
    """``clean`` and ``largest`` can be captured; only the copies to the host are left to be queued."""
    vocab, rows, padded = 32000, 5, 8
    static = make_logits(padded, vocab).cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        greedy_tokens(sanitize(static)[0])
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        cleaned, finite = sanitize(static)
        tokens = greedy_tokens(cleaned)
    prepared = prepare([SampleSpec(Sampling(), 0)] * rows, vocab)
    assert prepared.plain

    values = make_logits(padded, vocab, ties=True, seed=7)
    values[rows:] = math.nan  # of no interest
    static.copy_(values)
    graph.replay()
    assert SampledTokens(prepared, tokens, finite).fetch().resolve() == [
        (int(token), None) for token in values[:rows].argmax(dim=1)
    ]
    assert "not finite" not in caplog.text

    values[1, 100] = math.nan
    values[2, 200] = math.inf
    static.copy_(values)
    graph.replay()
    got = [token for token, _ in SampledTokens(prepared, tokens, finite).fetch().resolve()]
    values[1, 100], values[2, 200] = -1e30, 1e30
    assert got == values[:rows].argmax(dim=1).tolist() and got[2] == 200
    assert "not finite" in caplog.text


@pytest.mark.parametrize("vocab", [*VOCABULARIES, 1025, 1028, 32001])
def test_log_probabilities_have_the_same_bits_in_any_batch(vocab: int) -> None:
    rows = 33
    logits = make_logits(rows, vocab, seed=3).cuda()
    specs = [SampleSpec(Sampling(temperature=1.0, seed=row, top_logprobs=20), 5) for row in range(rows)]
    together = sample(logits, specs)
    for first in range(rows):
        for last in {first + 1, min(first + 4, rows), rows}:
            assert sample(logits[first:last], specs[first:last]) == together[first:last]


def test_padding_is_no_likely_token() -> None:
    vocab = 509
    [(_, logprob)] = sample(make_logits(1, vocab).cuda(), [SampleSpec(Sampling(top_logprobs=vocab + 3), 0)])
    assert logprob is not None and sorted(token for token, _ in logprob.top) == list(range(vocab))
    assert math.fsum(math.exp(value) for _, value in logprob.top) == pytest.approx(1.0, abs=1e-4)


@pytest.mark.parametrize("vocab", [50257, 128256])
def test_memory_of_log_probabilities_stays_within_what_is_announced(vocab: int) -> None:
    rows = 256
    logits = torch.randn(rows, vocab, device="cuda")
    specs = [SampleSpec(Sampling(top_logprobs=20), index) for index in range(rows)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    choose(logits, prepare(specs, vocab)).fetch().resolve()
    assert torch.cuda.max_memory_allocated() - before <= workspace_bytes(rows, vocab)


def test_banning_everything_leaves_the_row_as_it_was() -> None:
    vocab = 509
    logits = make_logits(2, vocab).cuda()
    banned = SampleSpec(Sampling(min_output_tokens=1), 0, tuple(range(vocab)))
    assert tokens_of(logits, [banned, SampleSpec(Sampling(), 0)]) == logits.argmax(dim=1).tolist()


@pytest.mark.parametrize(
    "kind", [Sampling(temperature=1.0, top_p=0.9), Sampling(temperature=1.0, top_k=50, top_p=0.9)]
)
def test_memory_stays_within_what_is_announced(kind: Sampling) -> None:
    rows, vocab = 256, 128256
    logits = torch.randn(rows, vocab, device="cuda")
    specs = [SampleSpec(kind, index) for index in range(rows)]
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    choose(logits, prepare(specs, vocab)).fetch().resolve()
    assert torch.cuda.max_memory_allocated() - before <= workspace_bytes(rows, vocab)
