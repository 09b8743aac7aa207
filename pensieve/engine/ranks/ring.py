"""Ring buffer in shared memory: one process broadcasts messages to several readers, in order.

Sending needs no system call; it takes as long as copying the bytes. A message occupies one or several slots,
and a slot is rewritten when every reader has taken it. Each slot has the number, length and checksum of its
piece. A reader that sees the number before the bytes, as some processors allow, gets a wrong checksum and
polls again.

=====================  ============  =======================
words (8 bytes each)   written by    read by
=====================  ============  =======================
taken, one a reader    that reader   writer
backlog, one a reader  that reader   writer
answers, 8 a reader    that reader   writer
slots                  writer        readers
=====================  ============  =======================

The memory has no name: it is freed when the last process that maps it exits, for whatever reason.
"""

from __future__ import annotations

import mmap
import os
import time
import zlib
from collections.abc import Callable
from functools import partial
from typing import Final, TypeVar

T = TypeVar("T")

SLOTS: Final = 16
SLOT_BYTES: Final = 128 << 10
WORD: Final = 8
LINE_WORDS: Final = 16
"""Words between two words of different writers: two cache lines."""
HEADER_WORDS: Final = LINE_WORDS
ANSWERS: Final = 4
"""Answers of a reader that the writer can still read: more than there are plans under way."""
SHORTEST_PAUSE_S: Final = 20e-6
LONGEST_PAUSE_S: Final = 1e-3
"""An idle reader polls every millisecond: two or three per cent of a core."""


class SharedRing:
    """The shared memory, mapped into one process."""

    def __init__(self, fd: int, readers: int) -> None:
        """Map a ring that ``create`` made for ``readers`` readers."""
        self.fd, self.readers = fd, readers
        self._memory = mmap.mmap(fd, _ring_bytes(readers))
        self._bytes = memoryview(self._memory)
        self._words = self._bytes.cast("Q")

    @classmethod
    def create(cls, readers: int) -> SharedRing:
        """Return a new ring. Any process that inherits its ``fd`` can map it."""
        fd = os.memfd_create("pensieve-ring")
        os.ftruncate(fd, _ring_bytes(readers))
        return cls(fd, readers)

    def taken(self, reader: int) -> int:
        """Number of the last piece that a reader has taken; pieces count from 1."""
        return self._words[2 * reader * LINE_WORDS]

    def take(self, reader: int, number: int) -> None:
        self._words[2 * reader * LINE_WORDS] = number

    def backlog(self, reader: int) -> int:
        return self._words[(2 * reader + 1) * LINE_WORDS]

    def set_backlog(self, reader: int, chunks: int) -> None:
        self._words[(2 * reader + 1) * LINE_WORDS] = chunks

    def memory(self, reader: int, number: int) -> tuple[int, int] | None:
        """Return a reader's answer to the plan of that number among those with ``Plan.memory``; None when it has not
        arrived."""
        low, high = self._words[self._answer(reader, number) : self._answer(reader, number) + 2]
        stamp = number % _STAMPS
        if low >> _ANSWER_BITS != stamp or high >> _ANSWER_BITS != stamp:
            return None
        return low & _ANSWER, high & _ANSWER

    def set_memory(self, reader: int, number: int, ends: tuple[int, int]) -> None:
        """Each word has the plan's number beside the bytes, so it does not matter which one is seen first."""
        at = self._answer(reader, number)
        for word, num_bytes in enumerate(ends):
            self._words[at + word] = number % _STAMPS << _ANSWER_BITS | num_bytes

    def put(self, number: int, piece: bytes | memoryview, *, last: bool) -> None:
        """Write a piece into its slot. All readers must have taken the slot's previous piece."""
        at = self._slot(number)
        start = (at + HEADER_WORDS) * WORD
        self._bytes[start : start + len(piece)] = piece
        self._words[at + 1] = 2 * len(piece) + last
        self._words[at + 2] = _checksum(piece, number)
        self._words[at] = number

    def get(self, number: int) -> tuple[bytes, bool] | None:
        """Return a piece and whether it is the last of its message; None when it has not arrived."""
        at = self._slot(number)
        if self._words[at] != number:
            return None
        length, last = divmod(self._words[at + 1], 2)
        start = (at + HEADER_WORDS) * WORD
        piece = bytes(self._bytes[start : start + length])
        return (piece, bool(last)) if _checksum(piece, number) == self._words[at + 2] else None

    def close(self) -> None:
        self._words.release()
        self._bytes.release()
        self._memory.close()
        os.close(self.fd)

    def _answer(self, reader: int, number: int) -> int:
        return (2 * reader + 1) * LINE_WORDS + 1 + 2 * (number % ANSWERS)

    def _slot(self, number: int) -> int:
        return 2 * self.readers * LINE_WORDS + number % SLOTS * _SLOT_WORDS


