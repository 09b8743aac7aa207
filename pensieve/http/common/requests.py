"""Shared by the bodies of all endpoints: sampling, ids, the form of an answer, and how each field is
honoured or refused.

A request's struct declares the fields that are read. Its class variables ``WITHOUT_EFFECT`` and ``REFUSED``
list the others, and ``NESTED`` the structs of fields that are checked in the same way. A null field counts as
absent.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias, cast

import msgspec
from starlette.requests import Request

from pensieve.client import TurnOptions
from pensieve.core import SAMPLING
from pensieve.errors import InvalidArgument
from pensieve.http.common.failures import HttpFailure, invalid_field, unsupported_field

Nested: TypeAlias = Mapping[str, type[msgspec.Struct]]
Schema: TypeAlias = dict[str, Any] | bool
_ANY_OBJECT: Final[Schema] = {"type": "object"}
_BELONGS_INSIDE: Final = "belongs into json_schema"
FORMAT_ELSEWHERE: Final = dict.fromkeys(
    (
        "json_schema", "json_object", "guided_decoding_backend", "guided_whitespace_pattern", "grammar", "regex",
        "ebnf", "structural_tag", "format", "schema",
    ),
    "is not a field here: the form of an answer is response_format in chat completions, text.format in responses",
)  # fmt: skip
"""Names of structured output in other servers, or in another place."""
_SERVICE_FIELDS: Final = ("turn.format", "schema", "choice", "regex", "lark")
"""Prefixes of the names that the service and the SDK have for the form."""
GUIDED: Final = {
    "guided_json": "schema",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "lark",
}
"""vLLM's fields for the form of an answer → option of the SDK."""
VLLM_FIELDS: Final = (*GUIDED, "structured_outputs")


class WantedForm(NamedTuple):
    """One form, from one field of a request."""

    param: str
    option: str
    """Its option in the SDK."""
    value: Any


class NamedSchema(msgspec.Struct, frozen=True):
    """``strict`` has no effect: a schema is always enforced."""

    REFUSED: ClassVar[Mapping[str, str]] = {}
    name: str
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None


class ResponseFormat(msgspec.Struct, frozen=True):
    """``response_format`` of chat completions."""

    NESTED: ClassVar[Nested] = {"json_schema": NamedSchema}
    REFUSED: ClassVar[Mapping[str, str]] = dict.fromkeys(("name", "schema", "strict"), _BELONGS_INSIDE)
    type: str = "text"
    json_schema: NamedSchema | None = None

    def wanted(self, param: str) -> WantedForm | None:
        """Raises HttpFailure for a form that does not exist, or is not complete."""
        if self.json_schema is not None and self.type != "json_schema":
            raise invalid_field(f"{param}.json_schema", "needs the type json_schema")
        schema = None if self.json_schema is None else self.json_schema.schema
        return _wanted(param, self.type, schema, f"{param}.json_schema.schema")


class TextFormat(msgspec.Struct, frozen=True):
    """``text.format`` of responses."""

    REFUSED: ClassVar[Mapping[str, str]] = {"json_schema": "its fields stand beside type in responses"}
    type: str = "text"
    name: str | None = None
    schema: Schema | None = None
    description: str | None = None
    strict: bool | None = None

    def wanted(self, param: str) -> WantedForm | None:
        """Raises HttpFailure for a form that does not exist, or is not complete."""
        if self.type == "json_schema" and self.name is None:
            raise invalid_field(f"{param}.name", "is missing", "missing_required_parameter")
        if self.schema is not None and self.type != "json_schema":
            raise invalid_field(f"{param}.schema", "needs the type json_schema")
        return _wanted(param, self.type, self.schema, f"{param}.schema")

    @property
    def echo(self) -> dict[str, Any]:
        if self.type != "json_schema":
            return {"type": self.type}
        fields = ("type", "name", "schema", "description", "strict")
        return {name: getattr(self, name) for name in fields}


def _wanted(param: str, kind: str, schema: Schema | None, schema_param: str) -> WantedForm | None:
    match kind:
        case "text":
            return None
        case "json_object":
            return WantedForm(param, "schema", _ANY_OBJECT)
        case "json_schema":
            if schema is None:
                raise invalid_field(schema_param, "is missing", "missing_required_parameter")
            return WantedForm(param, "schema", schema)
    raise unsupported_field(f"{param}.type", f"{kind!r} is not supported: text, json_object or json_schema")


class StructuredOutputs(msgspec.Struct, frozen=True):
    """vLLM's form of an answer."""

    REFUSED: ClassVar[Mapping[str, str]] = {
        "structural_tag": "is not supported: use tools",
        "whitespace_pattern": "is not supported: at most 8 characters of white space stand between two values",
        "disable_any_whitespace": "is not supported: at most 8 characters of white space stand between two values",
        "disable_additional_properties": "is not supported: write additionalProperties into the schema",
        "disable_fallback": "is not supported: there is no fallback",
    }
    json: Schema | str | None = None
    regex: str | None = None
    choice: list[str] | None = None
    grammar: str | None = None
    json_object: bool | None = None


