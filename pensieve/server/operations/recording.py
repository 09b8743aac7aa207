"""``--record``: a trace of the turns as lengths and times, for ``pensieve replay`` and ``pensieve simulate``.

One JSON object per line: a ``TraceHeader`` per start of a server, a ``TraceRow`` per turn as it ends. The trace never
holds text, token ids, or names of tenants and sessions: a session is a hash with a salt drawn at start and never
stored. Recording never delays or breaks serving: rows pass through a bounded queue to a thread. When the disk takes
no writes, recording pauses and retries; rows that do not fit into the queue are lost.
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import gzip
import hashlib
import logging
import os
import queue
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from io import FileIO
from pathlib import Path
from typing import Final

import msgspec

import pensieve
from pensieve.config import EngineTuning, batch_limits
from pensieve.engine.messages import EngineReady
from pensieve.server.values import TurnEnd
from pensieve.store import Key

log = logging.getLogger(__name__)

SCHEMA: Final = "pensieve.trace/1"
FLUSH_S: Final = 1.0
QUEUED_ROWS: Final = 1 << 16
"""Rows that may wait for the disk. Further rows are lost, so that memory stays bounded."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""Backoff after a failed write: doubles up to this."""
MAX_TRACKED_SESSIONS: Final = 1 << 18
CLOSE_S: Final = 5.0


_HEADER: Final = b'{"pensieve":'


class TraceHeader(msgspec.Struct, frozen=True):
    """Setup of the server: enough to replay or simulate with the same engine."""

    pensieve: str
    engine: dict[str, str | int | float | bool]
    schema: str = SCHEMA


class TraceRow(msgspec.Struct, frozen=True):
    """One turn that held its session. Times in seconds; ``timestamp_s`` counts from the header.

    ``input_tokens`` and ``output_tokens`` of a session's committed rows add up to each ``context_tokens``. A turn
    that does not continue the row before it (after a fork, rewind, regeneration or overflow, or with history from
    before the recording) therefore begins a new ``session_id`` with its whole context as input. Its receipt tells how
    much was cached.
    """

    session_id: str
    turn: int
    """Turn number within the session, from 0. A turn that was not committed shares its number with the next."""
    input_tokens: int
    """0 only for a turn that was refused before it was rendered."""
    output_tokens: int
    timestamp_s: float
    context_tokens: int
    gpu_cached_tokens: int
    swapped_in_tokens: int
    recomputed_tokens: int
    """The receipt, as in ``Usage``; all zero for a turn that was never admitted. The rest of the context was new."""
    queue_s: float
    ttft_s: float | None
    """Seconds from arrival to the first token; null: there was none."""
    end_s: float
    finish_reason: str
    """Finish reason or error reason, in lower case."""
    committed: bool


def header(info: EngineReady, options: EngineTuning) -> TraceHeader:
    """Return the header for an engine that reports ``info`` and was started with ``options``."""
    batch_tokens, running = batch_limits(options, "cuda" if info.device == "cuda" else "cpu")
    engine: dict[str, str | int | float | bool] = {
        "device": info.device,
        "dtype": info.dtype,
        "weights": info.weights,
        "kv": info.kv,
        "vocab_size": info.vocab_size,
        "context_limit": info.context_limit,
        "chunk_tokens": info.chunk_tokens,
        "device_tokens": info.device_capacity_tokens,
        "host_tokens": info.host_capacity_tokens,
        "device_bytes": info.device_bytes,
        "host_bytes": info.host_bytes,
        "policy": options.policy,
        "swap_watermark": options.swap_watermark,
        "decode_reserve": options.decode_reserve,
        "max_batch_tokens": batch_tokens,
        "max_running": running,
        "max_queued": options.max_queued,
        "stateless": options.stateless,
        "unified_batch": options.unified_batch,
        "swap_in_first": options.swap_in_first,
        "prefix_sharing": options.prefix_sharing,
    }
    return TraceHeader(pensieve.__version__, engine)


