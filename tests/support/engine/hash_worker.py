"""A worker whose KV is a hash: exact, instant, and wrong whenever one stale KV-token is read.

The KV of position p mixes its token with the KV of *every* earlier position, as attention does, each read through the
page table at the time of the step. The next token is a function of the last KV. So a run that ever reads a page that
was not restored, was overwritten, or belongs to someone else goes on with other tokens than ``oracle_tokens``.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from pensieve.core import RequestKey, Sampling, TokenLogprob
from pensieve.engine.beams import BeamSearch
from pensieve.engine.plan import PENDING, Plan, Sampled, SampleSpec, Span, StepResult, SynchronousWorker

MASK = (1 << 64) - 1
VOCABULARY = 97
POISON = 0xDEAD_BEEF_DEAD_BEEF


def mix(x: int) -> int:
    """splitmix64's finaliser: every input bit reaches every output bit."""
    x = (x + 0x9E3779B97F4A7C15) & MASK
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def token_kv(token: int, position: int, seen: int) -> int:
    """KV of one position; ``seen`` is the sum of ``read_kv`` over all earlier ones."""
    return mix(mix(token + 1) ^ mix(position + (1 << 32)) ^ seen)


def read_kv(kv: int, position: int) -> int:
    """What attention takes from an earlier position."""
    return mix(kv ^ (position << 20))


def next_token(kv: int, seed: int = 0, index: int = 0) -> int:
    return (kv ^ mix(seed + index) if seed else kv) % VOCABULARY


def top_tokens(kv: int, count: int) -> tuple[tuple[int, float], ...]:
    """The ``count`` most likely tokens after a KV and their log-probabilities, as good as any."""
    ranked = sorted((mix(kv ^ token) % 4096, token) for token in range(VOCABULARY))
    return tuple((token, -rank / 512) for rank, token in ranked[:count])


def sample_after(kv: int, request: RequestKey, spec: SampleSpec) -> Sampled:
    """What a worker samples after this KV."""
    sampling = spec.sampling
    token = next_token(kv, sampling.seed if sampling.temperature > 0.0 else 0, spec.output_index)
    if sampling.top_logprobs is None:
        return Sampled(request, token)
    return Sampled(request, token, TokenLogprob(token, 0.0, top_tokens(kv, sampling.top_logprobs)))


def oracle_beams(
    context: Sequence[int],
    sampling: Sampling,
    limit: int,
    kv_after: Callable[[Sequence[int]], int] | None = None,
) -> list[int]:
    """What a stateless beam search over ``context`` gives, whose longest context is ``limit``. ``kv_after``: the KV of
    a context's last position, of another worker than ``HashWorker``."""
    search = BeamSearch.from_sampling(sampling, len(context), limit, ())
    outputs: list[tuple[int, ...]] = [()]
    kv_after = kv_after or last_kv
    while True:
        step = search.step([top_tokens(kv_after([*context, *out]), search.candidates) for out in outputs])
        if step.finished is not None:
            return list(step.finished.tokens)
        outputs = [(*outputs[parent], token) for parent, token in zip(step.parents, step.tokens, strict=True)]


def last_kv(tokens: Sequence[int]) -> int:
    """KV of the last position of a context."""
    seen = kv = 0
    for position, token in enumerate(tokens):
        kv = token_kv(token, position, seen)
        seen = (seen + read_kv(kv, position)) & MASK
    return kv


def oracle_tokens(context: Sequence[int], count: int, seed: int = 0) -> list[int]:
    """What a stateless run over ``context`` generates."""
    tokens = list(context)
    seen = kv = 0
    output: list[int] = []
    for position in range(len(context) + count):
        if position >= len(context):
            output.append(next_token(kv, seed, len(output)))
            tokens.append(output[-1])
        kv = token_kv(tokens[position], position, seen)
        seen = (seen + read_kv(kv, position)) & MASK
    return output


def verify_tokens(context: Sequence[int], output: Sequence[int], seed: int = 0) -> None:
    """Raise AssertionError unless ``output`` is what a stateless run over ``context`` gives."""
    assert list(output) == oracle_tokens(context, len(output), seed)


def verify_beams(context: Sequence[int], output: Sequence[int], sampling: Sampling) -> None:
    """Raise AssertionError unless ``output`` is what a stateless beam search gives."""
    assert list(output) == oracle_beams(context, sampling, len(context) + len(output) + 1000)


