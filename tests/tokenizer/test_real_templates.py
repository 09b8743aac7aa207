"""Imported conversations against transformers, with tokenizers and templates as models are published with them."""

from __future__ import annotations

import datetime as dt
import json
import random
import re
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from pensieve.core import Role
from pensieve.speech import FunctionCall
from pensieve.tokenizer import ChatTokenizer, HistoryItem, RenderContext, TextMessage, TokenMessage, Tools
from pensieve.tokenizer.marked import MarkedTemplate
from support.lengths import at_length, some
from support.real_tokenizers import SHA256, wanted
from support.tool_templates import TOOLS

S, U, A, T = Role.SYSTEM, Role.USER, Role.ASSISTANT, Role.TOOL
NAMES = {S: "system", U: "user", A: "assistant", T: "tool"}
WHEN = dt.datetime(2025, 3, 9, 10, 11, 12)
TAKES_ANY_ORDER = ("qwen3", "qwen2_5", "llama3_1", "llama3_2")
TAKES_TOOLS = ("qwen3", "qwen2_5", "llama3_2")
MODELS = (*some(sorted(set(SHA256) - {"qwen3"}), 1), "qwen3")
CONVERSATIONS = at_length(10, 200)


class Model:
    """One tokenizer: ours and transformers'."""

    def __init__(self, name: str) -> None:
        folder = wanted(name)
        self.name = name
        self.chat = ChatTokenizer.from_folder(folder)
        self.oracle: Any = PreTrainedTokenizerFast.from_pretrained(str(folder))
        self.control = sorted(self.chat._encoder._control, key=len, reverse=True)
        spec = json.loads(self.oracle.backend_tokenizer.to_str())
        added = [token["content"] for token in spec["added_tokens"]]
        self.added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True))))
        spec["added_tokens"] = [one for one in spec["added_tokens"] if one["content"] not in self.control]
        self.without_control = Tokenizer.from_str(json.dumps(spec))

    def whole(self, messages: Sequence[TextMessage], tools: str = "", *, prompt: bool = False) -> list[int]:
        """The ids that transformers gives the conversation; control words in contents are text."""
        hidden = {word: chr(0xF100 + number) for number, word in enumerate(self.control)}

        def hide(text: str) -> str:
            for word, char in hidden.items():
                text = text.replace(word, char)
            return text

        text = self.oracle.apply_chat_template(
            [_shown(one, hide) for one in messages],
            tools=json.loads(tools) if tools else None,
            add_generation_prompt=prompt,
            tokenize=False,
        )
        if not any(char in text for char in hidden.values()):
            return list(self.oracle(text, add_special_tokens=False)["input_ids"])
        ids: list[int] = []
        for part in re.split(f"({self.added.pattern})", text):
            spelled = part
            for word, char in hidden.items():
                spelled = spelled.replace(char, word)
            encoder = self.without_control if spelled != part else self.oracle.backend_tokenizer
            ids += encoder.encode(spelled, add_special_tokens=False).ids
        return ids

    def imported(
        self, messages: Sequence[TextMessage], tools: str = "", follow: Sequence[Role] = ()
    ) -> list[list[int]]:
        """What each message becomes."""
        made = self.chat.render(
            [],
            messages,
            generation_prompt=False,
            followed_by=tuple(follow),
            context=RenderContext(Tools(tools), WHEN),
        )
        return [one.tolist() for one in made.item_tokens]


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest) -> Model:
    return Model(request.param)


