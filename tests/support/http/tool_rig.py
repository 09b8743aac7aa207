"""The door in front of a service whose model has tools, or thinks; what it says is scripted."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from pensieve.store import HistoryStore
from pensieve.tokenizer import ChatTokenizer
from support.http.http_rig import HttpRig, door
from support.service.scripted_link import ScriptedGeneration
from support.tool_templates import STYLES, tokenizer_json, write_model

ROME = '<tool_call>\n{"name": "weather", "arguments": {"town": "Rome"}}\n</tool_call>'
OSLO = '<tool_call>\n{"name": "weather", "arguments": {"town":"Oslo"}}\n</tool_call>'


@functools.cache
def speaker(style: str) -> ChatTokenizer:
    """The tokenizer of a model of this style."""
    with tempfile.TemporaryDirectory() as folder:
        return ChatTokenizer.from_folder(write_model(Path(folder) / "model", *STYLES[style]))


@functools.cache
def _backend() -> Tokenizer:
    return Tokenizer.from_str(tokenizer_json())


def spoken(text: str, style: str) -> list[int]:
    """Ids of a whole answer, marks as the tokens that they are."""
    return [*_backend().encode(text, add_special_tokens=False).ids, speaker(style).eos_token_ids[0]]


@asynccontextmanager
async def tool_door(
    *answers: str, style: str = "qwen", store: HistoryStore | None = None, model: str = "tiny"
) -> AsyncIterator[HttpRig]:
    """``answers``: what the model says, one turn after the other; the last again and again."""
    left = list(answers)

    def script(_: ScriptedGeneration) -> Sequence[int]:
        return spoken(left.pop(0) if len(left) > 1 else left[0], style)

    options: dict[str, Any] = {
        "speaks": speaker(style),
        "vocab_size": speaker(style).vocab_size,
        "context_limit": 4096,
        "store": store,
        "model": model,
    }
    async with door("", service_options=options) as rig:
        rig.service.link.answer = script
        yield rig


def context_of(rig: HttpRig, turn: int = -1) -> str:
    """What the model was given for a turn, control tokens shown."""
    return _backend().decode(rig.service.link.generations[turn].tokens, skip_special_tokens=False)
