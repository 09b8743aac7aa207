"""``bench/transformers_server.py`` as other servers with the OpenAI protocol behave, and as they fail.

    python tests/support/replay/openai_stub.py [FOLDER] [--port N]

Without a FOLDER nothing is computed: see ``Counting``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[3] / "bench"))  # which is no package
from transformers_server import Answers, Handler, Model, Server

__all__ = ["Counting", "Model", "Server", "Stub"]
MODEL, VERSION = "stub", "1.2"
_EXTENSIONS = {"ignore_eos", "min_tokens", "return_token_ids"}


class Counting:
    """Stands for a model: says 7, 8, 9, …"""

    vocab_size, context_limit = 100, 512

    def answer(
        self, prompt: list[int], limit: int, *, least: int = 0, ignore_eos: bool = True
    ) -> Iterator[int]:
        yield from (7 + index % 90 for index in range(limit))


class Stub(Server):
    """``prompts`` are all that came; ``break_after`` makes every later completion fail.

    ``strict``: refuses vLLM's extensions, and tells neither version nor sizes. ``chat_only``: has no
    ``/v1/completions``.
    """

    def __init__(
        self, model: Answers, port: int = 0, *, strict: bool = False, chat_only: bool = False
    ) -> None:
        super().__init__(model, port, StubHandler)
        self.strict, self.chat_only = strict, chat_only
        self.prompts: list[Any] = []
        self.break_after: int | None = None
        self.resets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class StubHandler(Handler):
    server: Stub

    def do_GET(self) -> None:
        strict = self.server.strict
        if self.path == "/version":
            return self.reply(404, {}) if strict else self.reply(200, {"version": VERSION})
        limits = {} if strict else {"max_model_len": self.server.model.context_limit}
        return self.reply(200, {"data": [{"id": MODEL, "owned_by": "stub", **limits}]})

    def do_POST(self) -> None:
        body, server = self.body(), self.server
        if self.path == "/reset_prefix_cache" and not server.strict:
            server.resets += 1
            return self.reply(200, {})
        chat = self.path == "/v1/chat/completions"
        if not chat and (self.path != "/v1/completions" or server.chat_only):
            return self.reply(404, {"error": "no such path"})
        if server.strict and (unknown := _EXTENSIONS & set(body)):
            return self.reply(400, {"error": f"unknown {sorted(unknown)}"})
        prompt = body["messages"] if chat else body["prompt"]
        server.prompts.append(prompt)
        if server.break_after is not None and len(server.prompts) > server.break_after:
            return self.reply(500, {"error": "broken"})
        ids = [ord(c) % 50 for message in prompt for c in message["content"]] if chat else prompt
        return self.stream(body, ids)

    def choice(self, token: int, body: dict[str, Any]) -> dict[str, Any]:
        text = f"<{token}>"
        piece: dict[str, Any] = {"delta": {"content": text}} if "messages" in body else {"text": text}
        return piece | ({"token_ids": [token]} if body.get("return_token_ids") else {})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--port", type=int, default=0)
    options = parser.parse_args()
    stub = Stub(Model(options.folder) if options.folder else Counting(), options.port)
    print(f"listening {stub.server_port}", flush=True)
    stub.serve_forever()


if __name__ == "__main__":
    main()
