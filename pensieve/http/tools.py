"""Functions that a request offers to the model, in either of OpenAI's forms, and how its choice may be bound."""

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
    """What chat completions say of a function."""

    name: str
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @property
    def rendered(self) -> dict[str, Any]:
        """As chat templates take it; ``strict`` is nothing for the model to read."""
        said = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": {key: one for key, one in said.items() if one is not None}}


class OfferedTool(msgspec.Struct, frozen=True):
    """A tool of a request: chat completions put the function under ``function``, responses its fields beside."""

    NESTED: ClassVar[Nested] = {"function": FunctionDefinition}
    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {"cache_control": "where to cut is found out without it"}
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
        """As responses show it again."""
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
    """The functions that are in force for one answer, and how the answer is to be read."""

    text: str
    """The definitions as JSON, for the session; empty: the request names none. Tells one set from another."""
    form: SpeechForm
    none_wanted: bool = False
    """What looks like a call is words."""

    def with_session_tools(self, info: ServerInfo, calls: bool) -> ToolUse:
        """The same, where the session has functions from before: ``calls``."""
        if not calls or self.text or self.none_wanted:
            return self
        return replace(self, form=info.speech)


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """``tool_choice`` of either protocol, as far as it can be enforced."""

    none: bool = False
    must_call: str | None = None
    """The answer is a call of this function, or of any (""); None: or words."""

    @classmethod
    def parse(cls, choice: Any, tools: Sequence[OfferedTool]) -> ToolChoice:
        """Raises HttpFailure for what is no choice among ``tools``, and for what nothing here could enforce."""
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
        if named != offered:
            raise unsupported_field(
                "tool_choice", "some of the tools cannot be excluded: offer only the allowed ones in tools"
            )
        return cls(must_call="" if mode == "required" else None)


def _name_of(choice: Any) -> str:
    match choice:
        case {"type": "function", "name": str(name)}:
            return name
        case {"type": "function", "function": {"name": str(name)}}:
            return name
        case {"type": str(kind)} if kind not in ("function", "allowed_tools"):
            raise unsupported_field("tool_choice", f"{kind!r} is not supported: functions only")
    raise invalid_field("tool_choice", "must be none, auto, required, or name functions")


def _names(tools: Sequence[OfferedTool]) -> set[str]:
    return {tool.definition.name for tool in tools if tool.definition is not None}


def _unknown(name: str) -> HttpFailure:
    return invalid_field("tool_choice", f"there is no function {name!r} in tools")


def check_tools(tools: Sequence[OfferedTool], choice: Any) -> None:
    """Raises HttpFailure for tools that are no functions, and for choices that nothing here could enforce."""
    for number, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported_field(
                f"tools[{number}].type", f"{tool.type!r} is not supported: functions only"
            )
        if tool.definition is None:
            raise invalid_field(f"tools[{number}].name", "is missing")
    ToolChoice.parse(choice, tools)


def call_options(tools: Sequence[OfferedTool], choice: Any, parallel: bool | None) -> TurnOptions:
    """How the answer is to call functions, for the SDK. Raises as ``check_tools``."""
    found = ToolChoice.parse(choice, tools)
    options: TurnOptions = {}
    if found.must_call is not None:
        options["must_call"] = found.must_call
    if parallel is False and not found.none:
        options["single_call"] = True
    return options


def tool_use(info: ServerInfo, tools: Sequence[OfferedTool], choice: Any) -> ToolUse:
    """What a request makes of its tools. Raises HttpFailure where the model cannot have any."""
    form = info.speech
    if tools and form.calls is None:
        if choice != "none":
            raise invalid_field(
                "tools", "the chat template of this model does not take them", "tools_not_supported"
            )
        tools = ()
    definitions = [tool.definition.rendered for tool in tools if tool.definition is not None]
    none_wanted = choice == "none"
    if not definitions or none_wanted:
        form = replace(form, calls=None)
    text = msgspec.json.encode(definitions).decode() if definitions else ""
    return ToolUse(text, form, none_wanted)
