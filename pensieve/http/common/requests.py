"""What chat completions and responses have in common: sampling, ids, the credential of a retry."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sized
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, cast

import msgspec
from starlette.requests import Request

from pensieve.client import TurnOptions
from pensieve.core import SAMPLING
from pensieve.http.common.failures import bad
from pensieve.http.common.fields import Nested

_KEYS: Final = uuid.UUID("6c0cbb0c-6c43-4b0e-9f5c-2a4a52c0a3d1")
"""Namespace of request ids made of ``Idempotency-Key``s."""

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


MAX_ELEMENTS: Final = 16384
"""As many fields as the service reads in one request."""
LONG_CACHED: Final = 4.0
"""Worth of cached state that is wanted for long, against 1 for any other: a wish, which the service may clip."""


class CacheOptions(msgspec.Struct, frozen=True):
    """How long cached state is wanted; where to cut it is found out without being told."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class ChunkOptions(msgspec.Struct, frozen=True):
    """Options of a stream."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "continuous_usage_stats": "usage comes once",
        "include_obfuscation": "events are never padded",
    }
    include_usage: bool = False


_BODY_TYPES: Final[dict[str, Any]] = {
    "top_k": Annotated[int, msgspec.Meta(ge=-1)],
    "min_output_tokens": Natural,
    "stop_token_ids": list[TokenId],
}
"""Sampling parameters that a body writes in another way than a program does. -1 is a ``top_k`` of 0, as in vLLM."""
_OPTIONS: Final = {row.http: name for name, row in SAMPLING.items() if row.http}
"""Sampling parameters that all bodies have, by their names there."""

if TYPE_CHECKING:
    _SamplingBody = msgspec.Struct
else:
    _SamplingBody = msgspec.defstruct(
        "_SamplingBody",
        [
            (field, _BODY_TYPES.get(name, SAMPLING[name].kind) | None, None)
            for field, name in _OPTIONS.items()
        ],
        kw_only=True,
        omit_defaults=True,
    )


class Drawing(_SamplingBody, kw_only=True, omit_defaults=True):
    """How tokens are drawn, by the rows of ``core.SamplingOptions``, and how long their state is wanted. The service
    checks ranges."""

    NESTED: ClassVar[Nested] = {"prompt_cache_options": CacheOptions}
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def drawn_with(self) -> dict[str, Any]:
        """The sampling parameters that are set, by their names in the body."""
        return {field: value for field in _OPTIONS if (value := getattr(self, field)) is not None}

    def options(self) -> TurnOptions:
        """Those that are set, for the SDK."""
        given: dict[str, Any] = {_OPTIONS[field]: value for field, value in self.drawn_with.items()}
        if "seed" in given:
            given["seed"] %= 1 << 64
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])
        check_number(given.get("stop_token_ids", ()), "stop_token_ids")
        ttl = self.prompt_cache_options.ttl if self.prompt_cache_options is not None else None
        if self.prompt_cache_retention == "24h" or ttl == "12h":
            given["importance"] = LONG_CACHED
        return cast(TurnOptions, given)


def by_token(biases: dict[str, float]) -> dict[int, float]:
    """Logit biases by token id. Raises HttpFailure for a key that is none, and for more than anybody gives."""
    check_number(biases, "logit_bias")
    found: dict[int, float] = {}
    for name, bias in biases.items():
        token = whole_number(name)
        if token is None or token >= 1 << 32:
            raise bad("logit_bias", f"{name!r} is no token id")
        found[token] = bias
    return found


def check_number(values: Sized, param: str) -> None:
    """Raises HttpFailure when there are more than the service reads: before time is spent on each of them."""
    if len(values) > MAX_ELEMENTS:
        raise bad(param, f"has more than {MAX_ELEMENTS} elements")


def whole_number(text: str) -> int | None:
    """A number as people write it, at most 18 digits long; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def request_id_of(request: Request) -> uuid.UUID:
    """The turn's request id; made of ``Idempotency-Key`` if there is one, so that a retry finds the first try."""
    key = request.headers.get("idempotency-key", "")
    return uuid.uuid5(_KEYS, key) if key else uuid.uuid4()


def seed_of(turn_id: uuid.UUID) -> int:
    """The seed of a turn that names none: each attempt at it draws the same answer."""
    return turn_id.int % (1 << 63)