class _TrackedSession:
    """A session's state in the trace."""

    __slots__ = ("session_id", "tokens", "turn")

    def __init__(self, session_id: str, tokens: int) -> None:
        self.session_id = session_id
        self.turn = 0
        self.tokens = tokens


class SessionTracker:
    """Assigns each turn its session hash, turn number and input length; see ``TraceRow``."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._ids_made = 0
        self._tracked: OrderedDict[Key, _TrackedSession] = OrderedDict()

    def forget(self, key: Key) -> None:
        """Forget a session after one of its rows was lost. Its next row begins a new session in the trace."""
        self._tracked.pop(key, None)

    def number_turn(self, end: TurnEnd) -> tuple[str, int, int]:
        """Return ``session_id``, ``turn`` and ``input_tokens`` of the turn's row."""
        before = end.context_tokens - end.new_tokens
        session = self._tracked.get(end.key)
        # A turn that was refused before rendering has no context tokens, changed nothing and continues the session. A
        # turn without new input regenerates an answer: by lengths, it does not continue the session.
        if session is None or (end.context_tokens and not (session.tokens == before and end.new_tokens)):
            session = self._tracked[end.key] = _TrackedSession(self._new_id(end.key), before)
        self._tracked.move_to_end(end.key)
        if len(self._tracked) > MAX_TRACKED_SESSIONS:
            self._tracked.popitem(last=False)
        turn = session.turn
        if end.committed:
            session.turn += 1
            session.tokens = end.context_tokens + end.usage.output_tokens
        return session.session_id, turn, end.new_tokens if turn else end.context_tokens

    def _new_id(self, key: Key) -> str:
        self._ids_made += 1
        name = f"{self._ids_made}\0{key.tenant}\0{key.session_id}".encode()
        return hashlib.blake2b(name, key=self._salt, digest_size=16).hexdigest()


