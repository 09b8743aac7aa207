"""Read rows from a history file's bytes, page by page, without SQLite, to recover a damaged file.

Each page is read by itself, without the pages above it. On an inconsistent page, rows are recognised by their
format; the caller must verify them (checksum and chain hash). Freed pages hold nothing, because SQLite erases
them (``secure_delete``). The WAL is laid over the file as SQLite would do it; frames after a damaged one,
which SQLite ignores, are read as well.

A power cut damages nothing that was flushed, but it may leave any of the pages that were written since. So the last
transaction of a WAL that has such frames may be there in part, and was then never acknowledged (``torn_from``).
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from pensieve.store._sqlite.disk import log_of_changes

Value = int | float | str | bytes | None

_USUAL: Final = 4096
_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER, _TABLE_INNER = 13, 10, 2, 5
_INTEGERS: Final = {1: 1, 2: 2, 3: 3, 4: 4, 5: 6, 6: 8}
_MOST_OVERFLOW: Final = 1 << 20
"""Pages of one row: more than any record has."""
_RECORD: Final = re.compile(
    rb"(?=([\x06-\x0f])([\x01-\x06\x08\x09])([\x01-\x06\x08\x09])([\x80-\xff]{0,4}[\x00-\x7f])([\x01-\x06\x08\x09])\x5d)"
)
"""The beginning of a row of ``records``: serial types of session, revision, data, crc, and of a 40-digit
chain hash."""


class PageRow(NamedTuple):
    is_table_row: bool
    rowid: int
    values: list[Value]
    place: int
    """Larger for a later version of a page."""
    is_whole: bool
    """Whether it was read from a consistent page."""


class Pages:
    """The pages of one file at construction."""

    def __init__(self, path: Path) -> None:
        self._data = _bytes_of(path)
        log = log_of_changes(path)
        # A copy: the WAL may be emptied meanwhile, and reading a mapping beyond the end of its file kills the
        # process.
        self._log = log.read_bytes() if log.exists() else b""
        self.size = self._page_size()
        self._frames = _frames(self._log, self.size)
        self._over = {frame.page: frame for frame in self._frames.valid}
        self._continued = set[int]()
        """Pages that continue a row of another page."""
        self._last = {**self._over, **{frame.page: frame for frame in self._frames.stray}}

    @property
    def has_lost_file(self) -> bool:
        """Whether the file is empty, and the WAL beside it is not."""
        return not self._data and bool(self._frames.valid)

    @property
    def log_is_cut(self) -> bool:
        """Whether committed changes are in the WAL where SQLite does not look, after damage."""
        return bool(self._frames.stray)

    @property
    def torn_from(self) -> int:
        """Place from which on rows may be of a transaction that was never acknowledged and is there in part."""
        return self._frames.torn_from

    def __len__(self) -> int:
        return -(-len(self._data) // self.size) + len(self._frames.valid) + len(self._frames.stray)

    def close(self) -> None:
        if isinstance(self._data, mmap.mmap):
            self._data.close()

    def rows(self, *, ignored: bool = False) -> Iterator[PageRow | None]:
        """Yield every readable row, and None after each page. Inconsistent pages come last. ``ignored``: only
        from the frames that SQLite ignores."""
        doubtful = list[tuple[bytes, int, int]]()
        for page, number, place in self._versions():
            if ignored and place < self._frames.first_stray:
                continue
            cells = _sound_cells(page, 100 if number == 1 else 0) if len(page) == self.size else None
            if cells is None:
                doubtful.append((page if place else b"", number, place))
            elif (kind := page[100 if number == 1 else 0]) != _TABLE_INNER:
                for at in cells:
                    yield from self._row(page, at, kind, place, is_whole=True)
            yield None
        for page, number, place in doubtful:
            if place >= self._frames.first_stray or number not in self._continued:
                yield from self._doubtful_rows(page if place else self._in_file(number), number, place)

    def _versions(self) -> Iterator[tuple[bytes, int, int]]:
        """Yield page, number and place: first the file's current pages, then the frames that SQLite ignores."""
        for number in range(1, -(-len(self._data) // self.size) + 1):
            if number not in self._over:
                yield self._in_file(number), number, 0
        latest = set(self._over.values())
        for frame in (*(one for one in self._frames.valid if one in latest), *self._frames.stray):
            yield self._in_log(frame), frame.page, frame.place

    def _page_size(self) -> int:
        """Return the page size that makes most of the first pages readable; the header may be damaged."""
        sizes = [int.from_bytes(self._data[16:18], "big"), int.from_bytes(self._log[8:12], "big"), _USUAL]
        sizes = [65536 if size == 1 else size for size in sizes]
        fit = [size for size in dict.fromkeys(sizes) if 512 <= size <= 65536 and size & (size - 1) == 0]

        def readable(size: int) -> int:
            starts = range(0, min(len(self._data), 200 * size), size)
            return sum(
                size
                for at in starts
                if len(page := self._data[at : at + size]) == size
                and _sound_cells(page, 100 if at == 0 else 0) is not None
            )

        return max(fit, key=readable)

    def _in_file(self, number: int) -> bytes:
        return self._data[(number - 1) * self.size : number * self.size]

    def _in_log(self, frame: _Frame) -> bytes:
        return self._log[frame.at : frame.at + self.size]

    def _page(self, number: int, place: int) -> bytes:
        """Return the newest version of a page, as seen from a page of that place."""
        frame = (self._last if place >= self._frames.first_stray else self._over).get(number)
        return self._in_file(number) if frame is None else self._in_log(frame)

    def _doubtful_rows(self, page: bytes, number: int, place: int) -> Iterator[PageRow]:
        if not any(page):
            return
        base = 100 if number == 1 else 0
        for kind in {page[base], _TABLE_LEAF} if len(page) > base else ():
            for at in _likely_cells(page, base, kind):
                yield from self._row(page, at, kind, place)
        yield from self._carved(page, place)

    def _row(
        self, page: bytes, at: int, kind: int, place: int, *, is_whole: bool = False
    ) -> Iterator[PageRow]:
        try:
            cell = _cell(page, at, kind, self.size)
            if cell is None:
                return
            payload = self._payload(page, cell.start, cell.length, cell.local, place)
            yield PageRow(kind == _TABLE_LEAF, cell.rowid, _values(payload), place, is_whole)
        except (ValueError, IndexError, struct.error):
            return

    def _payload(self, page: bytes, start: int, length: int, local: int, place: int) -> bytes:
        """Read a payload with its overflow pages. Raises ValueError if their chain is broken."""
        parts, left = [page[start : start + local]], length - local
        if len(parts[0]) != local:
            raise ValueError("a cell beyond the end of its page")
        following = int.from_bytes(page[start + local : start + local + 4], "big") if left else 0
        for _ in range(min(-(-left // (self.size - 4)), _MOST_OVERFLOW)):
            more = self._page(following, place) if following else b""
            if len(more) < min(self.size, left + 4):
                raise ValueError("a page is missing")
            parts.append(more[4 : 4 + min(left, self.size - 4)])
            left -= len(parts[-1])
            self._continued.add(following)
            following = int.from_bytes(more[:4], "big")
        return b"".join(parts)

    def _carved(self, page: bytes, place: int) -> Iterator[PageRow]:
        """Yield rows of ``records`` that are recognised by their beginning alone."""
        for match in _RECORD.finditer(page):
            try:
                at, header = match.start(), match[1][0]
                types, end = _types(page, at, header)
                if len(types) not in (5, 6) or end - at != header:
                    continue
                length = header + sum(_width(kind) for kind in types)
                local = _local(length, self.size, _TABLE_LEAF)
                yield PageRow(True, -1, _values(self._payload(page, at, length, local, place)), place, False)
            except (ValueError, IndexError, struct.error):
                continue


class _Cell(NamedTuple):
    start: int
    length: int
    local: int
    """Bytes of the payload on this page."""
    rowid: int
    end: int


class _Frame(NamedTuple):
    page: int
    at: int
    """Offset of its page in the WAL."""
    place: int
    commits: bool


class _Frames(NamedTuple):
    valid: list[_Frame]
    stray: list[_Frame]
    """Frames after a damaged one, of the same WAL."""
    first_stray: int = 1 << 62
    torn_from: int = 1 << 62
    """A change is flushed before the next one begins, so only the last transaction can be torn."""


def _bytes_of(path: Path) -> bytes | mmap.mmap:
    try:
        with path.open("rb") as file:
            if os.fstat(file.fileno()).st_size == 0:
                return b""
            return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        return b""


def _frames(log: bytes, size: int) -> _Frames:
    valid, stray = list[_Frame](), list[_Frame]()
    step = size + 24
    if len(log) < 32 + step:
        return _Frames([], [])
    order = ">" if log[3] & 1 else "<"
    header_sum = _wal_sum(log[:24], (0, 0), order)
    header_holds = struct.pack(">II", *header_sum) == log[24:32]
    salt = log[16:24] if header_holds else log[32 + 8 : 32 + 16]
    running = struct.unpack(">II", log[24:32])
    intact, committed, torn_from = header_holds, 0, 1
    starts = range(32, len(log) - step + 1, step)
    # What follows the last frame with this salt is of an earlier WAL, which this one overwrites.
    count = max((place for place, at in enumerate(starts, 1) if log[at + 8 : at + 16] == salt), default=0)
    for place, at in enumerate(starts[:count], 1):
        head = log[at : at + 24]
        is_ours = head[8:16] == salt
        page, commit = struct.unpack(">II", head[:8])
        stored = struct.unpack(">II", head[16:24])
        right = _wal_sum(log[at + 24 : at + step], _wal_sum(head[:8], running, order), order) == stored
        frame = _Frame(page, at + 24, place, bool(commit) and right)
        if intact and right and page and is_ours:
            valid.append(frame)
            committed = len(valid) if commit else committed
        else:
            intact = False
            if salt[:4] == head[8:12] or salt[4:] == head[12:16]:  # else a frame of an earlier WAL shows
                stray.append(frame)
        if commit and is_ours and place < count:
            torn_from = place + 1
        running = stored
    if not any(frame.commits for frame in stray):
        return _Frames(valid[:committed], [])  # the end of a WAL that was being written
    return _Frames(valid[:committed], [*valid[committed:], *stray], committed + 1, torn_from)


def _wal_sum(data: bytes, start: tuple[int, ...], order: str) -> tuple[int, int]:
    one, two = start
    words = struct.unpack(f"{order}{len(data) // 4}I", data)
    for at in range(0, len(words), 2):
        one = (one + words[at] + two) & 0xFFFFFFFF
        two = (two + words[at + 1] + one) & 0xFFFFFFFF
    return one, two


def _varint(data: bytes, at: int) -> tuple[int, int]:
    """Return the number and its end. Raises IndexError."""
    value = 0
    for place in range(at, at + 8):
        byte = data[place]
        value = value << 7 | byte & 0x7F
        if byte < 0x80:
            return value, place + 1
    value = value << 8 | data[at + 8]
    return value - (1 << 64) if value >= 1 << 63 else value, at + 9


def _local(length: int, size: int, kind: int) -> int:
    """Return how many bytes of a payload are on its own page."""
    most = size - 35 if kind == _TABLE_LEAF else (size - 12) * 64 // 255 - 23
    if length <= most:
        return length
    least = (size - 12) * 32 // 255 - 23
    fit = least + (length - least) % (size - 4)
    return fit if fit <= most else least


def _cell(page: bytes, at: int, kind: int, size: int) -> _Cell | None:
    """Parse a cell, or return None if it cannot be one. Raises IndexError."""
    rowid = 0
    if kind == _TABLE_INNER:
        rowid, end = _varint(page, at + 4)
        return _Cell(end, 0, 0, rowid, end)
    length, start = _varint(page, at + 4 if kind == _INDEX_INNER else at)
    if kind == _TABLE_LEAF:
        rowid, start = _varint(page, start)
    if length < 0:
        return None
    local = _local(length, size, kind)
    return _Cell(start, length, local, rowid, max(start + local + (4 if local < length else 0), at + 4))


def _sound_cells(page: bytes, base: int) -> list[int] | None:
    """Return the offsets of a page's cells, or None unless cells, free blocks and fragments fill the whole page."""
    size = len(page)
    kind = page[base]
    if kind not in (_TABLE_LEAF, _INDEX_LEAF, _INDEX_INNER, _TABLE_INNER):
        return None
    free, count, content, fragments = struct.unpack(">HHHB", page[base + 1 : base + 8])
    content = content or 65536
    first = base + (8 if kind in (_TABLE_LEAF, _INDEX_LEAF) else 12)
    if first + 2 * count > content or content > size:
        return None
    starts = list(struct.unpack(f">{count}H", page[first : first + 2 * count]))
    used = list[tuple[int, int]]()
    try:
        for at in starts:
            cell = _cell(page, at, kind, size)
            if cell is None:
                return None
            used.append((at, cell.end))
    except IndexError:
        return None
    while free:
        if free + 4 > size or len(used) > size:
            return None
        following, length = struct.unpack(">HH", page[free : free + 4])
        used.append((free, free + length))
        if following and following < free + length:
            return None
        free = following
    used.sort()
    end = content
    for start, stop in used:
        if start < end or stop > size:
            return None
        fragments -= start - end
        end = stop
    return starts if fragments == size - end else None


def _likely_cells(page: bytes, base: int, kind: int) -> Iterator[int]:
    """Yield the cell offsets of a damaged page, without trusting its cell count."""
    at = base + (12 if kind in (_INDEX_INNER, _TABLE_INNER) else 8)
    least = len(page)
    while at + 2 <= least:
        start = int.from_bytes(page[at : at + 2], "big")
        if at + 2 < start < len(page):
            least = min(least, start)
            yield start
        elif start == 0:
            return
        at += 2


def _types(data: bytes, at: int, header: int) -> tuple[list[int], int]:
    """Return the serial types of the row whose header begins at ``at``. Raises ValueError, IndexError."""
    _, place = _varint(data, at)
    types = []
    while place < at + header:
        kind, place = _varint(data, place)
        types.append(kind)
    return types, place


def _width(kind: int) -> int:
    """Return a value's size in bytes. Raises ValueError."""
    if kind >= 12:
        return (kind - 12) // 2
    if kind in (0, 8, 9):
        return 0
    if kind == 7:
        return 8
    if kind not in _INTEGERS:
        raise ValueError("unknown serial type")
    return _INTEGERS[kind]


def _values(payload: bytes) -> list[Value]:
    """Return a row's columns. Raises ValueError, IndexError."""
    header, _ = _varint(payload, 0)
    if not 0 < header <= len(payload):
        raise ValueError("no row")
    types, at = _types(payload, 0, header)
    values = list[Value]()
    for kind in types:
        width = _width(kind)
        raw = payload[at : at + width]
        if len(raw) != width:
            raise ValueError("the row ends early")
        at += width
        if kind >= 12:
            values.append(raw if kind % 2 == 0 else raw.decode("utf-8", errors="replace"))
        elif kind == 7:
            values.append(struct.unpack(">d", raw)[0])
        else:
            values.append(
                None if kind == 0 else kind - 8 if kind in (8, 9) else int.from_bytes(raw, "big", signed=True)
            )
    return values
