"""An answer told as it comes: output items one behind the other for responses, deltas for chat completions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from pensieve.http.common.logprobs import token_scores
from pensieve.http.tools.outputs import OutputItems, call_id, text_part
from pensieve.http.tools.scores import Scores, TokenScores
from pensieve.speech import FunctionCall, SpeechForm, SpeechReader, Spoken, Thought, Words

Event = tuple[str, dict[str, Any]]
"""Name and fields."""


class OutputTeller:
    """The events of a response's output, from the text of its answer."""

    def __init__(self, items: OutputItems, form: SpeechForm) -> None:
        self._items = items
        self._reader = SpeechReader(form)
        self._open: Words | Thought | None = None
        """The item that is being told, as far as it was."""
        self._index = 0
        self._calls = 0
        self._tokens = TokenScores()
        self._scores: Scores = ()
        """Of the words that are being told, as far as they were."""

    def push(self, text: str, scores: Scores = ()) -> Iterator[Event]:
        """With some more text, and its tokens if their log-probabilities are wanted."""
        self._tokens.push(scores)
        for part in self._reader.push(text):
            yield from self._tell(part)

    def finish(self, status: str) -> Iterator[Event]:
        """The end; ``status`` is the last item's."""
        parts = self._reader.finish()
        for part in parts:
            yield from self._tell(part)
        if self._open is None and not self._index:
            yield from self._tell(Words(""))
        if isinstance(self._open, Words) and (scores := self._tokens.rest()):
            yield self._delta("", scores)
        yield from self._close(status)

    def _tell(self, part: Spoken) -> Iterator[Event]:
        if type(part) is not type(self._open):
            yield from self._close("completed")
        if isinstance(part, FunctionCall):
            yield from self._call(part)
            return
        if self._open is None:
            self._open = type(part)("")
            yield self._item("added", self._open, "in_progress", begun=True)
            yield self._content("response.content_part.added", part=text_part(self._open))
        self._open = type(part)(self._open.text + part.text)
        if isinstance(part, Thought):
            yield self._content("response.reasoning_text.delta", delta=part.text)
        elif part.text:
            yield self._delta(part.text, self._tokens.of(part))

    def _delta(self, text: str, scores: Scores) -> Event:
        self._scores += scores
        return self._content("response.output_text.delta", delta=text, logprobs=token_scores(scores))

    def _call(self, call: FunctionCall) -> Iterator[Event]:
        yield self._item("added", call, "in_progress", begun=True)
        place = {"item_id": self._items.id(call, self._index), "output_index": self._index}
        yield "response.function_call_arguments.delta", {**place, "delta": call.arguments}
        done = {**place, "name": call.name, "arguments": call.arguments}
        yield "response.function_call_arguments.done", done
        yield self._item("done", call, "completed")
        self._index += 1
        self._calls += 1

    def _close(self, status: str) -> Iterator[Event]:
        part, self._open = self._open, None
        if part is None:
            return
        self._open = part
        if isinstance(part, Thought):
            yield self._content("response.reasoning_text.done", text=part.text)
        else:
            scores = token_scores(self._scores)
            yield self._content("response.output_text.done", text=part.text, logprobs=scores)
        yield self._content("response.content_part.done", part=text_part(part, self._scores))
        yield self._item("done", part, status)
        self._open, self._scores = None, ()
        self._index += 1

    def _item(self, what: str, part: Spoken, status: str, *, begun: bool = False) -> Event:
        item = self._items.item(part, self._index, self._calls, status, begun=begun, scores=self._scores)
        return f"response.output_item.{what}", {"output_index": self._index, "item": item}

    def _content(self, name: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._items.id(self._open, self._index), "output_index": self._index}
        return name, {**place, "content_index": 0, **fields}


class ChatTeller:
    """The deltas of one answer of a chat completion."""

    def __init__(self, form: SpeechForm, call_id_of: Callable[[int, FunctionCall], str]) -> None:
        self._reader = SpeechReader(form)
        self._call_id_of = call_id_of
        self._calls = 0
        self._begun = False

    def push(self, text: str) -> Iterator[dict[str, Any]]:
        """With some more text."""
        for part in self._reader.push(text):
            yield from self._deltas(part)

    def finish(self) -> Iterator[dict[str, Any]]:
        """What is left; the role, if nothing else came."""
        for part in self._reader.finish():
            yield from self._deltas(part)
        if not self._begun:
            yield from self._deltas(Words(""))

    def nothing(self) -> dict[str, Any]:
        """A delta that says nothing, for what comes beside it."""
        return next(self._deltas(Words("")))

    @property
    def begun(self) -> bool:
        """Whether anything was told."""
        return self._begun

    @property
    def calls(self) -> int:
        """How many were told."""
        return self._calls

    def _deltas(self, part: Spoken) -> Iterator[dict[str, Any]]:
        head: dict[str, Any] = {} if self._begun else {"role": "assistant", "content": None}
        self._begun = True
        match part:
            case Words():
                yield {**head, "content": part.text}
            case Thought():
                yield {**head, "reasoning_content": part.text}
            case FunctionCall():
                index, self._calls = self._calls, self._calls + 1
                call = {
                    "index": index,
                    "id": self._call_id_of(index, part),
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
                yield {**head, "tool_calls": [call]}
                yield {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}


def chat_teller(form: SpeechForm, turn_id: str, candidate: int) -> ChatTeller:
    """Of one candidate of a turn."""
    return ChatTeller(form, lambda number, call: call_id(turn_id, number, call, candidate))