class TraceRecorder:
    """Owns the trace file. ``start`` once, ``turn_ended`` on the event loop, ``close`` at the end."""

    def __init__(
        self,
        file: FileIO,
        *,
        compressed: bool,
        on_rows: Callable[[str, int], None] = lambda _outcome, _rows: None,
    ) -> None:
        """``file``: unbuffered, opened for appending. ``compressed``: rows are gzipped. ``on_rows``: called from any
        thread with ``written`` or ``lost`` and the number of turns."""
        self._file = file
        self._compressed = compressed
        self._sessions = SessionTracker()
        self._started_at = 0.0
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUED_ROWS)
        self._on_rows = on_rows
        self._state = threading.Lock()
        self._paused = False
        """Whether the pause was logged. Guarded by ``_state``, as ``_lost`` is."""
        self._lost = 0
        """Turns lost since the pause began."""
        self._closing = threading.Event()
        self._good_size: int | None = None
        """File size before the failed write."""
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)

    def start(self, head: TraceHeader) -> None:
        self._started_at = asyncio.get_running_loop().time()
        self._thread.start()
        self._lines.put_nowait(msgspec.json.encode(head))

    def turn_ended(self, end: TurnEnd) -> None:
        """Record a turn. Never blocks or raises."""
        if self._closing.is_set() or not self._started_at:
            return
        session_id, turn, input_tokens = self._sessions.number_turn(end)
        first = end.first_token_at
        row = TraceRow(
            session_id=session_id,
            turn=turn,
            input_tokens=input_tokens,
            output_tokens=end.usage.output_tokens,
            timestamp_s=_rounded(end.arrived_at - self._started_at),
            context_tokens=end.context_tokens,
            gpu_cached_tokens=end.usage.gpu_cached_tokens,
            swapped_in_tokens=end.usage.swapped_in_tokens,
            recomputed_tokens=end.usage.recomputed_tokens,
            queue_s=_rounded(end.usage.queue_s),
            ttft_s=None if first is None else _rounded(first - end.arrived_at),
            end_s=_rounded(end.ended_at - end.arrived_at),
            finish_reason=end.outcome,
            committed=end.committed,
        )
        try:
            self._lines.put_nowait(msgspec.json.encode(row))
        except queue.Full:
            self._sessions.forget(end.key)
            self._pause("the disk is too slow")
            self._lose(1)

    async def close(self) -> None:
        """Flush the queue, unless the disk takes too long, and close the file."""
        await asyncio.to_thread(self._close)

    # ---- parts

    def _pause(self, why: object) -> None:
        with self._state:
            was_paused, self._paused = self._paused, True
        if not was_paused:
            log.error("recording is paused until the disk takes writes: %s", why)

    def _resume(self) -> None:
        with self._state:
            was_paused, lost = self._paused, self._lost
            self._paused, self._lost = False, 0
        if was_paused:
            log.warning("recording resumed; %d turns are missing", lost)

    def _lose(self, rows: int) -> None:
        with self._state:
            self._lost += rows
        self._on_rows("lost", rows)

    def _close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):  # the writer hangs on the disk; the join below reports it
                self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._pause("the disk does not answer")
            return  # closing the file would hang as well; the process ends without it
        try:
            self._file.close()
        except OSError as error:
            self._pause(error)

    def _write(self) -> None:
        """Body of the thread. All rows that come within ``FLUSH_S`` are written at once."""
        more = True
        while more:
            lines, more = self._next_lines()
            if lines:
                self._write_with_retries(lines)

    def _write_with_retries(self, lines: list[bytes]) -> None:
        """Write the lines, retrying until it succeeds; during shutdown, try once."""
        data = b"".join(line + b"\n" for line in lines)
        turns = len(lines) - sum(line.startswith(_HEADER) for line in lines)
        pause, last = FIRST_PAUSE_S, False
        while True:
            last = self._closing.is_set()
            try:
                self._append(data)
            except OSError as error:
                self._pause(error)
                if last:
                    self._lose(turns)
                    return
                self._closing.wait(pause)
                pause = min(2 * pause, LONGEST_PAUSE_S)
            else:
                self._on_rows("written", turns)
                self._resume()
                return

    def _next_lines(self) -> tuple[list[bytes], bool]:
        """Return the lines to write and whether more may come."""
        line = self._lines.get()
        until = time.monotonic() + FLUSH_S
        lines: list[bytes] = []
        while line is not None:
            lines.append(line)
            try:
                line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
            except queue.Empty:
                return lines, True
        return lines, False

    def _append(self, data: bytes) -> None:
        """Append all of ``data``, or none if possible: half a line would corrupt what is appended later."""
        if self._compressed:
            # Each write is its own gzip member, so earlier members stay readable whatever happens next.
            # mtime=0: no time of day.
            data = gzip.compress(data, mtime=0)
        size = self._file.seek(0, os.SEEK_END)
        if self._good_size is not None and size > self._good_size:  # half a line is still there
            self._file.truncate(self._good_size)
            size = self._good_size
        remaining = memoryview(data)
        try:
            while remaining:
                remaining = remaining[self._file.write(remaining) or 0 :]
        except OSError:
            self._good_size = size
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._good_size = None


def open_recorder(
    path: Path, on_rows: Callable[[str, int], None] = lambda _outcome, _rows: None
) -> TraceRecorder:
    """Return a recorder that appends to ``path``, gzipped if it ends in ``.gz``. One server per file. ``on_rows``:
    see ``TraceRecorder``. Raises OSError when the file cannot be written or another server writes to it."""
    try:
        file = FileIO(path, "ab")
    except OSError as error:
        raise OSError(f"--record: cannot write to {path}: {error.strerror}") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise OSError(f"--record: another server is writing to {path}") from error
    return TraceRecorder(file, compressed=path.suffix == ".gz", on_rows=on_rows)


def _rounded(seconds: float) -> float:
    return round(seconds, 6)
