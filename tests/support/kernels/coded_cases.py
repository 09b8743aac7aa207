"""Inputs of the kernels over coded pools and the checks of their results, on a GPU or under the interpreter."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from pensieve.kernels import reference
from pensieve.kernels.attention.plan import AttentionPlan
from pensieve.kernels.kv_codec import coded, decode, exponents_of
from pensieve.kernels.kv_write import kv_write
from pensieve.kernels.ragged_paged_attention import attend_with_lse
from support.kernels.attention_cases import Case, oracle, relative_error
from support.kernels.decoder_cases import HeadCase

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 8e-3}


@dataclass(frozen=True, slots=True)
class CodedCase:
    plain: Case
    """With the pool that the codes decode to, float32. On the CPU."""
    pool: torch.Tensor
    """The coded pool, in pages with padding."""


def values_of(pool: torch.Tensor) -> torch.Tensor:
    """The values of a coded pool, float32."""
    return decode(pool, exponents_of(pool), torch.float32)


def padded(pool: torch.Tensor) -> torch.Tensor:
    """The same coded pool with room behind each page, full of ones."""
    used = pool.stride(0)
    held = torch.full((len(pool), -(-used // 128) * 128), 255, dtype=torch.uint8, device=pool.device)
    held[:, :used] = pool.view(torch.uint8).as_strided((len(pool), used), (used, 1))
    return held.view(pool.dtype).as_strided(pool.shape, (held.stride(0), *pool.stride()[1:]))


def code_case(case: Case, code: torch.dtype) -> CodedCase:
    pool = padded(coded(case.pool.float(), code))
    return CodedCase(replace(case, pool=values_of(pool)), pool)


def check_coded_attention(case: CodedCase, plan: AttentionPlan) -> None:
    """Results are those of the oracle over the decoded pool, on the device of the coded one."""
    plain, device = case.plain, case.pool.device
    plan.scratch.partial.fill_(torch.nan)
    q, tables = plain.q.to(device), plain.page_tables.to(device)
    logits = plain.logits._replace(sinks=None if plain.sinks is None else plain.sinks.to(device))
    out, lse = attend_with_lse(q, case.pool, plan, tables, logits, out=torch.full_like(q, torch.nan))
    want, want_lse = oracle(plain)
    assert relative_error(out.cpu(), want) <= TOLERANCE[plain.q.dtype]
    assert relative_error(lse.cpu(), want_lse) <= TOLERANCE[plain.q.dtype]


def check_coded_write(case: HeadCase, code: torch.dtype) -> None:
    """Codes and exponents are those of the reference, bit for bit unless heads are normed, and nothing else is
    written."""
    start = padded(coded(torch.zeros_like(case.pool, dtype=torch.float32), code))
    exponents_of(start).fill_(77)  # what no vector here has
    found = []
    for write in (kv_write, reference.kv_write):
        pool = _copy(start)
        queries = write(pool, case.qkv.clone(), case.slots, case.prep)
        found.append((queries, pool))
    (queries, got), (wanted, want) = found
    written = exponents_of(want) != 77
    assert torch.equal(exponents_of(got) != 77, written)
    if case.prep.query_norm is None:
        assert torch.equal(queries, wanted)
        assert torch.equal(page_bytes(got), page_bytes(want))
        return
    # A value may round the other way.
    values, expected = values_of(got)[written], values_of(want)[written]
    assert relative_error(values, expected) < 0.02
    assert (got.view(torch.uint8) != want.view(torch.uint8)).float().mean() < 0.02


def _copy(pool: torch.Tensor) -> torch.Tensor:
    held = page_bytes(pool).clone()
    return held.view(pool.dtype).as_strided(pool.shape, (held.shape[1], *pool.stride()[1:]))


def page_bytes(pool: torch.Tensor) -> torch.Tensor:
    """The pages of a coded pool with their padding, uint8 [P, bytes]."""
    return pool.view(torch.uint8).as_strided((len(pool), pool.stride(0)), (pool.stride(0), 1))
