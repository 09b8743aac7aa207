"""Response objects: every snapshot has every field."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from pensieve.client import FinishReason, Item, Role, ServerInfo, TokenLogprob, Turn, TurnState, Usage
from pensieve.http.common.answers import cached_tokens, was_cut
from pensieve.http.common.logprobs import token_scores
from pensieve.http.responses.ids import ResponseId, item_id
from pensieve.http.responses.kept import KeptResponse, guessed
from pensieve.http.responses.requests import ResponseRequest
from pensieve.http.tools.outputs import OutputItems, answer_parts, result_item
from pensieve.speech import PLAIN, SpeechForm

Document = dict[str, Any]

_ROLES = {Role.SYSTEM: "system", Role.USER: "user", Role.ASSISTANT: "assistant"}


@dataclass(frozen=True, slots=True)
class Response:
    """What all snapshots of one response say."""

    id: ResponseId
    kept: KeptResponse
    form: SpeechForm = PLAIN
    """How the answer is read."""

    @classmethod
    def read(cls, found: ResponseId, info: ServerInfo, turn: Turn) -> Response:
        """A response that was made before."""
        form = info.speech if found.calls else replace(info.speech, calls=None)
        return cls(found, KeptResponse.of(turn) or guessed(found, info.model, turn), form)

    def begun(self) -> Document:
        """While the answer is made."""
        return self._snapshot("in_progress")

    def ended(self, turn: Turn) -> Document:
        """With the answer, however it ended."""
        status = status_of(turn)
        output = self._output(turn, status) if turn.output is not None else []
        cut = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **(self.failed("server_error", _problem(turn)) if status == "failed" else self._snapshot(status)),
            "completed_at": completed_at(turn) if status == "completed" else None,
            "incomplete_details": cut,
            "output": output,
            "usage": usage_of(turn.usage),
        }

    def failed(self, code: str, message: str) -> Document:
        """When there is no answer."""
        return {**self._snapshot("failed"), "error": {"code": code, "message": message}}

    @property
    def items(self) -> OutputItems:
        """Makes the items of the output."""
        return OutputItems(self.id.message.removeprefix("msg_"), self.id.turn_id)

    def _output(self, turn: Turn, status: str) -> list[Document]:
        if self.form.plain:
            return [self.message(turn.text, status, turn.logprobs)]
        return self.items.all(
            answer_parts(turn.text, self.form),
            "completed" if status == "completed" else "incomplete",
            turn.logprobs,
        )

    def message(self, text: str, status: str, scores: tuple[TokenLogprob, ...] = ()) -> Document:
        """The answer as an item."""
        return {
            "id": self.id.message,
            "type": "message",
            "role": "assistant",
            "status": "completed" if status == "completed" else "incomplete",
            "content": [text_part(text, scores)],
        }

    def _snapshot(self, status: str) -> Document:
        asked = self.kept.asked
        conversation, drawn = asked.conversation_id, asked.drawn_with
        return {
            "id": str(self.id),
            "object": "response",
            "created_at": self.kept.created,
            "completed_at": None,
            "status": status,
            "background": bool(asked.background),
            "conversation": {"id": conversation} if conversation else None,
            "error": None,
            "frequency_penalty": drawn.get("frequency_penalty", 0.0),
            "incomplete_details": None,
            "instructions": asked.instructions,
            "max_output_tokens": asked.max_output_tokens,
            "max_tool_calls": asked.max_tool_calls,
            "metadata": asked.metadata or {},
            "model": self.kept.model,
            "output": [],
            "parallel_tool_calls": asked.parallel_tool_calls is not False,
            "presence_penalty": drawn.get("presence_penalty", 0.0),
            "previous_response_id": asked.previous_response_id,
            "prompt_cache_key": asked.prompt_cache_key,
            "prompt_cache_options": _cache_options(asked),
            "prompt_cache_retention": asked.prompt_cache_retention,
            "reasoning": None,
            "safety_identifier": asked.safety_identifier,
            "service_tier": "default",
            "store": asked.stored,
            "temperature": drawn.get("temperature", 1.0),
            "text": {"format": {"type": "text"}},
            "tool_choice": _tool_choice(asked.tool_choice),
            "tools": [tool.echo for tool in asked.tools or ()],
            "top_logprobs": asked.top_logprobs or 0,
            "top_p": drawn.get("top_p", 1.0),
            "truncation": asked.truncation or "disabled",
            "usage": None,
        }


def _problem(turn: Turn) -> str:
    """Why there is no answer."""
    if turn.discard_reason == "TURN_NOT_FOUND":
        return "the answer was lost with the server that made it: ask again"
    return f"the answer was not completed ({turn.discard_reason.lower() or 'unknown'}): ask again"


def status_of(turn: Turn) -> str:
    """The word for how a turn stands."""
    if turn.state is TurnState.RUNNING:
        return "in_progress"
    if turn.finish_reason == FinishReason.CANCELLED or turn.discard_reason in (
        "TURN_CANCELLED",
        "CLIENT_DISCONNECTED",
    ):
        return "cancelled"
    if turn.state is not TurnState.COMMITTED:
        return "failed"
    return "incomplete" if was_cut(turn.finish_reason) else "completed"


def _cache_options(asked: ResponseRequest) -> Document | None:
    options = asked.prompt_cache_options
    if options is None:
        return None
    return {"mode": options.mode or "implicit", "ttl": options.ttl or "30m"}


def _tool_choice(asked: Any) -> Any:
    """As the protocol shows it; chat completions' form of a name, which is understood too, is none of it."""
    match asked:
        case {"type": "function", "function": {"name": name}}:
            return {"type": "function", "name": name}
        case {"type": "allowed_tools", "allowed_tools": {**inner}}:
            return {"type": "allowed_tools", **inner}
    return asked or "auto"


