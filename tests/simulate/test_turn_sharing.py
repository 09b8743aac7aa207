"""``TurnCache`` shares as ``CacheManager`` does, on loads that say what their sessions begin with."""

from __future__ import annotations

from collections import deque

import pytest

from pensieve.config import CacheConfig
from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import Place, Range, take_front
from pensieve.simulate.scenario import policies
from pensieve.simulate.turns.cache import TurnCache
from pensieve.simulate.turns.victims import BOTH, DEVICE, DROPPED, HOST
from support.cache.turn_twins import (
    CONTEXT,
    COST,
    PREFIXES,
    SHARING,
    SIZE,
    Both,
    Manager,
    RunningTurn,
    prefix_of,
)
from support.lengths import at_length


class BothSharing(Both):
    """Sessions come and go, begin alike, meet in one plan, and are suspended in the middle of what they share."""

    def __init__(self, name: str, host: int, seed: str) -> None:
        super().__init__(name, host, seed)
        self.keys = list(range(SHARING, SHARING + 12))
        self.turns = dict.fromkeys(self.keys, 0)
        self.found = self.met = self.shared_lost = 0

    def step(self) -> None:
        self.now += self.rng.expovariate(0.2)
        place = self.rng.randrange(len(self.keys))
        key = self.keys[place]
        if key in self.running:
            self.grow(key)
            self.end(key, suspended=False)
            if self.rng.random() < 0.3 or self.context[key] > 240:
                self.keys[place] = (
                    max(self.keys) + 1
                )  # another comes in its place, nobody comes back for this one
                self.turns[self.keys[place]] = 0
        else:
            for _ in range(self.rng.choice((1, 1, 2, 3))):  # in one plan
                if not self.begin_sharing(self.rng.choice(self.keys)):
                    break
        self.plan_ends()

    def grow_twin(self, chunks: int) -> None:
        # What a session shares is as recent as its own. Which of equals go is not said, so both have to ask alike.
        for _ in range(chunks):
            self.twin.grow(1, self.now)

    def begin_sharing(self, key: int) -> bool:
        """Whether another may begin in the same plan."""
        history = self.context.get(key, 0)
        begins = sum(tokens for _, tokens in prefix_of(key)) if not history else 0
        total = history + begins + self.rng.randrange(1, 40)
        if key in self.running or total > 300 or len(self.running) >= 3:
            return True
        admits = self.manager.can_admit(key, history, total)
        assert self.twin.can_admit(key, total, prefix_of(key), reserve=True) == admits
        if not admits:
            return False
        ours = self.twin.admit(key, history, total, self.now, prefix_of(key))
        assert ours == self.manager.admit(key, history, total, self.now)
        self.lost += ours.recomputed
        self.found += ours.gpu_cached + ours.swapped_in > history
        self.met += begins > 0 and len(self.running) > 0
        self.turns[key] += 1
        missing = deque(ours.missing)
        # What is cut off is cut at the end of a chunk: the twin cannot have half of one.
        budget = CONTEXT
        if self.rng.random() < 0.5 and not any(start % SIZE for start, _ in missing):
            budget = self.rng.randrange(0, 80, SIZE)
        for start, end in take_front(missing, budget):
            self.manager.computed(key, start, end)
        self.running[key] = RunningTurn(total, tuple(missing), self.rng.expovariate(0.02))
        if missing:
            self.shared_lost += missing[0][0] < begins
            self.plan_ends()
            self.end(key, suspended=True)  # before any other begins
        return not missing

    def compare(self) -> None:
        super().compare()
        cache = self.manager.cache
        for key in self.keys:
            held = cache.residency(SessionKey(str(key)))
            session = self.twin._sessions.get(key)
            places = session.context() if session is not None else b""
            chunks = (sum(places.count(place) for place in some) for some in ((DEVICE, BOTH), (HOST,)))
            assert tuple(chunks) == (-(-held.device // SIZE), -(-held.host // SIZE))


# ``arc`` weighs its two lists anew in each round, and the twin asks for fewer rounds.
@pytest.mark.parametrize("name", [name for name in policies.NAMES if name != "arc"])
@pytest.mark.parametrize("host", [0, 40, 90])
def test_shares_as_the_manager(name: str, host: int) -> None:
    both = BothSharing(name, host, f"{name}{host}")
    for _ in range(at_length(400, 600)):
        both.step()
        both.compare()
    assert min(both.lost, both.found - 15, both.met - 15, both.shared_lost) > 0, (
        "nothing was ever shared, met or lost: the test shows nothing"
    )


A, B, C = (SHARING + 1 + len(PREFIXES) * number for number in range(3))
"""They begin with the same 45 tokens, five whole chunks."""


class Few:
    """Both caches with room for 20 chunks each, and turns that are told one by one."""

    def __init__(self) -> None:
        config = CacheConfig(device_chunks=20, host_chunks=20, chunk_tokens=SIZE, swap_watermark=0.0)
        self.twin, self.manager = (
            TurnCache(config, COST, policies.make_policy("lru")[0]),
            Manager(config, "lru"),
        )

    def can_admit(self, key: int, tokens: int) -> bool:
        admits = self.twin.can_admit(key, tokens, prefix_of(key), reserve=False)
        context, path = self.manager.tokens(key)[:tokens], self.manager.path(key, tokens)
        real = self.manager.cache.can_admit(SessionKey(str(key)), context, tokens, path=path)
        assert admits == real
        return admits

    def admit(self, key: int, tokens: int, now: float, budget: int = CONTEXT) -> None:
        assert self.can_admit(key, tokens)
        ours = self.twin.admit(key, 0, tokens, now, prefix_of(key))
        assert ours == self.manager.admit(key, 0, tokens, now)
        for start, end in take_front(deque(ours.missing), budget):
            self.manager.computed(key, start, end)

    def complete(self) -> None:
        self.twin.complete()
        self.manager.complete()

    def release(self, key: int, tokens: int, now: float, missing: tuple[Range, ...] = ()) -> None:
        self.twin.release(key, tokens, now, missing)
        self.manager.release(key, tokens, now)

    def places(self, key: int) -> str:
        """Of a session's chunks, when no copies are under way."""
        session = self.manager.cache.sessions[SessionKey(str(key))]
        told = {Place.DROPPED: DROPPED, Place.HOST: HOST, Place.DEVICE: DEVICE, Place.BOTH: BOTH}
        found = bytes(told[chunk.place] for chunk in session.chunks)
        assert self.twin._sessions[key].context() == found
        assert self.twin.device_free * SIZE == self.manager.cache.occupancy().device_free
        assert self.twin.host_free * SIZE == self.manager.cache.occupancy().host_free
        return found.hex()[1::2]

    def turn(self, key: int, tokens: int, now: float) -> None:
        self.admit(key, tokens, now)
        self.complete()
        self.release(key, tokens, now)


def test_what_is_being_saved_is_not_adopted_and_what_is_being_loaded_is() -> None:
    caches = Few()
    caches.turn(A, 56, 1.0)
    caches.admit(3, 160, 2.0)  # all there is
    assert not caches.can_admit(B, 60), "the plan that copies the beginning out cannot copy it in"
    assert caches.twin.is_copying(B, prefix_of(B))
    caches.complete()
    caches.release(3, 160, 2.0)
    assert caches.places(A) == "1111111"
    caches.admit(A, 60, 3.0)
    caches.admit(B, 64, 3.0)  # in the same plan
    caches.complete()
    assert (caches.places(A), caches.places(B)) == ("33333332", "33333222")
    # Copies of what is in use are the first that a full host does without: what is shared before what is not.
    caches.twin._free_spare_copies(5)
    for _ in range(5):
        chunk = next(iter(caches.manager.cache._tiers.spare))
        caches.manager.cache._tiers.evict_from_host(chunk)
    assert (caches.places(A), caches.places(B)) == ("22222332", "22222222")


def test_a_partly_computed_chunk_gives_way_to_a_whole_one() -> None:
    caches = Few()
    caches.admit(A, 60, 1.0, budget=20)
    caches.complete()
    caches.release(A, 60, 1.0, ((20, 60),))
    assert caches.places(A) == "222"
    caches.turn(B, 60, 2.0)
    assert caches.places(B) == "22222222"
    caches.turn(A, 60, 3.0)
    caches.turn(C, 60, 4.0)
    assert [caches.places(key) for key in (A, B, C)] == ["22222222"] * 3
    assert caches.twin.device_free == 20 - 5 - 3 * 3


def test_clear_frees_what_running_sessions_share() -> None:
    caches = Few()
    for key in (A, B, C):
        caches.admit(key, 60, 1.0)
    caches.complete()
    caches.twin.clear()
    assert (caches.twin.device_free, caches.twin.unpinned) == (20, 20)
    assert caches.twin.admit(A, 0, 60, 2.0, prefix_of(A)).missing == ((0, 60),)
