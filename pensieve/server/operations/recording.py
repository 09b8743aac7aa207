"""``--record``: a trace of what is served, as lengths and times, for ``pensieve replay`` and ``pensieve simulate``.

One JSON object per line: a header (``TraceHeader``) per start of a server, a row (``TraceRow``) per turn as it ends.
Never text, token ids, or names of tenants and sessions: a session is a hash under a salt that is drawn at start and
kept nowhere. Recording never holds up or breaks serving: rows go through a bounded queue to a thread of its own. When
the disk takes none, the recording pauses, tries again and goes on; rows that the queue has no room for are lost.
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
"""A row is in the file at most this much later."""
QUEUED_ROWS: Final = 1 << 16
"""Rows that wait for the disk. Further ones are lost, instead of taking ever more memory."""
FIRST_PAUSE_S: Final = 1.0
LONGEST_PAUSE_S: Final = 30.0
"""After a failed write it is tried again, each time twice as late, and at least this often."""
SESSIONS: Final = 1 << 18
"""Number of sessions that are followed; one that comes back after so many others is a new one in the trace."""
CLOSE_S: Final = 5.0
"""How long the end of a server waits for the disk."""


_HEADER: Final = b'{"pensieve":'
"""What the line of a header begins with."""


class TraceHeader(msgspec.Struct, frozen=True):
    """How the server was set up: enough to replay or simulate with the same engine."""

    pensieve: str
    """Version of the server."""
    engine: dict[str, str | int | float | bool]
    schema: str = SCHEMA


class TraceRow(msgspec.Struct, frozen=True):
    """One turn that held its session. Seconds; ``timestamp_s`` counts from the header.

    ``input_tokens`` and ``output_tokens`` of a session's committed rows add up to each ``context_tokens``. So a turn
    that does not go on from the row before (after a fork, rewind, regeneration or overflow, or with history from before
    the recording) begins a new ``session_id`` with its whole context as input; the receipt tells what of it was cached.
    """

    session_id: str
    turn: int
    """Number of the turn in its session, from 0. One that was not committed has the number of the one after it."""
    input_tokens: int
    """0 only for a turn that was refused before it was rendered."""
    output_tokens: int
    timestamp_s: float
    """When the turn arrived."""
    context_tokens: int
    gpu_cached_tokens: int
    swapped_in_tokens: int
    recomputed_tokens: int
    """The receipt, as in ``Usage``; all zero for a turn that was never admitted. The rest of the context was new."""
    queue_s: float
    """Seconds in the engine's queue."""
    ttft_s: float | None
    """Seconds from arrival to the first token; null: there was none."""
    end_s: float
    """Seconds from arrival to the end."""
    finish_reason: str
    """Why it ended: its finish reason or the reason of its error, in lower case."""
    committed: bool


