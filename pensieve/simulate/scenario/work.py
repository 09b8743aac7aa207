"""The amount of work in a step: the terms of ``Machine.step``."""

from __future__ import annotations

from dataclasses import dataclass

from pensieve.engine.plan import Plan


@dataclass(frozen=True, slots=True)
class Work:
    """The work of one plan, without its copies."""

    tokens: float
    rows: float
    """Requests."""
    kv_read: float
    """Contexts of the spans of one token, added up."""
    pairs: float
    """(query, key) pairs of the longer spans."""


def work_of(plan: Plan) -> Work:
    """The work that ``plan`` asks for."""
    kv_read, pairs = 0.0, 0.0
    for span in plan.spans:
        if len(span.tokens) == 1:
            kv_read += span.end
        else:
            pairs += len(span.tokens) * (span.start + span.end) / 2
    return Work(plan.num_tokens, len({span.request for span in plan.spans}), kv_read, pairs)