def vllm_forms(guided: Mapping[str, Any], inner: StructuredOutputs | None) -> list[WantedForm]:
    """Return the forms that vLLM's fields ask for. ``guided``: the values of ``guided_json`` and so on, by name.
    ``inner``: ``structured_outputs``. Raises HttpFailure when that is empty."""
    given = [WantedForm(name, option, guided[name]) for name, option in GUIDED.items()]
    if inner is not None:
        place = "structured_outputs"
        own = [
            WantedForm(f"{place}.json", "schema", inner.json),
            WantedForm(f"{place}.regex", "regex", inner.regex),
            WantedForm(f"{place}.choice", "choice", inner.choice),
            WantedForm(f"{place}.grammar", "lark", inner.grammar),
            WantedForm(f"{place}.json_object", "schema", _ANY_OBJECT if inner.json_object else None),
        ]
        if all(one.value is None for one in own):
            raise invalid_field(place, "must have one of json, regex, choice, grammar and json_object")
        given += own
    return [one for one in given if one.value is not None]


@contextmanager
def named_form(form: WantedForm | None) -> Iterator[None]:
    """Run a block in which the service may refuse the form. Its error then names the request's field."""
    try:
        yield
    except InvalidArgument as error:
        problems = [problem for where, problem in error.violations if where.startswith(_SERVICE_FIELDS)]
        if form is None or not problems:
            raise
        raise invalid_field(form.param, problems[0], error.reason.lower()) from error


def one_form(forms: Sequence[WantedForm]) -> WantedForm | None:
    """Return the only form. Raises HttpFailure for more than one."""
    if len(forms) > 1:
        raise invalid_field(forms[1].param, f"does not go with {forms[0].param}: an answer has one form")
    return forms[0] if forms else None


def add_form(options: TurnOptions, form: WantedForm | None, choice: Any) -> None:
    """Add a form to the SDK's options. ``choice``: the request's ``tool_choice``."""
    if form is None:
        return
    options.update({form.option: form.value})  # type: ignore[misc]
    if choice == "none":
        options["no_calls"] = True


