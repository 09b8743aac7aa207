"""The sampling values of a turn: from the turn, else its session, else the server, else the type's default."""

from __future__ import annotations

from typing import Final

import msgspec

from pensieve.core import SAMPLING, CandidateChoice, Sampling, SamplingDefaults
from pensieve.errors import InvalidArgument

_FIELDS = tuple(name for name in SAMPLING if name != "candidate_choice")
_UNSET: tuple[object, ...] = (None, (), {})
_NEUTRAL: Final = Sampling()

DRAWING_FIELDS: Final = tuple(name for name, row in SAMPLING.items() if row.beams == "replace")
"""Fields that beam search replaces. A turn with beams inherits none of these: recommended values are for sampling."""
BEAM_CONFLICTS: Final = (*DRAWING_FIELDS, *(name for name, row in SAMPLING.items() if row.beams == "refuse"))
"""Conflict with ``beam_width`` > 1. The last three are promises about the answer: refused, never dropped."""


def explicit_seed(*layers: SamplingDefaults) -> int | None:
    return next((layer.seed for layer in layers if layer.seed is not None), None)


def choice(*layers: SamplingDefaults) -> CandidateChoice:
    """Which candidate the turn commits."""
    found = (layer.candidate_choice for layer in layers if layer.candidate_choice is not None)
    return next(found, CandidateChoice.FIRST)


def is_neutral(name: str, value: object) -> bool:
    """Whether this value of a sampling field has no effect."""
    return bool(value == getattr(_NEUTRAL, name))


def resolve(*layers: SamplingDefaults, seed: int, top_logprobs: int | None) -> Sampling:
    """Effective values; the first layer that sets a field wins. Raises InvalidArgument on a contradiction."""
    drawing_layers = _drawing_layers(layers)
    values: dict[str, object] = {}
    for name in _FIELDS:
        searched = drawing_layers if name in DRAWING_FIELDS else layers
        value = next((v for layer in searched if (v := getattr(layer, name)) not in _UNSET), None)
        if value is not None:
            values[name] = value
    values["seed"] = seed
    values["top_logprobs"] = top_logprobs
    sampling = msgspec.convert(values, Sampling)
    if sampling.beam_width > 1:
        _check_beams(sampling)
    elif sampling.candidates > 1 and top_logprobs is None and choice(*layers) is CandidateChoice.BEST_LOGPROB:
        # Needed to choose the best candidate. Streams show them only on request.
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)
    if sampling.max_output_tokens is not None and sampling.min_output_tokens > sampling.max_output_tokens:
        raise InvalidArgument.field(
            "turn.sampling.min_output_tokens", "is larger than the max_output_tokens in force"
        )
    return sampling


def _drawing_layers(layers: tuple[SamplingDefaults, ...]) -> tuple[SamplingDefaults, ...]:
    """The layers that set how tokens are drawn: with beams, none below the layer that asks for them."""
    setting = (number for number, layer in enumerate(layers) if layer.beam_width is not None)
    first = next(setting, None)
    if first is None or (layers[first].beam_width or 1) <= 1:
        return layers
    return layers[: first + 1]


def _check_beams(sampling: Sampling) -> None:
    asked = (name for name in BEAM_CONFLICTS if not is_neutral(name, getattr(sampling, name)))
    paths = [f"turn.sampling.{name}" for name in asked]
    if sampling.top_logprobs is not None:
        paths.append("turn.output.top_logprobs")
    problem = f"does not go with the beam_width in force, which is {sampling.beam_width}"
    for path in paths[:1]:
        violations = [(one, problem) for one in paths]
        raise InvalidArgument(f"{path}: {problem}", violations=violations)
