"""A small server with the OpenAI protocol and no state: transformers ``generate`` over whatever prompt comes.

    python tests/support/openai_stub.py FOLDER [--port N] [--strict] [--chat-only]

Prints ``listening PORT``. Takes token ids as prompts and the extensions of vLLM that force lengths and return ids;
``--strict`` refuses such extensions, ``--chat-only`` has no ``/v1/completions``. It answers one at a time, and computes
the whole prompt each time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Lock
from typing import Any

MODEL, VERSION = "stub", "1.2"
_EXTENSIONS = {"ignore_eos", "min_tokens", "return_token_ids"}


class Model:
    """Greedy answers of a checkpoint, one at a time."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(1)
        self._torch = torch
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self._lock = Lock()
        eos = self._model.generation_config.eos_token_id
        self._eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.vocab_size = int(self._model.config.vocab_size)
        self.context_limit = int(self._model.config.max_position_embeddings)

    def answer(
        self, prompt: list[int], limit: int, *, least: int = 0, ignore_eos: bool = True
    ) -> Iterator[int]:
        """Recomputes the prompt, then decodes with its KV state; ends at ``limit`` or at an end of sequence.

        No end of sequence comes before ``least`` tokens, as ``min_new_tokens`` of ``generate`` has it.
        """
        torch = self._torch
        with self._lock, torch.inference_mode():
            ids, past = torch.tensor([prompt]), None
            for index in range(limit):
                result = self._model(input_ids=ids, past_key_values=past, use_cache=True)
                logits, past = result.logits[:, -1:], result.past_key_values
                if index < least:
                    logits[..., self._eos] = -torch.inf
                ids = logits.argmax(-1)
                yield int(ids)
                if int(ids) in self._eos and not ignore_eos:
                    return


class Counting:
    """Stands for a model: says 7, 8, 9, …"""

    vocab_size, context_limit = 100, 512

    def answer(
        self, prompt: list[int], limit: int, *, least: int = 0, ignore_eos: bool = True
    ) -> Iterator[int]:
        yield from (7 + index % 90 for index in range(limit))


class Stub(ThreadingHTTPServer):
    """``prompts`` are all that came; ``break_after`` makes every later completion fail."""

    daemon_threads = True

    def __init__(self, model: Any, port: int = 0, *, strict: bool = False, chat_only: bool = False) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.model, self.strict, self.chat_only = model, strict, chat_only
        self.prompts: list[Any] = []
        self.break_after: int | None = None
        self.resets = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Stub

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/version":
            return self._json(404, {}) if self.server.strict else self._json(200, {"version": VERSION})
        limits = {} if self.server.strict else {"max_model_len": self.server.model.context_limit}
        return self._json(200, {"data": [{"id": MODEL, "owned_by": "stub", **limits}]})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}")
        server = self.server
        if self.path == "/reset_prefix_cache" and not server.strict:
            server.resets += 1
            return self._json(200, {})
        chat = self.path == "/v1/chat/completions"
        if not chat and (self.path != "/v1/completions" or server.chat_only):
            return self._json(404, {"error": "no such path"})
        if server.strict and (unknown := _EXTENSIONS & set(body)):
            return self._json(400, {"error": f"unknown {sorted(unknown)}"})
        prompt = body["messages"] if chat else body["prompt"]
        server.prompts.append(prompt)
        if server.break_after is not None and len(server.prompts) > server.break_after:
            return self._json(500, {"error": "broken"})
        return self._stream(body, chat, prompt)

    def _stream(self, body: dict[str, Any], chat: bool, prompt: Any) -> None:
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        ids = [ord(c) % 50 for message in prompt for c in message["content"]] if chat else prompt
        count = 0
        lengths = {"least": body.get("min_tokens", 0), "ignore_eos": bool(body.get("ignore_eos"))}
        for token in self.server.model.answer(ids, body["max_tokens"], **lengths):
            count += 1
            text = f"<{token}>"
            choice: dict[str, Any] = {"delta": {"content": text}} if chat else {"text": text}
            if body.get("return_token_ids"):
                choice["token_ids"] = [token]
            self._event({"choices": [choice]})
        usage = {"prompt_tokens": len(ids), "completion_tokens": count}
        self._event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def _event(self, value: Any) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _json(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path, nargs="?")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--strict", action="store_true")
    parser.add_argument("--chat-only", action="store_true")
    options = parser.parse_args()
    model = Model(options.folder) if options.folder else Counting()
    stub = Stub(model, options.port, strict=options.strict, chat_only=options.chat_only)
    print(f"listening {stub.server_port}", flush=True)
    stub.serve_forever()


if __name__ == "__main__":
    main()
