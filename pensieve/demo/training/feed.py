"""Writes training rows in worker processes, so that the accelerator never waits for text."""

from __future__ import annotations

import ctypes
import os
import queue
import threading
from collections.abc import Generator
from multiprocessing import get_context
from multiprocessing.queues import Queue
from multiprocessing.sharedctypes import Synchronized
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from pensieve.demo.training.packing import Packer

_ITEM_TOKENS = 16384


def _work(tokenizer_file: Path, seed: str, length: Synchronized[int], out: Queue[Any]) -> None:
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # one process, one core
    packer = Packer(tokenizer_file, seed, held_out=False)
    while True:
        wanted = length.value
        rows = [packer.row(wanted) for _ in range(max(1, _ITEM_TOKENS // wanted))]
        out.put((wanted, np.stack([row.ids for row in rows]), np.stack([row.weights for row in rows])))


class Feed:
    """Batches of fresh rows. Start it before the first CUDA call: the workers are forked."""

    def __init__(self, tokenizer_file: Path, seed: str, length: int, workers: int) -> None:
        context = get_context("fork")
        self._length: Any = context.Value(ctypes.c_int, length)
        self._queue: Any = context.Queue(maxsize=8 * workers)
        self._processes = [
            context.Process(
                target=_work, args=(tokenizer_file, f"{seed} {n}", self._length, self._queue), daemon=True
            )
            for n in range(workers)
        ]
        for process in self._processes:
            process.start()

    def batches(
        self, length: int, rows: int, device: torch.device
    ) -> Generator[tuple[Tensor, Tensor], None, None]:
        """Endless (ids int64 [rows, length], weights fp32 [rows, length]) on the device, three ahead."""
        self._length.value = length
        ready: queue.Queue[tuple[Tensor, Tensor]] = queue.Queue(maxsize=3)
        stop = threading.Event()

        def assemble() -> None:
            ids: list[np.ndarray[Any, Any]] = []
            weights: list[np.ndarray[Any, Any]] = []
            while not stop.is_set():
                made_for, some_ids, some_weights = self._queue.get()
                if made_for != length:  # written before the workers saw that the length has changed
                    continue
                ids.append(some_ids)
                weights.append(some_weights)
                if sum(map(len, ids)) < rows:
                    continue
                batch = torch.from_numpy(np.concatenate(ids)[:rows].astype(np.int64))
                weight = torch.from_numpy(np.concatenate(weights)[:rows].astype(np.float32))
                ids, weights = [], []
                item = (batch.to(device), weight.to(device))
                while not stop.is_set():  # a plain put would wait for ever once nobody reads
                    try:
                        ready.put(item, timeout=0.5)
                        break
                    except queue.Full:
                        continue

        thread = threading.Thread(target=assemble, daemon=True)
        thread.start()
        try:
            while True:
                yield ready.get()
        finally:
            stop.set()

    def close(self) -> None:
        """Ends the workers."""
        for process in self._processes:
            process.terminate()
