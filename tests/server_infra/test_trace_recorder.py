"""The recorder of ``--record`` by itself: rows, and disks that are full, slow or somebody else's."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import EngineTuning
from pensieve.core import Usage
from pensieve.engine.messages import EngineReady
from pensieve.server.operations.recording import TraceRecorder, header, open_recorder
from pensieve.server.values import TurnEnd
from pensieve.store import Key


def rows(trace: Path) -> list[dict[str, Any]]:
    """The turns, behind one header."""
    return [json.loads(line) for line in trace.read_text().splitlines()[1:]]


def ended(number: int) -> TurnEnd:
    usage = Usage(context_tokens=5, new_tokens=5, output_tokens=3)
    return TurnEnd(Key("acme", f"s{number}"), "length", True, 5, 5, usage, 1.0, 1.5, 2.0)


class FailingFile(FileIO):
    """A disk with room for so many bytes."""

    room = 0

    def write(self, data: Any, /) -> int:
        taken = min(len(data), self.room)
        if not taken:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= taken
        return super().write(memoryview(data)[:taken])


@asynccontextmanager
async def recording(path: Path, room: int) -> AsyncIterator[TraceRecorder]:
    file = FailingFile(path, "ab")
    file.room = room
    recorder = TraceRecorder(file, compressed=False)
    info = EngineReady(
        context_limit=9,
        vocab_size=9,
        device="cpu",
        dtype="float32",
        device_capacity_tokens=9,
        host_capacity_tokens=0,
        chunk_tokens=1,
    )
    recorder.start(header(info, EngineTuning()))
    yield recorder
    await recorder.close()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


async def test_a_row_in_full(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with recording(path, 10_000) as recorder:
        start = asyncio.get_running_loop().time()
        usage = Usage(
            context_tokens=15,
            new_tokens=5,
            gpu_cached_tokens=1,
            swapped_in_tokens=2,
            recomputed_tokens=7,
            output_tokens=3,
            queue_s=0.25,
        )
        recorder.turn_ended(
            TurnEnd(
                Key("acme", "s"), "cancelled", True, 15, 5, usage, start + 1000, start + 1000.5, start + 1500
            )
        )
    (row,) = rows(path)
    assert len(row.pop("session_id")) == 32
    assert 1000 <= row.pop("timestamp_s") < 1100
    assert row == {
        "turn": 0,
        "input_tokens": 15,
        "output_tokens": 3,
        "context_tokens": 15,
        "gpu_cached_tokens": 1,
        "swapped_in_tokens": 2,
        "recomputed_tokens": 7,
        "queue_s": 0.25,
        "ttft_s": 0.5,
        "end_s": 500.0,
        "finish_reason": "cancelled",
        "committed": True,
    }


async def test_a_turn_that_was_never_admitted_has_its_length(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    async with recording(path, 10_000) as recorder:
        recorder.turn_ended(TurnEnd(Key("a", "s"), "queue_full", False, 15, 5, Usage(), 1.0, None, 2.0))
        recorder.turn_ended(TurnEnd(Key("a", "s"), "length", True, 14, 4, Usage(), 1.0, 2.0, 3.0))
    refused, served = rows(path)
    assert (refused["input_tokens"], refused["context_tokens"], refused["ttft_s"]) == (15, 15, None)
    assert (served["input_tokens"], served["turn"], served["session_id"]) == (14, 0, refused["session_id"])


@pytest.mark.parametrize("room", [0, 700])
async def test_a_full_disk_ends_the_recording_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("pensieve.server.operations.recording.FLUSH_S", 0.0)
    path = tmp_path / "trace.jsonl"
    async with recording(path, room) as recorder:
        for number in range(50):
            recorder.turn_ended(ended(number))
            await asyncio.sleep(0)
    assert len(errors(caplog)) == 1 and os.strerror(errno.ENOSPC) in errors(caplog)[0]
    assert all(json.loads(line) for line in path.read_text().splitlines()), "no half lines"


async def test_a_disk_that_hangs_costs_no_memory_and_no_waiting(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pensieve.server.operations.recording.QUEUED_ROWS", 10)
    monkeypatch.setattr("pensieve.server.operations.recording.FLUSH_S", 0.0)
    free = threading.Event()

    def hang(_: FileIO, data: Any, /) -> int:
        free.wait()
        return len(data)

    monkeypatch.setattr(FailingFile, "write", hang)
    async with recording(tmp_path / "trace.jsonl", 0) as recorder:
        for number in range(50):
            recorder.turn_ended(ended(number))
        assert len(errors(caplog)) == 1 and "too slow" in errors(caplog)[0]
        free.set()
    assert len(errors(caplog)) == 1


def test_a_file_has_one_writer(tmp_path: Path) -> None:
    first = open_recorder(tmp_path / "trace.jsonl")
    with pytest.raises(OSError, match="another server"):
        open_recorder(tmp_path / "trace.jsonl")
    asyncio.run(first.close())
    asyncio.run(open_recorder(tmp_path / "trace.jsonl").close())
