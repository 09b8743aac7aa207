"""Recurrent mixers: everything around the recurrence, which the caller computes because it stores the states.

A mixer projects its input to the inputs of a convolution, to gates of the recurrence and to a gate of the output. The
caller convolves and runs the recurrence (``Recur``). The output is normalised and gated; its projection follows in
``transformer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
import torch.nn.functional as F

from pensieve.kernels.recurrence import Recurrence
from pensieve.model.arch import RecurrentMixer, StateShape
from pensieve.model.weights import RecurrentWeights


class Recur(Protocol):
    """The recurrences of one step, layer after layer."""

    def __call__(
        self, layer: int, inputs: torch.Tensor, gates: torch.Tensor, recurrence: Recurrence
    ) -> torch.Tensor:
        """Convolve ``inputs`` [T, C], run the recurrence of ``layer`` from the states of the step's contexts, and
        store the states that follow. ``gates`` [T, 1 or 2, H]. Returns [T, H, V]. Called once per recurrent layer, in
        order."""
        ...


@dataclass(frozen=True, slots=True, eq=False)
class Mixer:
    """The recurrent mixer of one layer."""

    layer: int
    described: RecurrentMixer
    state: StateShape
    weights: RecurrentWeights
    recurrence: Recurrence
    eps: float

    @classmethod
    def make(
        cls, layer: int, described: RecurrentMixer, state: StateShape, weights: RecurrentWeights, eps: float
    ) -> Mixer:
        """``eps``: of the norm."""
        skip = None if weights.skip is None else weights.skip.float()
        recurrence = Recurrence(
            described.kind, weights.conv.weight, weights.conv.bias, described.key_heads,
            -weights.decay.float().exp(), weights.step_bias.float(), skip, described.step_limit,
        )  # fmt: skip
        return cls(layer, described, state, weights, recurrence, eps)

    def __call__(self, x: torch.Tensor, recur: Recur) -> torch.Tensor:
        """Return the mixer's output before its last projection, [T, H * V]. ``x`` [T, hidden]."""
        project, heads = self.weights.project, self.state.heads
        projected = F.linear(x, project.weight, project.bias)
        channels, inner = self.state.conv_channels, heads * self.state.value_dim
        steps = self.recurrence.gates * heads
        if self.described.kind == "ssd":
            gate, inputs, gates = projected.split((inner, channels, steps), dim=1)
        else:
            inputs, gate, gates = projected.split((channels, inner, steps), dim=1)
        out = recur(self.layer, inputs, gates.unflatten(1, (-1, heads)), self.recurrence)
        return self._gated(out, gate)

    def _gated(self, out: torch.Tensor, gate: torch.Tensor) -> torch.Tensor:
        """Norm and gate of ``out`` [T, H, V], computed in float32 and rounded once. ``gate`` [T, H * V]."""
        factor = F.silu(gate.float()).view(out.shape)
        values, weight = out.float(), self.weights.norm
        if self.described.gate != "after norm":
            values = values * factor
        if weight is not None:
            groups = self.state.heads if self.described.norm_per_head else self.described.key_heads
            grouped = values.reshape(len(out), groups, -1)
            normed = F.rms_norm(grouped, grouped.shape[-1:], None, self.eps)
            values = (normed * weight.float().view(-1, grouped.shape[-1])).view(out.shape)
        if self.described.gate == "after norm":
            values = values * factor
        return values.to(out.dtype).flatten(1)
