"""Each event of a chunk, alone: from which place to which, and what becomes of its pages and of what they hold."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pensieve.config import CacheConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import CachedSession, Chunk, Place, SharedRun
from pensieve.engine.cache.tiers import Tiers

SIZE = 4
Event = Callable[[Tiers, Chunk], None]


class Bench:
    """Tiers without a cache around them, and one chunk in a place of choice; it remembers whose rows went stale."""

    def __init__(self, place: Place = Place.DROPPED) -> None:
        self.changed: list[CachedSession | SharedRun] = []
        self.tiers = Tiers(CacheConfig(4, 4, SIZE), self.changed.append)
        self.session = CachedSession(SessionKey("s"), row=0)
        self.chunk = self.new()
        if place is not Place.DROPPED:
            self.tiers.place(self.chunk)
            self.tiers.fill((self.chunk,), 0, SIZE)
        if place in (Place.BOTH, Place.HOST):
            self.tiers.save(self.chunk)
            self.tiers.complete()
        if place is Place.HOST:
            self.tiers.evict_from_device(self.chunk)
        self.tiers.take_copies()
        self.changed.clear()

    def new(self) -> Chunk:
        return Chunk(index=0, holder=self.session)

    def pages(self) -> tuple[int, int]:
        return self.tiers.device.used(), self.tiers.host.used()


def launched(event: Event) -> Event:
    def both(tiers: Tiers, chunk: Chunk) -> None:
        event(tiers, chunk)
        tiers.complete()

    return both


EVENTS: dict[str, tuple[Place, Event, Place, int]] = {
    "place": (Place.DROPPED, Tiers.place, Place.DEVICE, 0),
    "load": (Place.HOST, Tiers.load, Place.BOTH, SIZE),
    "save": (Place.DEVICE, Tiers.save, Place.DEVICE, SIZE),
    "save, launched": (Place.DEVICE, launched(Tiers.save), Place.BOTH, SIZE),
    "evict from device, saved": (Place.BOTH, Tiers.evict_from_device, Place.HOST, SIZE),
    "evict from device, not saved": (Place.DEVICE, Tiers.evict_from_device, Place.DROPPED, 0),
    "evict from host, alone there": (Place.HOST, Tiers.evict_from_host, Place.DROPPED, 0),
    "evict from host, a copy": (Place.BOTH, Tiers.evict_from_host, Place.DEVICE, SIZE),
    "drop": (Place.BOTH, Tiers.drop, Place.DROPPED, 0),
    "free": (Place.BOTH, Tiers.free, Place.DROPPED, 0),
    "truncate": (Place.HOST, lambda tiers, chunk: tiers.truncate(chunk, 1), Place.HOST, 1),
    "truncate to nothing": (Place.HOST, lambda tiers, chunk: tiers.truncate(chunk, 0), Place.DROPPED, 0),
}


@pytest.mark.parametrize("name", EVENTS)
def test_an_event_leads_to_its_place(name: str) -> None:
    before, event, after, filled = EVENTS[name]
    bench = Bench(before)
    event(bench.tiers, bench.chunk)
    chunk = bench.chunk
    assert (chunk.place, chunk.filled) == (after, filled)
    assert bench.pages() == (chunk.device >= 0, chunk.host >= 0)


@pytest.mark.parametrize("event", ["evict_from_device", "drop", "free"])
def test_what_is_freed_does_not_count_as_dropped(event: str) -> None:
    bench = Bench(Place.DEVICE)
    getattr(bench.tiers, event)(bench.chunk)
    lost = event != "free"
    assert bench.tiers.dropped_tokens == SIZE * lost
    assert bench.tiers.take_dropped() == [bench.session] * lost
    assert bench.tiers.take_dropped() == []


def test_holders_are_told_in_the_order_of_their_last_drop() -> None:
    bench = Bench(Place.DEVICE)
    other = Chunk(index=0, holder=CachedSession(SessionKey("other"), row=1))
    again = bench.new()
    for chunk in (other, again):
        bench.tiers.place(chunk)
    for chunk in (bench.chunk, other, again):
        bench.tiers.drop(chunk)
    assert bench.tiers.take_dropped() == [other.holder, bench.session]


def test_a_host_copy_of_what_is_written_to_goes_when_the_plan_is_launched() -> None:
    bench = Bench(Place.BOTH)
    bench.tiers.truncate(bench.chunk, 3)
    bench.tiers.fill((bench.chunk,), 3, SIZE)
    assert bench.chunk.place is Place.BOTH
    bench.tiers.complete()
    assert (bench.chunk.place, bench.chunk.filled) == (Place.DEVICE, SIZE)


def test_a_copy_reads_its_source_even_if_the_same_plan_evicts_it() -> None:
    bench = Bench(Place.DEVICE)
    target = bench.new()
    page = bench.chunk.device
    bench.tiers.copy(bench.chunk, target, 2)
    assert (target.place, target.filled, target.loading, bench.chunk.pins) == (Place.DEVICE, 2, True, 0)
    assert not bench.tiers.can_copy(target) and bench.tiers.can_copy(bench.chunk)
    bench.tiers.evict_from_device(bench.chunk)
    assert [(copy.src, copy.dst) for copy in bench.tiers.take_copies().copies] == [(page, target.device)]
    bench.tiers.complete()
    assert (target.loading, bench.tiers.pinned[0]) == (False, 0)


def test_a_moved_page_changes_hands_and_none_is_taken() -> None:
    bench = Bench(Place.DEVICE)
    double, page = bench.new(), bench.chunk.device
    bench.tiers.move_page(bench.chunk, double)
    bench.tiers.free(bench.chunk)
    assert (double.device, double.filled, bench.chunk.place) == (page, SIZE, Place.DROPPED)
    assert bench.pages() == (1, 0)


def test_pins_count_each_chunk_once_and_mark_copies_that_nothing_needs() -> None:
    bench = Bench(Place.BOTH)
    tiers, chunk = bench.tiers, bench.chunk
    tiers.pin((chunk,))
    tiers.pin((chunk,))
    assert (chunk.pins, tiers.pinned[0], tiers.pinned_by[0], list(tiers.spare)) == (2, 1, 1, [chunk])
    tiers.unpin((chunk,))
    assert (tiers.pinned[0], list(tiers.spare)) == (1, [chunk])
    tiers.unpin((chunk,))
    assert (tiers.pinned[0], tiers.pinned_by[0], list(tiers.spare)) == (0, 0, [])
    assert bench.changed == [bench.session] * 2, "a row is stale when the first pin comes and the last goes"
