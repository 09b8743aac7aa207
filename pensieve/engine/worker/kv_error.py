"""The error of keys and values in 8 bits on one model and text: ``pensieve profile --kv-error``.

The model computes a text at once, in plain torch, without a codec and with each one. Each position predicts the next
token from the text itself, so that an early difference does not change what follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from pensieve.kernels import reference
from pensieve.kernels.arguments import HeadPrep, Logits
from pensieve.kernels.kv_codec import CODES, pool_of, used_bytes
from pensieve.kernels.spans import make_spans
from pensieve.model.arch import ModelError
from pensieve.model.transformer import Transformer

PAGE = 32


@dataclass(frozen=True, slots=True)
class KvError:
    """Differences from the same model without a codec, over all positions of a text."""

    codec: str
    spread: float
    """Mean over positions of the root mean square difference of logits, in standard deviations of the logits."""
    worst: float
    """The largest at one position."""
    changed: int
    """Positions whose largest logit is another token's."""
    loss: float
    """Nats by which the text's own next token is less likely, on average."""


@dataclass(slots=True)
class _OneText:
    """``pensieve.model.transformer.Attend`` for one context in pages of its own, which each layer overwrites."""

    model: Transformer
    pool: torch.Tensor
    tokens: int
    plans: dict[int | None, Any] = field(default_factory=dict)

    def __call__(self, layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
        arch, device = self.model.arch, qkv.device
        q = reference.kv_write(self.pool, qkv, torch.arange(self.tokens, device=device), prep)
        window = arch.layers[layer].window
        if window not in self.plans:
            tables = torch.arange(len(self.pool), dtype=torch.int32, device=device)[None]
            spans = make_spans([self.tokens], [0], [0])
            self.plans[window] = reference.make_plan(q, self.pool, spans, tables, window=window)
        return reference.attend(
            q,
            self.pool,
            self.plans[window],
            Logits(arch.attention_scale, arch.softcap, prep.sinks),
        )


def kv_errors(model: Transformer, tokens: Sequence[int]) -> list[KvError]:
    """Measure each codec on a text of at least two tokens. Raises ModelError for a model with recurrent layers."""
    if model.arch.recurrent is not None:
        raise ModelError(f"--kv-error: {model.arch.family} has recurrent layers, which it does not measure")
    exact = _logits(model, tokens, None)
    return [_compare(name, exact, _logits(model, tokens, code), tokens) for name, code in CODES.items()]


@torch.inference_mode()
def _logits(model: Transformer, tokens: Sequence[int], code: torch.dtype | None) -> torch.Tensor:
    """Return the logits at every position, float32 [T, vocab]."""
    arch, like, pages = model.arch, model.weights.embedding, -(-len(tokens) // PAGE)
    shape = (arch.num_kv_heads, PAGE, arch.head_dim)
    if code is None:
        pool = like.new_zeros((pages, 2, *shape))
    else:
        pool = pool_of(like.new_zeros((pages, used_bytes(*shape)), dtype=torch.uint8), *shape, code)
    ids = torch.from_numpy(np.asarray(tokens, np.int64)).to(like.device)
    positions = torch.arange(len(tokens), device=like.device)
    return model.forward(ids, positions, _OneText(model, pool, len(tokens)), positions)


def _compare(name: str, exact: torch.Tensor, coded: torch.Tensor, tokens: Sequence[int]) -> KvError:
    apart = (coded - exact).pow(2).mean(-1).sqrt() / exact.std(-1)
    following = torch.tensor(tokens[1:], device=exact.device)[:, None]
    before, after = (
        torch.log_softmax(logits[:-1], -1).gather(1, following).mean().item() for logits in (exact, coded)
    )
    changed = int((coded.argmax(-1) != exact.argmax(-1)).sum())
    return KvError(name, apart.mean().item(), apart.max().item(), changed, before - after)
