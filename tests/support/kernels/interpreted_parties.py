"""The Triton attention kernel on a CPU, with work lists of spans that read a common beginning together.

A pytest file that is not collected by itself: Triton's interpreter is chosen when triton is imported, so
``tests/ops/test_interpreted.py`` runs it in a process of its own, with TRITON_INTERPRET=1.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, replace

import pytest
import torch

from pensieve.kernels.attention.capacity import Capacity
from pensieve.kernels.attention.plan import AttentionPlan, geometry_of
from pensieve.kernels.attention.prefixes import PrefixGroupRule
from pensieve.kernels.attention.tiles import Tile, TileSet
from pensieve.kernels.attention.work_lists import HEADER, ITEM, MERGE
from pensieve.kernels.ragged_paged_attention import attend, attend_with_lse
from pensieve.kernels.spans import Ints, make_spans, num_tokens
from pensieve.kernels.spans import Spans as SpanRows
from support.kernels.attention_cases import Case, make_case, oracle, relative_error
from support.lengths import at_length, some

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3}  # the interpreter's products of bfloat16 are wrong
NARROW = Tile(4, 16, 4, 2, None, 1, 16)
WIDE = Tile(16, 16, 4, 2, None, 1, 32, True)
TINY = TileSet(NARROW, NARROW, replace(NARROW, rows=8, resident=3), replace(WIDE, rows=8), WIDE)
UNIT = 16
"""Tokens of a key tile."""
Span = tuple[int, int]
"""(position, query tokens) at the end of a context."""


class Eager(PrefixGroupRule):
    """A rule for tiny contexts: whatever is read more than once is worth a party."""

    def saved_us(self, rows: int, spans: int, tokens: int) -> float:
        return float(tokens * (spans - 1))


@dataclass(frozen=True, slots=True)
class Shared:
    """A step whose parties lie next to each other."""

    case: Case
    parties: Ints

    @property
    def flat(self) -> torch.Tensor:
        return self.case.page_tables.reshape(-1)

    @property
    def spans(self) -> SpanRows:
        """The spans over page tables that lie end to end, as a server has them."""
        _, lengths, positions, tables = self.case.spans.T
        return make_spans(lengths, positions, tables * self.case.page_tables.shape[1])


def shared(spans: list[Span], alike: dict[int, tuple[int, int]], *, least: int = 2, **more: object) -> Shared:
    """A context for each span; ``alike``: row → (another row, leading pages that it takes over from that one)."""
    case = make_case([(row, position, length) for row, (position, length) in enumerate(spans)], **more)  # type: ignore[arg-type]
    for row, (other, pages) in alike.items():
        case.page_tables[row, :pages] = case.page_tables[other, :pages]
    geometry = replace(geometry_of(case.q, case.pool), multiprocessors=4, own_tiles=TINY)
    rule = Eager(geometry, case.pool.shape[3], least, 0.0)
    host = case.spans.copy()
    host[:, 3] *= case.page_tables.shape[1]
    found = rule.find(host, case.page_tables.reshape(-1).numpy())
    assert found is not None, "nothing is shared"
    host = case.spans[found.order]
    return Shared(replace(case, spans=make_spans(host[:, 1], host[:, 2], host[:, 3])), found.table)


def run(step: Shared, parties: Ints | None, processors: int = 4, spoil: Callable[[AttentionPlan], None] | None = None,
        capacity: Capacity | None = None) -> tuple[torch.Tensor, torch.Tensor, AttentionPlan]:  # fmt: skip
    case, spans = step.case, step.spans
    geometry = replace(geometry_of(case.q, case.pool), multiprocessors=processors, own_tiles=TINY)
    plan = AttentionPlan.from_spans(
        spans, len(case.q), geometry, case.q.device, prefix_groups=parties, capacity=capacity
    )
    plan.scratch.partial.fill_(torch.nan)
    plan.scratch.partial_lse.fill_(torch.nan)
    if spoil is not None:
        spoil(plan)
    out = torch.full_like(case.q, torch.nan)
    return *attend_with_lse(case.q, case.pool, plan, step.flat, case.logits, out=out), plan


def check(step: Shared, processors: int = 4) -> AttentionPlan:
    """Together and apart, and both as the oracle has it."""
    out, lse, plan = run(step, step.parties, processors)
    apart, _, _ = run(step, None, processors)
    want, want_lse = oracle(step.case)
    used = num_tokens(step.case.spans)
    limit = TOLERANCE[step.case.q.dtype]
    assert relative_error(out[:used], want[:used]) <= limit
    assert relative_error(lse[:used], want_lse[:used]) <= limit
    assert relative_error(out, apart) <= limit
    assert (out[used:] == 0).all() and torch.isneginf(lse[used:]).all()
    return plan


def decodes(contexts: list[int]) -> list[Span]:
    return [(context - 1, 1) for context in contexts]


def first_of(count: int, pages: int) -> dict[int, tuple[int, int]]:
    """All begin as the first one does."""
    return {row: (0, pages) for row in range(1, count)}


@pytest.mark.parametrize("dtype", list(TOLERANCE), ids=str)
def test_suffixes_of_all_lengths(dtype: torch.dtype) -> None:
    """The common beginning is 40 tokens, of which 32 are whole key tiles; 41: one token behind its pages."""
    step = shared(decodes([41, 42, 48, 49, 64, 65, 120]), first_of(7, 5), dtype=dtype)
    assert step.parties.tolist() == [[0, 7, 32]]
    check(step)


@pytest.mark.parametrize("context", some([32, 33, 47, 48], 2))
def test_contexts_that_are_the_same_to_the_end(context: int) -> None:
    """Also of whole tiles, where nothing is left to see for a member alone, and with a last page partly filled."""
    step = shared(decodes([context] * 5), first_of(5, -(-context // 8)))
    assert step.parties.tolist() == [[0, 5, context // UNIT * UNIT]]
    plan = check(step)
    assert int(plan.words[0]) == (0 if context % UNIT == 0 else 5)


def test_a_member_that_ends_in_the_beginning_of_others_keeps_it_short() -> None:
    step = shared(decodes([90, 34, 95, 100]), first_of(4, 10), least=4)
    assert step.parties.tolist() == [[0, 4, 32]]
    check(step)


@pytest.mark.parametrize(
    ("heads", "processors"), some([((6, 2), 30), ((1, 1), 1), ((8, 2), 4), ((4, 4), 30)], 2)
)
def test_grouped_heads(heads: tuple[int, int], processors: int) -> None:
    contexts = [52, 53, 72, 49, 102, 51, 50]
    check(shared(decodes(contexts), first_of(7, 6), heads=heads[0], kv_heads=heads[1]), processors)


@pytest.mark.parametrize("page", some([3, 1, 64], 2))
def test_page_sizes(page: int) -> None:
    check(shared(decodes([130, 140, 150, 131]), first_of(4, 120 // page), heads=2, kv_heads=1, page=page))


def test_a_party_between_others() -> None:
    """Decodes alone, a prefill, and two parties, one of them with spans of two tokens."""
    spans = [(50, 1), (80, 1), (3, 30), (81, 2), (70, 1), (99, 1), (85, 2), (64, 1), (0, 1), (72, 1), (66, 1)]
    alike = {3: (1, 8), 6: (1, 8), 7: (4, 6), 9: (4, 6), 10: (4, 6)}
    step = shared(spans, alike, heads=4, kv_heads=2)
    assert sorted(step.parties[:, 1].tolist()) == [3, 4]
    check(step)


def test_beginnings_of_beginnings() -> None:
    """Nine share 4 pages, five of them 12: those read the longer one together, and the others the shorter one apart or
    together."""
    step = shared(decodes([110] * 9), {**first_of(9, 4), **first_of(5, 12)}, heads=2, kv_heads=1)
    assert step.parties[0].tolist() == [0, 5, 96]
    check(step)


def test_rows_outside_spans_come_out_zero() -> None:
    step = shared(decodes([60, 70, 65, 66]), first_of(4, 6))
    case = replace(step.case, q=torch.cat([step.case.q, torch.full_like(step.case.q, torch.nan)]))
    want = oracle(step.case)[0]
    out, lse, _ = run(replace(step, case=case), step.parties)
    assert relative_error(out[:4], want) <= 1e-5
    assert (out[4:] == 0).all() and torch.isneginf(lse[4:]).all()


@pytest.mark.parametrize("seed", range(at_length(1, 6)))
def test_any_pattern(seed: int) -> None:
    dice = random.Random(seed)
    count = dice.randrange(5, 14)
    spans, alike = [], {}
    for row in range(count):
        length = dice.choice([1, 1, 1, 1, 2, dice.randrange(1, 30)])
        spans.append((dice.randrange(48, 150), length))
        if row and dice.random() < 0.8:
            alike[row] = (dice.randrange(row), dice.randrange(3, 7))
    alike[1] = (0, 6)
    heads, kv_heads = dice.choice([(1, 1), (4, 2), (6, 2)])
    step = shared(spans, alike, heads=heads, kv_heads=kv_heads, seed=seed, dtype=dice.choice(list(TOLERANCE)))
    check(step, dice.choice([1, 4, 30]))


def test_other_parties_in_the_same_memory() -> None:
    """As a captured graph has it: launches are those of the first step; steps with and without parties follow."""
    step = shared(decodes([99, 120, 100, 96, 98, 130]), first_of(6, 12), heads=2, kv_heads=1)
    case, spans = step.case, step.spans
    _, _, plan = run(step, step.parties, 8, capacity=Capacity(40, 20, 40, 400))
    tables = [[[0, 6, 96]], None, [[0, 2, 32], [2, 3, 80]], [[3, 3, 96]]]
    for parties in tables:
        plan.scratch.partial.fill_(torch.nan)
        plan.refill(spans, None if parties is None else torch.tensor(parties).numpy())
        out = torch.full_like(case.q, torch.nan)
        attend(case.q, case.pool, plan, step.flat, case.logits, out=out)
        assert relative_error(out, oracle(case)[0]) <= 1e-5


def _items(plan: AttentionPlan) -> torch.Tensor:
    at = int(plan.words[3])
    return plan.words[at : at + ITEM * int(plan.words[0])].view(-1, ITEM)


def _merges(plan: AttentionPlan) -> torch.Tensor:
    at = int(plan.words[5])
    return plan.words[at : at + MERGE * int(plan.words[2])].view(-1, MERGE)


def drop_a_member(plan: AttentionPlan) -> None:
    """The beginning is read for one member fewer."""
    plan.words[HEADER + 1] -= plan.geometry.groups


def begin_a_page_late(plan: AttentionPlan) -> None:
    items = _items(plan)
    items[0, 5] += UNIT


def begin_a_page_early(plan: AttentionPlan) -> None:
    items = _items(plan)
    items[0, 5] -= UNIT


def miss_a_piece(plan: AttentionPlan) -> None:
    _merges(plan)[0, 4] -= 1


def another_table(plan: AttentionPlan) -> None:
    """The beginning is read through the page table of somebody else."""
    plan.words[HEADER + 3] = _items(plan)[:, 3].max()


def one_key_more(plan: AttentionPlan) -> None:
    """The beginning ends inside the suffix of the first."""
    plan.words[HEADER + 6] += UNIT
    plan.words[HEADER + 2] += UNIT


MUTANTS = [drop_a_member, begin_a_page_late, begin_a_page_early, miss_a_piece, another_table, one_key_more]


@pytest.mark.parametrize("spoil", MUTANTS, ids=lambda spoil: spoil.__name__)
def test_wrong_lists_are_noticed(spoil: Callable[[AttentionPlan], None]) -> None:
    spans = decodes([99, 120, 100, 98, 90])
    step = shared(spans, {**first_of(4, 9)}, heads=2, kv_heads=1, least=4)
    assert step.parties.tolist() == [[0, 4, 64]]
    want = oracle(step.case)[0]
    assert relative_error(run(step, step.parties)[0], want) <= 1e-5
    error = relative_error(run(step, step.parties, spoil=spoil)[0], want)
    assert not error <= 1e-2
