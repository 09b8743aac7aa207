"""A worker whose KV is a hash: exact, instant, and wrong whenever one stale KV-token is read.

The KV of position p mixes its token with the KV of *every* earlier position, as attention does, each read through the
page table at the time of the step. The next token is a function of the last KV. So a run that ever reads a page that
was not restored, was overwritten, or belongs to someone else goes on with other tokens than ``oracle_tokens``.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve.core import RequestKey
from pensieve.engine.plan import PENDING, Plan, Sampled, Span, StepResult, SynchronousWorker

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


def next_token(kv: int) -> int:
    return kv % VOCABULARY


def oracle_tokens(context: Sequence[int], count: int) -> list[int]:
    """What a stateless run over ``context`` generates."""
    tokens = list(context)
    seen = kv = 0
    output: list[int] = []
    for position in range(len(context) + count):
        if position >= len(context):
            output.append(next_token(kv))
            tokens.append(output[-1])
        kv = token_kv(tokens[position], position, seen)
        seen = (seen + read_kv(kv, position)) & MASK
    return output


def verify_tokens(context: Sequence[int], output: Sequence[int]) -> None:
    """Raise AssertionError unless ``output`` is what a stateless run over ``context`` gives."""
    assert list(output) == oracle_tokens(context, len(output))


class HashWorker(SynchronousWorker):
    """Executes plans on two pools of hashes [chunks, chunk_tokens]."""

    def __init__(self, device_chunks: int, host_chunks: int, chunk_tokens: int) -> None:
        self.size = chunk_tokens
        self.device = np.full((device_chunks, chunk_tokens), POISON, dtype=np.uint64)
        self.host = np.full((max(host_chunks, 1), chunk_tokens), POISON, dtype=np.uint64)
        self.plans: list[Plan] = []
        self._sampled: dict[RequestKey, int] = {}

    def run(self, plan: Plan) -> StepResult:
        self.check_plan(plan)
        self.plans.append(plan)
        for copy in plan.swap_out:
            self.host[copy.dst] = self.device[copy.src]
        for copy in plan.copies:
            self.device[copy.dst] = self.device[copy.src]
        for copy in plan.swap_in:
            self.device[copy.dst] = self.host[copy.src]
        sampled: list[Sampled] = []
        for span in plan.spans:
            kv = self._compute(plan, span)
            if span.sample is not None:
                sampled.append(Sampled(span.request, next_token(kv)))
        self._sampled = {one.request: one.token_id for one in sampled}
        return StepResult(tuple(sampled))

    def check_plan(self, plan: Plan) -> None:
        """No host page is written and read in one plan; no page table names a page twice."""
        written = {copy.dst for copy in plan.swap_out}
        assert len(written) == len(plan.swap_out), "two chunks saved to one host page"
        assert not written & {copy.src for copy in plan.swap_in}, (
            "a host page is written and read in one plan"
        )
        targets = [copy.dst for copy in plan.swap_in + plan.copies]
        assert len(set(targets)) == len(targets), "two chunks restored to one device page"
        for span in plan.spans:
            seen = span.sample.output if span.sample is not None else None
            assert seen is None or PENDING not in seen, f"{span.request} samples before its output is known"
        for table in plan.page_tables:
            assert len(set(table.tolist())) == len(table), f"page table {table} names a page twice"

    def _compute(self, plan: Plan, span: Span) -> int:
        table = plan.page_tables[span.page_table]
        kv = seen = 0
        for position in range(span.end):
            page, offset = int(table[position // self.size]), position % self.size
            if position >= span.start:
                token = int(span.tokens[position - span.start])
                if token == PENDING:
                    assert position == span.end - 1, "only the last token of a span may be pending"
                    token = self._sampled[span.request]
                kv = token_kv(token, position, seen)
                self.device[page, offset] = kv
            kv = int(self.device[page, offset])
            seen = (seen + read_kv(kv, position)) & MASK
        return kv

    def close(self) -> None:
        """Nothing to give back."""
