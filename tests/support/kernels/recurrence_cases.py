"""Random steps of a recurrent layer over state pages, and their oracle: one token after another, in float64."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

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

Kind = Literal["ssd", "gated_delta"]
KINDS: tuple[Kind, ...] = ("ssd", "gated_delta")
PART_ALIGNMENT = 16
"""Bytes; each part of a page begins at a multiple."""


@dataclass(frozen=True)
class State:
    """What a layer keeps of one context, float64."""

    inputs: torch.Tensor
    """[C, W - 1]"""
    state: torch.Tensor
    """[H, K, V]"""


@dataclass(frozen=True)
class Case:
    """One layer and one step's tensors."""

    layer: Recurrence
    inputs: torch.Tensor
    gates: torch.Tensor
    pages: torch.Tensor
    """uint8 [P, bytes]: a strided view; a page is shorter than the distance to the next."""
    parts: tuple[torch.Tensor, torch.Tensor]
    chains: Chains

    def on(self, device: str) -> Case:
        layer = replace(
            self.layer,
            **{
                name: None if value is None else value.to(device)
                for name in ("conv_weight", "conv_bias", "decay", "step_bias", "skip")
                for value in [getattr(self.layer, name)]
            },
        )
        shape = self.parts[1].shape[1:]
        pages = _nan_pages(len(self.pages), self.pages.shape[1]).to(device)
        pages = pages[1:, : self.pages.shape[1]].copy_(self.pages)
        return Case(
            layer, self.inputs.to(device), self.gates.to(device), pages,
            _parts(pages, layer, shape, self.inputs.dtype), self.chains,
        )  # fmt: skip


def make_layer(kind: Kind, seed: int = 0, *, heads: int = 4, key_heads: int = 2, key: int = 8, value: int = 6,
               width: int = 4, dtype: torch.dtype = torch.float32) -> Recurrence:  # fmt: skip
    rng = torch.Generator().manual_seed(seed)
    channels = 2 * key_heads * key + heads * value

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=rng)

    return Recurrence(
        kind, (normal(channels, width) * 0.5).to(dtype),
        normal(channels).to(dtype) if kind == "ssd" else None, key_heads,
        -torch.rand(heads, generator=rng) * 2 - 0.05, normal(heads),
        normal(heads) if kind == "ssd" else None,
        (0.05, 0.9) if kind == "ssd" else (0.0, float("inf")),
    )  # fmt: skip


def make_case(
    layer: Recurrence,
    state_shape: tuple[int, int, int],
    rows: list[list[int]],
    tokens: int,
    pages: int,
    seed: int = 0,
) -> Case:
    """A step of ``tokens`` tokens. Pages that no chain reads are NaN, every page that a chain reads is random."""
    rng = torch.Generator().manual_seed(seed)
    dtype, (channels, width) = layer.conv_weight.dtype, layer.conv_weight.shape
    inputs = torch.randn((tokens, channels), generator=rng).to(dtype)
    gates = torch.randn((tokens, layer.gates, state_shape[0]), generator=rng).to(dtype)
    size = page_bytes(channels, width, state_shape, dtype)
    data = torch.full((pages, size + 48), 255, dtype=torch.uint8)[
        :, :size
    ]  # all bits set: NaN in every dtype
    parts = _parts(data, layer, state_shape, dtype)
    chains = make_chains(rows, tokens, pages)
    for page in {int(page) for page in chains[:, 2]} - {NO_PAGE}:
        for part in parts:
            part[page] = torch.randn(part.shape[1:], generator=rng).to(part.dtype)
    return Case(layer, inputs, gates, data, parts, chains)


def _nan_pages(pages: int, size: int) -> torch.Tensor:
    """One page more, before page 0: a kernel that reads page -1 reads NaN. All bits are set, which is NaN in every
    dtype."""
    return torch.full((pages + 1, size + 48), 255, dtype=torch.uint8)