def completed_at(turn: Turn) -> int | None:
    """When the answer was committed, in seconds since the epoch."""
    time = turn.output.create_time if turn.output is not None else None
    return int(time.timestamp()) if time is not None else None


def usage_of(usage: Usage) -> Document:
    """Token counts over the whole history; ``cached_tokens``: what was not computed for this turn."""
    return {
        "input_tokens": usage.context_tokens,
        "input_tokens_details": {"cached_tokens": cached_tokens(usage), "cache_write_tokens": 0},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.context_tokens + usage.output_tokens,
    }


def text_part(text: str, scores: tuple[TokenLogprob, ...] = ()) -> Document:
    """A part of an answer."""
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": token_scores(scores)}


def input_message(session_id: str, item: Item) -> Document:
    """An item of a history."""
    if item.role == Role.TOOL:
        return result_item(item_id(session_id, item.item), item.text, item.call_id)
    role = item.role if isinstance(item.role, Role) else Role.USER
    part = text_part(item.text) if role is Role.ASSISTANT else {"type": "input_text", "text": item.text}
    return {
        "id": item_id(session_id, item.item),
        "type": "message",
        "role": _ROLES[role],
        "status": "completed",
        "content": [part],
    }


def history_items(session_id: str, item: Item, form: SpeechForm) -> list[Document]:
    """An item of a history as the items that a response tells it as."""
    if item.role != Role.ASSISTANT or form.plain:
        return [input_message(session_id, item)]
    made = OutputItems(item_id(session_id, item.item).removeprefix("msg_"), item.request_id)
    return made.all(answer_parts(item.text, form), "completed")


def listing(items: list[Document], *, has_more: bool = False) -> Document:
    """A page of objects."""
    ids = [str(item["id"]) for item in items]
    return {
        "object": "list",
        "data": items,
        "first_id": ids[0] if ids else "",
        "last_id": ids[-1] if ids else "",
        "has_more": has_more,
    }
