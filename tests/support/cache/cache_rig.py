"""Whole turns on a ``CacheManager`` without an engine, checked after each; and what one sees of the cache then."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pensieve.config import CacheConfig, PolicyName
from pensieve.core import SessionKey, TokenArray
from pensieve.engine.cache.chunk import CachedSession, Chunk, Place, Restore, SharedRun
from pensieve.engine.cache.index import Reclaim
from pensieve.engine.cache.manager import CacheManager
from pensieve.engine.cost import CostModel

SIZE = 4
COST = CostModel(((0, 0.0), (1000, 1000.0)), 4.0, SIZE)
"""Cost(l) = l + 4: chunk k of four tokens costs 4k + 8."""
_LETTERS = {Place.DEVICE: "D", Place.BOTH: "B", Place.HOST: "H", Place.DROPPED: "."}


def make(
    device: int = 40,
    host: int = 40,
    policy: PolicyName = "retention",
    *,
    size: int = SIZE,
    sharing: bool = True,
    watermark: float = 0.0,
) -> CacheManager:
    config = CacheConfig(
        device, host, size, policy=policy, swap_watermark=watermark, prefix_sharing=sharing
    )  # fmt: skip
    return CacheManager(config, CostModel(COST.attention, COST.other, size))


def text(count: int, seed: int = 0) -> TokenArray:
    """Tokens that no other seed gives."""
    return (np.arange(count) * 7 + 100_000 * seed).astype(np.int32)


def joined(*parts: TokenArray) -> TokenArray:
    return np.concatenate(parts)


def begin(
    cache: CacheManager,
    name: str,
    context: TokenArray,
    now: float,
    *,
    scope: str = "a",
    new: int | None = None,
) -> Restore:
    """Admit a request; nothing is computed yet."""
    key = SessionKey(name)
    num_new = len(context) if new is None else new
    path = cache.prefix_path(key, scope, context)
    assert cache.can_admit(key, context, num_new, path=path)
    return cache.admit(key, context, num_new, now, path)


def compute(cache: CacheManager, name: str, restore: Restore) -> None:
    for start, end in restore.missing:
        cache.computed(SessionKey(name), start, end)


def commit(cache: CacheManager) -> tuple[int, int, int]:
    """Execute the planned copies; how many of each kind there were."""
    out, copies, swapped_in, _ = cache.take_copies()
    cache.complete_copies()
    cache.check()
    return len(out), len(copies), len(swapped_in)


def end(cache: CacheManager, name: str, now: float, answer: TokenArray | None = None) -> None:
    """The request ends, with an answer whose KV was computed token by token."""
    key = SessionKey(name)
    if answer is None:
        cache.release(key, now)
    else:
        context = cache._running[key].tokens
        for count in range(1, len(answer) + 1):
            assert cache.extend(key, len(context) + count, now)
            cache.computed(key, len(context) + count - 1, len(context) + count)
        cache.release(key, now, joined(context, answer))
    cache.check()


def serve(
    cache: CacheManager,
    name: str,
    context: TokenArray,
    now: float,
    *,
    scope: str = "a",
    new: int | None = None,
    answer: TokenArray | None = None,
) -> Restore:
    """One whole turn: restore, compute what is missing, generate, release."""
    restore = begin(cache, name, context, now, scope=scope, new=new)
    compute(cache, name, restore)
    commit(cache)
    end(cache, name, now, answer)
    return restore


def receipt(restore: Restore, context: TokenArray) -> tuple[int, int, int, int]:
    """(device, host, recomputed, new)."""
    cached = restore.gpu_cached + restore.swapped_in
    return (
        restore.gpu_cached,
        restore.swapped_in,
        restore.recomputed,
        len(context) - cached - restore.recomputed,
    )


def chunks(cache: CacheManager, name: str) -> Sequence[Chunk]:
    session = cache.sessions.get(SessionKey(name))
    return session.chunks if session else ()


def places(cache: CacheManager, name: str) -> str:
    """A letter per chunk: D(evice) B(oth) H(ost) .(dropped)."""
    return "".join(_LETTERS[chunk.place] for chunk in chunks(cache, name))


def owners(chunk: Chunk) -> list[CachedSession]:
    return list(chunk.holder.owners) if isinstance(chunk.holder, SharedRun) else [chunk.holder]


def owner_names(cache: CacheManager, name: str) -> list[str]:
    """Who owns each chunk of a session, as one word of sorted names."""
    return ["".join(sorted(str(owner.key) for owner in owners(chunk))) for chunk in chunks(cache, name)]


def drop(cache: CacheManager, name: str, indices: Sequence[int]) -> None:
    """Lose some chunks of a session in both tiers, as for want of room."""
    mine = list(chunks(cache, name))
    for index in indices:
        cache._tiers.drop(mine[index])
    cache._remove_emptied()
    cache.check()


def to_host(cache: CacheManager, name: str, indices: Sequence[int]) -> None:
    """Move some chunks of a session to the host."""
    mine = list(chunks(cache, name))
    for index in indices:
        if mine[index].host < 0:
            cache._tiers.save(mine[index])
        cache._tiers.evict_from_device(mine[index])
    commit(cache)


def victims(cache: CacheManager, reclaim: Reclaim, now: float, count: int) -> list[Chunk]:
    """The next victims in order, without evicting them."""
    order = cache.index.round(reclaim, now, count)
    found: list[Chunk] = []
    while len(found) < count and (group := order.take()):
        for chunk in group:
            chunk.pins += 1  # out of the running, as if evicted
            found.append(chunk)
        order.put_back()
    for chunk in found:
        chunk.pins -= 1
        cache.index.touch(chunk.holder)
    return found
