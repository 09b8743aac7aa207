"""Bodies of ``POST /v1/completions``, checked."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Final, NamedTuple, cast

from pensieve.client import RawText, TurnOptions
from pensieve.http.common import fields
from pensieve.http.common.failures import bad, unsupported
from pensieve.http.common.requests import ChunkOptions, Drawing, Positive, TokenId, by_token, check_number

MAX_PROMPTS: Final = 128
"""Of one request: each is a turn."""
MAX_TOKENS: Final = 16
"""Of an answer, unless the request says otherwise: OpenAI's default."""
MAX_TOP: Final = 5

Prompt = RawText | list[int]


class AskedCompletion(NamedTuple):
    """A checked request, and what is made of it."""

    body: CompletionRequest
    prompts: list[Prompt]
    options: TurnOptions
    """For the SDK."""


class CompletionRequest(Drawing, kw_only=True):
    """The request; ``return_token_ids`` is vLLM's."""

    NESTED: ClassVar[fields.Nested] = {
        **Drawing.NESTED,
        "stream_options": ChunkOptions,
    }
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cache_prompt": "cached state is used wherever there is some",
        "metadata": "a completion is not kept",
        "prompt_cache_key": "beginnings are shared whatever it says",
        "safety_identifier": "users are not told apart",
        "service_tier": "there is one",
        "store": "a completion is not kept",
        "user": "users are not told apart",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **fields.REFUSED,
        "max_completion_tokens": "is max_tokens in completions",
        "max_output_tokens": "is max_tokens in completions",
        "messages": "belong to chat completions",
    }
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    model: str | None = None
    stream: bool | None = False
    stream_options: ChunkOptions | None = None
    n: Positive | None = None
    best_of: Positive | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    logit_bias: dict[str, float] | None = None
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    return_token_ids: bool | None = False

    def asked(self) -> AskedCompletion:
        """Raises HttpFailure as ``check``, and for prompts that cannot be."""
        self.check()
        return AskedCompletion(self, self.prompts, self.turn_options)

    def check(self) -> None:
        """Raises HttpFailure for contradictions, and for what is asked for and not done."""
        if self.suffix:
            raise unsupported("suffix", "text is not inserted before other text")
        if not 0 <= (self.logprobs or 0) <= MAX_TOP:
            raise bad("logprobs", f"must be from 0 to {MAX_TOP}")
        if self.echo and self.logprobs is not None:
            raise unsupported("echo", "does not go with logprobs: those of a prompt are not computed")
        if self.drawn < self.answers:
            raise bad("best_of", "must not be less than n")
        if self.stream and self.drawn > self.answers:
            raise bad("best_of", "does not go with stream: the best are known at the end")

    @property
    def answers(self) -> int:
        """Of each prompt."""
        return self.n or 1

    @property
    def drawn(self) -> int:
        """How many answers are drawn, to return the best."""
        return self.best_of or self.answers

    @property
    def prompts(self) -> list[Prompt]:
        """Raises HttpFailure for a list of this and that."""
        given = self.prompt
        if given is None or isinstance(given, str):
            return [RawText(given or "")]
        if not given:
            raise bad("prompt", "must not be empty")
        kinds = set(map(type, given))
        if kinds == {int}:
            return [cast("list[int]", given)]
        if len(given) > MAX_PROMPTS:
            raise bad("prompt", f"has more than {MAX_PROMPTS} prompts")
        if kinds == {str}:
            return [RawText(one) for one in given]
        if kinds == {list} and all(given):
            return [*cast("list[list[int]]", given)]
        raise bad(
            "prompt", "must be a text, token ids, or a list of texts or of token ids, none of them empty"
        )

    @property
    def turn_options(self) -> TurnOptions:
        """For the SDK."""
        options = self.options()
        options["max_output_tokens"] = self.max_tokens or MAX_TOKENS
        if self.stop:
            check_number([self.stop] if isinstance(self.stop, str) else self.stop, "stop")
            options["stop"] = self.stop
        if self.drawn > 1:
            options["candidates"] = self.drawn
        if self.drawn > self.answers:
            options["candidate_choice"] = "best_logprob"
        if self.logit_bias:
            options["logit_bias"] = by_token(self.logit_bias)
        if self.logprobs is not None:
            options["top_logprobs"] = self.logprobs
        return options
