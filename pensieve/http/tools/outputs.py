"""The output items of a response: reasoning, messages and calls of functions, in the order in which they were said."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from pensieve.http.common.logprobs import token_scores
from pensieve.http.tools.scores import Scores, TokenScores
from pensieve.speech import Answer, FunctionCall, SpeechForm, Spoken, Thought, Words, read

Document = dict[str, Any]


def call_id(turn_id: str, number: int, call: FunctionCall, candidate: int = 0) -> str:
    """Id of a call: the model's own, or one made of the turn, so that it is the same whenever it is told."""
    if call.id:
        return call.id
    made_of = f"{turn_id}/{candidate}/{number}".encode()
    return f"call_{hashlib.blake2b(made_of, digest_size=12).hexdigest()}"


def answer_parts(text: str, form: SpeechForm) -> tuple[Spoken, ...]:
    """The parts of an answer; an empty one is empty words."""
    return read(text, form).parts or (Words(""),)


class OutputItems:
    """Makes the items of one response."""

    def __init__(self, suffix: str, turn_id: str) -> None:
        """``suffix``: what the ids of all items of this response have in common."""
        self._suffix = suffix
        self._turn_id = turn_id

    def id(self, part: Spoken, index: int) -> str:
        """Id of the item with this place in the output."""
        prefix = {Words: "msg", Thought: "rs", FunctionCall: "fc"}[type(part)]
        return f"{prefix}_{self._suffix}{f'-{index}' if index else ''}"

    def item(
        self,
        part: Spoken,
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

    def all(self, parts: Sequence[Spoken], status: str, scores: Scores = ()) -> list[Document]:
        """``status``: of the last item; those before are complete. ``scores``: of the whole answer."""
        found, calls, dealt = [], 0, TokenScores()
        dealt.push(scores)
        for index, part in enumerate(parts):
            last = index == len(parts) - 1
            own = dealt.of(part) if isinstance(part, Words) else ()
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
