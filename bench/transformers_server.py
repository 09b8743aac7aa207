"""The baseline without state: transformers behind the OpenAI protocol. Every prompt is computed anew, one at a time.

    python bench/transformers_server.py FOLDER --port 8000

Prompts are token ids, and so are the answers: there is no text. Takes ``ignore_eos`` and ``min_tokens``, as vLLM does.
Prints ``listening PORT``.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from importlib.metadata import version
from pathlib import Path
from threading import Lock
from typing import Any, Protocol, cast

import click


class Answers(Protocol):
    vocab_size: int
    context_limit: int

    def answer(
        self, prompt: list[int], limit: int, *, least: int = 0, ignore_eos: bool = True
    ) -> Iterator[int]: ...


class Model:
    """Greedy answers of a checkpoint: the tokens of ``generate``, without its bookkeeping."""

    def __init__(
        self, folder: Path, *, device: str = "cpu", dtype: str = "float32", threads: int = 1
    ) -> None:
        # Late: tests stand a server without a model in for this one, and start it often.
        import torch
        from transformers import AutoModelForCausalLM

        torch.set_num_threads(threads)
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
        self._model = cast(Any, loaded).to(device).eval()  # `to` is annotated as if it were no method
        self._device = device
        self._lock = Lock()
        eos = self._model.generation_config.eos_token_id
        self._eos = [] if eos is None else [eos] if isinstance(eos, int) else list(eos)
        self.vocab_size = int(self._model.config.vocab_size)
        self.context_limit = int(self._model.config.max_position_embeddings)

    def answer(
        self, prompt: list[int], limit: int, *, least: int = 0, ignore_eos: bool = True
    ) -> Iterator[int]:
        """Computes the prompt, then decodes with its KV state; ends at ``limit`` or at an end of sequence.

        No end of sequence comes before ``least`` tokens, as ``min_new_tokens`` of ``generate`` has it.
        """
        import torch

        with self._lock, torch.inference_mode():
            ids, past = torch.tensor([prompt], device=self._device), None
            for index in range(limit):
                result = self._model(input_ids=ids, past_key_values=past, use_cache=True, logits_to_keep=1)
                logits, past = result.logits, result.past_key_values
                if index < least:
                    logits[..., self._eos] = -torch.inf
                ids = logits.argmax(-1)
                yield int(ids)
                if int(ids) in self._eos and not ignore_eos:
                    return


class Server(ThreadingHTTPServer):
    """One model, on a port of this machine; 0 finds a free one."""

    daemon_threads = True

    def __init__(self, model: Answers, port: int = 0, handler: type[Handler] | None = None) -> None:
        super().__init__(("127.0.0.1", port), handler or Handler)
        self.model = model


class Handler(BaseHTTPRequestHandler):
    """Answers requests: as much of the protocol as ``pensieve replay`` asks for."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    def log_message(self, format: str, *arguments: Any) -> None: ...

    def do_GET(self) -> None:
        if self.path == "/version":
            return self.reply(200, {"version": version("transformers")})
        model = self.server.model
        sizes = {"max_model_len": model.context_limit, "vocab_size": model.vocab_size}
        return self.reply(200, {"data": [{"id": "transformers", "owned_by": "transformers", **sizes}]})

    def do_POST(self) -> None:
        body = self.body()
        if self.path != "/v1/completions":
            return self.reply(404, {"error": "no such path"})
        if not isinstance(body["prompt"], list):
            return self.reply(400, {"error": "a prompt is a list of token ids here"})
        return self.stream(body, body["prompt"])

    def choice(self, token: int, body: dict[str, Any]) -> dict[str, Any]:
        """One token as a piece of a stream."""
        return {"text": "", "token_ids": [token]}

    def body(self) -> dict[str, Any]:
        return dict(json.loads(self.rfile.read(int(self.headers.get("content-length") or 0)) or b"{}"))

    def stream(self, body: dict[str, Any], prompt: list[int]) -> None:
        """Answer token by token. When the caller hangs up, sending fails, and the answer ends."""
        self.send_response(200)
        self.send_header("content-type", "text/event-stream")
        self.send_header("transfer-encoding", "chunked")
        self.end_headers()
        count, least, ignore_eos = 0, body.get("min_tokens", 0), bool(body.get("ignore_eos"))
        for token in self.server.model.answer(prompt, body["max_tokens"], least=least, ignore_eos=ignore_eos):
            count += 1
            self._event({"choices": [self.choice(token, body)]})
        usage = {"prompt_tokens": len(prompt), "completion_tokens": count}
        self._event({"choices": [], "usage": usage | {"prompt_tokens_details": {"cached_tokens": 0}}})
        self._chunk(b"data: [DONE]\n\n")
        self._chunk(b"")

    def reply(self, status: int, value: Any) -> None:
        data = json.dumps(value).encode()
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def _event(self, value: Any) -> None:
        self._chunk(b"data: " + json.dumps(value).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(f"{len(data):x}\r\n".encode() + data + b"\r\n")


@click.command(context_settings={"show_default": True})
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--port", type=click.IntRange(0, 65535), default=0, help="0: a free one.")
@click.option("--device", type=click.Choice(["cpu", "cuda"]), default="cpu")
@click.option("--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32")
@click.option("--threads", type=click.IntRange(min=1), default=1, metavar="N", help="On the CPU.")
def main(folder: Path, port: int, device: str, dtype: str, threads: int) -> None:
    """Serve the model in FOLDER."""
    server = Server(Model(folder, device=device, dtype=dtype, threads=threads), port)
    click.echo(f"listening {server.server_port}")
    server.serve_forever()


if __name__ == "__main__":
    main()
