"""Attention over paged and over contiguous keys and values, and the memory that the contiguous ones lie in.

vAttention (ASPLOS '25) gives each request one range of addresses for its keys and one for its values (section 5.1), so
that kernels that know nothing of pages run unchanged. Here these ranges are parts of a ``Region`` of small handles.
"""

from __future__ import annotations

import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, cast

import torch
import torch.nn.functional as F
from common.gpu_timing import Contender, times
from kernel_ops import attention
from kernel_ops.flash_attention import Peer
from torch.nn.attention.bias import causal_lower_right

from pensieve.engine.kv.virtual.driver import DriverBackend
from pensieve.engine.kv.virtual.plain import PlainBackend
from pensieve.engine.kv.virtual.region import Region, RegionSizes
from pensieve.kernels import reference

IN_CACHE = 100e6
"""KV sets of fewer bytes than this take turns, four of them, so that the L2 cache holds none."""
SETS = 4
Pairs = list[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values [B, S, Hkv, D] of each set."""


@dataclass(frozen=True, slots=True)
class Shape:
    """A model in bf16, and the sizes that depend on where it is measured."""

    layers: int
    heads: int
    kv_heads: int
    dim: int
    hidden: int
    inner: int
    chunk: int
    """Tokens that are prefilled at once."""
    longest: int
    """Tokens that a request's range has addresses for when it decodes."""
    page: int
    """Bytes of a physical page."""
    most_sliced: float
    """Most bytes of a tensor for all layers; larger ones are not measured."""

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys, or values, in one layer."""
        return 2 * self.kv_heads * self.dim

    @property
    def token_bytes(self) -> int:
        """Bytes of a token's keys and values in all layers."""
        return 2 * self.layers * self.row_bytes

    @property
    def products(self) -> list[tuple[int, int]]:
        """Inputs and outputs of a layer's four products."""
        attended = self.heads * self.dim
        qkv = attended + 2 * self.kv_heads * self.dim
        return [
            (self.hidden, qkv),
            (attended, self.hidden),
            (self.hidden, 2 * self.inner),
            (self.inner, self.hidden),
        ]


LLAMA = Shape(40, 40, 10, 128, 5120, 13824, 8192, 4608, 2 << 20, 14.5e9)
TINY = Shape(4, 8, 2, 16, 64, 96, 256, 144, 64 << 10, 20e6)


@dataclass(frozen=True, slots=True)
class Setting:
    """What is measured and where, and what failed."""

    shape: Shape
    device: torch.device
    peer: Peer | None
    notes: list[str]
    """One sentence for each empty cell."""

    def region(self, num_bytes: int, handle: int, kept: int = 0) -> Region:
        """A region of which only the first handle is backed. All sizes in bytes."""
        backend = DriverBackend(self.device) if self.device.type == "cuda" else PlainBackend()
        return Region(num_bytes, backend, RegionSizes(handle=handle, kept=kept))

    def times(
        self, what: str, contenders: dict[str, Contender], sets: int, calls: int, replays: int
    ) -> dict[str, float]:
        """Median milliseconds of one call of each, by graphs on a GPU. One that fails has a note and no time."""
        try:
            if self.device.type == "cuda":
                return {name: us / 1e3 for name, us in times(contenders, sets, calls, replays).items()}
            return {name: _seconds(contender) * 1e3 for name, contender in contenders.items()}
        except RuntimeError as error:
            if len(contenders) == 1:
                self.note(what, next(iter(contenders)), error)
                return {}
        alone = [self.times(what, {name: each}, sets, calls, replays) for name, each in contenders.items()]
        return {name: ms for found in alone for name, ms in found.items()}

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()

    def note(self, what: str, name: str, error: Exception) -> None:
        reason = (str(error).splitlines() or [""])[0][:200]
        self.notes.append(f"{name}, {what}: {type(error).__name__}: {reason}")

    def product_ms(self, rows: int) -> float:
        """Milliseconds of a layer's four products of this many rows."""
        found = {"products": self.products(rows)}
        return self.times(f"products of {rows} rows", found, 1, 4, 7)["products"]

    def products(self, rows: int) -> Contender:
        """A layer's four products; their weights, 0.55 GB, do not fit the L2 cache."""
        made = [
            (self._random(rows, inputs), self._random(outputs, inputs).t(), self._random(rows, outputs))
            for inputs, outputs in self.shape.products
        ]

        def call(_: int) -> None:
            for x, weight, out in made:
                torch.mm(x, weight, out=out)

        return call

    def data(self, spans: attention.Spans) -> attention.Data:
        """A step's query and pages, with as many KV sets as take turns."""
        shape = self.shape
        made = attention.make_data(spans, shape.heads, shape.kv_heads, self.device.type, shape.dim)
        return replace(made, pools=made.pools[: self.sets(spans)])

    def sets(self, spans: attention.Spans) -> int:
        return SETS if sum(context for _, context in spans) * 2 * self.shape.row_bytes < IN_CACHE else 1

    def ours(self, data: attention.Data) -> Contender:
        """Our paged kernel; on a CPU, its reference."""
        if self.device.type == "cuda":
            return attention.ours(data, torch.empty_like(data.q))
        scale = data.q.shape[2] ** -0.5
        return lambda index: reference.ragged_paged_attention(
            data.q, data.pools[index], data.spans, data.tables, scale=scale
        )

    def _random(self, *sizes: int) -> torch.Tensor:
        return torch.randn(sizes, device=self.device, dtype=torch.bfloat16)


class Arena:
    """A region that is backed throughout, and handed out from its start on."""

    def __init__(self, region: Region, page: int) -> None:
        region.grow(region.ceiling, 0)
        self._region, self._page, self._used = region, page, 0

    def take(self, batch: int, tokens: int, *row: int) -> torch.Tensor:
        """bf16 [batch, tokens, *row]. Each request's part begins at a page's start."""
        row_values = torch.Size(row).numel()
        stride = room(1, tokens * row_values * 2, self._page) // 2
        values = self._region.tensor.view(torch.bfloat16)
        strides = [torch.Size(row[at + 1 :]).numel() for at in range(len(row))]
        start, self._used = self._used, self._used + batch * stride
        if self._used > len(values):
            raise MemoryError("the arena is too small")
        return values.as_strided((batch, tokens, *row), (stride, row_values, *strides), start)

    def clear(self) -> None:
        self._used = 0


@contextmanager
def arena(setting: Setting, num_bytes: int) -> Iterator[Arena]:
    """An arena, whose memory is given back at the end."""
    region = setting.region(num_bytes, setting.shape.page)
    try:
        yield Arena(region, setting.shape.page)
    finally:
        tidy(setting)
        region.free()


def tidy(setting: Setting) -> None:
    """Wait for the device, and let torch give back what nothing uses any more."""
    gc.collect()
    setting.wait()
    if setting.device.type == "cuda":
        torch.cuda.empty_cache()


def room(batch: int, num_bytes: int, page: int) -> int:
    """Return the bytes of ``batch`` parts of ``num_bytes`` each, every part rounded up to whole pages."""
    return batch * -(-num_bytes // page) * page


def arena_bytes(setting: Setting, spans: attention.Spans, longest: int, sliced: bool) -> int:
    """Bytes that ``attention_ms`` takes of an arena. ``longest``: tokens of a request's range."""
    shape, batch, context = setting.shape, len(spans), spans[0][1]
    found = setting.sets(spans) * 2 * room(batch, longest * shape.row_bytes, shape.page)
    return found + sliced * 2 * room(batch, context * shape.layers * shape.row_bytes, shape.page)


def attention_ms(
    setting: Setting, what: str, spans: attention.Spans, space: Arena, *, longest: int, sliced: bool, plain: bool,
    repeats: tuple[int, int],
) -> dict[str, float]:  # fmt: skip
    """Milliseconds of one layer's attention by each contender. All requests are alike.

    ``longest``: tokens of a request's range. ``sliced``: also with one tensor for all layers (tensor slicing, section
    8.2). ``plain``: also in memory of torch's. ``repeats``: calls and replays. A contender whose result differs from
    the first one's has no time.
    """
    shape, data, batch, (new, context) = setting.shape, setting.data(spans), len(spans), spans[0]
    shown: dict[str, Contender] = {"ours": setting.ours(data)}
    if setting.peer is not None:
        shown["FA3 paged"] = attention.theirs(data, setting.peer, torch.empty_like(data.q))
    space.clear()
    row = shape.kv_heads, shape.dim
    layouts: dict[str, Pairs] = {"contiguous": [], "sliced": [], "contiguous, torch's memory": []}
    if sliced:
        tensors = [space.take(batch, context, shape.layers, *row) for _ in range(2)]
    for number, pool in enumerate(data.pools):
        pages = pool[data.tables].transpose(3, 4)  # [B, pages, 2, N, Hkv, D]
        parts = [pages[:, :, part].flatten(1, 2)[:, :context] for part in range(2)]
        keys, values = (space.take(batch, longest, *row)[:, :context].copy_(part) for part in parts)
        layouts["contiguous"].append((keys, values))
        if plain:
            layouts["contiguous, torch's memory"].append((keys.clone(), values.clone()))
        if sliced:
            layer = number * shape.layers // SETS
            keys, values = (
                tensor[:, :, layer].copy_(part) for tensor, part in zip(tensors, parts, strict=True)
            )
            layouts["sliced"].append((keys, values))
    for layout, pairs in layouts.items():
        if pairs and setting.peer is not None:
            shown[f"FA3 {layout}"] = _flash(setting.peer, data, pairs)
        if pairs:
            shown[f"SDPA {layout}"] = _sdpa(data.q.view(batch, new, shape.heads, shape.dim), pairs)
    right = _agreeing(setting, what, shown, data.q)
    return setting.times(what, right, len(data.pools), *repeats)


def _flash(peer: Peer, data: attention.Data, pairs: Pairs) -> Contender:
    """FlashAttention-3 without a page table: request b's keys are row b."""
    no_table = cast(torch.Tensor, None)
    forward = peer.prepare(data.spans, no_table, torch.empty_like(data.q), data.q.shape[2] ** -0.5)
    return lambda index: forward(data.q, *pairs[index])


def _sdpa(q: torch.Tensor, pairs: Pairs) -> Contender:
    """torch's own attention. ``q`` [B, new, H, D]."""
    context, new = pairs[0][0].shape[1], q.shape[1]
    mask: Any = causal_lower_right(new, context) if new > 1 else None

    def call(index: int) -> torch.Tensor:
        keys, values = (part.transpose(1, 2) for part in pairs[index])
        found = F.scaled_dot_product_attention(
            q.transpose(1, 2), keys, values, attn_mask=mask, enable_gqa=True
        )
        return found.transpose(1, 2)

    return call


def _agreeing(
    setting: Setting, what: str, contenders: dict[str, Contender], q: torch.Tensor
) -> dict[str, Contender]:
    """Return the contenders that run and agree with the first one. Each of the others gets a note."""
    right: dict[str, Contender] = {}
    expected: torch.Tensor | None = None
    for name, contender in contenders.items():
        try:
            made = cast(Any, contender(0))
            found = (made if isinstance(made, torch.Tensor) else made[0]).reshape(q.shape).float()
            expected = found if expected is None else expected
            error = float((found - expected).norm() / expected.norm())
            if not error <= attention.AGREEMENT:
                raise ValueError(f"the result differs by {error:.1e} of its norm")
            right[name] = contender
        except (RuntimeError, TypeError, ValueError) as failure:
            setting.note(what, name, failure)
    return right


def _seconds(contender: Contender) -> float:
    contender(0)
    started = time.perf_counter()
    contender(0)
    return time.perf_counter() - started


def captured(setting: Setting, call: Callable[[], object]) -> Callable[[], Callable[[], object]]:
    """A function that queues ``call`` as a graph, and returns one that waits for it. On a CPU it just runs."""
    if setting.device.type != "cuda":
        return lambda: (call(), lambda: None)[1]
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()

    def queue(kept: object = call) -> Callable[[], object]:  # the graph does not keep its tensors
        graph.replay()
        event = torch.cuda.Event()
        event.record()
        return event.synchronize

    return queue
