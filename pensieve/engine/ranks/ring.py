"""Messages from one process to several others, each of which gets all of them in order: a ring in shared memory.

Nothing is called to pass a message on, so it takes as long as its bytes take to be copied. A message lies in one slot
or in several; a slot is written again when every reader has taken it. Each slot has its piece's number, length and
checksum: a reader that sees the number before the bytes, which some processors allow, finds that they do not go
together, and looks again.

=====================  ============  =======================
words (8 bytes each)   written by    read by
=====================  ============  =======================
taken, one a reader    that reader   writer
behind, one a reader   that reader   writer
slots                  writer        readers
=====================  ============  =======================

The memory has no name: it is gone when the last process that has it is gone, however that came.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Callable
from typing import Final

SLOTS: Final = 16
SLOT_BYTES: Final = 128 << 10
WORD: Final = 8
LINE_WORDS: Final = 16
"""Words between two that different processes write: two cache lines."""
HEADER_WORDS: Final = LINE_WORDS
SHORTEST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3
"""A reader with nothing to do looks every millisecond: two or three per cent of a core."""


class SharedRing:
    """The memory, mapped into one process."""

    def __init__(self, fd: int, readers: int) -> None:
        """Map the ring that ``create`` made for so many readers."""
        self.fd, self.readers = fd, readers
        self._memory = mmap.mmap(fd, _ring_bytes(readers))
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")

    @classmethod
    def create(cls, readers: int) -> SharedRing:
        """A new ring. Whoever gets its ``fd`` can map it."""
        fd = os.memfd_create("pensieve-ring")
        os.ftruncate(fd, _ring_bytes(readers))
        return cls(fd, readers)

    def taken(self, reader: int) -> int:
        """Number of the piece that a reader has taken last; pieces count from 1."""
        return self._words[2 * reader * LINE_WORDS]

    def take(self, reader: int, number: int) -> None:
        self._words[2 * reader * LINE_WORDS] = number

    def backlog(self, reader: int) -> int:
        """What a reader said last, see ``say_behind``."""
        return self._words[(2 * reader + 1) * LINE_WORDS]

    def set_backlog(self, reader: int, chunks: int) -> None:
        """Chunks that a reader has still to copy out."""
        self._words[(2 * reader + 1) * LINE_WORDS] = chunks

    def put(self, number: int, piece: bytes | memoryview, *, last: bool) -> None:
        """Write a piece into its slot, which all readers have taken before."""
        at = self._slot(number)
        start = (at + HEADER_WORDS) * WORD
        self._bytes[start : start + len(piece)] = piece
        self._words[at + 1] = 2 * len(piece) + last
        self._words[at + 2] = _checksum(piece, number)
        self._words[at] = number

    def get(self, number: int) -> tuple[bytes, bool] | None:
        """A piece and whether it is the last of its message; None when it is not there yet."""
        at = self._slot(number)
        if self._words[at] != number:
            return None
        length, last = divmod(self._words[at + 1], 2)
        start = (at + HEADER_WORDS) * WORD
        piece = bytes(self._bytes[start : start + length])
        return (piece, bool(last)) if _checksum(piece, number) == self._words[at + 2] else None

    def close(self) -> None:
        """Unmap the memory."""
        self._words.release()
        self._bytes.release()
        self._memory.close()
        os.close(self.fd)

    def _slot(self, number: int) -> int:
        return 2 * self.readers * LINE_WORDS + number % SLOTS * _SLOT_WORDS


_SLOT_WORDS: Final = HEADER_WORDS + SLOT_BYTES // WORD


def _ring_bytes(readers: int) -> int:
    return (2 * readers * LINE_WORDS + SLOTS * _SLOT_WORDS) * WORD


def _checksum(piece: bytes | memoryview, number: int) -> int:
    return zlib.crc32(piece, number & 0xFFFFFFFF)


class RingWriter:
    """The one end that writes."""

    def __init__(self, ring: SharedRing, *, spin_s: float) -> None:
        """``spin_s``: seconds that it looks without pause when it has to wait."""
        self._ring, self._spin_s, self._sent = ring, spin_s, 0

    def send(self, message: bytes) -> None:
        """Pass a message of any length on; waits while the ring is full."""
        view = memoryview(message)
        for start in range(0, max(1, len(view)), SLOT_BYTES):
            number = self._sent + 1
            wait_until(lambda number=number: self._is_free(number), self._spin_s)  # type: ignore[misc]
            piece = view[start : start + SLOT_BYTES]
            self._ring.put(number, piece, last=start + SLOT_BYTES >= len(view))
            self._sent = number

    def max_backlog(self) -> int:
        """Most chunks that any reader has still to copy out."""
        return max(self._ring.backlog(reader) for reader in range(self._ring.readers))

    def _is_free(self, number: int) -> bool:
        return all(self._ring.taken(reader) >= number - SLOTS for reader in range(self._ring.readers))


class RingReader:
    """One of the ends that read."""

    def __init__(self, ring: SharedRing, reader: int, *, spin_s: float) -> None:
        """``reader``: which one, from 0. ``spin_s``: seconds that it looks without pause when it has to wait."""
        self._ring, self._reader, self._spin_s, self._taken = ring, reader, spin_s, 0

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """The next message; None when none has begun to arrive after ``timeout_s``. None waits for ever."""
        pieces: list[bytes] = []
        while True:
            number = self._taken + 1
            found: list[tuple[bytes, bool]] = []

            def arrived(number: int = number, found: list[tuple[bytes, bool]] = found) -> bool:
                piece = self._ring.get(number)
                if piece is not None:
                    found.append(piece)
                return piece is not None

            if not wait_until(arrived, self._spin_s, timeout_s if not pieces else None):
                return None
            self._taken = number
            self._ring.take(self._reader, number)
            piece, last = found[0]
            pieces.append(piece)
            if last:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def report_backlog(self, chunks: int) -> None:
        """Tell the writer how many chunks are still to be copied out here."""
        self._ring.set_backlog(self._reader, chunks)


def wait_until(ready: Callable[[], bool], spin_s: float, timeout_s: float | None = None) -> bool:
    """Whether ``ready`` became true in time: it is asked without pause for ``spin_s``, then ever more rarely."""
    began, pause = time.monotonic(), SHORTEST_PAUSE_S
    while not ready():
        waited = time.monotonic() - began
        if timeout_s is not None and waited >= timeout_s:
            return False
        if waited >= spin_s:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
    return True