def _parts(
    pages: torch.Tensor, layer: Recurrence, state_shape: tuple[int, ...], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    channels, width = layer.conv_weight.shape
    heads, key, value = state_shape
    return page_parts(pages, channels, width, (heads, key, value), dtype)


def random_rows(rng: random.Random, most: int = 5, longest: int = 200) -> tuple[list[list[int]], int, int]:
    """Chains with random lengths, gaps, pages and boundaries, in random order; tokens; pages."""
    chains, at = [], 0
    count = rng.randrange(1, most + 1)
    pages = list(range(3 * count + 2))
    rng.shuffle(pages)
    for _ in range(count):
        at += rng.choice((0, 0, 1, 5))
        rows = rng.choice((1, 1, 2, rng.randrange(1, 20), rng.randrange(1, longest)))
        read = rng.choice((NO_PAGE, pages.pop()))
        boundary = rng.choice((NO_PAGE, pages.pop()))
        live = pages.pop()
        if boundary != NO_PAGE and rng.random() < 0.2:
            live = NO_PAGE
        elif read != NO_PAGE and rng.random() < 0.5:
            live = read
        after = 0
        if boundary != NO_PAGE:
            after = rows if live == NO_PAGE else rng.choice((rows, rng.randrange(1, rows + 1)))
        chains.append([at, rows, read, boundary, after, live])
        at += rows
    rng.shuffle(chains)
    return chains, at + rng.choice((0, 3)), 3 * count + 2


def start_of(case: Case, read: int) -> State:
    """The state from which a chain starts."""
    inputs, states = case.parts
    if read == NO_PAGE:
        return State(
            torch.zeros(inputs.shape[1:], dtype=torch.float64),
            torch.zeros(states.shape[1:], dtype=torch.float64),
        )
    return State(inputs[read].double(), states[read].double())


def token_by_token(case: Case, start: State, first: int, rows: int) -> tuple[torch.Tensor, list[State]]:
    """Outputs float64 [rows, H, V] and the states after 0, 1, .. ``rows`` tokens, by the definition."""
    layer, states, outs = case.layer, [start], []
    heads, key, value = start.state.shape
    keys, group = layer.key_heads * key, heads // layer.key_heads
    bias = 0.0 if layer.conv_bias is None else layer.conv_bias.double()
    for row in range(first, first + rows):
        window = torch.cat((states[-1].inputs, case.inputs[row].double()[:, None]), dim=1)
        mixed = F.silu((window * layer.conv_weight.double()).sum(1) + bias)
        mixed = mixed.to(case.inputs.dtype).double()
        if layer.kind == "ssd":
            v, k, q = mixed.split((heads * value, keys, keys))
        else:
            q, k, v = mixed.split((keys, keys, heads * value))
        state, out = torch.empty_like(start.state), torch.empty((heads, value), dtype=torch.float64)
        for head in range(heads):
            own = slice(head // group * key, head // group * key + key)
            query, written, val = q[own], k[own], v[head * value : (head + 1) * value]
            step = F.softplus(case.gates[row, -1, head].double() + layer.step_bias[head].double())
            step = step.clamp(*layer.step_limit)
            decayed = states[-1].state[head] * torch.exp(step * layer.decay[head].double())
            if layer.kind == "ssd":
                state[head] = decayed + torch.outer(written, step * val)
                out[head] = query @ state[head]
                if layer.skip is not None:
                    out[head] += layer.skip[head].double() * val
            else:
                query = query / torch.sqrt(query @ query + 1e-6) / key**0.5
                written = written / torch.sqrt(written @ written + 1e-6)
                strength = torch.sigmoid(case.gates[row, 0, head].double())
                state[head] = decayed + torch.outer(written, strength * (val - written @ decayed))
                out[head] = query @ state[head]
        outs.append(out)
        states.append(State(window[:, 1:], state))
    return torch.stack(outs) if outs else torch.zeros((0, heads, value), dtype=torch.float64), states


def make_chains(rows: Sequence[Sequence[int]] | Chains, tokens: int, pages: int) -> Chains:
    """Return chains [n, 6] for steps of ``tokens`` tokens and tiers of ``pages`` state pages. Raises ValueError when a
    chain leaves the step, two overlap, a page does not exist, one is written twice, or a last state is lost."""
    chains = np.asarray(rows, dtype=np.int64).reshape(-1, 6)
    used = chains[chains[:, ROWS] != 0]
    if not len(chains):
        return chains
    order = used[np.argsort(used[:, FIRST], kind="stable")]
    ends = order[:, FIRST] + order[:, ROWS]
    if (chains[:, ROWS] < 0).any() or (len(used) and (order[0, FIRST] < 0 or ends[-1] > tokens)):
        raise ValueError(f"a chain lies outside the step's {tokens} rows")
    if (order[1:, FIRST] < ends[:-1]).any():
        raise ValueError("two chains overlap")
    named = chains[:, [READ, BOUNDARY, LIVE]]
    if named.min() < NO_PAGE or named.max() >= pages:
        raise ValueError(f"a chain names a state page outside 0..{pages - 1}")
    written = named[:, 1:][named[:, 1:] != NO_PAGE]
    if len(np.unique(written)) < len(written):
        raise ValueError("two chains write one state page, or a chain writes one twice")
    at = chains[chains[:, BOUNDARY] != NO_PAGE]
    if ((at[:, BOUNDARY_ROWS] < 1) | (at[:, BOUNDARY_ROWS] > at[:, ROWS])).any():
        raise ValueError("a chain's boundary lies outside the chain")
    ends_at_boundary = (used[:, BOUNDARY] != NO_PAGE) & (used[:, BOUNDARY_ROWS] == used[:, ROWS])
    if ((used[:, LIVE] == NO_PAGE) & ~ends_at_boundary).any():
        raise ValueError("a chain's last state goes to no page")
    return chains


def inputs_bytes(channels: int, conv_width: int, dtype: torch.dtype) -> int:
    """Return the bytes of a page before its state: the inputs of the convolution, padded to ``PART_ALIGNMENT``."""
    size = channels * (conv_width - 1) * dtype.itemsize
    return -(-size // PART_ALIGNMENT) * PART_ALIGNMENT


def page_bytes(channels: int, conv_width: int, state_shape: tuple[int, int, int], dtype: torch.dtype) -> int:
    """Return the bytes of one layer's state page, a multiple of ``PART_ALIGNMENT``."""
    state = int(np.prod(state_shape)) * torch.float32.itemsize
    return inputs_bytes(channels, conv_width, dtype) + -(-state // PART_ALIGNMENT) * PART_ALIGNMENT


def page_parts(
    pages: torch.Tensor, channels: int, conv_width: int, state_shape: tuple[int, int, int], dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of both parts of ``pages`` (uint8 [P, page_bytes], any page stride that is a multiple of
    ``PART_ALIGNMENT``): inputs ``dtype`` [P, C, W - 1] and states float32 [P, H, K, V]."""
    first, count = channels * (conv_width - 1) * dtype.itemsize, len(pages)
    inputs = pages[:, :first].view(dtype).view(count, channels, conv_width - 1)
    start = inputs_bytes(channels, conv_width, dtype)
    state = pages[:, start : start + int(np.prod(state_shape)) * torch.float32.itemsize]
    return inputs, state.view(torch.float32).view(count, *state_shape)