_ANSWER_BITS: Final = 48
_ANSWER: Final = (1 << _ANSWER_BITS) - 1
_STAMPS: Final = 1 << 16
_SLOT_WORDS: Final = HEADER_WORDS + SLOT_BYTES // WORD


def _ring_bytes(readers: int) -> int:
    return (2 * readers * LINE_WORDS + SLOTS * _SLOT_WORDS) * WORD


def _checksum(piece: bytes | memoryview, number: int) -> int:
    return zlib.crc32(piece, number & 0xFFFFFFFF)


class RingWriter:
    """The writer of a ring, which broadcasts messages."""

    def __init__(self, ring: SharedRing, *, spin_s: float) -> None:
        """``spin_s``: seconds to spin before sleeping between polls."""
        self._ring, self._spin_s, self._sent = ring, spin_s, 0
        self._asked = 0
        """Answers about memory that were read."""

    def send(self, message: bytes) -> None:
        """Send a message of any length; waits while the ring is full."""
        view = memoryview(message)
        for start in range(0, max(1, len(view)), SLOT_BYTES):
            number = self._sent + 1
            wait_for(partial(self._is_free, number), self._spin_s)
            piece = view[start : start + SLOT_BYTES]
            self._ring.put(number, piece, last=start + SLOT_BYTES >= len(view))
            self._sent = number

    def max_backlog(self) -> int:
        """Most chunks that any reader still has to copy out."""
        return max(self._ring.backlog(reader) for reader in range(self._ring.readers))

    def least_memory(self) -> tuple[int, int]:
        """Wait for all readers' answers to the next plan with ``Plan.memory``; return the least of each end."""
        self._asked += 1
        lows, highs = zip(*map(self._answer_of, range(self._ring.readers)), strict=True)
        return min(lows), min(highs)

    def _answer_of(self, reader: int) -> tuple[int, int]:
        found = wait_for(partial(self._ring.memory, reader, self._asked), self._spin_s)
        assert found is not None
        return found

    def _is_free(self, number: int) -> bool:
        return all(self._ring.taken(reader) >= number - SLOTS for reader in range(self._ring.readers))


class RingReader:
    """One reader of a ring. Each reader gets every message."""

    def __init__(self, ring: SharedRing, reader: int, *, spin_s: float) -> None:
        """``reader``: its index, from 0. ``spin_s``: seconds to spin before sleeping between polls."""
        self._ring, self._reader, self._spin_s, self._taken = ring, reader, spin_s, 0
        self._answered = 0

    def receive(self, timeout_s: float | None = None) -> bytes | None:
        """Return the next message; None when none has begun to arrive within ``timeout_s`` (None: wait forever)."""
        pieces: list[bytes] = []
        while True:
            number = self._taken + 1
            found = wait_for(partial(self._ring.get, number), self._spin_s, timeout_s if not pieces else None)
            if found is None:
                return None
            self._taken = number
            self._ring.take(self._reader, number)
            piece, last = found
            pieces.append(piece)
            if last:
                return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def report_backlog(self, chunks: int) -> None:
        """Tell the writer how many chunks this reader still has to copy out."""
        self._ring.set_backlog(self._reader, chunks)

    def report_memory(self, ends: tuple[int, int]) -> None:
        """Answer the next plan with ``Plan.memory``: bytes that are backed from the bottom and from the top."""
        self._answered += 1
        self._ring.set_memory(self._reader, self._answered, ends)


def wait_for(poll: Callable[[], T | None], spin_s: float, timeout_s: float | None = None) -> T | None:
    """Poll until the result is true and return it; None after ``timeout_s``. Spins for ``spin_s``, then sleeps ever
    longer between polls."""
    began, pause = time.monotonic(), SHORTEST_PAUSE_S
    while not (found := poll()):
        waited = time.monotonic() - began
        if timeout_s is not None and waited >= timeout_s:
            return None
        if waited >= spin_s:
            time.sleep(pause)
            pause = min(2 * pause, LONGEST_PAUSE_S)
    return found
