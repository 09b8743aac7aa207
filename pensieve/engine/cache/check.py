"""The invariants of the cache: checked after each step in debug mode, and after each operation in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, SharedRun
from pensieve.engine.cache.eviction import EvictionIndex
from pensieve.engine.cache.sharing import SharedChunks
from pensieve.engine.cache.tiers import PagePool, Tiers


def check_cache(
    sessions: Mapping[SessionKey, CachedSession],
    running: Mapping[SessionKey, CachedSession],
    tiers: Tiers,
    index: EvictionIndex,
    shared: SharedChunks,
) -> None:
    """Raise AssertionError on the first invariant that does not hold."""
    size = tiers.chunk_tokens
    chunks = list({id(chunk): chunk for session in sessions.values() for chunk in session.chunks}.values())
    _check_pool("device", tiers.device, [(c.device, c.holder.tenant) for c in chunks if c.device != NOWHERE])
    _check_pool("host", tiers.host, [(c.host, c.holder.tenant) for c in chunks if c.host != NOWHERE])
    assert tiers.pinned == sum(c.pins > 0 for c in chunks), (
        f"{tiers.pinned} pinned, which the chunks contradict"
    )
    pinned = Counter(chunk.holder.tenant for chunk in chunks if chunk.pins)
    assert +Counter(tiers.pinned_by) == pinned, "pins by tenant contradict the chunks"
    for chunk in chunks:
        _check_chunk(chunk, size)
    spare = {chunk for chunk in chunks if chunk.pins and chunk.host != NOWHERE}
    assert set(tiers.spare) == spare, "the list of spare host copies is wrong"
    for session in sessions.values():
        _check_session(session, size)
        assert session.running == (session.key in running), f"{session.key}: running flag is wrong"
    _check_owners(sessions, chunks)
    shared.check(chunks)
    index.check()


def _check_pool(name: str, pool: PagePool, owned: list[tuple[int, int]]) -> None:
    """``owned``: (page, number of the tenant that holds it)."""
    held = [page for page, _ in owned]
    by_tenant = Counter(tenant for _, tenant in owned)
    assert +Counter(pool.held) == by_tenant, f"{name}: pages by tenant are {by_tenant}, not {dict(pool.held)}"
    twice = [page for page, count in Counter(held).items() if count > 1]
    assert not twice, f"{name} pages {twice} have two owners"
    assert len(held) + pool.free == pool.capacity, (
        f"{name}: {len(held)} held + {pool.free} free != {pool.capacity}: a page leaked"
    )
    both = [page for page in held if pool.is_free(page)]
    assert not both, f"{name} pages {both} are held and free"


def _check_chunk(chunk: Chunk, size: int) -> None:
    name = f"chunk {chunk.index}"
    owners = list(chunk.holder.owners) if isinstance(chunk.holder, SharedRun) else [chunk.holder]
    assert 0 <= chunk.filled <= size, f"{name}: filled {chunk.filled} of {size}"
    assert chunk.filled == 0 or chunk.cached, f"{name}: dropped but filled"
    assert chunk.pins == sum(owner.running for owner in owners), f"{name}: {chunk.pins} pins"
    assert not chunk.pins or chunk.device != NOWHERE, f"{name}: pinned without a device page"


def _check_owners(sessions: Mapping[SessionKey, CachedSession], chunks: list[Chunk]) -> None:
    """A chunk's owners are the sessions that have it in their lists."""
    lists: dict[int, set[int]] = {id(chunk): set() for chunk in chunks}
    for session in sessions.values():
        for chunk in session.chunks:
            lists[id(chunk)].add(id(session))
    for chunk in chunks:
        holder = chunk.holder
        owners = set(map(id, holder.owners)) if isinstance(holder, SharedRun) else {id(holder)}
        assert owners == lists[id(chunk)], (
            f"chunk {chunk.index}: {len(owners)} owners, {len(lists[id(chunk)])} lists"
        )
        assert not isinstance(holder, SharedRun) or len(owners) > 1, (
            f"chunk {chunk.index}: shared by one session"
        )


def _check_session(session: CachedSession, size: int) -> None:
    key = session.key
    for index, chunk in enumerate(session.chunks):
        assert chunk.index == index, f"{key}: chunk {chunk.index} at {index}"
        assert chunk.shared == (index < session.shared), f"{key}: chunk {index}: shared flag is wrong"
    holders: list[CachedSession | SharedRun] = [session, *session.shared_runs()]
    for holder in holders:
        assert [chunk.holder for chunk in holder.own_chunks] == [holder] * len(holder.own_chunks), (
            f"{key}: wrong holders"
        )
    assert session.running or session.has_cached_chunks, f"{key}: no chunk cached, but not removed"
    assert len(session.tokens) <= len(session.chunks) * size or session.running, (
        f"{key}: tokens without chunks"
    )
    if session.running:
        pages = [chunk.device for chunk in session.chunks]
        assert list(session.table) == pages, f"{key}: page table {list(session.table)} is not {pages}"
