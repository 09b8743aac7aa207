"""The form of an answer that a request asks for, in OpenAI's words and in vLLM's."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar, Final, NamedTuple, TypeAlias

import msgspec

from pensieve.client import TurnOptions
from pensieve.errors import InvalidArgument
from pensieve.http.common.failures import invalid_field, unsupported_field

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
