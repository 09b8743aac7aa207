"""Reference of the recurrent layers in plain torch: a causal convolution, then a gated linear recurrence.

Exact, so the kernels are tested against it, and fast enough to serve on a CPU. No kernel imports this module.

Both recurrences keep a state S [K, V] per head and read it with a query: o = qᵀS. With decay a = exp(g) of a token,
``ssd`` sets S ← aS + k(Δx)ᵀ and ``gated_delta`` S ← aS + k(β(v − aSᵀk))ᵀ. Short runs of tokens go step by step, many
chains at a time. Long runs go by blocks: inside a block the updates u are the solution of a triangular system (for
``ssd`` they are known), and everything else is a matrix product.

Shapes: T tokens, C channels, W convolution width, G key heads, H = G * R value heads, K and V values per key and value,
P pages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

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

BLOCK = 64
"""Tokens of a block. Longer blocks cost more inside, shorter ones more updates of the state."""
PIECE = 1024
"""Most tokens of a run whose blocks are prepared at a time; bounds memory."""
STEPPED = 16
"""Runs of fewer tokens are computed step by step, batched over chains."""
BATCH_ELEMENTS = 1 << 21
"""Values of the states that are stepped at a time: they stay in the caches."""


def recurrent(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    layer: Recurrence,
    chains: Chains,
) -> torch.Tensor:
    """Convolve ``inputs`` [T, C] and run the layer's recurrence over each chain; update the layer's state pages.

    ``gates`` [T, 1 or 2, H]: as ``Recurrence.gates`` says, before softplus and sigmoid. ``pages``: inputs [P, C, W - 1]
    and states float32 [P, H, K, V]. Returns [T, H, V] in the dtype of ``inputs``; rows of no chain are 0. Computes in
    float32. All reads of pages precede all writes. Pages that no chain reads may hold anything, NaN included.
    """
    history, states = pages
    mixed = causal_conv(inputs, layer.conv_weight, layer.conv_bias, history, chains)
    heads, key_dim, value_dim = states.shape[1:]
    keys, values = layer.key_heads * key_dim, heads * value_dim
    if layer.kind == "ssd":
        v, k, q = mixed.split((values, keys, keys), dim=1)
    else:
        q, k, v = mixed.split((keys, keys, values), dim=1)
    q, k = q.unflatten(1, (-1, key_dim)), k.unflatten(1, (-1, key_dim))
    v = v.unflatten(1, (heads, value_dim))
    q, k, v = q.float(), k.float(), v.float()
    tokens = _ssd(q, k, v, gates[:, 0], layer) if layer.kind == "ssd" else _gated_delta(q, k, v, gates, layer)
    out = _run(tokens, states, chains)
    if layer.skip is not None:
        out.addcmul_(v, layer.skip[:, None])
    return out.to(inputs.dtype)


def causal_conv(
    inputs: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    history: torch.Tensor,
    chains: Chains,
) -> torch.Tensor:
    """Convolve each channel of ``inputs`` [T, C] over the tokens of each chain, apply SiLU, round once; return [T, C].

    ``weight`` [C, W], ``bias`` [C]. ``history`` [P, C, W - 1]: pages that hold the inputs before a chain, oldest first;
    boundary and live pages receive the inputs before the next token.
    """
    past = weight.shape[1] - 1
    # One array for all chains: before the tokens of each, the inputs that precede them.
    starts = np.cumsum(chains[:, ROWS] + past) - chains[:, ROWS] - past
    padded = inputs.new_empty((int(chains[:, ROWS].sum()) + past * len(chains), inputs.shape[1]))
    rows = _rows(chains[:, FIRST], chains[:, ROWS], inputs)
    places = _rows(starts + past, chains[:, ROWS], inputs)
    padded[places] = inputs[rows]
    padded[_rows(starts, past, inputs)] = _read(history, chains[:, READ]).transpose(1, 2).flatten(0, 1)

    length = max(len(padded) - past, 0)
    total = torch.zeros((length, inputs.shape[1]), device=inputs.device)
    if bias is not None:
        total += bias.float()
    for tap in range(past + 1):
        total.addcmul_(padded[tap : tap + length].float(), weight[:, tap].float())
    out = torch.zeros_like(inputs)
    out[rows] = F.silu(total[places - past]).to(inputs.dtype)

    for page, after in ((BOUNDARY, BOUNDARY_ROWS), (LIVE, ROWS)):
        written = chains[:, page] != NO_PAGE
        last = padded[_rows((starts + chains[:, after])[written], past, inputs)]
        history[_index(chains[written, page], history)] = last.unflatten(0, (-1, past)).transpose(1, 2)
    return out


def _ssd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, step: torch.Tensor, layer: Recurrence) -> _Tokens:
    """Mamba-2: ``q`` (C) and ``k`` (B) [T, G, K], ``v`` (x) [T, H, V], ``step`` (Δ) [T, H] before bias and softplus.
    The step limit holds for every token: an answer does not depend on where the context was cut. (transformers applies
    it to whole prompts, not to tokens that it decodes one by one.)"""
    size = F.softplus(step.float() + layer.step_bias).clamp(*layer.step_limit)
    return _Tokens(q, k, v * size[..., None], size * layer.decay, None)


def _gated_delta(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, gates: torch.Tensor, layer: Recurrence
) -> _Tokens:
    """The gated delta rule: ``q`` and ``k`` [T, G, K], normalised here, ``v`` [T, H, V], ``gates`` [T, 2, H]: write
    strength before its sigmoid, step size before bias and softplus."""
    strength, step = gates.float().unbind(1)
    decay = F.softplus(step + layer.step_bias) * layer.decay
    return _Tokens(_unit(q) * q.shape[-1] ** -0.5, _unit(k), v, decay, strength.sigmoid())


def _unit(x: torch.Tensor) -> torch.Tensor:
    """Scale the heads of ``x`` to length 1, as transformers and fla do: with 1e-6 added to the square."""
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6)


@dataclass(frozen=True, slots=True)
class _Tokens:
    """Tokens of a step, all float32."""

    q: torch.Tensor
    """[T, G, K]"""
    k: torch.Tensor
    v: torch.Tensor
    """[T, H, V]"""
    decay: torch.Tensor
    """[T, H]: logarithms, at most 0."""
    strength: torch.Tensor | None
    """[T, H] with the delta rule, else None."""

    def select(self, rows: slice | torch.Tensor) -> _Tokens:
        strength = None if self.strength is None else self.strength[rows]
        return _Tokens(self.q[rows], self.k[rows], self.v[rows], self.decay[rows], strength)


def _run(tokens: _Tokens, pages: torch.Tensor, chains: Chains) -> torch.Tensor:
    """Run all chains; return the outputs [T, H, V]. ``pages`` [P, H, K, V]."""
    out = torch.zeros_like(tokens.v)
    at = np.where(chains[:, BOUNDARY] == NO_PAGE, chains[:, ROWS], chains[:, BOUNDARY_ROWS])
    order = np.argsort(-at, kind="stable")  # chains that are stepped together lie side by side
    chains, at = chains[order], at[order]
    states = _read(pages, chains[:, READ])  # a copy: pages are written below
    for page, first, rows in (
        (BOUNDARY, chains[:, FIRST], at),
        (LIVE, chains[:, FIRST] + at, chains[:, ROWS] - at),
    ):
        for batch in _batches(rows, pages[0].numel()):
            adjacent = batch[-1] - batch[0] == len(batch) - 1 and (np.diff(batch) == 1).all()
            chosen = slice(batch[0], batch[-1] + 1) if adjacent else _index(batch, pages)
            stepped = states[chosen]
            _steps(tokens, stepped, out, first[batch], rows[batch])
            if not adjacent:
                states[chosen] = stepped
        for index in np.flatnonzero(rows >= STEPPED):
            end = int(first[index] + rows[index])
            for start in range(int(first[index]), end, PIECE):
                own = slice(start, min(start + PIECE, end))
                out[own], states[index] = _blocks(tokens.select(own), states[index])
        written = np.flatnonzero(chains[:, page] != NO_PAGE)
        if len(written):
            last = states if len(written) == len(states) else states.index_select(0, _index(written, pages))
            pages[_index(chains[written, page], pages)] = last
    return out


def _batches(rows: Ints, elements: int) -> Iterator[Ints]:
    """Yield the chains with 1 to ``STEPPED`` - 1 of ``rows`` [n], longest first, in batches of ``BATCH_ELEMENTS`` state
    values."""
    short = np.flatnonzero((rows > 0) & (rows < STEPPED))
    short = short[np.argsort(-rows[short], kind="stable")]
    size = max(1, BATCH_ELEMENTS // elements)
    for start in range(0, len(short), size):
        yield short[start : start + size]


def _steps(tokens: _Tokens, states: torch.Tensor, out: torch.Tensor, first: Ints, rows: Ints) -> None:
    """Step states [n, H, K, V] through ``rows`` [n] tokens each, fewer for later ones, from ``first`` [n] on. Write the
    outputs; update the states."""
    groups, shared = tokens.q.shape[1], states.shape[1] // tokens.q.shape[1]
    for step in range(int(rows[0])):
        count = int((rows > step).sum())
        own = _index(first[:count] + step, states)
        now, state = tokens.select(own), states[:count]
        decay = now.decay.exp()[..., None, None]
        # Both products read the state before this token: o = a qᵀS + (qᵀk) u.
        both = torch.stack((now.q, now.k), dim=2).repeat_interleave(shared, dim=1)  # [n, H, 2, K]
        read = (both @ state) * decay
        update = now.v
        if now.strength is not None:
            update = (now.v - read[:, :, 1]) * now.strength[..., None]
        score = (now.q * now.k).sum(-1).repeat_interleave(shared, dim=1)
        out[own] = read[:, :, 0] + score[..., None] * update
        state *= decay
        grouped = state.unflatten(1, (groups, shared))
        grouped.addcmul_(now.k[:, :, None, :, None], update.unflatten(1, (groups, shared))[..., None, :])


def _blocks(run: _Tokens, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the outputs [t, H, V] of a run of t tokens that starts from ``state`` [H, K, V], and its last state."""
    rows, groups = len(run.q), run.q.shape[1]
    q, k = _blocked(run.q, BLOCK)[:, None], _blocked(run.k, BLOCK)[:, None]  # [G, 1, b, L, K]
    v = _blocked(run.v, BLOCK).unflatten(0, (groups, -1))  # [G, R, b, L, V]
    sums = _blocked(run.decay[..., None], BLOCK).unflatten(0, (groups, -1)).cumsum(3)  # [G, R, b, L, 1]
    between = sums - sums.transpose(3, 4)
    # Above the diagonal the logarithm is positive and may overflow.
    later = torch.ones((BLOCK, BLOCK), dtype=torch.bool, device=v.device).triu(1)
    between = between.masked_fill_(later, -torch.inf).exp_()  # [G, R, b, L, L]
    scores = (q @ k.transpose(3, 4)) * between
    updates, known = v, None
    if run.strength is not None:
        strength = _blocked(run.strength[..., None], BLOCK).unflatten(0, (groups, -1))
        system = (k @ k.transpose(3, 4)) * between * strength
        sides = torch.cat((v * strength, k * (strength * sums.exp())), dim=-1)
        solved = torch.linalg.solve_triangular(system, sides, upper=False, unitriangular=True)
        updates, known = solved.split((v.shape[-1], k.shape[-1]), dim=-1)
    q_decayed, k_decayed = q * sums.exp(), (k * (sums[..., -1:, :] - sums).exp()).transpose(3, 4)
    whole = sums[..., -1:, :].exp()
    state = state.unflatten(0, (groups, -1))
    out = torch.empty_like(v)
    for block in range(v.shape[2]):
        update = updates[:, :, block]
        if known is not None:
            update = update - known[:, :, block] @ state
        out[:, :, block] = q_decayed[:, :, block] @ state + scores[:, :, block] @ update
        state = state * whole[:, :, block] + k_decayed[:, :, block] @ update
    return out.flatten(2, 3).flatten(0, 1)[:, :rows].transpose(0, 1), state.flatten(0, 1)


