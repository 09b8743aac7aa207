"""A range of addresses that memory backs from both ends, against a model of it."""

from __future__ import annotations

import mmap
import os
import random
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.engine.kv.virtual import backing as virtual_backing
from pensieve.engine.kv.virtual.backing import Backing
from pensieve.engine.kv.virtual.plain import PlainBackend
from pensieve.engine.kv.virtual.region import (
    LARGE_HANDLE,
    MOST_HANDLES,
    Region,
    RegionSizes,
    handle_bytes,
    reserve,
)
from support.lengths import at_length

PAGE = mmap.PAGESIZE


@dataclass
class FakeBackend:
    """Addresses and handles of nothing, which checks how it is used."""

    granule: int = 1
    room: int = 1 << 40
    """Bytes of handles that can exist at once."""
    handles: dict[int, int] = field(default_factory=dict)
    mapped: dict[int, tuple[int, int]] = field(default_factory=dict)
    """Bytes and handle by offset."""
    created: list[int] = field(default_factory=list)
    size: int = 0
    freed: bool = False

    def reserve(self, num_bytes: int) -> None:
        assert num_bytes % self.granule == 0 and self.size == 0
        self.size = num_bytes

    def tensor(self, num_bytes: int) -> torch.Tensor:
        assert 0 in self.mapped
        return torch.zeros(num_bytes, dtype=torch.uint8)

    def create(self, num_bytes: int) -> int:
        if sum(self.handles.values()) + num_bytes > self.room:
            raise MemoryError("no room")
        handle = len(self.created)
        self.created.append(num_bytes)
        self.handles[handle] = num_bytes
        return handle

    def map(self, offset: int, num_bytes: int, handle: int) -> None:
        assert self.handles[handle] == num_bytes and offset + num_bytes <= self.size
        assert all(handle != other for _, other in self.mapped.values())
        for start, (length, _) in self.mapped.items():
            assert offset + num_bytes <= start or start + length <= offset
        self.mapped[offset] = num_bytes, handle

    def unmap(self, offset: int, num_bytes: int) -> None:
        assert self.mapped.pop(offset)[0] == num_bytes

    def release(self, handle: int, num_bytes: int) -> None:
        assert self.handles.pop(handle) == num_bytes
        assert all(handle != other for _, other in self.mapped.values())

    def free(self) -> None:
        assert not self.mapped and not self.handles and not self.freed
        self.freed = True

    def backs(self, start: int, stop: int) -> bool:
        at = start
        while at < stop:
            found = next((o + n for o, (n, _) in self.mapped.items() if o <= at < o + n), None)
            if found is None:
                return False
            at = found
        return True


def backed_bytes(ceiling: int, slot: int, permanent: int, low: int, high: int) -> int:
    """The model: bytes of all slots that an end or the permanent part has a byte of."""
    fixed = min(permanent, ceiling)
    starts = [*range(0, fixed, LARGE_HANDLE), *range(fixed, ceiling, slot)]
    total = 0
    for start, stop in zip(starts, [*starts[1:], ceiling], strict=True):
        if start == 0 or start < max(low, fixed) or (high and stop > ceiling - high):
            total += stop - start
    return total


@given(seed=st.integers(0, 10**9))
@settings(max_examples=at_length(100, 3000))
def test_steps_follow_a_model(seed: int) -> None:
    """Random steps, with memory that runs out: what is asked for is backed, and nothing else but what may be kept."""
    rng = random.Random(seed)
    ceiling, slot, permanent, room = (rng.randint(*ends) for ends in ((1, 200), (1, 40), (0, 250), (0, 500)))
    kept, ahead = (rng.choice([0, rng.randint(0, 90)]) for _ in range(2))
    backend = FakeBackend(room=room)
    wanted = RegionSizes(permanent, slot, ahead, kept)
    if room < backed_bytes(ceiling, slot, permanent, 0, 0):
        with pytest.raises(MemoryError):
            reserve(ceiling, backend, wanted)
        assert backend.freed
        return
    region = reserve(ceiling, backend, wanted)
    for _ in range(12):
        before = region.low, region.high
        low, high = rng.randint(0, ceiling), rng.randint(0, ceiling)
        # Both are backed for a moment.
        grown = max(low, region.low), max(high, region.high)
        if backed_bytes(ceiling, slot, permanent, *grown) <= room:
            region.step(low, high)
        else:
            with pytest.raises(MemoryError):
                region.step(low, high)
            low, high = before
        assert (region.low, region.high) == (low, high)
        if rng.random() < 0.5:
            region.map_ahead()
        least = backed_bytes(ceiling, slot, permanent, low, high)
        assert backend.backs(0, min(ceiling, max(low, permanent, 1)))
        assert backend.backs(ceiling - high, ceiling)
        assert least <= region.held == sum(backend.handles.values()) <= min(least + kept + ahead, room)
        if rng.random() < 0.5:
            region.trim()
            assert region.held == least == sum(size for size, _ in backend.mapped.values())
    region.free()
    region.free()
    assert backend.freed


