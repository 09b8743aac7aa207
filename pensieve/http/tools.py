"""The functions that a request offers, in either of OpenAI's forms, and its ``tool_choice``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import msgspec

from pensieve.client import ServerInfo, TurnOptions
from pensieve.http.common.failures import HttpFailure, invalid_field, unsupported_field
from pensieve.http.common.requests import Nested
from pensieve.speech import SpeechForm


class FunctionDefinition(msgspec.Struct, frozen=True):
    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def rendered(self) -> dict[str, Any]:
        """The form that chat templates take. They do not read ``strict``."""
        said = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: one for key, one in said.items() if one is not None}}


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool of a request. Chat completions put the function under ``function``, responses put its fields
    beside ``type``."""

    NESTED: ClassVar[Nested] = {"function": FunctionDefinition}
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {"cache_control": "reusable prefixes are found without it"}
    REFUSED: ClassVar[Mapping[str, str]] = {
        "allowed_callers": "only the model calls functions",
        "async": "is not supported: the next turn brings the result",
        "defer_loading": "is not supported: the model sees all tools",
        "output_schema": "is not supported: put it into the description",
    }
    type: str
    function: FunctionDefinition | None = None
    name: str | None = None
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def definition(self) -> FunctionDefinition | None:
        if self.function is not None or self.name is None:
            return self.function
        return FunctionDefinition(self.name, self.description, self.parameters, self.strict)

    @property
    def echo(self) -> dict[str, Any]:
        one = self.definition
        assert one is not None, "checked"
        return {
            "type": "function",
            "name": one.name,
            "description": one.description,
            "parameters": one.parameters,
            "strict": one.strict,
        }


@dataclass(frozen=True, slots=True)
class ToolUse:
    text: str
    form: SpeechForm
    none_wanted: bool = False
    """``tool_choice`` is none: text that looks like a call is plain text."""

    def with_session_tools(self, info: ServerInfo, calls: bool) -> ToolUse:
        """Return the same, given whether the session has functions from earlier requests (``calls``)."""
        if not calls or self.text or self.none_wanted:
            return self
        return replace(self, form=replace(info.speech, tagged=self.form.tagged))


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``tool_choice`` of either protocol."""

    none: bool = False
    must_call: str | None = None
    """The answer must be a call of this function, or of any (""). None: it may be text."""
    allowed: tuple[str, ...] = ()
    """Only these functions may be called; (): all."""

    @classmethod
    def parse(cls, choice: Any, tools: Sequence[OfferedTool]) -> ToolChoice:
        """Raises HttpFailure for a choice that is not among ``tools``."""
        match choice:
            case None | "auto":
                return cls()
            case "none":
                return cls(none=True)
            case "required":
                if not tools:
                    raise invalid_field("tool_choice", "there are no tools to choose from")
                return cls(must_call="")
            case {"type": "allowed_tools", "allowed_tools": {"mode": mode, "tools": list(allowed)}}:
                return cls._among(mode, allowed, tools)
            case {"type": "allowed_tools", "mode": mode, "tools": list(allowed)}:
                return cls._among(mode, allowed, tools)
        name = _name_of(choice)
        if name not in _names(tools):
            raise _unknown(name)
        return cls(must_call=name)

    @classmethod
    def _among(cls, mode: Any, allowed: Sequence[Any], tools: Sequence[OfferedTool]) -> ToolChoice:
        if mode not in ("auto", "required") or not 0 < len(allowed) <= len(tools):
            raise invalid_field(
                "tool_choice", "needs a mode, auto or required, and the tools that are allowed"
            )
        named, offered = set(map(_name_of, allowed)), _names(tools)
        for name in named - offered:
            raise _unknown(name)
        if mode == "required" and len(named) == 1:
            return cls(must_call=named.pop())
        return cls(
            must_call="" if mode == "required" else None,
            allowed=tuple(sorted(named)) if named != offered else (),
        )


def _name_of(choice: Any) -> str:
    match choice:
        case {"type": "function", "name": str(name)}:
            return name
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise unsupported_field("tool_choice", f"{kind!r} is not supported: only functions are")
    raise invalid_field("tool_choice", "must be none, auto or required, or name functions")


def _names(tools: Sequence[OfferedTool]) -> set[str]:
    return {tool.definition.name for tool in tools if tool.definition is not None}


def _unknown(name: str) -> HttpFailure:
    return invalid_field("tool_choice", f"there is no function {name!r} in tools")


def check_tools(tools: Sequence[OfferedTool], choice: Any) -> None:
    """Raise HttpFailure for tools that are not functions, and for a choice that is not among them."""
    for number, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported_field(
                f"tools[{number}].type", f"{tool.type!r} is not supported: functions only"
            )
        if tool.definition is None:
            raise invalid_field(f"tools[{number}].name", "is missing")
    ToolChoice.parse(choice, tools)


def call_options(tools: Sequence[OfferedTool], choice: Any, parallel: bool | None) -> TurnOptions:
    """Return the SDK's options for calls. Raises as ``check_tools``."""
    found = ToolChoice.parse(choice, tools)
    options: TurnOptions = {}
    if found.must_call is not None:
        options["must_call"] = found.must_call
    if parallel is False and not found.none:
        options["single_call"] = True
    if found.allowed:
        options["allowed_calls"] = found.allowed
    strict = [tool.definition.name for tool in tools if tool.definition and tool.definition.strict]
    if strict and not found.none:
        options["strict_calls"] = strict
    return options


def tool_use(info: ServerInfo, tools: Sequence[OfferedTool], choice: Any, *, has_form: bool) -> ToolUse:
    """Return the tools of a request as the model supports them. ``has_form``: an answer that calls no function has a
    form. Raises HttpFailure if the model supports no tools."""
    form = replace(info.speech, tagged=True) if has_form else info.speech
    if tools and form.calls is None:
        if choice != "none":
            raise invalid_field(
                "tools", "the chat template of this model does not support them", "tools_not_supported"
            )
        tools = ()
    definitions = [tool.definition.rendered for tool in tools if tool.definition is not None]
    none_wanted = choice == "none"
    if not definitions or none_wanted:
        form = replace(form, calls=None)
    text = msgspec.json.encode(definitions).decode() if definitions else ""
    return ToolUse(text, form, none_wanted)
