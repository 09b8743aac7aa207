"""A server of chat completions without a model that caches prefixes as vLLM does: blocks of 16 tokens, by content.

    python bench/stand_ins/chat_server.py FOLDER --port 8000

It makes tokens of the whole history each time, as it reads, and finds what it has computed before; then it draws its
answer from the tokens that ``logit_bias`` names. So a load for vLLM can be tried where that cannot run.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import jinja2
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route
from tokenizers import Tokenizer

BLOCK = 16


class PrefixCache:
    """Which blocks have been computed; each is named by itself and all before it."""

    def __init__(self) -> None:
        self._blocks: set[int] = set()

    def take_in(self, tokens: list[int]) -> int:
        """Note the whole blocks; returns how many tokens at the beginning were known, never all of them."""
        known, name, unbroken = 0, 0, True
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            name = hash((name, *tokens[start : start + BLOCK]))
            unbroken = unbroken and name in self._blocks and start + BLOCK < len(tokens)
            known += BLOCK if unbroken else 0
            self._blocks.add(name)
        return known

    def empty(self) -> None:
        self._blocks.clear()


class ChatStandIn:
    """The tokenizer and the template of a model folder, and no model."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
        told = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
        self._template = jinja2.Environment(autoescape=False).from_string(told["chat_template"])
        self._cache = PrefixCache()

    def app(self) -> Starlette:
        return Starlette(
            routes=[
                Route("/v1/models", self.models),
                Route("/v1/chat/completions", self.chat, methods=["POST"]),
                Route("/reset_prefix_cache", self.reset, methods=["POST"]),
            ]
        )

    async def models(self, _: Request) -> Response:
        return JSONResponse({"data": [{"id": "stand-in"}]})

    async def reset(self, _: Request) -> Response:
        self._cache.empty()
        return JSONResponse({})

    async def chat(self, request: Request) -> Response:
        return StreamingResponse(self._answer(await request.json()), media_type="text/event-stream")

    def _answer(self, body: dict[str, Any]) -> Iterator[bytes]:
        text = self._template.render(messages=body["messages"], add_generation_prompt=True)
        prompt = list(self.tokenizer.encode(text, add_special_tokens=False).ids)
        cached = self._cache.take_in(prompt)
        draw = random.Random(text)  # the same history has the same answer, whatever else is asked meanwhile
        drawn = draw.choices([int(token) for token in body["logit_bias"]], k=body["max_completion_tokens"])
        for token in drawn:
            choice = {"index": 0, "delta": {"content": self.tokenizer.decode([token])}}
            yield _event({"choices": [choice]})
        self._cache.take_in([*prompt, *drawn])
        usage: dict[str, Any] = {"prompt_tokens": len(prompt), "completion_tokens": len(drawn)}
        usage["prompt_tokens_details"] = {"cached_tokens": cached} if cached else None
        yield _event({"choices": [], "usage": usage})
        yield b"data: [DONE]\n\n"


def _event(value: Any) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--port", type=click.IntRange(1, 65535), default=8000)
def main(folder: Path, port: int) -> None:
    """Serve chat completions with the tokenizer in FOLDER."""
    uvicorn.run(ChatStandIn(folder).app(), host="127.0.0.1", port=port, log_level="warning")


if __name__ == "__main__":
    main()
