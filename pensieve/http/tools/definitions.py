"""Functions that a request offers to the model, in either of OpenAI's forms, and how its choice may be bound."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from pensieve.client import ServerInfo
from pensieve.http.common.failures import bad, unsupported
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

    definitions: list[dict[str, Any]]
    """For the session; empty: the request names none."""
    form: SpeechForm
    none_wanted: bool = False
    """What looks like a call is words."""

    def kept(self, info: ServerInfo, calls: bool) -> ToolUse:
        """The same, where the session has functions from before: ``calls``."""
        if not calls or self.definitions or self.none_wanted:
            return self
        return replace(self, form=info.speech)

    @property
    def text(self) -> str:
        """The definitions as JSON: tells one set from another."""
        return msgspec.json.encode(self.definitions).decode() if self.definitions else ""


def check_tools(tools: Sequence[OfferedTool], choice: Any, parallel: bool | None) -> None:
    """Raises HttpFailure for tools that are no functions, and for choices that nothing here could enforce."""
    for number, tool in enumerate(tools):
        if tool.type != "function":
            raise unsupported(f"tools[{number}].type", f"{tool.type!r} is not supported: functions only")
        if tool.definition is None:
            raise bad(f"tools[{number}].name", "is missing")
    if choice not in (None, "auto", "none") and (tools or choice != "required"):
        raise unsupported("tool_choice", "a call cannot be forced: auto or none")
    if choice == "required":
        raise bad("tool_choice", "there are no tools to choose from")
    if tools and parallel is False:
        raise unsupported("parallel_tool_calls", "how many functions the model calls at once cannot be bound")


def tool_use(info: ServerInfo, tools: Sequence[OfferedTool], choice: Any) -> ToolUse:
    """What a request makes of its tools. Raises HttpFailure where the model cannot have any."""
    form = info.speech
    if tools and form.calls is None:
        if choice != "none":
            raise bad("tools", "the chat template of this model does not take them", "tools_not_supported")
        tools = ()
    definitions = [tool.definition.rendered for tool in tools if tool.definition is not None]
    none_wanted = choice == "none"
    if not definitions or none_wanted:
        form = replace(form, calls=None)
    return ToolUse(definitions, form, none_wanted)
