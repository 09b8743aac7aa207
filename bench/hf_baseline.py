"""The baseline without state: transformers ``generate`` over the whole history, one turn at a time, in arrival order.

As a program it replays a dataset against that alone; ``replay_compare.py`` sets it beside Pensieve.

    python bench/hf_baseline.py DATASET --model FOLDER --json FILE
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from pathlib import Path
from typing import Any

import click
import torch
from rich.console import Console
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from pensieve.core import Usage
from pensieve.replay.command import make_plan, run_with_progress, wide_console, workload_options
from pensieve.replay.table import show
from pensieve.replay.targets import OnTokens, TargetInfo, TurnFailed, TurnSpec


class Arrivals(BaseStreamer):
    """Tells the time of every token; ``generate`` shows it the prompt first."""

    def __init__(self, on_tokens: OnTokens) -> None:
        self._on_tokens = on_tokens
        self._prompt_seen = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            self._on_tokens(value.numel(), time.perf_counter())
        self._prompt_seen = True

    def end(self) -> None: ...


class HuggingFaceTarget:
    """Histories live here as token ids; nothing else outlives a turn."""

    name = "transformers generate"

    def __init__(
        self, folder: Path, *, dtype: str = "float32", device: str = "cpu", threads: int = 0
    ) -> None:
        self._folder, self._dtype, self._device, self._threads = folder, dtype, device, threads
        self._model: Any = None
        self._histories: dict[str, torch.Tensor] = {}
        self._turns = asyncio.Lock()  # first come, first served

    async def open(self) -> TargetInfo:
        torch.set_num_threads(self._threads or os.cpu_count() or 1)
        self._model = AutoModelForCausalLM.from_pretrained(self._folder, dtype=getattr(torch, self._dtype))
        self._model.to(self._device).eval()
        config = self._model.config
        details = {"model": str(self._folder.name), "dtype": self._dtype, "device": self._device}
        return TargetInfo(config.vocab_size, config.max_position_embeddings, details)

    async def start_session(self) -> str:
        name = str(len(self._histories))
        self._histories[name] = torch.empty(0, dtype=torch.int64)
        return name

    async def turn(self, session: str, spec: TurnSpec, on_tokens: OnTokens) -> Usage | None:
        context = torch.cat([self._histories[session], torch.from_numpy(spec.input_ids).to(torch.int64)])
        asked = time.perf_counter()
        async with self._turns:
            queued = time.perf_counter() - asked
            whole = await asyncio.to_thread(self._generate, context, spec, on_tokens)
        recomputed = len(self._histories[session])
        self._histories[session] = whole
        return Usage(
            context_tokens=len(context),
            new_tokens=len(spec.input_ids),
            recomputed_tokens=recomputed,
            output_tokens=len(whole) - len(context),
            queue_s=queued,
        )

    async def end_session(self, session: str) -> None:
        del self._histories[session]

    async def close(self) -> None:
        self._model = None

    def _generate(self, context: torch.Tensor, spec: TurnSpec, on_tokens: OnTokens) -> torch.Tensor:
        ids = context[None].to(self._device)
        try:
            with torch.inference_mode():
                out = self._model.generate(
                    ids,
                    attention_mask=torch.ones_like(ids),
                    do_sample=False,
                    max_new_tokens=spec.output_tokens,
                    min_new_tokens=spec.output_tokens if spec.forced else None,
                    pad_token_id=0,
                    streamer=Arrivals(on_tokens),
                )
        except (RuntimeError, ValueError) as error:
            raise TurnFailed("GENERATE", str(error)) from error
        history: torch.Tensor = out[0].cpu()
        return history


@click.command()
@workload_options
@click.option("--model", type=click.Path(exists=True, file_okay=False, path_type=Path), required=True)
@click.option(
    "--dtype", type=click.Choice(["float32", "bfloat16", "float16"]), default="float32", show_default=True
)
@click.option("--device", default="cpu", show_default=True)
@click.option("--threads", type=click.IntRange(min=0), default=0, help="CPU threads; 0: all cores.")
@click.option("--json", "json_file", type=click.Path(dir_okay=False, path_type=Path))
def main(model: Path, dtype: str, device: str, threads: int, json_file: Path | None, **workload: Any) -> None:
    """Replay DATASET against transformers."""
    target = HuggingFaceTarget(model, dtype=dtype, device=device, threads=threads)
    report = run_with_progress(make_plan(**workload), [target], Console(stderr=True))
    report["command"] = ["python", *sys.argv]
    show(report, wide_console())
    if json_file is not None:
        json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
