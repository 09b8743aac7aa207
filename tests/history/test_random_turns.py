"""Random turns, imports, cuts, prompts and tools, rendered as they come: each context is that of transformers, which
renders the whole conversation at once."""

from __future__ import annotations

import functools
import json
import random
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import jinja2
import msgspec
import pytest
from transformers import PreTrainedTokenizerFast

from pensieve.core import Role, pack_tokens
from pensieve.errors import PensieveError
from pensieve.server.history.cuts import truncated_to
from pensieve.server.history.rendering import ContextRoom, ItemStamp, Renderer, with_frame
from pensieve.server.values import InputEntry, ToolEntry
from pensieve.speech import FunctionCall
from pensieve.store.records import History, Item, Overflow, SessionConfig
from support.http.tool_rig import speaker, spoken
from support.lengths import seeds
from support.tool_templates import STYLES, write_model

Said = dict[str, Any]
"""A message as transformers takes it."""
ROOM = ContextRoom(100_000, Overflow.REJECT, None)


@functools.cache
def oracle(style: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        return PreTrainedTokenizerFast.from_pretrained(str(write_model(Path(folder) / "m", *STYLES[style])))


def whole(style: str, messages: list[Said], tools: str) -> list[int] | None:
    """The context of the whole conversation; None where the template does not take it."""
    try:
        text = oracle(style).apply_chat_template(
            messages, tools=json.loads(tools) if tools else None, add_generation_prompt=True, tokenize=False
        )
    except jinja2.TemplateError:
        return None
    return list(oracle(style)(text, add_special_tokens=False)["input_ids"])


def function(name: str) -> Said:
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object"}}}


TOOLS = ["", *(json.dumps([function(name) for name in names]) for names in ("a", "ab", "ba", "b"))]


def entry(said: Said) -> InputEntry:
    role = Role[said["role"].upper()]
    calls = tuple(
        FunctionCall(call["function"]["name"], json.dumps(call["function"]["arguments"]), call["id"])
        for call in said.get("tool_calls", ())
    )
    if calls or role is Role.TOOL:
        return ToolEntry(role, said["content"], calls=calls, call_id=said.get("tool_call_id", ""))
    return InputEntry(role, said["content"])


class Talk:
    """One conversation, as the server keeps it and as transformers takes it."""

    def __init__(self, style: str, seed: int) -> None:
        self.style, self.random = style, random.Random(f"{style} {seed}")
        self.renderer = Renderer(speaker(style))
        self.history, self.said = History(config=SessionConfig()), list[Said]()
        self.steps: list[str] = []
        self.compared = 0

    def stamp(self, history: History) -> ItemStamp:
        return ItemStamp(history.head_item + 1, "r", 1)

    def add(self, *items: Item) -> None:
        last = items[-1].number if items else self.history.head_item
        self.history = replace(self.history, items=(*self.history.items, *items), head_item=last)

    def answer(self, imported: bool) -> Said:
        if self.random.random() < 0.5:
            return {
                "role": "assistant",
                "content": self.random.choice(["Yes.", "No", "Well\n" if imported else "Well"]),
            }
        names = [
            "".join(self.random.choices("abcdefgh", k=9)) for _ in range(1 if self.style == "llama" else 2)
        ]
        calls = [
            {
                "id": name,
                "type": "function",
                "function": {"name": self.random.choice("ab"), "arguments": {"x": "y"}},
            }
            for name in names
        ]
        return {"role": "assistant", "content": "", "tool_calls": calls}

    def new(self, *, imported: bool) -> list[Said]:
        """Messages that may follow. A turn brings no answers."""
        found = list[Said]()
        for _ in range(self.random.choice([1, 1, 2, 4])):
            before = (found or self.said or [{"role": "none"}])[-1]
            if calls := before.get("tool_calls"):
                texts = self.random.choices(["1", "ok.", "a b\n", '{"a": 1}', " x"], k=len(calls))
                found += [
                    {"role": "tool", "tool_call_id": call["id"], "content": text}
                    for call, text in zip(calls, texts, strict=True)
                ]
            elif before["role"] in ("user", "tool") and imported and self.random.random() < 0.7:
                found.append(self.answer(imported=True))
            else:
                role = "system" if self.random.random() < 0.1 else "user"
                found.append({"role": role, "content": self.random.choice(["hi", "go on.", "a\n", "why?"])})
        return found

    async def step(self) -> None:
        kind = self.random.choice(["append", "turn", "turn", "frame", "settings", "cut"])
        if kind == "append":
            new = self.new(imported=True)
            self.steps.append(f"append {new}")
            items, _ = await self.renderer.items(
                self.history, tuple(map(entry, new)), self.stamp(self.history)
            )
            self.add(*items)
            self.said += new
        elif kind == "cut":
            keep = self.random.randrange(len(self.said) + 1)
            self.steps.append(f"cut {keep}")
            items = self.history.items[len(self.history.items) - len(self.said) :][:keep]
            self.history = truncated_to(self.history, items[-1].number if items else 0)
            del self.said[keep:]
        elif kind == "settings":
            self.history = await self.framed()
        else:
            await self.turn(framed=kind == "frame")

    async def framed(self) -> History:
        prompt, tools = self.random.choice(["", "Be brief.", "Be kind."]), self.random.choice(TOOLS)
        self.steps.append(f"settings {prompt!r} {tools}")
        config = msgspec.structs.replace(self.history.config, system_prompt=prompt, tools=tools)
        return await with_frame(self.renderer, self.history, config, 1)

    async def turn(self, *, framed: bool) -> None:
        new = self.new(imported=False)
        self.steps.append(f"turn {new}")
        entries = tuple(map(entry, new))
        shown = await self.framed() if framed else self.history
        seen = await self.renderer.prepare(shown, entries, self.stamp(shown), ROOM)
        prompt = [{"role": "system", "content": shown.config.prompt}] if shown.config.prompt else []
        expected = whole(self.style, [*prompt, *self.said, *new], shown.config.tools)
        if expected is not None:
            assert seen.context.tolist() == expected, "\n".join(self.steps)
            self.compared += 1
        kept = await self.renderer.prepare(self.history, entries, self.stamp(self.history), ROOM)
        answer = self.answer(imported=False)
        text = self.written(answer)
        self.add(*kept.items)
        tokens = pack_tokens([*kept.prompt.tolist(), *spoken(text, self.style)])
        self.add(
            Item(self.history.head_item + 1, Role.ASSISTANT, text, tokens, prefix_tokens=len(kept.prompt))
        )
        self.said += [*new, answer]

    def written(self, answer: Said) -> str:
        """The answer as a model of this family writes it."""
        calls = [call["function"] for call in answer.get("tool_calls", ())]
        if not calls:
            # This template leaves the space before an answer to the model.
            return f"{' ' if self.style == 'mistral' else ''}{answer['content']}"
        key = "parameters" if self.style == "llama" else "arguments"
        texts = [f'{{"name": "{call["name"]}", "{key}": {json.dumps(call["arguments"])}' for call in calls]
        if self.style == "mistral":
            names = [call["id"] for call in answer["tool_calls"]]
            listed = [f'{text}, "id": "{name}"}}' for text, name in zip(texts, names, strict=True)]
            return f"[TOOL_CALLS][{', '.join(listed)}]"
        if self.style == "llama":
            return f"{texts[0]}}}"
        return "\n".join(f"<tool_call>\n{text}}}\n</tool_call>" for text in texts)


@pytest.mark.parametrize("style", ["qwen", "llama", "mistral"])
async def test_random_turns(style: str) -> None:
    compared = 0
    for seed in seeds(short=10, long=1000):
        talk = Talk(style, seed)
        for _ in range(12):
            try:
                await talk.step()
            except PensieveError:  # the template does not take it, and nothing was added
                continue
        talk.renderer.close()
        compared += talk.compared
    assert compared > 15