def test_a_handle_that_cannot_be_made_leaves_everything_as_it_was() -> None:
    backend = FakeBackend(room=60)
    region = reserve(100, backend, RegionSizes(permanent=10, handle=10))
    region.step(30, 20)
    before = dict(backend.mapped)
    for low, high in [(60, 0), (30, 40), (31, 31)]:
        with pytest.raises(MemoryError):
            region.step(low, high)
        assert backend.mapped == before and region.held == 50 and (region.low, region.high) == (30, 20)
    backend.room = 1000
    region.step(60, 40)
    assert region.held == 100


def test_memory_that_is_held_without_need_is_used_first() -> None:
    backend = FakeBackend(room=40)
    region = reserve(100, backend, RegionSizes(permanent=10, handle=10, ahead=20, kept=20))
    region.step(20, 0)
    region.map_ahead()
    assert region.held == 40  # as much ahead as the end has grown by
    region.step(10, 20)
    assert region.held == 40 and backend.backs(80, 100)
    region.step(0, 30)
    assert region.held == 40 and backend.backs(70, 100)
    region.trim()
    assert region.held == 40


def test_kept_handles_are_used_again() -> None:
    backend = FakeBackend()
    region = reserve(100, backend, RegionSizes(permanent=10, handle=10, kept=20))
    region.step(50, 0)
    made = len(backend.created)
    region.step(10, 0)
    assert region.held == 30
    region.step(0, 20)
    assert len(backend.created) == made and region.held == 30
    region.step(0, 30)
    assert len(backend.created) == made + 1


def test_an_end_that_gives_up_what_was_mapped_ahead() -> None:
    region = reserve(100, backend := FakeBackend(), RegionSizes(permanent=10, handle=10, ahead=30))
    region.step(40, 0)
    region.map_ahead()
    assert backend.backs(0, 70) and region.held == 70
    region.step(30, 0)
    assert region.held == 30


def test_what_a_region_refuses() -> None:
    region = reserve(100, FakeBackend(), RegionSizes(handle=10))
    for ends in [(101, 0), (0, 101), (-1, 0)]:
        with pytest.raises(ValueError, match="in a range of 100"):
            region.step(*ends)
    region.free()
    with pytest.raises(RuntimeError, match="freed"):
        region.grow(1, 1)


def test_sizes_of_handles() -> None:
    assert handle_bytes(79 << 20, 60 << 30) == 32 << 20
    assert handle_bytes(3 << 20, 4 << 30) == 3 << 20
    assert handle_bytes(4096, 1 << 30) == (1 << 30) // MOST_HANDLES


# -- following plans -------------------------------------------------------------------------------------------------


@dataclass
class FakeMark:
    reached: bool = False

    def query(self) -> bool:
        return self.reached


