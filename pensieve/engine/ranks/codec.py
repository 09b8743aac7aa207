"""Plans as bytes, for ranks that sample no tokens. numpy and msgspec, no torch.

Values of one kind are packed into one column, so a step with hundreds of spans is about a dozen values.
Sampling parameters are left out, since only rank 0 samples.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import msgspec
import numpy as np

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import Chain, Copy, PageCheck, PageTable, Plan, SampleSpec, Span

SAMPLED_ON_RANK_0 = SampleSpec(Sampling(), 0)
"""Sample spec of decoded spans whose token is sampled on rank 0."""
SAMPLED_LATE = SampleSpec(Sampling(), 0, late=True)
"""The same, where rank 0 chooses the token after the step before."""


class PlanFrame(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """A plan; all fields but ``step`` and ``memory`` are packed little-endian integers."""

    step: int
    spans: bytes
    """int64 [S, 8]: request, start, tokens, page table, whether a token is sampled (2: late), stores, drafts, undecided
    drafts."""
    tokens: bytes
    """int32: tokens of all spans, concatenated, then all undecided drafts."""
    lengths: bytes
    """int64: length of each page table."""
    pages: bytes
    """int32: all page tables, concatenated."""
    swap_out: bytes
    """int32 [n, 3], as the two below: source, target, group."""
    copies: bytes
    swap_in: bytes
    window_pages: bytes
    """int32: all window tables, concatenated: none, or as many and as long as the page tables."""
    chains: bytes
    """int64 [C, 6]: the fields of each chain."""
    memory: tuple[int, int] | None = None
    checks: bytes = b""
    """int64 [n, 2]: address, page."""


class StopFrame(msgspec.Struct, frozen=True, array_like=True, tag="leave"):
    """No more plans follow."""


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(PlanFrame | StopFrame)


def encode(plan: Plan | None) -> bytes:
    """Return the message for the other ranks; None: stop."""
    if plan is None:
        return _encoder.encode(StopFrame())
    spans = [
        (
            span.request,
            span.start,
            len(span.tokens),
            span.page_table,
            _sampled(span),
            span.stores,
            span.drafts,
            0 if span.undecided is None else len(span.undecided),
        )
        for span in plan.spans
    ]
    undecided = [span.undecided for span in plan.spans if span.undecided is not None]
    tokens = np.concatenate([span.tokens for span in plan.spans] + undecided) if spans else np.empty(0)
    chains = [
        (chain.first, chain.last, chain.read, chain.boundary, chain.boundary_at, chain.live)
        for chain in plan.chains
    ]
    return _encoder.encode(
        PlanFrame(
            step=plan.step,
            spans=np.array(spans, "<i8").tobytes(),
            tokens=tokens.astype("<i4").tobytes(),
            lengths=np.array([len(table) for table in plan.page_tables], "<i8").tobytes(),
            pages=_pack_tables(plan.page_tables),
            swap_out=_pack(plan.swap_out),
            copies=_pack(plan.copies),
            swap_in=_pack(plan.swap_in),
            window_pages=_pack_tables(plan.window_tables),
            chains=np.array(chains, "<i8").tobytes(),
            memory=plan.memory,
            checks=np.array([(check.address, check.page) for check in plan.checks], "<i8").tobytes(),
        )
    )


def decode(message: bytes) -> Plan | None:
    """Return the plan that ``encode`` was given. Raises msgspec.DecodeError on invalid messages."""
    frame = _decoder.decode(message)
    if isinstance(frame, StopFrame):
        return None
    columns = np.frombuffer(frame.spans, "<i8").reshape(-1, 8)
    tokens = np.frombuffer(frame.tokens, "<i4")
    ends = np.cumsum(columns[:, [2, 7]].T.reshape(-1)).tolist()
    ends, ends_undecided = ends[: len(columns)], ends[len(columns) :]
    spans = tuple(
        Span(
            RequestKey(request),
            start,
            tokens[end - count : end],
            table,
            (None, SAMPLED_ON_RANK_0, SAMPLED_LATE)[chosen],
            stores,
            drafts,
            tokens[last - undecided : last] if undecided else None,
        )
        for (request, start, count, table, chosen, stores, drafts, undecided), end, last in zip(
            columns.tolist(), ends, ends_undecided, strict=True
        )
    )
    bounds = [0, *np.cumsum(np.frombuffer(frame.lengths, "<i8")).tolist()]

    def tables(data: bytes) -> tuple[PageTable, ...]:
        pages = np.frombuffer(data, "<i4")
        return tuple(pages[start:end] for start, end in itertools.pairwise(bounds))

    return Plan(
        step=frame.step,
        spans=spans,
        page_tables=tables(frame.pages),
        swap_out=_unpack(frame.swap_out),
        copies=_unpack(frame.copies),
        swap_in=_unpack(frame.swap_in),
        window_tables=tables(frame.window_pages) if frame.window_pages else (),
        chains=tuple(Chain(*fields) for fields in np.frombuffer(frame.chains, "<i8").reshape(-1, 6).tolist()),
        memory=frame.memory,
        checks=tuple(
            PageCheck(*fields) for fields in np.frombuffer(frame.checks, "<i8").reshape(-1, 2).tolist()
        ),
    )


def _sampled(span: Span) -> int:
    return 0 if span.sample is None else 1 + span.sample.late


def _pack_tables(tables: Sequence[PageTable]) -> bytes:
    pages = np.concatenate(tables) if tables else np.empty(0)
    return pages.astype("<i4").tobytes()


def _pack(copies: Sequence[Copy]) -> bytes:
    return np.array([(copy.src, copy.dst, copy.group) for copy in copies], "<i4").tobytes()


def _unpack(data: bytes) -> tuple[Copy, ...]:
    return tuple(Copy(*fields) for fields in np.frombuffer(data, "<i4").reshape(-1, 3).tolist())
