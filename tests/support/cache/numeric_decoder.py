"""A decoder in float64 with full, sliding and recurrent layers, over paged caches that hold NaN where nothing is held.

It computes exactly the positions that it is told to, by the rule of ``pensieve.engine.cache.restore``. A position that
reads anything that is neither held nor computed becomes NaN. A write to a position that is held fails at once.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from pensieve.core import Floats
from pensieve.engine.cache import restore
from pensieve.engine.cache.chunk import Range
from pensieve.engine.cache.restore import Needs

WIDTH = 5
"""Components of a hidden state, a key and a value."""
CONV = 3
"""Tokens that the convolution of a recurrent layer sees."""
VOCABULARY = 11


class Layer(NamedTuple):
    group: int
    window: int
    """0: sees everything."""
    weights: Floats
    """float64 [6, WIDTH, WIDTH]."""


class State(NamedTuple):
    conv: Floats
    """Inputs of the convolution before this position, float64 [CONV - 1, WIDTH]."""
    memory: Floats
    """float64 [WIDTH, WIDTH]."""


def close(mine: Floats, other: Floats) -> bool:
    return bool(np.allclose(mine, other, rtol=1e-9, atol=1e-9))  # NaN is close to nothing


ZERO_STATE = State(np.zeros((CONV - 1, WIDTH)), np.zeros((WIDTH, WIDTH)))


@dataclass(frozen=True)
class Decoder:
    needs: tuple[Needs, ...]
    layers: tuple[Layer, ...]
    embedding: Floats

    @classmethod
    def random(cls, rng: random.Random, needs: tuple[Needs, ...]) -> Decoder:
        """Two layers per group, in a random order; one layer of a window group may have a narrower window."""
        noise = np.random.default_rng(rng.randrange(1 << 30))
        groups = [group for group, need in enumerate(needs) if need.kind != "empty" for _ in range(2)]
        rng.shuffle(groups)
        widest = {group: need.window for group, need in enumerate(needs)}
        layers: list[Layer] = []
        for at, group in enumerate(groups):
            window = widest[group]
            if window and group in groups[:at] and rng.random() < 0.5:
                window = rng.randint(1, window)
            layers.append(Layer(group, window, noise.normal(0, 0.6, (6, WIDTH, WIDTH))))
        return cls(needs, tuple(layers), noise.normal(0, 1, (VOCABULARY, WIDTH)))


@dataclass
class Pages:
    """The slices of all chunks of some contexts. A page holds one chunk's slices of all groups."""

    decoder: Decoder
    size: int
    count: int
    filled: list[list[int]] = field(init=False)
    """By group and page."""
    kv: list[Floats] = field(init=False)
    """By layer, float64 [pages, size, 2, WIDTH]."""
    states: list[list[State | None]] = field(init=False)
    """By layer and page: the state after the page's last token."""

    def __post_init__(self) -> None:
        layers = self.decoder.layers
        self.filled = [[0] * self.count for _ in self.decoder.needs]
        self.kv = [np.full((self.count, self.size, 2, WIDTH), np.nan) for _ in layers]
        self.states = [[None] * self.count for _ in layers]

    def have(self, table: list[int]) -> list[list[int]]:
        """Return what a context holds, as the rule reads it: by group and chunk."""
        return [[filled[page] for page in table] for filled in self.filled]

    def take(self, source: Pages, chunk: int, page: int, held: list[int]) -> None:
        """Copy into an empty page what ``held`` says, by group, of a chunk of a context that ``stateless`` computed."""
        for group, valid in enumerate(held):
            self.filled[group][page] = valid
            for layer, (of_group, *_) in enumerate(self.decoder.layers):
                if of_group == group:
                    self.kv[layer][page, :valid] = source.kv[layer][chunk, :valid]
                    if valid == self.size:
                        self.states[layer][page] = source.states[layer][chunk]

    def assert_equal(self, source: Pages, table: list[int]) -> None:
        """Assert that a context holds what ``stateless`` computed for it."""
        for layer, (group, *_) in enumerate(self.decoder.layers):
            for chunk, page in enumerate(table):
                valid = self.filled[group][page]
                if self.decoder.needs[group].kind == "state":
                    if valid == self.size:
                        mine, other = self.states[layer][page], source.states[layer][chunk]
                        assert mine is not None and other is not None
                        assert close(mine.conv, other.conv) and close(mine.memory, other.memory)
                else:
                    assert close(self.kv[layer][page, :valid], source.kv[layer][chunk, :valid])


