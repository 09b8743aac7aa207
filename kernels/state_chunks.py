"""Recurrent layers on a GPU: long runs of tokens by blocks, with the kernels of fla-core, and the rest token by token.

fla-core (https://github.com/fla-org/flash-linear-attention) computes runs of any length, from a float32 state to a
float32 state. The states inside a run have the model's dtype, which is not enough for a boundary page: a chain with a
boundary is two runs. float32 models do not use fla-core, since its products are TF32.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from types import ModuleType

import numpy as np
import torch
import torch.nn.functional as F

from pensieve.kernels.recurrence import (
    BOUNDARY,
    BOUNDARY_ROWS,
    FIRST,
    LIVE,
    NO_PAGE,
    READ,
    ROWS,
    Chains,
    Recurrence,
)
from pensieve.kernels.spans import Ints
from pensieve.kernels.state_step import check_recurrent, convolve, state_step

LONG = 512
"""Fewest tokens of a run that is computed by blocks. On an H100 a layer with Qwen3-Next's heads takes 0.20, 0.25, 0.47
and 0.92 ms for a run of 64, 128, 256 and 512 tokens step by step, and 1.4 to 2.0 ms by blocks, most of it launches;
for 1,024 tokens 2.1 and 1.3 ms. Shorter runs also fit graphs."""


@dataclass(frozen=True, slots=True, eq=False)
class LongRuns:
    """Runs that are computed by blocks, on the device: one after another in a packed array of their tokens."""

    rows: torch.Tensor
    """int64 [t]: the step's row of each packed token."""
    ends: torch.Tensor
    """int64 [n + 1]: packed tokens before each run, and all of them."""
    ends_cpu: torch.Tensor
    chains: torch.Tensor
    """int32 [n, 6]: each run as a chain of its own; a boundary is at its end."""
    most_rows: int
    read: torch.Tensor
    """int64 [n]: page before each run; any page where there is none."""
    fresh: torch.Tensor
    """bool [n]: whether a run starts from zeros."""
    written: torch.Tensor
    """int64 [w]: pages that receive a run's last state."""
    writers: torch.Tensor
    """int64 [w]: the run of each."""


@dataclass(frozen=True, slots=True, eq=False)
class RecurrentPlan:
    """Runs of one step, shared by all its layers: phases, one after another. Each has long runs and, after them, chains
    int32 [n, 6] for ``state_step``."""

    phases: tuple[tuple[LongRuns | None, torch.Tensor | None], ...]
    covers_all: bool
    """Whether every row belongs to a chain."""


def make_recurrent_plan(
    chains: Chains, tokens: int, dtype: torch.dtype, device: torch.device
) -> RecurrentPlan:
    """Make the plan of a step of ``tokens`` tokens with ``chains``. Raises ValueError if a chain reads a page that
    another one writes, RuntimeError when there are long runs and fla-core is missing."""
    chains = chains[chains[:, ROWS] > 0]
    _check_apart(chains)
    long = LONG if dtype != torch.float32 else 2**62
    bounded = chains[:, BOUNDARY] != NO_PAGE
    at = np.where(bounded, chains[:, BOUNDARY_ROWS], chains[:, ROWS])
    left = chains[:, ROWS] - at
    short = (at < long) & (left < long)
    heads, tails = chains[~short].copy(), chains[~short & (left > 0)].copy()
    split = left[~short] > 0
    heads[split, ROWS], heads[split, LIVE] = heads[split, BOUNDARY_ROWS], heads[split, BOUNDARY]
    heads[split, BOUNDARY] = NO_PAGE
    tails[:, FIRST] += tails[:, BOUNDARY_ROWS]
    tails[:, ROWS] -= tails[:, BOUNDARY_ROWS]
    tails[:, READ], tails[:, BOUNDARY], tails[:, BOUNDARY_ROWS] = tails[:, BOUNDARY], NO_PAGE, 0
    phases = []
    for runs, others in ((heads, chains[short]), (tails, tails[:0])):
        by_blocks = runs[:, ROWS] >= long
        stepped = np.concatenate((runs[~by_blocks], others))
        if len(runs) or len(stepped):
            phases.append(
                (
                    _long_runs(runs[by_blocks], device) if by_blocks.any() else None,
                    _on_device(stepped.astype(np.int32), device) if len(stepped) else None,
                )
            )
    if any(runs is not None for runs, _ in phases):
        _fla("gated_delta_rule")
    return RecurrentPlan(tuple(phases), int(chains[:, ROWS].sum()) == tokens)


