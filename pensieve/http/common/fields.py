"""Fields of requests: each is honoured, has no effect on the answer, or is refused by name.

The struct of a request declares what is read. Its class variables ``WITHOUT_EFFECT`` and ``REFUSED`` name the rest, and
``NESTED`` the structs of fields that are looked into in the same way.
A field with the value null is one that was left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, TypeAlias

import msgspec

from pensieve.http.common.failures import HttpFailure, unsupported

Nested: TypeAlias = Mapping[str, type[msgspec.Struct]]
"""Structs by the names of fields."""
Fields: TypeAlias = Mapping[str, msgspec.Raw]
"""The fields of a JSON object by name, each not yet decoded."""
_STRUCTURED: Final = "structured output is not supported"
STRUCTURED: Final = dict.fromkeys(
    (
        "response_format", "json_schema", "json_object", "structured_outputs", "guided_json", "guided_regex",
        "guided_choice", "guided_grammar", "guided_decoding_backend", "guided_whitespace_pattern", "grammar", "regex",
        "ebnf", "structural_tag", "format", "schema",
    ),
    _STRUCTURED,
)  # fmt: skip
"""What programs of this kind call structured output."""
REFUSED: Final = {
    **STRUCTURED,
    "add_generation_prompt": "the answer always begins with the template's generation prompt",
    "bad_words": "is not supported; logit_bias of -100 keeps a token out",
    "chat_template": "the server's own template is used",
    "chat_template_kwargs": "the template takes no arguments here",
    "continue_final_message": "the last message is answered, not continued",
    "early_stopping": "beam search is not offered over HTTP",
    "extra_body": "its fields belong into the request itself",
    "include_stop_str_in_output": "a stop string is never part of the answer",
    "length_penalty": "beam search is not offered over HTTP",
    "max_new_tokens": "is max_tokens in completions and max_output_tokens in responses",
    "n_predict": "is max_tokens in completions and max_output_tokens in responses",
    "num_predict": "is max_tokens in completions and max_output_tokens in responses",
    "options": "its fields belong into the request itself",
    "prompt_logprobs": "log-probabilities of a prompt are not computed",
    "repeat_penalty": "is repetition_penalty here",
    "skip_special_tokens": "control tokens are never part of the answer's text",
    "spaces_between_special_tokens": "control tokens are never part of the answer's text",
    "truncate_prompt_tokens": "a prompt is never cut",
    "typical_p": "is not supported: temperature, top_p, top_k and min_p are",
    "use_beam_search": "beam search is not offered over HTTP",
}  # fmt: skip
"""Fields of other programs that would change the answer, and what is said of them."""
NEUTRAL: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    "continue_final_message": (False,),
    "early_stopping": (False,),
    "extra_body": ({},),
    "function_call": ("none", "auto"),
    "include_stop_str_in_output": (False,),
    "length_penalty": (1,),
    "logit_bias": ({},),
    "logprobs": (False,),
    "n": (1,),
    "options": ({},),
    "repeat_penalty": (1,),
    "response_format": ({"type": "text"},),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),
    "stop": ([],),
    "typical_p": (1,),
    "use_beam_search": (False,),
}
"""Values with which a refused field asks for what is done anyway."""


def check_fields(fields: Fields, kind: type[msgspec.Struct]) -> None:
    """Raises HttpFailure (400) for the first field that a request of this kind has not."""
    _check(fields, kind, "")


def check_nested(fields: Fields, kind: type[msgspec.Struct]) -> None:
    """The same for the objects that ``kind`` names in ``NESTED``: options and tools. Messages and items may come back
    with all that they were told with."""
    for name, raw in fields.items():
        _descend(name, raw, kind, name)


def _descend(name: str, raw: msgspec.Raw, kind: type[msgspec.Struct], path: str) -> None:
    nested: Nested = getattr(kind, "NESTED", {})
    inner = nested.get(name)
    if inner is None:
        return
    match msgspec.json.decode(raw, type=dict[str, msgspec.Raw] | list[dict[str, msgspec.Raw]] | None):
        case dict(found):
            _check(found, inner, f"{path}.")
        case list(several):
            for number, found in enumerate(several):
                _check(found, inner, f"{path}[{number}].")


def _check(found: Fields, kind: type[msgspec.Struct], path: str) -> None:
    without_effect: Mapping[str, str] = getattr(kind, "WITHOUT_EFFECT", {})
    refused: Mapping[str, str] = getattr(kind, "REFUSED", {})
    known = {one.encode_name for one in msgspec.structs.fields(kind)}
    for name, raw in found.items():
        param = path + name
        if path and name in known:
            _descend(name, raw, kind, param)
        if name in known or name in without_effect or bytes(raw).strip() == b"null":
            continue
        if name not in refused:
            raise HttpFailure(
                400, f"{param}: this request has no such field", param=param, code="unknown_parameter"
            )
        if msgspec.json.decode(raw) not in NEUTRAL.get(name, ()):
            raise unsupported(param, refused[name])
