"""Recurrent layers, token by token, from state page to state page: one launch for the convolution, one for the state.

Matches ``pensieve.kernels.recurrent.recurrent`` up to the order of sums. Each program keeps its part of a state in
registers, reads it from its page once and writes it once or twice, so a decode moves no more than the state itself.
Meant for chains of few tokens; ``state_chunks`` computes long ones.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from pensieve.kernels.checks import FLOAT_DTYPES, check_device, check_given, check_layout
from pensieve.kernels.recurrence import Recurrence

CHANNELS = 256
"""Channels of one program of the convolution."""
ROWS_PER_PROGRAM = 16
"""Tokens of one program of the convolution where a chain's tokens are shared out."""
STATE_VALUES = 8192
"""Most values of a state that one program keeps: 64 registers of each of 128 threads. On an H200, 64 decodes of a layer
take, with 4096 and with 8192: 91 and 77 µs for 32 heads of [128, 128], 196 and 106 µs for 80 heads of [128, 64]."""


@triton.jit
def _if_page(mask, page):  # type: ignore[no-untyped-def]
    """Return the mask if ``page`` is one, else a mask of nothing. Triton's interpreter cannot join a mask and a
    scalar."""
    return mask & (tl.where(mask, page, -1) >= 0)


@triton.jit  # type: ignore[untyped-decorator]
def _before(  # type: ignore[no-untyped-def]
    inputs, history, row, column, first, read, channel, valid, in_stride, page_stride, PAST: tl.constexpr
):  # fmt: skip
    """Load one input of each channel: row ``row`` of a chain or, before its first, column ``column`` of page ``read``;
    zeros for no page."""
    inside = _if_page(valid, row)
    own = tl.load(inputs + (first + row) * in_stride + channel, mask=inside, other=0.0)
    earlier = _if_page(valid, tl.where(row < 0, read, -1))
    kept = tl.load(history + read * page_stride + channel * PAST + column, mask=earlier, other=0.0)
    return tl.where(inside, own, kept)


@triton.jit  # type: ignore[untyped-decorator]
def _keep(  # type: ignore[no-untyped-def]
    inputs, history, page, rows, first, read, channel, valid, in_stride, page_stride, PAST: tl.constexpr
):  # fmt: skip
    """Write the inputs before row ``rows`` of a chain to ``page``, oldest first: it may be the page that is read."""
    for column in tl.static_range(PAST):
        row = rows - PAST + column
        value = _before(
            inputs, history, row, row + PAST, first, read, channel, valid, in_stride, page_stride, PAST
        )
        at = history + page * page_stride + channel * PAST + column
        tl.store(at, value, mask=_if_page(valid, page))