Fields: TypeAlias = Mapping[str, msgspec.Raw]
"""Fields of a JSON object by name, not yet decoded."""
REFUSED_EVERYWHERE: Final = {
    **FORMAT_ELSEWHERE,
    "add_generation_prompt": "the answer always begins with the template's generation prompt",
    "bad_words": "is not supported; logit_bias of -100 keeps a token out",
    "chat_template": "the server's own template is used",
    "chat_template_kwargs": "the template takes no arguments here",
    "continue_final_message": "the last message is answered, not continued",
    "early_stopping": "beam search is not offered over HTTP",
    "extra_body": "put its fields into the request itself",
    "include_stop_str_in_output": "a stop string is never part of the answer",
    "length_penalty": "beam search is not offered over HTTP",
    "max_new_tokens": "is max_tokens in completions and max_output_tokens in responses",
    "n_predict": "is max_tokens in completions and max_output_tokens in responses",
    "num_predict": "is max_tokens in completions and max_output_tokens in responses",
    "options": "put its fields into the request itself",
    "prompt_logprobs": "log-probabilities of a prompt are not computed",
    "repeat_penalty": "is repetition_penalty here",
    "skip_special_tokens": "control tokens are never part of the answer's text",
    "spaces_between_special_tokens": "control tokens are never part of the answer's text",
    "truncate_prompt_tokens": "prompts are never truncated",
    "typical_p": "is not supported: temperature, top_p, top_k and min_p are",
    "use_beam_search": "beam search is not offered over HTTP",
}  # fmt: skip
"""Other servers' fields that would change the answer, each with the error text."""
ACCEPTED_VALUES: Final[Mapping[str, tuple[Any, ...]]] = {
    "add_generation_prompt": (True,),
    "allowed_callers": (["direct"],),
    "async": (False,),
    "bad_words": ([],),
    "best_of": (1,),
    "chat_template_kwargs": ({},),
    # Claude Code sends the second: all thoughts stay, as they do here.
    "context_management": ({"edits": []}, {"edits": [{"type": "clear_thinking_20251015", "keep": "all"}]}),
    "continue_final_message": (False,),
    "defer_loading": (False,),
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
"""Values of refused fields that ask for the default behaviour and are accepted."""


def check_fields(fields: Fields, kind: type[msgspec.Struct]) -> None:
    """Raise HttpFailure (400) for the first field that this kind of request does not have."""
    _check(fields, kind, "")


def check_nested(fields: Fields, kind: type[msgspec.Struct]) -> None:
    """Check the objects that ``kind`` names in ``NESTED``: options and tools. Messages and items are not
    checked, because clients resend them with all fields that the answers had."""
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
    known = kind.__struct_encode_fields__  # msgspec.structs.fields() takes a millisecond
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
        try:
            is_default = msgspec.json.decode(raw) in ACCEPTED_VALUES.get(name, ())
        except msgspec.DecodeError:  # a number that no float holds, such as 1e400
            is_default = False
        if not is_default:
            raise unsupported_field(param, refused[name])


_KEYS: Final = uuid.UUID("6c0cbb0c-6c43-4b0e-9f5c-2a4a52c0a3d1")

Positive = Annotated[int, msgspec.Meta(ge=1)]
Natural = Annotated[int, msgspec.Meta(ge=0)]
TokenId = Annotated[int, msgspec.Meta(ge=0, lt=1 << 32)]


MAX_ELEMENTS: Final = 16384
"""Fields that the service reads in one request."""
LONG_CACHE_IMPORTANCE: Final = 4.0
"""Importance of state that is wanted for long; the default is 1. The service may clip it."""


class CacheOptions(msgspec.Struct, frozen=True):
    """How long cached state is wanted. The door finds where a prompt can be reused itself."""

    mode: Literal["implicit", "explicit"] | None = None
    ttl: Literal["30m", "12h"] | None = None


class ChatStreamOptions(msgspec.Struct, frozen=True):
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
"""Sampling parameters whose type in a body differs from the SDK's. A ``top_k`` of -1 means 0, as in vLLM."""
_OPTIONS: Final = {row.http: name for name, row in SAMPLING.items() if row.http}
"""Name in a body → sampling parameter, for those that all bodies have."""

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


class SamplingFields(_SamplingBody, kw_only=True, omit_defaults=True):
    """The fields of ``core.SamplingOptions``, and how long the cached state is wanted. The service checks ranges."""

    NESTED: ClassVar[Nested] = {"prompt_cache_options": CacheOptions}
    prompt_cache_retention: Literal["in_memory", "in-memory", "24h"] | None = None
    prompt_cache_options: CacheOptions | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        return {field: value for field in _OPTIONS if (value := getattr(self, field)) is not None}

    def options(self) -> TurnOptions:
        given: dict[str, Any] = {_OPTIONS[field]: value for field, value in self.sampling.items()}
        if "seed" in given:
            given["seed"] %= 1 << 64
        if "top_k" in given:
            given["top_k"] = max(0, given["top_k"])
        check_count(given.get("stop_token_ids", ()), "stop_token_ids")
        ttl = self.prompt_cache_options.ttl if self.prompt_cache_options is not None else None
        if self.prompt_cache_retention == "24h" or ttl == "12h":
            given["importance"] = LONG_CACHE_IMPORTANCE
        return cast(TurnOptions, given)


class CompletionFields(SamplingFields, kw_only=True):
    NESTED: ClassVar[Nested] = {
        **SamplingFields.NESTED,
        "stream_options": ChatStreamOptions,
        "structured_outputs": StructuredOutputs,
    }
    model: str | None = None
    stream: bool | None = False
    stream_options: ChatStreamOptions | None = None
    n: Positive | None = None
    stop: str | list[str] | None = None
    max_tokens: Positive | None = None
    logit_bias: dict[str, float] | None = None
    guided_json: Schema | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    structured_outputs: StructuredOutputs | None = None

    @property
    def vllm_forms(self) -> list[WantedForm]:
        return vllm_forms({name: getattr(self, name) for name in GUIDED}, self.structured_outputs)

    def options(self) -> TurnOptions:
        given = super().options()
        if self.stop:
            check_count([self.stop] if isinstance(self.stop, str) else self.stop, "stop")
            given["stop"] = self.stop
        if self.logit_bias:
            given["logit_bias"] = _by_token(self.logit_bias)
        return given


def _by_token(biases: dict[str, float]) -> dict[int, float]:
    """Return logit biases by token id. Raises HttpFailure for a key that is not a token id, and for too many of
    them."""
    check_count(biases, "logit_bias")
    found: dict[int, float] = {}
    for name, bias in biases.items():
        token = parse_whole_number(name)
        if token is None or token >= 1 << 32:
            raise invalid_field("logit_bias", f"{name!r} is not a token id")
        found[token] = bias
    return found


def check_count(values: Sized, param: str) -> None:
    """Raise HttpFailure, before any element is processed, when there are more than the service reads."""
    if len(values) > MAX_ELEMENTS:
        raise invalid_field(param, f"has more than {MAX_ELEMENTS} elements")


def parse_whole_number(text: str) -> int | None:
    """Parse a decimal number of at most 18 digits; None for anything else."""
    return int(text) if text.isascii() and text.isdecimal() and len(text) <= 18 else None


def request_id_for(request: Request) -> uuid.UUID:
    """Return the turn's request id, derived from ``Idempotency-Key`` if there is one, so that a retry finds the
    first try."""
    key = request.headers.get("idempotency-key", "")
    return uuid.uuid5(_KEYS, key) if key else uuid.uuid4()


def seed_for(turn_id: uuid.UUID) -> int:
    """Return the seed of a turn that names none: each attempt samples the same answer."""
    return turn_id.int % (1 << 63)
