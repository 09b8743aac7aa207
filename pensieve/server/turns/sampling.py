"""The sampling values of a turn: its own where it sets them, else the session's, else the server's, else the type's."""

from __future__ import annotations

import msgspec

from pensieve.core import Sampling
from pensieve.errors import InvalidArgument
from pensieve.store.records import SamplingDefaults

_FIELDS = tuple(field.name for field in msgspec.structs.fields(SamplingDefaults))
_UNSET: tuple[object, ...] = (None, (), {})


def explicit_seed(*layers: SamplingDefaults) -> int | None:
    """The seed that the first of ``layers`` sets, if any does."""
    return next((layer.seed for layer in layers if layer.seed is not None), None)


def resolve(*layers: SamplingDefaults, seed: int, top_logprobs: int | None) -> Sampling:
    """Effective values; the first layer that sets a field wins. Raises InvalidArgument on a contradiction."""
    values: dict[str, object] = {}
    for name in _FIELDS:
        value = next((v for layer in layers if (v := getattr(layer, name)) not in _UNSET), None)
        if value is not None:
            values[name] = value
    values["seed"] = seed
    values["top_logprobs"] = top_logprobs
    sampling = msgspec.convert(values, Sampling)
    if sampling.max_output_tokens is not None and sampling.min_output_tokens > sampling.max_output_tokens:
        raise InvalidArgument.field(
            "turn.sampling.min_output_tokens", "is larger than the max_output_tokens in force"
        )
    return sampling
