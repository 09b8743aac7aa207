"""Deliberate faults of the engine, by name. A suite that claims exactness must fail under each of them.

Each takes a plan and returns the plan that a broken scheduler, cache or worker would have executed instead.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import msgspec

from pensieve.engine.plan import PendingStep, Plan, Span, StepWorker


def without_swap_in(plan: Plan) -> Plan:
    """Chunks on the host get device pages, but nothing is copied into them."""
    return replace(plan, swap_in=())


def without_swap_out(plan: Plan) -> Plan:
    """Chunks are marked as saved, but nothing is copied out."""
    return replace(plan, swap_out=())


def without_recomputation(plan: Plan) -> Plan:
    """Only the span that ends in a sample is computed: dropped ranges before it stay as they are."""
    return replace(plan, spans=tuple(span for span in plan.spans if span.sample is not None))


def shifted_positions(plan: Plan) -> Plan:
    """A restored range is computed one position too early."""

    def shift(span: Span) -> Span:
        moved = span.sample is None and span.start > 0
        return msgspec.structs.replace(span, start=span.start - 1) if moved else span

    return replace(plan, spans=tuple(shift(span) for span in plan.spans))


def repeated_page(plan: Plan) -> Plan:
    """The second page to be copied in gets the first one's content.

    (Pages in each other's place would be no fault that anyone could see: attention does not ask for the order.)
    """
    if len(plan.swap_in) < 2:
        return plan
    first, second, *rest = plan.swap_in
    return replace(plan, swap_in=(first, msgspec.structs.replace(second, src=first.src), *rest))


PLAN_MUTANTS: dict[str, Callable[[Plan], Plan]] = {
    "swap-in: not copied": without_swap_in,
    "swap-in: one page read twice": repeated_page,
    "swap-out: not copied": without_swap_out,
    "recomputation: dropped range skipped": without_recomputation,
    "span positions: off by one": shifted_positions,
}


class MutantWorker:
    """Runs what a mutant makes of each plan."""

    def __init__(self, worker: StepWorker, mutant: Callable[[Plan], Plan]) -> None:
        self._worker = worker
        self._mutant = mutant

    def launch(self, plan: Plan) -> PendingStep:
        return self._worker.launch(self._mutant(plan))

    def close(self) -> None:
        self._worker.close()


class SwapOutLastWorker:
    """Copy order: swap-out runs after the step has written, so it saves what took the chunk's place."""

    def __init__(self, worker: StepWorker) -> None:
        self._worker = worker

    def launch(self, plan: Plan) -> PendingStep:
        step = self._worker.launch(replace(plan, swap_out=()))
        self._worker.launch(Plan(plan.step, swap_out=plan.swap_out))
        return step

    def close(self) -> None:
        self._worker.close()
