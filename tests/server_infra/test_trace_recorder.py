"""The recorder of ``--record`` by itself: rows, and disks that are full, slow or somebody else's."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import threading
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import FileIO
from pathlib import Path
from typing import Any

import pytest

from pensieve.config import EngineTuning
from pensieve.core import Usage
from pensieve.engine.messages import EngineReady
from pensieve.replay.load.workload import load
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
async def recording(
    path: Path, room: int, counted: Counter[str] | None = None
) -> AsyncIterator[TraceRecorder]:
    """``counted``: turns by what became of them."""
    file = FailingFile(path, "ab")
    file.room = room
    counts = Counter[str]() if counted is None else counted
    recorder = TraceRecorder(file, compressed=False, on_rows=lambda what, rows: counts.update({what: rows}))
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
async def test_a_full_disk_pauses_the_recording_with_one_log_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    monkeypatch.setattr("pensieve.server.operations.recording.FLUSH_S", 0.0)
    path = tmp_path / "trace.jsonl"
    counted = Counter[str]()
    async with recording(path, room, counted) as recorder:
        for number in range(50):
            recorder.turn_ended(ended(number))
            await asyncio.sleep(0)
    assert len(errors(caplog)) == 1 and os.strerror(errno.ENOSPC) in errors(caplog)[0]
    lines = path.read_text().splitlines()
    assert all(json.loads(line) for line in lines), "no half lines"
    assert counted["written"] == max(0, len(lines) - 1) and counted["written"] + counted["lost"] == 50


@pytest.mark.parametrize("left", ["cut", "uncut"])
async def test_the_recording_goes_on_when_there_is_room_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch, left: str
) -> None:
    """Rows that waited are in it; a session with a lost row is another one behind the gap."""
    module = "pensieve.server.operations.recording"
    monkeypatch.setattr(f"{module}.FLUSH_S", 0.0)
    monkeypatch.setattr(f"{module}.FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(f"{module}.LONGEST_PAUSE_S", 0.01)
    monkeypatch.setattr(f"{module}.QUEUED_ROWS", 4)
    tried = threading.Event()
    append = TraceRecorder._append

    def appending(recorder: TraceRecorder, data: bytes) -> None:
        try:
            append(recorder, data)
        except OSError:
            tried.set()
            raise

    monkeypatch.setattr(TraceRecorder, "_append", appending)
    if left == "uncut":  # a half line stays, because the disk does not even take it back

        def truncate(file: FailingFile, size: int | None = None) -> int:
            if not file.room:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return FileIO.truncate(file, size)

        monkeypatch.setattr(FailingFile, "truncate", truncate)
    path = tmp_path / "trace.jsonl"
    counted = Counter[str]()
    async with recording(path, 600, counted) as recorder:
        while not tried.is_set():
            recorder.turn_ended(ended(0))
            await asyncio.sleep(0.001)
        for number in range(1, 20):  # more than wait
            recorder.turn_ended(ended(number))
        assert counted["lost"] >= 15
        recorder._file.room = 1 << 20  # type: ignore[attr-defined]
        while recorder._paused or recorder._lines.qsize():
            await asyncio.sleep(0.001)
        goes_on = Usage(context_tokens=13, new_tokens=5, output_tokens=3)
        recorder.turn_ended(TurnEnd(Key("acme", "s19"), "length", True, 13, 5, goes_on, 1.0, 1.5, 2.0))
    said = [one.getMessage() for one in caplog.records if "recording" in one.getMessage()]
    assert len(said) == 2 and "paused" in said[0] and "resumed" in said[1]
    assert f"{counted['lost']} turns" in said[1]
    found = rows(path)
    assert len(found) == counted["written"]
    assert (found[-1]["turn"], found[-1]["input_tokens"]) == (0, 13), "its session lost a turn"
    assert len(load(path).conversations) == len(found), "a trace with a gap is one"


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
