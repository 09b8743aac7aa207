"""Parses an answer into output items (reasoning, messages, function calls) and chat deltas, whole or streamed."""

from __future__ import annotations

import codecs
import hashlib
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from pensieve.client import TokenLogprob
from pensieve.http.common.answers import token_scores
from pensieve.speech import Answer, AnswerPart, FunctionCall, SpeechForm, SpeechReader, Thought, Words, read

Scores = tuple[TokenLogprob, ...]


class TokenScores:
    """Assigns the tokens of an answer, as they arrive, to its words. Each token is assigned once.

    A token that overlaps the beginning or end of words belongs to them. Tokens of thoughts and calls are
    dropped. Tokens after the last words, such as the one that ends the answer, belong to those words.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0
        self._pending: deque[tuple[int, int, TokenLogprob]] = deque()
        """Begin and end of a token in the text, in characters, and its log-probabilities."""

    def push(self, scores: Iterable[TokenLogprob]) -> None:
        for one in scores:
            begin = self._chars
            self._chars += len(self._decoder.decode(one.token.piece))
            self._pending.append((begin, self._chars, one))

    def take_for(self, words: Words) -> Scores:
        """Return the tokens of these words; tokens before them are dropped."""
        first = words.end - len(words.text)
        found = []
        while self._pending and self._pending[0][0] < words.end:
            begin, end, one = self._pending.popleft()
            if begin >= first or end > first:
                found.append(one)
        return tuple(found)

    def take_rest(self) -> Scores:
        found = tuple(one for _, _, one in self._pending)
        self._pending.clear()
        return found


Document = dict[str, Any]


def call_id(turn_id: str, number: int, call: FunctionCall, candidate: int = 0) -> str:
    """Return the id of a call: the model's own, or one derived from the turn, so that it never changes."""
    if call.id:
        return call.id
    made_of = f"{turn_id}/{candidate}/{number}".encode()
    return f"call_{hashlib.blake2b(made_of, digest_size=12).hexdigest()}"


def answer_parts(text: str, form: SpeechForm) -> tuple[AnswerPart, ...]:
    """Return the parts of an answer; an empty answer is one part with empty text."""
    return read(text, form).parts or (Words(""),)


class OutputItems:
    def __init__(self, suffix: str, turn_id: str) -> None:
        self._suffix = suffix
        self._turn_id = turn_id

    def id(self, part: AnswerPart, index: int) -> str:
        prefix = {Words: "msg", Thought: "rs", FunctionCall: "fc"}[type(part)]
        return f"{prefix}_{self._suffix}{f'-{index}' if index else ''}"

    def item(
        self,
        part: AnswerPart,
        index: int,
        calls_before: int,
        status: str,
        *,
        begun: bool = False,
        scores: Scores = (),
    ) -> Document:
        """Return an item. ``begun``: as it is announced, without content. ``scores``: log-probabilities of a
        message."""
        head = {"id": self.id(part, index), "status": status}
        match part:
            case Words():
                content = [] if begun else [text_part(part, scores)]
                return {**head, "type": "message", "role": "assistant", "content": content}
            case Thought():
                content = [] if begun else [text_part(part)]
                return {**head, "type": "reasoning", "summary": [], "content": content}
            case FunctionCall():
                return {
                    **head,
                    "type": "function_call",
                    "call_id": call_id(self._turn_id, calls_before, part),
                    "name": part.name,
                    "arguments": "" if begun else part.arguments,
                }

    def all(self, parts: Sequence[AnswerPart], status: str, scores: Scores = ()) -> list[Document]:
        """Return the items of a whole answer. ``status`` is the last item's; the others are complete."""
        found, calls, assigned = [], 0, TokenScores()
        assigned.push(scores)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            own = assigned.take_for(part) if isinstance(part, Words) else ()
            own += assigned.take_rest() if last and isinstance(part, Words) else ()
            found.append(self.item(part, index, calls, status if last else "completed", scores=own))
            calls += isinstance(part, FunctionCall)
        return found


