"""The operations of a mixture of experts in plain torch: exact, and fast enough to serve on a CPU.

Shapes: T tokens, each in K of E experts, so R = T * K rows; I inputs and O outputs of one expert's product.
"""

from __future__ import annotations

import torch


def pick_experts(
    logits: torch.Tensor, per_token: int, *, softmax_first: bool, renormalised: bool, rounded: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the weights and, int32, the numbers of the ``per_token`` experts picked for each token, [T, K] both.

    ``logits`` [T, E] of the router. ``softmax_first``: the weights are a softmax over all experts, in float32; if
    ``renormalised``, divided by the sum of the picked ones; if ``rounded``, in the dtype of ``logits``. Else they are a
    softmax over the picked experts, in the dtype of ``logits``.
    """
    if not softmax_first:
        best, picked = logits.topk(per_token, dim=-1)
        return best.softmax(dim=-1), picked.int()
    weights, picked = logits.softmax(dim=-1, dtype=torch.float32).topk(per_token, dim=-1)
    if renormalised:
        weights = weights / weights.sum(dim=-1, keepdim=True)
    return weights.to(logits.dtype) if rounded else weights, picked.int()


def group_rows(picked: torch.Tensor, experts: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return the rows in order of their expert, rows of one expert in order of their tokens: (ends, tokens, rows).

    ``picked`` [T, K]. ``ends`` int32 [E]: expert e has the places ``ends[e - 1]`` (0 for the first) to ``ends[e]``.
    ``rows`` int32 [R]: the row at each place, its index in ``picked.flatten()``; ``tokens``: the token of that row.
    """
    numbers, rows = picked.flatten().sort(stable=True)
    every = torch.arange(experts, dtype=numbers.dtype, device=numbers.device)
    ends = torch.searchsorted(numbers, every, right=True, out_int32=True)
    return ends, torch.div(rows, picked.shape[1], rounding_mode="floor").int(), rows.int()


def grouped_product(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    ends: torch.Tensor,
    *,
    read: torch.Tensor | None = None,
    write: torch.Tensor | None = None,
) -> torch.Tensor:
    """Multiply each row by the weight of its expert; return [R, O].

    ``weight`` [E, I, O] of any strides, ``bias`` [E, O] or None. ``ends`` int32 [E]: expert e has the rows from
    ``ends[e - 1]`` (0 for the first) to ``ends[e]``; the last is R. Row r is ``x[read[r]]``, and its result becomes row
    ``write[r]``, a permutation; None: row r both times. The product is rounded before the bias is added.
    """
    rows = len(x) if read is None else len(read)
    out = x.new_empty((rows, weight.shape[2]))
    start = 0
    for expert, end in enumerate(ends.tolist()):
        if end > start:
            part = (x[start:end] if read is None else x.index_select(0, read[start:end])) @ weight[expert]
            if bias is not None:
                part += bias[expert]
            if write is None:
                out[start:end] = part
            else:
                out.index_copy_(0, write[start:end].long(), part)
            start = end
    return out


def clamped_glu(up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """Return gpt-oss's ``gate * sigmoid(alpha * gate) * (value + 1)`` [T, I] for ``up`` [T, 2 * I], whose columns are
    gate and value in turn. The gate is clamped to at most ``limit``, the value to within ``limit`` of 0. Each operation
    rounds to the dtype of ``up``."""
    gate, value = up[:, ::2].clamp(max=limit), up[:, 1::2].clamp(-limit, limit)
    return (value + 1) * (gate * torch.sigmoid(gate * alpha))


def combine_rows(x: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
    """Return the weighted sum of each token's rows, [T, W] in the dtype of ``x``.

    ``x`` [T * K, W]. ``weights`` [T, K]: in float32, or in the dtype of ``x``, to which each product is rounded then.
    The sum is computed in float32.
    """
    return (x.view(*weights.shape, x.shape[1]) * weights[..., None]).sum(dim=1).to(x.dtype)
