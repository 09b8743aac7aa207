"""The sampling values of a turn: its own where it sets them, else the session's, else the server's, else the type's."""

from __future__ import annotations

from typing import Final

import msgspec

from pensieve.core import Sampling
from pensieve.errors import InvalidArgument
from pensieve.store.records import CandidateChoice, SamplingDefaults

_FIELDS = tuple(
    field.name for field in msgspec.structs.fields(SamplingDefaults) if field.name != "candidate_choice"
)
_UNSET: tuple[object, ...] = (None, (), {})
_NEUTRAL: Final = Sampling()

HOW_TO_DRAW: Final = (
    "temperature",
    "candidates",
    "repetition_penalty",
    "frequency_penalty",
    "presence_penalty",
)
"""What beam search takes the place of. A turn with beams inherits none of these: what a model's authors recommend, and
what a session is set to, is for sampling."""
NOT_WITH_BEAMS: Final = (*HOW_TO_DRAW, "stop", "logit_bias", "min_output_tokens")
"""What does not go together with ``beam_width`` > 1. The last three are promises about the answer: never dropped."""


def explicit_seed(*layers: SamplingDefaults) -> int | None:
    """The seed that the first of ``layers`` sets, if any does."""
    return next((layer.seed for layer in layers if layer.seed is not None), None)


def choice(*layers: SamplingDefaults) -> CandidateChoice:
    """Which candidate the turn commits."""
    found = (layer.candidate_choice for layer in layers if layer.candidate_choice is not None)
    return next(found, CandidateChoice.FIRST)


def is_neutral(name: str, value: object) -> bool:
    """Whether this value of a sampling field asks for nothing."""
    return bool(value == getattr(_NEUTRAL, name))


def resolve(*layers: SamplingDefaults, seed: int, top_logprobs: int | None) -> Sampling:
    """Effective values; the first layer that sets a field wins. Raises InvalidArgument on a contradiction."""
    drawn_by = _layers_of_drawing(layers)
    values: dict[str, object] = {}
    for name in _FIELDS:
        among = drawn_by if name in HOW_TO_DRAW else layers
        value = next((v for layer in among if (v := getattr(layer, name)) not in _UNSET), None)
        if value is not None:
            values[name] = value
    values["seed"] = seed
    values["top_logprobs"] = top_logprobs
    sampling = msgspec.convert(values, Sampling)
    if sampling.beam_width > 1:
        _check_beams(sampling)
    elif sampling.candidates > 1 and top_logprobs is None and choice(*layers) is CandidateChoice.BEST_LOGPROB:
        # To choose by. Only a stream that asks for them shows them.
        sampling = msgspec.structs.replace(sampling, top_logprobs=0)
    if sampling.max_output_tokens is not None and sampling.min_output_tokens > sampling.max_output_tokens:
        raise InvalidArgument.field(
            "turn.sampling.min_output_tokens", "is larger than the max_output_tokens in force"
        )
    return sampling


def _layers_of_drawing(layers: tuple[SamplingDefaults, ...]) -> tuple[SamplingDefaults, ...]:
    """The layers that say how tokens are drawn: with beams, none below the one that asks for them."""
    setting = (number for number, layer in enumerate(layers) if layer.beam_width is not None)
    first = next(setting, None)
    if first is None or (layers[first].beam_width or 1) <= 1:
        return layers
    return layers[: first + 1]


def _check_beams(sampling: Sampling) -> None:
    asked = (name for name in NOT_WITH_BEAMS if not is_neutral(name, getattr(sampling, name)))
    paths = [f"turn.sampling.{name}" for name in asked]
    if sampling.top_logprobs is not None:
        paths.append("turn.output.top_logprobs")
    problem = f"does not go with the beam_width in force, which is {sampling.beam_width}"
    for path in paths[:1]:
        violations = [(one, problem) for one in paths]
        raise InvalidArgument(f"{path}: {problem}", violations=violations)