def recurrent(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    layer: Recurrence,
    plan: RecurrentPlan,
) -> torch.Tensor:
    """Convolve ``inputs`` [T, C] and run the recurrence; update the state pages; return [T, H, V]. The reference
    documents the contract. Raises ValueError when the tensors do not fit each other."""
    heads, _, value_dim = check_recurrent(inputs, gates, pages, layer, None)
    shape = (len(inputs), heads, value_dim)
    out = inputs.new_empty(shape) if plan.covers_all else inputs.new_zeros(shape)
    for runs, chains in plan.phases:
        if runs is not None:
            _by_blocks(inputs, gates, pages, layer, runs, out)
        if chains is not None:
            state_step(inputs, gates, pages, layer, chains, out)
    return out


def _by_blocks(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    layer: Recurrence,
    runs: LongRuns,
    out: torch.Tensor,
) -> None:
    history, states = pages
    heads, key_dim, value_dim = states.shape[1:]
    mixed = convolve(inputs, history, layer, runs.chains, runs.most_rows)[runs.rows][None]
    keys, values = layer.key_heads * key_dim, heads * value_dim
    start = states[runs.read].masked_fill_(runs.fresh[:, None, None, None], 0.0)
    gate = gates[runs.rows][None].float()
    size = F.softplus(gate[:, :, -1] + layer.step_bias)
    common = {
        "initial_state": start, "output_final_state": True, "cu_seqlens": runs.ends, "cu_seqlens_cpu": runs.ends_cpu,
    }  # fmt: skip
    if layer.kind == "gated_delta":
        q, k, v = mixed.split((keys, keys, values), dim=2)
        result, last = _fla("gated_delta_rule").chunk_gated_delta_rule(
            q.unflatten(2, (-1, key_dim)).contiguous(), k.unflatten(2, (-1, key_dim)).contiguous(),
            v.unflatten(2, (heads, value_dim)).contiguous(), size * layer.decay, gate[:, :, 0].sigmoid(),
            use_qk_l2norm_in_kernel=True, **common,
        )  # fmt: skip
    else:
        v, k, q = mixed.split((values, keys, keys), dim=2)
        size, v = size.clamp(*layer.step_limit), v.unflatten(2, (heads, value_dim))
        shared = heads // layer.key_heads
        q, k = (x.unflatten(2, (-1, key_dim)).repeat_interleave(shared, dim=2) for x in (q, k))
        result, last = _fla("simple_gla").chunk_simple_gla(
            q, k, (v * size[..., None]).to(v.dtype), size * layer.decay, scale=1.0, **common
        )
        if layer.skip is not None:
            result = torch.addcmul(result.float(), v.float(), layer.skip[:, None]).to(out.dtype)
    out[runs.rows] = result[0]
    states[runs.written] = last[runs.writers]


def _check_apart(chains: Chains) -> None:
    owner = {int(page): index for index, row in enumerate(chains) for page in row[[BOUNDARY, LIVE]]}
    for index, page in enumerate(chains[:, READ].tolist()):
        if page != NO_PAGE and owner.get(page, index) != index:
            raise ValueError(f"a chain reads state page {page}, which another chain writes in the same step")


def _long_runs(runs: Chains, device: torch.device) -> LongRuns:
    counts = runs[:, ROWS]
    ends = np.concatenate(([0], np.cumsum(counts)))
    rows = np.arange(ends[-1]) + np.repeat(runs[:, FIRST] - ends[:-1], counts)
    fresh = runs[:, READ] == NO_PAGE
    pages = runs[:, [BOUNDARY, LIVE]]
    writers, which = np.nonzero(pages != NO_PAGE)
    return LongRuns(
        _on_device(rows, device), _on_device(ends, device), torch.from_numpy(ends),
        _on_device(runs.astype(np.int32), device), int(counts.max()),
        _on_device(np.where(fresh, 0, runs[:, READ]), device), torch.from_numpy(fresh).to(device),
        _on_device(pages[writers, which], device), _on_device(writers, device),
    )  # fmt: skip


def _on_device(values: Ints, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(values)).to(device)


def _fla(module: str) -> ModuleType:
    """Import a module of fla's operations. Raises RuntimeError when fla-core is not installed."""
    try:
        return importlib.import_module(f"fla.ops.{module}")
    except ImportError as error:
        raise RuntimeError(
            "recurrent layers on a GPU need the package fla-core: pip install 'pensieve[server]'"
        ) from error