@given(seed=st.integers(0, 10**9))
@settings(max_examples=at_length(60, 1500))
def test_memory_stays_until_the_plans_that_use_it_are_done(seed: int) -> None:
    """What a plan gives up is what the plans before it may still use: it goes when their marks are reached."""
    rng = random.Random(seed)
    backend = FakeBackend(room=rng.choice([1000, 150]))
    region = reserve(200, backend, RegionSizes(permanent=20, handle=10))
    backing = Backing(region, threaded=False)
    ends, under_way = (0, 0), list[tuple[tuple[int, int], list[FakeMark]]]()
    for _ in range(12):
        low = rng.randint(0, 200)
        high = rng.randint(0, 200 - low)
        before, ends = ends, backing.grow(low, high)
        assert backend.backs(0, max(ends[0], 20)) and backend.backs(200 - ends[1], 200)
        assert min(low, max(before[0], 20)) <= ends[0] <= low and min(high, before[1]) <= ends[1] <= high
        marks = [FakeMark() for _ in range(rng.randint(0, 2))]
        under_way.append(((max(before[0], ends[0]), max(before[1], ends[1])), marks))
        for _, some in under_way:
            for mark in some:
                mark.reached |= rng.random() < 0.4
        backing.shrink(marks)
        while under_way and all(mark.reached for mark in under_way[0][1]):
            del under_way[0]
        for used in [ends, *(used for used, _ in under_way)]:
            assert backend.backs(0, max(used[0], 20)) and backend.backs(200 - used[1], 200)
        if not under_way:
            assert region.held == backed_bytes(200, 10, 20, *ends)
    backing.close()
    assert backend.freed


def wait_for(condition: Callable[[], bool]) -> None:
    limit = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.002)


def test_a_thread_gives_memory_back_and_maps_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(virtual_backing, "QUIET_S", 0.05)
    backend = FakeBackend()
    region = reserve(200, backend, RegionSizes(permanent=20, handle=10, ahead=30, kept=20))
    backing = Backing(region, threaded=True)
    assert backing.grow(100, 0) == (100, 0)
    backing.shrink()
    wait_for(lambda: 130 in [*backend.created, region.held])
    wait_for(lambda: region.held == 100)  # nothing has come of it
    mark = FakeMark()
    assert backing.grow(20, 0) == (20, 0)
    backing.shrink([mark])
    time.sleep(0.1)
    assert backend.backs(0, 100)
    mark.reached = True
    wait_for(lambda: region.held == 20)
    backing.close()
    assert backend.freed


def test_handles_are_kept_for_the_other_end_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """They pass from one end to the other without calls, but a tier that shrinks gives back all that it gives up."""
    monkeypatch.setattr(virtual_backing, "QUIET_S", 1000.0)
    backend = FakeBackend()
    region = reserve(200, backend, RegionSizes(permanent=10, handle=10, kept=50))
    backing = Backing(region, threaded=True)

    def follow(low: int, high: int) -> None:
        backing.grow(low, high)
        backing.shrink()
        wait_for(lambda: (region.low, region.high) == (low, high))

    follow(100, 0)
    follow(60, 40)
    wait_for(lambda: not backend.backs(90, 100))
    assert region.held == 140
    created = len(backend.created)
    follow(60, 80)
    assert len(backend.created) == created
    follow(60, 20)
    wait_for(lambda: region.held == 80)
    backing.close()


def test_a_thread_that_fails_is_heard_of() -> None:
    backend = FakeBackend()
    backing = Backing(reserve(200, backend, RegionSizes(handle=10)), threaded=True)
    backing.grow(100, 0)
    backing.shrink()
    backend.mapped.pop(90)  # the driver knows better
    backing.grow(0, 0)
    backing.shrink()
    wait_for(lambda: backing._failure is not None)
    with pytest.raises(RuntimeError, match="could not be given back"):
        backing.grow(0, 0)


# -- plain memory ----------------------------------------------------------------------------------------------------


def plain(pages: int, **sizes: int) -> tuple[Region, PlainBackend]:
    backend = PlainBackend()
    in_bytes = RegionSizes(**{name: count * PAGE for name, count in sizes.items()})
    return reserve(pages * PAGE, backend, in_bytes), backend


