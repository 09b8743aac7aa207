"""An answer as output items (reasoning, messages, calls of functions), whole or as it comes, and as chat deltas."""

from __future__ import annotations

import codecs
import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from pensieve.client import TokenLogprob
from pensieve.http.common.answers import token_scores
from pensieve.speech import Answer, AnswerPart, FunctionCall, SpeechForm, SpeechReader, Thought, Words, read

Scores = tuple[TokenLogprob, ...]


class TokenScores:
    """Takes the tokens of one answer as they come, and deals them out to its words, each once.

    Where words begin or end within a token, the token is theirs. Those of thoughts and calls are nobody's; those behind
    the last words, such as the token that ends the answer, are theirs.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._chars = 0
        self._left: deque[tuple[int, int, TokenLogprob]] = deque()
        """Where a token begins and ends in the text, in characters, and its log-probabilities."""

    def push(self, scores: Iterable[TokenLogprob]) -> None:
        """Some more tokens."""
        for one in scores:
            begin = self._chars
            self._chars += len(self._decoder.decode(one.token.piece))
            self._left.append((begin, self._chars, one))

    def take_for(self, words: Words) -> Scores:
        """Those of these words; what lies before them goes to nobody."""
        first = words.end - len(words.text)
        found = []
        while self._left and self._left[0][0] < words.end:
            begin, end, one = self._left.popleft()
            if begin >= first or end > first:
                found.append(one)
        return tuple(found)

    def rest(self) -> Scores:
        """Those that are left, when no more words follow."""
        found = tuple(one for _, _, one in self._left)
        self._left.clear()
        return found


Document = dict[str, Any]


def call_id(turn_id: str, number: int, call: FunctionCall, candidate: int = 0) -> str:
    """Id of a call: the model's own, or one made of the turn, so that it is the same whenever it is told."""
    if call.id:
        return call.id
    made_of = f"{turn_id}/{candidate}/{number}".encode()
    return f"call_{hashlib.blake2b(made_of, digest_size=12).hexdigest()}"


def answer_parts(text: str, form: SpeechForm) -> tuple[AnswerPart, ...]:
    """The parts of an answer; an empty one is empty words."""
    return read(text, form).parts or (Words(""),)


class OutputItems:
    """Makes the items of one response."""

    def __init__(self, suffix: str, turn_id: str) -> None:
        """``suffix``: what the ids of all items of this response have in common."""
        self._suffix = suffix
        self._turn_id = turn_id

    def id(self, part: AnswerPart, index: int) -> str:
        """Id of the item with this place in the output."""
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
        """``begun``: the item as it is announced, without its content. ``scores``: of words."""
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
        """``status``: of the last item; those before are complete. ``scores``: of the whole answer."""
        found, calls, dealt = [], 0, TokenScores()
        dealt.push(scores)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            own = dealt.take_for(part) if isinstance(part, Words) else ()
            own += dealt.rest() if last and isinstance(part, Words) else ()
            found.append(self.item(part, index, calls, status if last else "completed", scores=own))
            calls += isinstance(part, FunctionCall)
        return found


def text_part(part: Words | Thought, scores: Scores = ()) -> Document:
    """The content of a message or of a reasoning item. ``scores``: of a message's tokens."""
    if isinstance(part, Thought):
        return {"type": "reasoning_text", "text": part.text}
    return {"type": "output_text", "text": part.text, "annotations": [], "logprobs": token_scores(scores)}


def result_item(item_id: str, text: str, called: str) -> Document:
    """What a function gave back, as an item."""
    return {
        "id": item_id.replace("msg_", "fco_", 1),
        "type": "function_call_output",
        "status": "completed",
        "call_id": called,
        "output": text,
    }


def chat_message(answer: Answer, turn_id: str, candidate: int) -> Document:
    """An answer as chat completions tell it."""
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
"""Name and fields."""


class OutputEvents:
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

    def _tell(self, part: AnswerPart) -> Iterator[Event]:
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

    def _deltas(self, part: AnswerPart) -> Iterator[dict[str, Any]]:
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


def chat_teller(form: SpeechForm, turn_id: str, candidate: int) -> ChatDeltas:
    """Of one candidate of a turn."""
    return ChatDeltas(form, lambda number, call: call_id(turn_id, number, call, candidate))