@triton.jit  # type: ignore[untyped-decorator]
def _convolve(  # type: ignore[no-untyped-def]
    inputs, weight, bias, history, chains, mixed, channels,
    in_stride, weight_stride, page_stride, mixed_stride, share,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, BIAS: tl.constexpr, CONVOLVE: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Convolve ``share`` rows of one chain, BLOCK channels; write the chain's last inputs to its pages."""
    PAST: tl.constexpr = WIDTH - 1
    chain = chains + tl.program_id(0) * 6
    first, rows = tl.load(chain).to(tl.int64), tl.load(chain + 1)
    read = tl.load(chain + 2).to(tl.int64)
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    valid = channel < channels
    if CONVOLVE:
        start = tl.program_id(2) * share
        for row in tl.range(start, tl.minimum(rows, start + share)):
            total = tl.zeros([BLOCK], dtype=tl.float32)
            if BIAS:
                total += tl.load(bias + channel, mask=valid, other=0.0).to(tl.float32)
            for tap in tl.static_range(WIDTH):
                value = _before(
                    inputs, history, row - PAST + tap, row + tap, first, read, channel, valid, in_stride,
                    page_stride, PAST,
                )  # fmt: skip
                factor = tl.load(weight + channel * weight_stride + tap, mask=valid, other=0.0)
                total += value.to(tl.float32) * factor.to(tl.float32)
            total = total / (1.0 + tl.exp(-total))
            tl.store(
                mixed + (first + row) * mixed_stride + channel, total.to(mixed.dtype.element_ty), mask=valid
            )
    if KEEP:
        boundary, after = tl.load(chain + 3).to(tl.int64), tl.load(chain + 4)
        live = tl.load(chain + 5).to(tl.int64)
        # The page that was read is written last.
        in_place = live == read
        page, count = tl.where(in_place, boundary, live), tl.where(in_place, after, rows)
        _keep(inputs, history, page, count, first, read, channel, valid, in_stride, page_stride, PAST)
        page, count = tl.where(in_place, live, boundary), tl.where(in_place, rows, after)
        _keep(inputs, history, page, count, first, read, channel, valid, in_stride, page_stride, PAST)


@triton.jit
def _softplus(x):  # type: ignore[no-untyped-def]
    """log(1 + exp(x)) without the rounding of 1 + exp(x); ``x`` itself above 20, as torch does."""
    power = tl.exp(tl.minimum(x, 20.0))
    rounded = 1.0 + power
    small = tl.where(
        rounded == 1.0, power, tl.log(rounded) * (power / tl.where(rounded == 1.0, 1.0, rounded - 1.0))
    )
    return tl.where(x > 20.0, x, small)


@triton.jit  # type: ignore[untyped-decorator]
def _step(  # type: ignore[no-untyped-def]
    mixed, gates, states, chains, decay, step_bias, skip, out, lowest, highest,
    mixed_stride, token_stride, gate_stride, page_stride, out_stride,
    HEADS: tl.constexpr, SHARED: tl.constexpr, KEY: tl.constexpr, VALUE: tl.constexpr,
    KEY_WIDTH: tl.constexpr, BLOCK: tl.constexpr, DELTA: tl.constexpr, SKIP: tl.constexpr,
):  # fmt: skip
    """Run BLOCK columns of one head's state through the tokens of one chain."""
    KEYS: tl.constexpr = HEADS // SHARED * KEY
    KEY_START: tl.constexpr = KEYS if DELTA else HEADS * VALUE
    QUERY_START: tl.constexpr = 0 if DELTA else HEADS * VALUE + KEYS
    VALUE_START: tl.constexpr = 2 * KEYS if DELTA else 0
    chain = chains + tl.program_id(0) * 6
    head = tl.program_id(1)
    first, rows = tl.load(chain).to(tl.int64), tl.load(chain + 1)
    read, boundary = tl.load(chain + 2).to(tl.int64), tl.load(chain + 3).to(tl.int64)
    after, live = tl.load(chain + 4), tl.load(chain + 5).to(tl.int64)
    keys, values = tl.arange(0, KEY_WIDTH), tl.program_id(2) * BLOCK + tl.arange(0, BLOCK)
    in_key, in_value = keys < KEY, values < VALUE
    inside = in_key[:, None] & in_value[None, :]
    at = states + head * KEY * VALUE + keys[:, None] * VALUE + values[None, :]
    state = tl.load(at + read * page_stride, mask=_if_page(inside, tl.where(rows > 0, read, -1)), other=0.0)
    rate, bias = tl.load(decay + head), tl.load(step_bias + head)
    for row in tl.range(0, rows):
        token = first + row
        own = mixed + token * mixed_stride + head // SHARED * KEY + keys
        query = tl.load(own + QUERY_START, mask=in_key, other=0.0).to(tl.float32)
        key = tl.load(own + KEY_START, mask=in_key, other=0.0).to(tl.float32)
        value_at = mixed + token * mixed_stride + VALUE_START + head * VALUE + values
        value = tl.load(value_at, mask=in_value, other=0.0).to(tl.float32)
        gate = gates + token * token_stride + head
        if DELTA:
            strength = tl.load(gate).to(tl.float32)
            size = _softplus(tl.load(gate + gate_stride).to(tl.float32) + bias)
            query *= tl.math.rsqrt(tl.sum(query * query, 0) + 1e-6) * (KEY**-0.5)
            key *= tl.math.rsqrt(tl.sum(key * key, 0) + 1e-6)
            state *= tl.exp(size * rate)
            known = tl.sum(state * key[:, None], 0)
            update = (value - known) / (1.0 + tl.exp(-strength))
        else:
            size = _softplus(tl.load(gate).to(tl.float32) + bias)
            size = tl.minimum(tl.maximum(size, lowest), highest)
            state *= tl.exp(size * rate)
            update = value * size
        state += key[:, None] * update[None, :]
        result = tl.sum(state * query[:, None], 0)
        if SKIP:
            result += tl.load(skip + head) * value
        to = out + token * out_stride + head * VALUE + values
        tl.store(to, result.to(out.dtype.element_ty), mask=in_value)
        tl.store(
            at + boundary * page_stride,
            state,
            mask=_if_page(inside, tl.where(row + 1 == after, boundary, -1)),
        )
    tl.store(at + live * page_stride, state, mask=_if_page(inside, tl.where(rows > 0, live, -1)))


def state_step(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    layer: Recurrence,
    chains: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """Convolve ``inputs`` [T, C] and run the recurrence; update the state pages; return [T, H, V].

    See the reference for the contract, with two differences. ``chains`` is a contiguous int32 [n, 6] on the device,
    with columns as in ``recurrence.Chains``, and no chain may read a page that another one writes. Rows of no chain
    keep what ``out`` [T, H, V] has there, or are undefined without it. Can be captured in a graph. Raises ValueError
    when the tensors do not fit each other.
    """
    heads, key_dim, value_dim = check_recurrent(inputs, gates, pages, layer, out)
    if chains.dtype != torch.int32 or chains.dim() != 2 or chains.shape[1] != 6 or not chains.is_contiguous():
        raise ValueError(f"chains are {chains.dtype} {tuple(chains.shape)}, not contiguous int32 [n, 6]")
    check_device([inputs, chains])
    states = pages[1]
    if out is None:
        out = inputs.new_empty((len(inputs), heads, value_dim))
    if not len(chains) or not len(inputs):
        return out
    mixed = convolve(inputs, pages[0], layer, chains)
    block = value_block(key_dim, value_dim)
    skip = layer.decay if layer.skip is None else layer.skip
    _step[(len(chains), heads, triton.cdiv(value_dim, block))](
        mixed, gates, states, chains, layer.decay, layer.step_bias, skip, out, *layer.step_limit,
        mixed.stride(0), gates.stride(0), gates.stride(1), states.stride(0), out.stride(0),
        **step_constants(layer, heads, key_dim, value_dim), enable_fp_fusion=True,
    )  # fmt: skip
    return out


def convolve(
    inputs: torch.Tensor,
    history: torch.Tensor,
    layer: Recurrence,
    chains: torch.Tensor,
    most_rows: int | None = None,
    mixed: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the convolution's outputs [T, C] after SiLU, and write the inputs that boundary and live pages keep. Rows
    of no chain are as in ``mixed``. ``most_rows``: tokens of the longest chain, if its tokens shall be shared out over
    programs; each chain then has W - 1 tokens at least before its boundary and before its end."""
    mixed = torch.empty_like(inputs, memory_format=torch.contiguous_format) if mixed is None else mixed
    channels, width = layer.conv_weight.shape
    share = 2**30 if most_rows is None else ROWS_PER_PROGRAM
    passes = ((True, True, 1),) if most_rows is None else (
        (True, False, triton.cdiv(most_rows, ROWS_PER_PROGRAM)), (False, True, 1),
    )  # fmt: skip
    bias = layer.conv_weight if layer.conv_bias is None else layer.conv_bias
    for compute, keep, parts in passes:
        _convolve[(len(chains), triton.cdiv(channels, CHANNELS), parts)](
            inputs, layer.conv_weight, bias, history, chains, mixed, channels,
            inputs.stride(0), layer.conv_weight.stride(0), history.stride(0), mixed.stride(0), share,
            WIDTH=width, BLOCK=CHANNELS, BIAS=layer.conv_bias is not None, CONVOLVE=compute, KEEP=keep,
            enable_fp_fusion=True,
        )  # fmt: skip
    return mixed


def value_block(key_dim: int, value_dim: int) -> int:
    """Return the columns of a head's state that one program keeps."""
    most = max(1, STATE_VALUES // triton.next_power_of_2(key_dim))
    return int(min(most, triton.next_power_of_2(value_dim)))


def step_constants(layer: Recurrence, heads: int, key_dim: int, value_dim: int) -> dict[str, int | bool]:
    """Compile-time arguments of ``_step``."""
    return {
        "HEADS": heads, "SHARED": heads // layer.key_heads, "KEY": key_dim, "VALUE": value_dim,
        "KEY_WIDTH": triton.next_power_of_2(key_dim), "BLOCK": value_block(key_dim, value_dim),
        "DELTA": layer.kind == "gated_delta", "SKIP": layer.skip is not None,
    }  # fmt: skip


def check_recurrent(
    inputs: torch.Tensor,
    gates: torch.Tensor,
    pages: tuple[torch.Tensor, torch.Tensor],
    layer: Recurrence,
    out: torch.Tensor | None,
) -> tuple[int, int, int]:
    """Return heads, key and value size. Raises ValueError when the tensors do not fit each other."""
    history, states = pages
    channels, width = layer.conv_weight.shape
    if history.shape[1:] != (channels, width - 1) or states.dim() != 4 or len(states) != len(history):
        raise ValueError(
            f"pages of {tuple(history.shape)} and {tuple(states.shape)} do not fit a convolution of "
            f"{channels} channels and width {width}"
        )
    heads, key_dim, value_dim = states.shape[1:]
    if heads % layer.key_heads or channels != 2 * layer.key_heads * key_dim + heads * value_dim:
        raise ValueError(
            f"{channels} channels do not fit {layer.key_heads} key heads and {tuple(states.shape)}"
        )
    if inputs.dtype not in FLOAT_DTYPES or inputs.dim() != 2 or inputs.shape[1] != channels:
        raise ValueError(f"inputs are {inputs.dtype} {tuple(inputs.shape)}, not [T, {channels}]")
    if states.dtype != torch.float32 or not states[0].is_contiguous() or not history[0].is_contiguous():
        raise ValueError("states must be float32, and both parts of a page contiguous")
    tokens, each = len(inputs), (heads,)
    expected = [
        ("gates", gates, (tokens, layer.gates, heads)), ("conv_weight", layer.conv_weight, (channels, width)),
        ("conv_bias", layer.conv_bias, (channels,)), ("history", history, tuple(history.shape)),
        ("out", out, (tokens, heads, value_dim)),
    ]  # fmt: skip
    given = check_given(expected, inputs.dtype)
    constants = [
        ("decay", layer.decay, each),
        ("step_bias", layer.step_bias, each),
        ("skip", layer.skip, each),
    ]
    given += check_given(constants, torch.float32)
    check_layout([inputs, gates, layer.conv_weight])
    check_device([inputs, states, *given])
    if out is not None and not out.is_contiguous():
        raise ValueError("out must be contiguous")
    return heads, key_dim, value_dim