def test_plain_memory_comes_and_goes() -> None:
    region, backend = plain(64, permanent=4, handle=2)
    address = region.tensor.data_ptr()
    region.step(20 * PAGE, 10 * PAGE)
    region.tensor[: 20 * PAGE] = 1
    region.tensor[-10 * PAGE :] = 2
    assert backend.resident == region.held == 30 * PAGE
    region.step(4 * PAGE, 3 * PAGE)  # half of a handle is in use
    assert backend.resident == region.held == 8 * PAGE
    assert region.tensor.data_ptr() == address
    assert region.tensor[: 4 * PAGE].eq(1).all() and region.tensor[-4 * PAGE :].eq(2).all()
    region.step(40 * PAGE, 3 * PAGE)
    region.tensor[: 40 * PAGE] = 3
    assert backend.resident == region.held == 44 * PAGE and region.tensor[-4 * PAGE :].eq(2).all()
    region.free()


@given(seed=st.integers(0, 10**9))
@settings(max_examples=at_length(30, 500))
def test_plain_memory_keeps_its_bytes(seed: int) -> None:
    """Bytes of an end that stays are never those of another place of the file."""
    rng = random.Random(seed)
    region, backend = plain(40, permanent=3, handle=3, kept=6)
    model = torch.zeros(40, dtype=torch.uint8)
    values = region.tensor.view(40, PAGE)
    was = set(range(3))
    for number in range(10):
        low, high = rng.randint(0, 40), rng.randint(0, 40)
        region.step(low * PAGE, high * PAGE)
        now = {*range(max(low, 3)), *range(40 - high, 40)}
        for page in sorted(now & was):
            assert values[page].eq(model[page]).all()
        for page in sorted(now):
            values[page] = model[page] = (number * 41 + page) % 251
        was = now
        assert region.held <= (3 * -(-len(now) // 3) + 6 + 9) * PAGE and backend.resident <= region.held
    region.free()


def test_memory_is_given_back_with_the_last_tensor() -> None:
    region, backend = plain(16, handle=4)
    region.step(8 * PAGE, 0)
    view = region.tensor[: 4 * PAGE]
    file = backend._file
    del region
    view.fill_(1)
    assert backend.resident == 4 * PAGE
    del view, backend
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(file)


TOUCHES = {
    "read": ("", "int(tensor[8 * page])"),
    "write": ("", "tensor[4 * page] = 1"),
    "below": ("region.step(2 * page, 0)", "int(tensor[2 * page])"),
    "above": ("region.step(2 * page, 0)", "int(tensor[-1])"),
    "freed": ("region.free()", "int(tensor[0])"),
}
CHILD = f"""
import faulthandler, mmap, os
from pensieve.engine.kv.virtual.plain import PlainBackend
from pensieve.engine.kv.virtual.region import RegionSizes, reserve

faulthandler.disable()
page = mmap.PAGESIZE
for name, (before, touch) in {TOUCHES}.items():
    child = os.fork()
    if child == 0:
        region = reserve(16 * page, PlainBackend(), RegionSizes(page, page))
        tensor = region.tensor
        region.step(4 * page, 4 * page)
        tensor[:4 * page] = 1
        tensor[-4 * page:] = 1
        exec(before)
        print(name, "alive", flush=True)
        exec(touch)
        print(name, "survived", flush=True)
        os._exit(0)
    print(name, "ended" if os.WIFSIGNALED(os.waitpid(child, 0)[1]) else "exited", flush=True)
"""


def test_unbacked_memory_ends_the_process() -> None:
    done = subprocess.run([sys.executable, "-c", CHILD], capture_output=True, text=True, check=False)
    expected = [f"{name} {what}" for name in TOUCHES for what in ("alive", "ended")]
    assert done.stdout.splitlines() == expected, done


def test_a_mapping_that_fails_gives_its_handle_back() -> None:
    backend = FakeBackend()
    region = reserve(100, backend, RegionSizes(permanent=10, handle=10))
    map_: Callable[[int, int, int], None] = backend.map

    def fails(offset: int, num_bytes: int, handle: int) -> None:
        if offset == 40:
            raise MemoryError("no mapping")
        map_(offset, num_bytes, handle)

    backend.map = fails  # type: ignore[method-assign]
    with pytest.raises(MemoryError, match="no mapping"):
        region.step(60, 0)
    assert region.held == 10 == sum(backend.handles.values())