class HashWorker(SynchronousWorker):
    """Executes plans on two pools of hashes [chunks, chunk_tokens]."""

    def __init__(self, device_chunks: int, host_chunks: int, chunk_tokens: int) -> None:
        self.size = chunk_tokens
        self.device = np.full((device_chunks, chunk_tokens), POISON, dtype=np.uint64)
        self.host = np.full((max(host_chunks, 1), chunk_tokens), POISON, dtype=np.uint64)
        self.plans: list[Plan] = []
        self.chosen: dict[RequestKey, list[int]] = {}
        """Tokens of each request in the latest step, for pending tokens of the next."""

    def run(self, plan: Plan) -> StepResult:
        plan = self.decided(plan)
        rows = [(span.request, kv) for span, kv in self.compute(plan) if span.sample is not None]
        sampled = [sample_after(kv, one, spec) for (one, kv), spec in zip(rows, plan.specs, strict=True)]
        self.choose(sampled)
        return StepResult(tuple(sampled))

    def choose(self, sampled: Sequence[Sampled]) -> None:
        """Take in the tokens of the latest step."""
        self.chosen = {}
        for one in sampled:
            self.chosen.setdefault(one.request, []).append(one.token_id)

    def decided(self, plan: Plan) -> Plan:
        """Return a plan as its step is computed."""
        self.plans.append(plan)
        for span in plan.spans:
            pending = np.flatnonzero(span.tokens == PENDING).tolist()
            last = len(span.tokens) - 1 - span.drafts
            assert pending in ([], [last]), "only the last token that is no draft may be pending"
            assert span.undecided is None or (len(span.undecided) and pending == [0])
            table = plan.page_tables[span.page_table]
            assert span.latest_end <= len(table) * self.size, "accepted drafts need more pages"
        return plan.decided(self.chosen)

    def compute(self, plan: Plan) -> list[tuple[Span, int]]:
        """Execute all of a decided plan but the choice of tokens; return each span and the KV of its last token, once
        for each token that is chosen after a KV of the span."""
        self.check_plan(plan)
        for copy in plan.swap_out:
            self.host[copy.dst] = self.device[copy.src]
        sources = self.device[[copy.src for copy in plan.copies]]  # all are read before any target is written
        self.device[[copy.dst for copy in plan.copies]] = sources
        for copy in plan.swap_in:
            self.device[copy.dst] = self.host[copy.src]
        return [
            (span, kv) for span in plan.spans for kv in self._compute(plan, span)[-max(1, span.num_chosen) :]
        ]

    def check_plan(self, plan: Plan) -> None:
        """No host page is written and read in one plan; no page table names a page twice."""
        written = {copy.dst for copy in plan.swap_out}
        assert len(written) == len(plan.swap_out), "two chunks saved to one host page"
        assert not written & {copy.src for copy in plan.swap_in}, (
            "a host page is written and read in one plan"
        )
        targets = [copy.dst for copy in plan.swap_in + plan.copies]
        assert len(set(targets)) == len(targets), "two chunks restored to one device page"
        written = [
            (int(plan.page_tables[span.page_table][at // self.size]), at % self.size)
            for span in plan.spans
            for at in range(span.start, span.end)
        ]
        assert len(set(written)) == len(written), "two spans write to one place"
        for span in plan.spans:
            seen = span.sample.output if span.sample is not None else None
            assert seen is None or PENDING not in seen, f"{span.request} samples before its output is known"
        for table in plan.page_tables:
            assert len(set(table.tolist())) == len(table), f"page table {table} names a page twice"

    def _compute(self, plan: Plan, span: Span) -> list[int]:
        """Return the KV of the span's positions."""
        table = plan.page_tables[span.page_table]
        seen, found = 0, []
        for position in range(span.end):
            page, offset = int(table[position // self.size]), position % self.size
            if position >= span.start:
                kv = token_kv(int(span.tokens[position - span.start]), position, seen)
                self.device[page, offset] = kv
            kv = int(self.device[page, offset])
            seen = (seen + read_kv(kv, position)) & MASK
            if position >= span.start:
                found.append(kv)
        return found

    def close(self) -> None:
        """Nothing to release."""
