"""One rank's shard of a decoder: as wide as the whole model outside, and narrower inside. No torch.

Attention is divided by heads and the MLP by its inner width, as in Megatron-LM
(https://arxiv.org/abs/1909.08053): projections into a block by rows, those out of it by columns, so that a
block needs one all-reduce, at its end. Of a mixture of experts, each rank has a part of every expert's width.
With fewer KV heads than ranks, each KV head is on every rank that has query heads of it. Recurrent mixers are
divided by key heads, with the value heads that each serves. The output head is divided by vocabulary. The
embedding is whole on every rank: a step reads a few rows of it, and dividing it would cost one more all-reduce.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from pensieve.model.arch import Arch, Layer, ModelError, RecurrentMixer

VOCABULARY_UNIT = 8
"""A rank's share of the output head is a multiple of this many rows (except the last rank's), for matrix units."""


@dataclass(frozen=True, slots=True)
class Shard:
    """Rank ``rank`` of ``ranks``."""

    rank: int = 0
    ranks: int = 1

    def arch(self, whole: Arch) -> Arch:
        """Return this rank's architecture. Vocabulary and hidden size stay those of the whole model. Raises
        ModelError when the model cannot be divided this way."""
        if self.ranks == 1:
            return whole
        heads, kv_heads, ranks = whole.num_heads, whole.num_kv_heads, self.ranks
        if whole.qk_norm == "projection":
            raise ModelError(
                f"{whole.family} normalises all queries and keys of a token together: it cannot be divided over ranks"
            )
        if whole.recurrent is not None and whole.recurrent.key_heads % ranks:
            raise ModelError(
                f"{whole.recurrent.key_heads} key heads of recurrent layers do not divide over {ranks} "
                f"ranks{_instead(whole)}"
            )
        if heads % ranks and whole.attention_layers:
            raise ModelError(f"{heads} attention heads do not divide over {ranks} ranks{_instead(whole)}")
        if kv_heads % ranks and ranks % kv_heads and whole.attention_layers:
            raise ModelError(f"{kv_heads} KV heads do not divide over {ranks} ranks{_instead(whole)}")
        for width in _mlp_widths(whole):
            if width % ranks:
                raise ModelError(f"an MLP of {width} does not divide over {ranks} ranks{_instead(whole)}")
        experts = whole.experts
        if experts is not None:
            experts = replace(
                experts, width=experts.width // ranks, shared_width=experts.shared_width // ranks
            )
        return replace(
            whole,
            num_heads=max(1, heads // ranks),
            num_kv_heads=max(1, kv_heads // ranks),
            intermediate_size=whole.intermediate_size // ranks,
            experts=experts,
            layers=tuple(self._layer(layer) for layer in whole.layers),
            recurrent=self._recurrent(whole.recurrent),
        )

    def _layer(self, layer: Layer) -> Layer:
        state = layer.state
        if state is None:
            return layer
        divided = replace(
            state, conv_channels=state.conv_channels // self.ranks, heads=state.heads // self.ranks
        )
        return replace(layer, state=divided)

    def _recurrent(self, mixer: RecurrentMixer | None) -> RecurrentMixer | None:
        return None if mixer is None else replace(mixer, key_heads=mixer.key_heads // self.ranks)

    def even(self, count: int) -> slice:
        """Return this rank's range of ``count`` things that divide evenly."""
        part = count // self.ranks
        return slice(self.rank * part, (self.rank + 1) * part)

    def kv_heads(self, count: int) -> slice:
        """Return this rank's KV heads, of ``count``."""
        if count >= self.ranks:
            return self.even(count)
        first = self.rank * count // self.ranks
        return slice(first, first + 1)

    def vocabulary(self, size: int) -> slice:
        """Return this rank's tokens; the last ranks may have fewer than ``vocabulary_width``, or none."""
        width = self.vocabulary_width(size)
        return slice(min(self.rank * width, size), min((self.rank + 1) * width, size))

    def vocabulary_width(self, size: int) -> int:
        if self.ranks == 1:
            return size
        unit = VOCABULARY_UNIT * self.ranks
        return -(-size // unit) * VOCABULARY_UNIT


WHOLE_MODEL = Shard()


def divisors(whole: Arch, most: int = 8) -> list[int]:
    """Return the numbers of ranks, up to ``most``, over which a model can be divided."""
    kv_heads = whole.num_kv_heads
    if whole.qk_norm == "projection":
        return [1]
    key_heads = whole.recurrent.key_heads if whole.recurrent else 0
    attends = bool(whole.attention_layers)
    return [
        ranks
        for ranks in range(1, most + 1)
        if not (attends and whole.num_heads % ranks)
        and not (attends and kv_heads % ranks and ranks % kv_heads)
        and not key_heads % ranks
        and not any(width % ranks for width in _mlp_widths(whole))
    ]


def _mlp_widths(whole: Arch) -> list[int]:
    """Return the inner widths of the model's MLPs and experts, which are divided."""
    dense = [whole.intermediate_size] if any(layer.mlp == "dense" for layer in whole.layers) else []
    return dense if whole.experts is None else [*dense, whole.experts.width, whole.experts.shared_width]


def _instead(whole: Arch) -> str:
    return f"; this model can have {', '.join(map(str, divisors(whole)))}"