@pytest.fixture(autouse=True)
def today(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers asks the clock: here it has stopped."""
    import transformers.utils.chat_template_utils as utils

    class Stopped(dt.datetime):
        @classmethod
        def now(cls, tz: dt.tzinfo | None = None) -> Any:
            return WHEN

    monkeypatch.setattr(utils, "datetime", Stopped)


def _nfc(text: str) -> str:
    return unicodedata.normalize("NFC", text)


def _shown(message: TextMessage, hide: Callable[[str], str]) -> dict[str, Any]:
    shown: dict[str, Any] = {"role": NAMES[message.role], "content": hide(message.text)}
    if message.calls:
        shown["tool_calls"] = [
            {
                "id": call.id,
                "type": "function",
                "function": {"name": call.name, "arguments": json.loads(hide(call.arguments))},
            }
            for call in message.calls
        ]
    if message.role is T:
        shown["tool_call_id"] = message.call_id
    return shown


WORDS = (
    "a",
    "the",
    " fox",
    "über",
    "Straße",
    "1234567",
    "x=1;",
    "don't",
    "日本語",
    "नमस्ते",
    "🦊👩‍👩‍👧",
    "e\u0301",
    "\u200b",
    "...",
)
JOINS = ("", " ", "  ", "\n", "\n\n", "\t", "\r\n", " \n ")
ODD = (
    "",
    " ",
    "\n",
    "a",
    "}",
    "<b>",
    "</b>",
    "{}",
    "[]",
    '"',
    "\\n",
    "assistant",
    "user\n",
    "<tool_response>\nx\n</tool_response>",
)


def a_text(draw: random.Random, control: Sequence[str]) -> str:
    if draw.random() < 0.15:
        return draw.choice(ODD)
    parts = [draw.choice(WORDS) + draw.choice(JOINS) for _ in range(draw.randint(1, 12))]
    if draw.random() < 0.12:
        parts.insert(draw.randrange(len(parts)), draw.choice(control))
    if draw.random() < 0.12:
        parts.insert(draw.randrange(len(parts)), draw.choice(("<think>", "</tool_call>", "<|fim_prefix|>")))
    return draw.choice(("", "", "", " ", "\n")) + "".join(parts)


def a_thought(draw: random.Random) -> str:
    return draw.choice(
        (
            "<think>\nHm, so.\n</think>\n\n",
            "<think>\n\n</think>\n\n",
            "<think>Ja.</think>",
            "<think>\nno\n</think>\n",
        )
    )


def a_conversation(draw: random.Random, model: Model) -> tuple[list[TextMessage], str]:
    """Roles as the template takes them, and whether it has tools."""
    control = model.control
    any_order = model.name in TAKES_ANY_ORDER and draw.random() < 0.4
    tools = TOOLS if model.name in TAKES_TOOLS and draw.random() < 0.4 else ""
    said = [TextMessage(S, a_text(draw, control))] if draw.random() < 0.5 else []
    if tools and model.name == "llama3_2":
        said.append(TextMessage(U, "Well " + a_text(draw, control)))
        said.append(TextMessage(A, a_text(draw, control)))
    for _ in range(draw.randint(0 if said else 1, 7)):
        if any_order:
            role = draw.choice((U, U, A, A, S))
            said.append(TextMessage(role, a_text(draw, control)))
            continue
        said.append(TextMessage(U, a_text(draw, control)))
        while tools and draw.random() < 0.5:
            count = 1 if model.name == "llama3_2" else draw.randint(1, 3)
            names = [f"call{len(said):04}{number}" for number in range(count)]
            calls = tuple(
                FunctionCall("weather", json.dumps({"town": a_text(draw, control)}, ensure_ascii=False), name)
                for name in names
            )
            words = a_thought(draw) if draw.random() < 0.4 and model.name != "llama3_2" else ""
            said.append(TextMessage(A, words + draw.choice(("", "Let me see.")), calls))
            said += [TextMessage(T, a_text(draw, control), call_id=name) for name in names]
        thought = a_thought(draw) if draw.random() < 0.5 else ""
        said.append(TextMessage(A, thought + a_text(draw, control)))
    if model.name == "gemma3" and said[0].role is S and len(said) == 1:
        said.append(TextMessage(U, "hi"))
    if draw.random() < 0.4 and len(said) > 1:
        said = said[: draw.randint(1 + (said[0].role is S), len(said))]
    return said, tools


def test_an_import_is_what_transformers_makes_of_the_whole_conversation(model: Model) -> None:
    for seed in range(CONVERSATIONS):
        messages, tools = a_conversation(random.Random(f"{model.name}{seed}"), model)
        got = model.imported(messages, tools)
        assert [one for item in got for one in item] == model.whole(messages, tools), (seed, messages)


def test_a_resent_history_and_its_turn_are_one_conversation(model: Model) -> None:
    """The door imports what came before the last answer's end, and the rest is the turn's input."""
    for seed in range(CONVERSATIONS):
        draw = random.Random(f"resent{model.name}{seed}")
        messages, tools = a_conversation(draw, model)
        if messages[-1].role is A:
            messages.append(TextMessage(U, "And now? " + a_text(draw, model.control)))
        cut = max((n + 1 for n, one in enumerate(messages) if one.role is A), default=0)
        if messages[-1].role is S or (model.name == "gemma3" and cut == 0):
            continue
        history, new = messages[:cut], messages[cut:]
        first = model.imported(history, tools, [one.role for one in new]) if history else []
        items = [model.chat.seen(one.role, ids) for one, ids in zip(history, first, strict=True)]
        turn = model.chat.render(
            items, new, generation_prompt=True, context=RenderContext(Tools(tools), WHEN)
        )
        context = [one for ids in first for one in ids]
        context += [*np.concatenate(turn.item_tokens).tolist(), *turn.generation_prompt.tolist()]
        whole = model.whole(messages, tools, prompt=True)
        assert context == whole, (seed, messages)


def test_each_item_holds_its_own_text(model: Model) -> None:
    for seed in range(at_length(5, 50)):
        draw = random.Random(f"own{model.name}{seed}")
        messages = []
        for number in range(draw.randint(1, 6)):
            messages.append(TextMessage(U, f"question {number} {a_text(draw, model.control).strip()}!"))
            messages.append(TextMessage(A, f"answer {number}!"))
        for message, ids in zip(messages, model.imported(messages), strict=True):
            assert _nfc(message.text.split("!")[0]) in _nfc(model.oracle.decode(ids))
            assert model.oracle.decode(ids).count("question") + model.oracle.decode(ids).count("answer ") == 1


@pytest.mark.parametrize("shape", ["dialogue", "any order", "answers as tokens"])
def test_the_work_of_an_import_is_linear_in_its_messages(
    model: Model, shape: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if shape == "any order" and model.name not in TAKES_ANY_ORDER:
        pytest.skip("the template takes no other order")
    draw = random.Random(7)
    shown = 0
    plain = MarkedTemplate.say

    def say(self: MarkedTemplate, messages: Sequence[Any], **more: Any) -> str:
        nonlocal shown
        shown += len(messages)
        return plain(self, messages, **more)

    monkeypatch.setattr(MarkedTemplate, "say", say)
    roles = draw.choices((U, A, S, T), k=1000) if shape == "any order" else [U, A] * 500
    said: list[Any] = [TextMessage(role, "a") for role in roles]
    each = 6
    if shape == "answers as tokens":  # each begins a part that is written anew
        said[1::2] = [TokenMessage(A, np.array([20], dtype=np.int32))] * 500
        each = 15
    for count in (10, 1000):
        shown = 0
        model.imported(said[:count])
        assert shown <= each * count
    history = [HistoryItem(role, ends_with_eos=role is A) for role in roles]
    shown = 0
    model.chat.render(
        history, [TextMessage(U, "hi")], generation_prompt=True, context=RenderContext(when=WHEN)
    )
    assert shown < 400, "a turn looks at its whole history"


def test_a_system_prompt_and_the_first_turn_are_one_conversation(model: Model) -> None:
    """A session is created with a system prompt, and tools; its first turn comes later."""
    for seed in range(CONVERSATIONS):
        draw = random.Random(f"first{model.name}{seed}")
        tools = TOOLS if model.name in TAKES_TOOLS and draw.random() < 0.5 else ""
        system = TextMessage(S, draw.choice(WORDS) + a_text(draw, model.control))
        asked = [TextMessage(U, "Well, " + a_text(draw, model.control))]
        first = model.imported([system], tools)
        turn = model.chat.render(
            [model.chat.seen(S, first[0])],
            asked,
            generation_prompt=True,
            context=RenderContext(Tools(tools), WHEN),
        )
        context = [*first[0], *turn.item_tokens[0].tolist(), *turn.generation_prompt.tolist()]
        whole = model.whole([system, *asked], tools, prompt=True)
        if model.name == "gemma3":  # system prompt and question are one run of text, and were encoded apart
            assert model.oracle.decode(context) == model.oracle.decode(whole)
        else:
            assert context == whole, (seed, system, asked)
