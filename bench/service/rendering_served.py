"""How long one tenant's turns take beside another's imports of long histories, over gRPC and over HTTP.

    python bench/service/rendering_served.py FOLDER...

FOLDER holds tokenizer.json and tokenizer_config.json. A server with that tokenizer and a very small random model serves
two tenants. One takes one-word turns of four tokens, each in a new session: alone, and beside four imports at a time of
histories of 2,000 messages of the other tenant. Over gRPC these are CreateSession and AppendItems; over HTTP a response
to the whole history, so that the model computes it, too. The last line is one JSON document, in milliseconds.
``bench/results/rendering.md`` has results.
"""

from __future__ import annotations

import asyncio
import json
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any, Final

import click
import httpx2 as httpx

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.servers import write_keys

from pensieve.client import AsyncClient, Role
from pensieve.spawn import ServerProcess
from pensieve.tokenizer import ChatTokenizer

MESSAGES: Final = 2000
AT_ONCE: Final = 4
MOST_IN_A_CALL: Final = 1000
MODEL: Final = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 32, "intermediate_size": 64,
    "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "hidden_act": "silu",
    "max_position_embeddings": 65536, "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "tie_word_embeddings": True,
    "attention_bias": False, "mlp_bias": False, "torch_dtype": "float32",
}  # fmt: skip
KEYS: Final = {"acme": "secret", "flood": "water"}
Work = Callable[[], Awaitable[None]]


def bearer(tenant: str) -> str:
    return f"ck_{tenant}_{KEYS[tenant]}"


def model_folder(source: Path, into: Path) -> Path:
    """A checkpoint of random weights with the tokenizer and the template of ``source``."""
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        if (source / name).exists():
            shutil.copy(source / name, into / name)
    tokenizer = ChatTokenizer.from_folder(source, allow_rewriting=True)
    config = {**MODEL, "vocab_size": tokenizer.vocab_size, "eos_token_id": 0}
    (into / "config.json").write_text(json.dumps(config))
    return into


async def times(work: Work, seconds: float) -> list[float]:
    """Milliseconds of one call after another."""
    took: list[float] = []
    until = time.perf_counter() + seconds
    while time.perf_counter() < until:
        began = time.perf_counter()
        await work()
        took.append((time.perf_counter() - began) * 1e3)
        await asyncio.sleep(0.02)
    return took


async def compared(turn: Work, imported: Work, seconds: float) -> dict[str, float]:
    """The turns alone, and beside the imports."""
    for _ in range(5):
        await turn()
    alone = await times(turn, seconds / 2)
    imports, over = 0, False

    async def flood() -> None:
        nonlocal imports
        while not over:
            await imported()
            imports += 1

    floods = [asyncio.create_task(flood()) for _ in range(AT_ONCE)]
    await asyncio.sleep(0.5)
    beside = await times(turn, seconds)
    over = True
    await asyncio.gather(*floods)
    return {
        **{f"alone_{name}": value for name, value in told(alone).items()},
        **{f"beside_{name}": value for name, value in told(beside).items()},
        "imports": imports,
    }


def told(took: list[float]) -> dict[str, float]:
    p99 = statistics.quantiles(took, n=100)[98]
    return {"p50": round(statistics.median(took), 1), "p99": round(p99, 1), "most": round(max(took), 1)}


async def over_grpc(target: str, seconds: float) -> dict[str, float]:
    history = [(Role.USER if number % 2 == 0 else Role.ASSISTANT, "a") for number in range(MESSAGES)]
    async with (
        AsyncClient(target, api_key=bearer("acme")) as acme,
        AsyncClient(target, api_key=bearer("flood")) as flood,
    ):

        async def turn() -> None:
            await (await acme.create_session()).send("hi", max_output_tokens=4)

        async def imported() -> None:
            session = await flood.create_session(initial_items=history[:MOST_IN_A_CALL])
            for first in range(MOST_IN_A_CALL, MESSAGES, MOST_IN_A_CALL):
                await session.append(history[first : first + MOST_IN_A_CALL])
            await session.delete()

        return await compared(turn, imported, seconds)


async def over_http(address: str, seconds: float) -> dict[str, float]:
    history = [
        {"type": "message", "role": "user" if number % 2 == 0 else "assistant", "content": "a"}
        for number in range(MESSAGES)
    ]
    async with httpx.AsyncClient(base_url=f"http://{address}", timeout=120) as http:

        async def post(tenant: str, path: str, body: Any) -> None:
            answer = await http.post(path, json=body, headers={"Authorization": f"Bearer {bearer(tenant)}"})
            answer.raise_for_status()

        async def turn() -> None:
            await post("acme", "/v1/responses", {"input": "hi", "max_output_tokens": 4, "store": False})

        async def imported() -> None:
            asked = {
                "input": [*history, {"role": "user", "content": "hi"}],
                "max_output_tokens": 1,
                "store": False,
            }
            await post("flood", "/v1/responses", asked)

        return await compared(turn, imported, seconds)


def measure(source: Path, seconds: float) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="pensieve-bench-") as place:
        folder = Path(place)
        keys = folder / "keys.toml"
        write_keys(keys, KEYS)
        model = folder / "model"
        model.mkdir()
        options = f"--load-format dummy --allow-rewriting-template --api-keys {keys} --log-level error"
        store = f"sqlite:///{folder}/history.sqlite3"
        words = ("--model", str(model_folder(source, model)), "--store", store, *options.split())
        with ServerProcess(*words, "--http", "127.0.0.1:0", listen="127.0.0.1:0") as server:
            return {
                "gRPC": asyncio.run(over_grpc(server.target, seconds)),
                "HTTP": asyncio.run(over_http(server.http, seconds)),
            }


@click.command(context_settings={"show_default": True})
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
@click.option("--seconds", default=15.0)
def main(folders: tuple[Path, ...], seconds: float) -> None:
    """Print one JSON document: milliseconds by model folder and protocol."""
    found = {}
    for folder in folders:
        found[folder.name] = measure(folder, seconds)
        click.echo(f"{folder.name}: {found[folder.name]}", err=True)
    click.echo(json.dumps(found))


if __name__ == "__main__":
    main()
