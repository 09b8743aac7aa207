"""Promise 1: whatever way a context came to be on the device, the logits are those of a stateless run."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest
import torch

from pensieve.core import Sampling
from support.engine.worker_driver import (
    EVERYTHING,
    logprobs,
    make_worker,
    random_tokens,
    reference_greedy,
    reference_logprobs,
    span,
    step,
)

TABLE = [5, 0, 9, 3, 17, 11, 2, 8, 14, 21, 7, 1]
"""Pages in no order: 96 tokens."""


def close(got: torch.Tensor, want: torch.Tensor) -> None:
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)


def test_whole_prefill(folder: Path) -> None:
    worker, tokens = make_worker(folder), random_tokens(61)
    result = step(worker, [span(tokens, 0, 61, sampling=EVERYTHING)], [TABLE])
    close(logprobs(result), reference_logprobs(folder, tokens)[-1])


def test_chunked_prefill_samples_after_every_span(folder: Path) -> None:
    worker, tokens = make_worker(folder), random_tokens(70)
    want = reference_logprobs(folder, tokens)
    for start, end in [(0, 1), (1, 20), (20, 24), (24, 69), (69, 70)]:
        result = step(worker, [span(tokens, start, end, sampling=EVERYTHING)], [TABLE])
        close(logprobs(result), want[end - 1])


def test_mixed_batch_of_contexts(folder: Path) -> None:
    """Decode, chunked prefill and a fresh prefill in one step, as every step is (paper §4.2)."""
    worker = make_worker(folder)
    contexts = [random_tokens(length, seed) for seed, length in enumerate((30, 41, 17, 9))]
    tables = [TABLE[:4], TABLE[4:10], [4, 6, 10], [12, 13]]
    before = [29, 12, 0, 8]
    step(worker, [span(contexts[row], 0, n, row=row) for row, n in enumerate(before) if n], tables)
    spans = [
        span(tokens, before[row], len(tokens), row=row, sampling=EVERYTHING)
        for row, tokens in enumerate(contexts)
    ]
    result = step(worker, spans, tables)
    assert [sampled.request for sampled in result.sampled] == [0, 1, 2, 3]
    for row, tokens in enumerate(contexts):
        close(logprobs(result, row), reference_logprobs(folder, tokens)[-1])


def test_dropped_leading_range_beside_the_new_turn(folder: Path) -> None:
    """Figure 8 of the paper: trailing pages kept, leading ones recomputed in the step of the new turn."""
    worker, tokens = make_worker(folder), random_tokens(75)
    step(worker, [span(tokens, 0, 60)], [TABLE])
    worker.pools.device[:, TABLE[:3]] = torch.nan  # 24 tokens dropped
    spans = [span(tokens, 0, 24), span(tokens, 60, 75, sampling=EVERYTHING)]
    result = step(worker, spans, [TABLE])
    close(logprobs(result), reference_logprobs(folder, tokens)[-1])


def test_several_holes_recomputed_over_several_steps(folder: Path) -> None:
    worker, tokens = make_worker(folder), random_tokens(96)
    step(worker, [span(tokens, 0, 88)], [TABLE])
    moved = [20, *TABLE[1:4], 22, 23, *TABLE[6:]]  # chunks 0, 4 and 5 get other pages
    worker.pools.device[:, [TABLE[0], TABLE[4], TABLE[5]]] = torch.nan
    step(worker, [span(tokens, 0, 5)], [moved])
    result = step(
        worker,
        [
            span(tokens, 88, 96, sampling=EVERYTHING),
            span(tokens, 32, 48),
            span(tokens, 5, 8, sampling=EVERYTHING),
        ],
        [moved],
    )
    want = reference_logprobs(folder, tokens)
    close(logprobs(result, 0), want[-1])
    close(logprobs(result, 1), want[7])


def test_greedy_continuation_is_that_of_generate(folder: Path) -> None:
    worker, tokens, count = make_worker(folder), random_tokens(23, seed=4), 40
    want = reference_greedy(folder, tokens, count)
    context, done, output = list(tokens), 0, []
    greedy = Sampling(min_output_tokens=count)
    for index in range(count):
        one = span(context, done, len(context), sampling=greedy)
        assert one.sample is not None
        one = msgspec.structs.replace(
            one,
            sample=msgspec.structs.replace(
                one.sample, output_index=index, eos_token_ids=worker.arch.eos_token_ids
            ),
        )
        (sampled,) = step(worker, [one], [TABLE]).sampled
        done = len(context)
        context.append(sampled.token_id)
        output.append(sampled.token_id)
    assert output == want
    assert len(set(output)) > 5


@pytest.mark.parametrize("chunk_tokens", [1, 32])
def test_other_chunk_sizes(llama: Path, chunk_tokens: int) -> None:
    worker, tokens = make_worker(llama, device_chunks=70, chunk_tokens=chunk_tokens), random_tokens(60)
    table = list(range(69, -1, -1))
    step(worker, [span(tokens, 0, 40)], [table])
    result = step(worker, [span(tokens, 40, 60, sampling=EVERYTHING)], [table])
    close(logprobs(result), reference_logprobs(llama, tokens)[-1])


def test_other_requests_do_not_change_a_result(llama: Path) -> None:
    tokens, other = random_tokens(40), random_tokens(50, seed=9)
    alone, among = make_worker(llama), make_worker(llama)
    for worker, extra in ((alone, []), (among, [span(other, 0, 50, row=1, sampling=EVERYTHING)])):
        step(worker, [span(tokens, 0, 39), *extra], [TABLE[:5], TABLE[5:]])
    decode = span(tokens, 39, 40, sampling=EVERYTHING)
    more = [span([*other, 3], 50, 51, row=1, sampling=EVERYTHING)]
    first = step(alone, [decode], [TABLE[:5]])
    second = step(among, [decode, *more], [TABLE[:5], TABLE[5:]])
    torch.testing.assert_close(logprobs(first), logprobs(second), atol=1e-5, rtol=0)
    assert first.sampled[0].token_id == second.sampled[0].token_id


def test_a_span_past_its_page_table_is_refused(llama: Path) -> None:
    worker = make_worker(llama)
    with pytest.raises(ValueError, match="page table"):
        step(worker, [span(random_tokens(9), 0, 9)], [[1]])