def _blocked(x: torch.Tensor, size: int) -> torch.Tensor:
    """Return [t, h, d] as blocks [h, b, size, d]; rows of zeros fill the last one: they change no state."""
    padding = -len(x) % size
    blocked: torch.Tensor = F.pad(x, (0, 0, 0, 0, 0, padding)).transpose(0, 1).unflatten(1, (-1, size))
    return blocked


def _rows(first: Ints, count: Ints | int, like: torch.Tensor) -> torch.Tensor:
    """Return the rows ``first[i] .. first[i] + count[i] - 1`` of all i, int64, on the device of ``like``."""
    counts = np.broadcast_to(count, first.shape)
    ends = np.cumsum(counts)
    return _index(np.arange(counts.sum()) + np.repeat(first - (ends - counts), counts), like)


def _read(pages: torch.Tensor, numbers: Ints) -> torch.Tensor:
    """Return a copy of the pages [n, ...]; zeros for ``NO_PAGE``."""
    copied = pages.index_select(0, _index(np.maximum(numbers, 0), pages))
    missing = np.flatnonzero(numbers == NO_PAGE)
    if len(missing):
        copied[_index(missing, pages)] = 0.0
    return copied


def _index(numbers: Ints, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(np.ascontiguousarray(numbers)).to(like.device)
