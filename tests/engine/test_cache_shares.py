"""What a tenant keeps of the cache: chunks within its share do not give way to others', whatever those do."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import dataclass
from typing import get_args

import pytest

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import NOWHERE, Chunk, Place
from pensieve.engine.cache.manager import CacheManager
from support.cache.cache_rig import COST, SIZE, commit, joined, places, text

SHARES = {"a": 0.3, "b": 0.2}
"""The tenants "c" and "d" have none."""


def make(
    device: int = 20, host: int = 20, policy: PolicyName = "retention", *, watermark: float = 0.0
) -> CacheManager:
    cache = CacheManager(CacheConfig(device, host, SIZE, policy=policy, swap_watermark=watermark), COST)
    for tenant, share in SHARES.items():
        cache.shares.set_share(tenant, share)
    return cache


def begin(cache: CacheManager, name: str, context: TokenArray, now: float, *, reserve: bool = False) -> bool:
    """Admit a turn of a session, whose tenant is the first letter of its name, if that may be; all is computed."""
    key, tenant = SessionKey(name), name[0]
    path = cache.prefix_path(key, "" if name.endswith("-") else tenant, context)
    size = len(context)
    if not cache.can_admit(key, context, size, path=path, reserve_for=tenant if reserve else None):
        return False
    for start, end in cache.admit(key, context, size, now, path, tenant=tenant).missing:
        cache.computed(key, start, end)
    return True


def serve(cache: CacheManager, name: str, chunks: int, now: float) -> None:
    """A whole turn over a context of its own."""
    assert begin(cache, name, text(chunks * SIZE, seed=sum(map(ord, name))), now)
    commit(cache)
    cache.release(SessionKey(name), now)
    cache.check()


def test_a_flood_leaves_a_tenant_its_share_of_both_tiers() -> None:
    """Its chunks are the oldest by far. Without a share they go first, on the device and on the host."""
    cache = make()
    serve(cache, "a1", 9, 1.0)  # six are its share
    for number in range(30):
        serve(cache, f"d{number}", 4, 1000.0 + number)
    assert Counter(places(cache, "a1")) == {"D": 6, "H": 3}
    cache.shares.set_share("a", 0.0)
    for number in range(30, 60):
        serve(cache, f"d{number}", 4, 1000.0 + number)
    assert places(cache, "a1") == ""


def test_its_own_turns_evict_its_own_chunks() -> None:
    cache = make(device=10)
    serve(cache, "a1", 3, 1.0)
    serve(cache, "d1", 7, 2.0)
    serve(cache, "a2", 2, 1000.0)
    assert places(cache, "a1") == "HDD"


def test_a_turn_joins_only_if_others_keep_their_share() -> None:
    """Unless nothing runs: a share stops nobody, and no context that fits the device."""
    cache = make(device=10)
    serve(cache, "a1", 3, 1.0)
    context = text(8 * SIZE, seed=5)
    assert not begin(cache, "c1", context, 2.0, reserve=True)
    assert places(cache, "a1") == "DDD"
    assert begin(cache, "c1", context, 2.0)
    commit(cache)
    assert Counter(places(cache, "a1")) == {"D": 2, "H": 1}, "its place on the host is kept as well"


def test_a_turn_that_runs_takes_what_it_needs() -> None:
    cache = make(device=10)
    serve(cache, "a1", 3, 1.0)
    assert begin(cache, "c1", text(7 * SIZE, seed=5), 2.0)
    commit(cache)
    assert places(cache, "a1") == "DDD"
    assert cache.extend(SessionKey("c1"), 7 * SIZE + 1, 3.0)
    commit(cache)
    assert Counter(places(cache, "a1")) == {"D": 2, "H": 1}


@dataclass
class Held:
    """What the chunks themselves say of one tenant."""

    device: int = 0
    host: int = 0
    pinned: int = 0


def counted(cache: CacheManager) -> tuple[dict[str, Held], dict[str, set[Chunk]]]:
    """By tenant: pages, and the chunks that are in a tier."""
    held = {tenant: Held() for tenant in "abcd"}
    there: dict[str, set[Chunk]] = {tenant: set() for tenant in "abcd"}
    for key, session in cache.sessions.items():
        for chunk in session.chunks:
            if chunk not in there[key[0]] and chunk.place is not Place.DROPPED:
                there[key[0]].add(chunk)
                held[key[0]].device += chunk.device != NOWHERE
                held[key[0]].host += chunk.host != NOWHERE
                held[key[0]].pinned += chunk.pins > 0
    return held, there


class Watch:
    """Around one thing that a turn of a tenant does: the others have their shares afterwards."""

    def __init__(self, cache: CacheManager, tenant: str, seen: Counter[str]) -> None:
        self._cache, self._tenant, self._seen = cache, tenant, seen

    def __enter__(self) -> None:
        self._before, self._there = counted(self._cache)

    def __exit__(self, *error: object) -> None:
        after, _ = counted(self._cache)
        reason = self._reason(after)
        commit(self._cache)
        assert not reason, reason

    def _reason(self, after: dict[str, Held]) -> str:
        """What is wrong before the plan's copies are done, if anything is."""
        config = self._cache.config
        for tenant in SHARES.keys() - {self._tenant}:
            device, host = (int(SHARES[tenant] * size) for size in (config.device_chunks, config.host_chunks))
            was, now = self._before[tenant], after[tenant]
            if now.device < min(was.device, device):
                self._seen["last resort"] += 1
                if self._others_could_give(after):
                    return f"{tenant} has {now.device} of {device} pages"
            self._seen["kept"] += now.device == device and was.device > device
            lost = [chunk for chunk in self._there[tenant] if chunk.place is Place.DROPPED]
            self._seen["dropped"] += bool(lost)
            if lost and now.host < host and self._host_only(after):
                return f"{tenant} lost chunks and has {now.host} of {host} on the host"
        return ""

    def _others_could_give(self, after: dict[str, Held]) -> bool:
        """Whether a page is free, or some tenant has an idle one beyond its share."""
        config = self._cache.config
        if sum(one.device for one in after.values()) < config.device_chunks:
            return True
        for tenant, one in after.items():
            kept = 0 if tenant == self._tenant else int(SHARES.get(tenant, 0.0) * config.device_chunks)
            if min(one.device - one.pinned, one.device - kept) > 0:
                return True
        return False

    def _host_only(self, after: dict[str, Held]) -> bool:
        """Whether the host has a chunk that could have gone instead, of a tenant beyond its share."""
        size = self._cache.config.host_chunks
        for key, session in self._cache.sessions.items():
            kept = int(SHARES.get(key[0], 0.0) * size) if key[0] != self._tenant else 0
            if after[key[0]].host > kept and any(
                chunk.place is Place.HOST and not (chunk.pins or chunk.saving or chunk.loading)
                for chunk in session.chunks
            ):
                return True
        return False