def text_part(part: Words | Thought, scores: Scores = ()) -> Document:
    """Return the content of a message or of a reasoning item. ``scores``: log-probabilities of a message."""
    if isinstance(part, Thought):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": token_scores(scores)}


def result_item(item_id: str, text: str, called: str) -> Document:
    return {
        "id": item_id.replace("msg_", "fco_", 1),
        "type": "function_call_output",
        "status": "completed",
        "call_id": called,
        "output": text,
    }


def chat_message(answer: Answer, turn_id: str, candidate: int) -> Document:
    message: Document = {"role": "assistant", "content": answer.words, "refusal": None}
    if answer.thoughts:
        message["reasoning_content"] = answer.thoughts
    if answer.calls:
        message["content"] = answer.words or None
        message["tool_calls"] = [
            {
                "id": call_id(turn_id, number, call, candidate),
                "type": "function",
                "function": {"name": call.name, "arguments": call.arguments},
            }
            for number, call in enumerate(answer.calls)
        ]
    return message


Event = tuple[str, dict[str, Any]]


class OutputEvents:
    def __init__(self, items: OutputItems, form: SpeechForm) -> None:
        self._items = items
        self._reader = SpeechReader(form)
        self._open: Words | Thought | None = None
        """The item in progress, with the text that was sent."""
        self._index = 0
        self._calls = 0
        self._tokens = TokenScores()
        self._scores: Scores = ()

    def push(self, text: str, scores: Scores = ()) -> Iterator[Event]:
        self._tokens.push(scores)
        for part in self._reader.push(text):
            yield from self._add(part)

    def finish(self, status: str) -> Iterator[Event]:
        """End the output; ``status`` is the last item's."""
        parts = self._reader.finish()
        for part in parts:
            yield from self._add(part)
        if self._open is None and not self._index:
            yield from self._add(Words(""))
        if isinstance(self._open, Words) and (scores := self._tokens.take_rest()):
            yield self._delta("", scores)
        yield from self._close(status)

    def _add(self, part: AnswerPart) -> Iterator[Event]:
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
            yield self._delta(part.text, self._tokens.take_for(part))

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

    def _item(self, what: str, part: AnswerPart, status: str, *, begun: bool = False) -> Event:
        item = self._items.item(part, self._index, self._calls, status, begun=begun, scores=self._scores)
        return f"response.output_item.{what}", {"output_index": self._index, "item": item}

    def _content(self, name: str, **fields: Any) -> Event:
        assert self._open is not None
        place = {"item_id": self._items.id(self._open, self._index), "output_index": self._index}
        return name, {**place, "content_index": 0, **fields}


class ChatDeltas:
    """The deltas of one candidate's answer."""

    def __init__(self, form: SpeechForm, turn_id: str, candidate: int) -> None:
        self._reader = SpeechReader(form)
        self._turn_id = turn_id
        self._candidate = candidate
        self.calls = 0
        """Calls sent so far."""
        self.begun = False

    def push(self, text: str) -> Iterator[dict[str, Any]]:
        for part in self._reader.push(text):
            yield from self._deltas(part)

    def finish(self) -> Iterator[dict[str, Any]]:
        """End the answer. An empty answer yields one delta with the role."""
        for part in self._reader.finish():
            yield from self._deltas(part)
        if not self.begun:
            yield from self._deltas(Words(""))

    def empty_delta(self) -> dict[str, Any]:
        """Return a delta without text, to carry other fields of a chunk."""
        return next(self._deltas(Words("")))

    def _deltas(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
        head: dict[str, Any] = {} if self.begun else {"role": "assistant", "content": None}
        self.begun = True
        match part:
            case Words():
                yield {**head, "content": part.text}
            case Thought():
                yield {**head, "reasoning_content": part.text}
            case FunctionCall():
                index, self.calls = self.calls, self.calls + 1
                call = {
                    "index": index,
                    "id": call_id(self._turn_id, index, part, self._candidate),
                    "type": "function",
                    "function": {"name": part.name, "arguments": ""},
                }
                yield {**head, "tool_calls": [call]}
                yield {"tool_calls": [{"index": index, "function": {"arguments": part.arguments}}]}
