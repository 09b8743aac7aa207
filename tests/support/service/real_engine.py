"""A real engine on a tiny random checkpoint, in a thread of the test, behind the whole service."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import torch

from pensieve.config import EngineOptions
from pensieve.engine.build import build_engine
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Event
from pensieve.tokenizer import ChatTokenizer
from support.engine.checkpoints import tiny_checkpoint
from support.engine.hf_oracle import HfOracle
from support.service.inprocess_link import InProcessLink
from support.service.service_rig import Rig, serving
from support.tokenizers_ import CHATML, byte_level, write_folder

VOCAB = 432
"""Rows of the embedding: more than the tokenizer has tokens."""


@dataclass
class TinyModel:
    """A checkpoint with its tokenizer, and what transformers makes of it."""

    folder: Path

    @cached_property
    def oracle(self) -> HfOracle:
        return HfOracle(self.folder)

    @classmethod
    def make(cls, below: Path) -> TinyModel:
        folder = tiny_checkpoint("llama3", below, vocab_size=VOCAB)
        write_folder(folder, byte_level(), CHATML, bos=None, eos="<|im_end|>")
        return cls(folder)

    def expected(self, context: list[int]) -> torch.Tensor:
        """Log-probabilities after each token of ``context``, float32 [n, vocab]."""
        return self.oracle.logprobs(context)


class DyingEngine:
    """An engine that fails after some steps with work; the next one that is built lives."""

    def __init__(self, engine: Engine, steps: int) -> None:
        self._engine = engine
        self._left = steps

    def step(self) -> list[Event]:
        if self._engine.has_work:
            self._left -= 1
            if self._left < 0:
                raise RuntimeError("broken on purpose")
        return self._engine.step()

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


@asynccontextmanager
async def really_serving(
    model: TinyModel, *, device: str = "1024tokens", dies_after: int | None = None, **rig: object
) -> AsyncIterator[Rig]:
    """``device``: room for KV on the device. ``dies_after``: steps of the first engine."""
    options = EngineOptions(
        model=str(model.folder),
        device_cache=device,
        host_cache="64tokens",
        chunk_tokens=8,
        dtype="float32",
        torch_threads=1,
    )
    lives = 0

    def build() -> Engine:
        nonlocal lives
        lives += 1
        engine = build_engine(options)
        if dies_after is None or lives > 1:
            return engine
        return DyingEngine(engine, dies_after)  # type: ignore[return-value]

    link = InProcessLink(build)
    await link.start()
    try:
        async with serving(link=link, speaks=ChatTokenizer.from_folder(model.folder), **rig) as service:  # type: ignore[arg-type]
            yield service
    finally:
        await link.stop()