class Run:
    """One request: computes ranges of a context's positions in ascending order."""

    keeps_live_state = False
    """A fault: a range goes on from the state that the last one left, not from the one before its start."""

    def __init__(self, pages: Pages, table: list[int], tokens: list[int]) -> None:
        self.outputs = np.full((len(tokens), WIDTH), np.nan)
        """Of the last layer, at each position computed here, float64 [tokens, WIDTH]."""
        self._pages = pages
        self._decoder = pages.decoder
        self._table = table
        self._tokens = tokens
        self._live: dict[int, State] = {}
        """By layer: the state after the last position computed, in a range under way."""

    def compute(self, ranges: list[Range], rng: random.Random) -> None:
        """Compute ascending ranges, each in one or more steps."""
        size, needs = self._pages.size, self._decoder.needs
        for start, end in ranges:
            self._begin(start)
            at = start
            while at < end:
                to = rng.randint(at + 1, end)
                for piece in restore.pieces_of((at, to), size, needs, self._pages.have(self._table)):
                    self._piece(piece)
                at = to

    def _begin(self, start: int) -> None:
        if self._live and self.keeps_live_state:
            return
        states = [layer for layer in range(len(self._decoder.layers)) if self._kind(layer) == "state"]
        if not states:
            return
        before = restore.state_before(start, self._pages.size)
        for layer in states:
            state = self._pages.states[layer][self._table[before]] if before >= 0 else ZERO_STATE
            assert state is not None, f"the state at {start} is not held"
            self._live[layer] = state

    def _kind(self, layer: int) -> str:
        return self._decoder.needs[self._decoder.layers[layer].group].kind

    def _piece(self, piece: restore.SpanPart) -> None:
        start, end, stores = piece
        hidden = self._decoder.embedding[self._tokens[start:end]]
        for layer, (group, window, weights) in enumerate(self._decoder.layers):
            normed = hidden / np.sqrt((hidden**2).mean(1, keepdims=True) + 1e-6)
            if self._kind(layer) == "state":
                mixed = self._recur(layer, weights, normed, start)
            else:
                mixed = self._attend(layer, window, weights, normed, start, bool(stores >> group & 1))
            hidden = hidden + mixed @ weights[4]
            hidden = hidden + np.tanh(hidden @ weights[5])
        self.outputs[start:end] = hidden
        self._note_held(start, end, stores)

    def _attend(
        self, layer: int, window: int, weights: Floats, normed: Floats, start: int, stored: bool
    ) -> Floats:
        pages, size = self._pages, self._pages.size
        group, pool = self._decoder.layers[layer].group, pages.kv[layer]
        end = start + len(normed)
        queries, keys, values = (normed @ weights[part] for part in range(3))
        for row, position in enumerate(range(start, end)):
            page, slot = self._table[position // size], position % size
            held = slot < pages.filled[group][page]
            assert held != stored, f"position {position} of group {group}: held {held}, stored {stored}"
            if stored:
                pool[page, slot] = keys[row], values[row]
        first = max(start - window + 1, 0) if window else 0
        chunk = first // size
        seen = pool[self._table[chunk : -(-end // size)]].reshape(-1, 2, WIDTH)
        out = np.empty_like(normed)
        for row, position in enumerate(range(start, end)):
            low = max(position - window + 1, 0) if window else 0
            read = seen[low - chunk * size : position + 1 - chunk * size]
            scores = np.exp(read[:, 0] @ queries[row] / WIDTH)
            out[row] = scores @ read[:, 1] / scores.sum()
        return out

    def _recur(self, layer: int, weights: Floats, normed: Floats, start: int) -> Floats:
        """A short convolution, then the gated delta rule; stores the state at boundaries that are not held."""
        pages, size = self._pages, self._pages.size
        conv, memory = self._live[layer]
        inputs = np.concatenate((conv, normed))
        mixed = np.tanh(inputs[2:] + 0.5 * inputs[1:-1] - 0.3 * inputs[:-2])
        queries, keys, values, gates = (mixed @ weights[part] for part in range(4))
        keys = keys / np.sqrt((keys**2).sum(1, keepdims=True) + 1e-6)
        decay, beta = 1 / (1 + np.exp(-gates[:, :2])).T
        out = np.empty_like(normed)
        for row in range(len(normed)):
            memory = decay[row] * memory
            memory = memory + np.outer(keys[row], beta[row] * (values[row] - keys[row] @ memory))
            out[row] = queries[row] @ memory
            boundary = start + row + 1
            if boundary % size == 0 and pages.states[layer][self._table[boundary // size - 1]] is None:
                state = State(inputs[row + 1 : row + CONV], memory)
                pages.states[layer][self._table[boundary // size - 1]] = state
        self._live[layer] = State(inputs[len(normed) :], memory)
        return out

    def _note_held(self, start: int, end: int, stores: int) -> None:
        size = self._pages.size
        for group, (kind, _) in enumerate(self._decoder.needs):
            filled = self._pages.filled[group]
            if kind == "state":
                for chunk in range(start // size, end // size):
                    filled[self._table[chunk]] = size
            elif stores >> group & 1:
                for position in range(start, end):
                    page = self._table[position // size]
                    if filled[page] == position % size:  # a window of one token can leave a hole
                        filled[page] += 1


def stateless(decoder: Decoder, size: int, tokens: list[int]) -> tuple[Pages, Floats]:
    """Compute a context from nothing. Returns what it leaves and the outputs of all positions."""
    table = list(range(-(-len(tokens) // size)))
    pages = Pages(decoder, size, len(table))
    run = Run(pages, table, tokens)
    run.compute([(0, len(tokens))], random.Random(0))
    return pages, run.outputs