def header(info: EngineReady, options: EngineTuning) -> TraceHeader:
    """The header of a server whose engine says ``info`` of itself and was started with ``options``."""
    batch_tokens, running = batch_limits(options, "cuda" if info.device == "cuda" else "cpu")
    engine: dict[str, str | int | float | bool] = {
        "device": info.device,
        "dtype": info.dtype,
        "vocab_size": info.vocab_size,
        "context_limit": info.context_limit,
        "chunk_tokens": info.chunk_tokens,
        "device_tokens": info.device_capacity_tokens,
        "host_tokens": info.host_capacity_tokens,
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


class _Followed:
    """A session as far as the trace has it."""

    __slots__ = ("session_id", "tokens", "turn")

    def __init__(self, session_id: str, tokens: int) -> None:
        self.session_id = session_id
        self.turn = 0
        """Committed turns so far."""
        self.tokens = tokens
        """Length of its history."""


class SessionTracker:
    """Follows sessions, to find each turn's hash of a session, its number and its input length: see ``TraceRow``."""

    def __init__(self) -> None:
        self._salt = secrets.token_bytes(32)
        self._begun = 0
        self._followed: OrderedDict[Key, _Followed] = OrderedDict()

    def forget(self, key: Key) -> None:
        """A row of the session is lost: its next one begins a new session in the trace."""
        self._followed.pop(key, None)

    def number_turn(self, end: TurnEnd) -> tuple[str, int, int]:
        """``session_id``, ``turn`` and ``input_tokens`` of the turn's row."""
        before = end.context_tokens - end.new_tokens
        session = self._followed.get(end.key)
        # A turn that was refused before it was rendered (no context tokens) says nothing of the history and changed
        # nothing. One without input of its own asks for another answer: read by lengths, it is no turn that goes on.
        if session is None or (end.context_tokens and not (session.tokens == before and end.new_tokens)):
            session = self._followed[end.key] = _Followed(self._new_id(end.key), before)
        self._followed.move_to_end(end.key)
        if len(self._followed) > SESSIONS:
            self._followed.popitem(last=False)
        turn = session.turn
        if end.committed:
            session.turn += 1
            session.tokens = end.context_tokens + end.usage.output_tokens
        return session.session_id, turn, end.new_tokens if turn else end.context_tokens

    def _new_id(self, key: Key) -> str:
        self._begun += 1
        name = f"{self._begun}\0{key.tenant}\0{key.session_id}".encode()
        return hashlib.blake2b(name, key=self._salt, digest_size=16).hexdigest()


class TraceRecorder:
    """Owner of the file. ``start`` once, ``turn_ended`` from the event loop, ``close`` in the end."""

    def __init__(
        self,
        file: FileIO,
        *,
        compressed: bool,
        on_rows: Callable[[str, int], None] = lambda _what, _rows: None,
    ) -> None:
        """``file``: unbuffered, for appending. ``compressed``: rows are gzipped.

        ``on_rows`` hears, from any thread, how many turns were ``written`` or ``lost``.
        """
        self._file = file
        self._compressed = compressed
        self._sessions = SessionTracker()
        self._started_at = 0.0
        self._lines: queue.Queue[bytes | None] = queue.Queue(QUEUED_ROWS)
        self._on_rows = on_rows
        self._state = threading.Lock()
        self._paused = False
        """Whether it was said that rows do not reach the disk. Changed under ``_state``, as ``_lost`` is."""
        self._lost = 0
        """Turns that are missing since then."""
        self._closing = threading.Event()
        self._sound: int | None = None
        """Size of the file before the write that failed."""
        self._thread = threading.Thread(target=self._write, name="trace", daemon=True)

    def start(self, head: TraceHeader) -> None:
        """Time 0 of the trace is now. Until then nothing is recorded."""
        self._started_at = asyncio.get_running_loop().time()
        self._thread.start()
        self._lines.put_nowait(msgspec.json.encode(head))

    def turn_ended(self, end: TurnEnd) -> None:
        """Never blocks, never raises."""
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
        """Write what is left, unless the disk takes too long, and close the file."""
        await asyncio.to_thread(self._close)

    # ---- parts

    def _pause(self, why: object) -> None:
        with self._state:
            said, self._paused = self._paused, True
        if not said:
            log.error("recording pauses until the disk takes it: %s", why)

    def _go_on(self) -> None:
        with self._state:
            said, lost = self._paused, self._lost
            self._paused, self._lost = False, 0
        if said:
            log.warning("recording goes on; %d turns are missing in it", lost)

    def _lose(self, rows: int) -> None:
        with self._state:
            self._lost += rows
        self._on_rows("lost", rows)

    def _close(self) -> None:
        self._closing.set()
        if self._thread.is_alive():
            with contextlib.suppress(queue.Full):  # The writer hangs in the disk: joining it says so.
                self._lines.put(None, timeout=CLOSE_S)
            self._thread.join(CLOSE_S)
        if self._thread.is_alive():
            self._pause("the disk does not answer")
            return  # Closing the file would wait for it as well; the process ends without.
        try:
            self._file.close()
        except OSError as error:
            self._pause(error)

    def _write(self) -> None:
        """Body of the thread: all rows that come within ``FLUSH_S`` go to the file in one write."""
        more = True
        while more:
            lines, more = self._next_lines()
            if lines:
                self._keep(lines)

    def _keep(self, lines: list[bytes]) -> None:
        """Write the lines, however often that has to be tried; when the server ends, once more."""
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
                self._go_on()
                return

    def _next_lines(self) -> tuple[list[bytes], bool]:
        """Lines to write, and whether more may come."""
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
        """Write all of ``data``, or nothing if the disk allows: half a line would spoil what is appended later."""
        if self._compressed:
            # A member of its own each time: what was written can be read whatever happens next. No time of day in it.
            data = gzip.compress(data, mtime=0)
        size = self._file.seek(0, os.SEEK_END)
        if self._sound is not None and size > self._sound:  # a half line that could not be taken back then
            self._file.truncate(self._sound)
            size = self._sound
        left = memoryview(data)
        try:
            while left:
                left = left[self._file.write(left) or 0 :]
        except OSError:
            self._sound = size
            with contextlib.suppress(OSError):
                self._file.truncate(size)
            raise
        self._sound = None


def open_recorder(
    path: Path, on_rows: Callable[[str, int], None] = lambda _what, _rows: None
) -> TraceRecorder:
    """A recorder that appends to ``path``, gzipped when that ends in ``.gz``; one server per file.

    ``on_rows``: see ``TraceRecorder``.

    Raises OSError when the file cannot be written to or another server is writing it.
    """
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
    """Microseconds are enough."""
    return round(seconds, 6)