@pytest.mark.parametrize("policy", get_args(PolicyName))
def test_whatever_others_do_a_share_is_kept(policy: PolicyName) -> None:
    """Random turns of four tenants, side by side; the oracle counts the chunks themselves."""
    seen: Counter[str] = Counter()
    for seed in range(4):
        rng = random.Random(f"{policy} {seed}")
        device = rng.choice((10, 20, 33))
        cache = make(device, rng.choice((0, 5, device, 3 * device)), policy, watermark=rng.choice((0.0, 0.3)))
        histories: dict[str, TokenArray] = {}
        now = 1.0
        for step in range(100):
            now += rng.expovariate(1.0)
            for name in [str(key) for key in cache._running if rng.random() < 0.4]:
                with Watch(cache, name[0], seen):
                    grown = joined(histories[name], text(rng.randrange(1, 9), seed=step))
                    start = len(histories[name])
                    if cache.extend(SessionKey(name), len(grown), now):
                        cache.computed(SessionKey(name), start, len(grown))
                        histories[name] = grown
                cache.release(SessionKey(name), now, histories[name])
            name = f"{rng.choice('aabcdd')}{rng.randrange(4)}{rng.choice(('', '-'))}"
            common = text(2 * SIZE, seed=ord(name[0]))
            context = joined(histories.get(name, common), text(rng.randrange(1, 6 * SIZE), seed=1000 + step))
            if len(context) > 0.6 * device * SIZE:
                context = common
            with Watch(cache, name[0], seen):
                if begin(cache, name, context, now, reserve=bool(cache._running)):
                    histories[name] = context
            with Watch(cache, "", seen):
                cache.swap_out_ahead(now, 8)
    assert seen["kept"] > 5 and seen["last resort"] and seen["dropped"], seen
