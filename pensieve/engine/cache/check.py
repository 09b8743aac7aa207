"""The invariants of the cache: checked after each step in debug mode, and after each operation in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from pensieve.core import SessionKey
from pensieve.engine.cache.chunk import NOWHERE, CachedSession, Chunk, OtherSlice, SharedRun, Slice
from pensieve.engine.cache.eviction import EvictionIndex
from pensieve.engine.cache.pages import PagePool
from pensieve.engine.cache.sharing import SharedChunks
from pensieve.engine.cache.tiers import Tiers


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
    parts: list[Slice] = [*chunks, *(chunk.other for chunk in chunks if chunk.other is not None)]
    _check_pool("device", tiers.device, [(c, c.device) for c in parts if c.device != NOWHERE])
    _check_pool("host", tiers.host, [(c, c.host) for c in parts if c.host != NOWHERE])
    pinned = [sum(part.pins > 0 for part in parts if group == part.group) for group in (0, 1)]
    assert tiers.pinned == pinned, f"{tiers.pinned} pinned, but the slices say {pinned}"
    repeated = sum(part.pins - 1 for part in parts if part.group and part.pins)
    assert tiers.repeated == repeated, f"{tiers.repeated} pins repeated, but the slices say {repeated}"
    by_tenant: Counter[int] = Counter()
    for part in parts:
        if part.pins:
            by_tenant[part.holder.tenant] += tiers.page_bytes(part)
    assert +Counter(tiers.pinned_by) == +by_tenant, "pins by tenant contradict the slices"
    for part in parts:
        _check_slice(part, size)
    spare = {part for part in parts if part.pins and part.host != NOWHERE}
    assert set(tiers.spare) == spare, "the list of spare host copies is wrong"
    _check_second_group(sessions, chunks, tiers)
    for session in sessions.values():
        _check_session(session, size, tiers.moves)
        assert session.running == (session.key in running), f"{session.key}: running flag is wrong"
    _check_owners(sessions, chunks)
    shared.check(chunks)
    index.check()


def _check_pool(name: str, pool: PagePool, owned: list[tuple[Slice, int]]) -> None:
    """``owned``: slices and the page that each has in the tier."""
    by_tenant: Counter[int] = Counter()
    for group, kind in enumerate(pool.groups):
        held = [page for part, page in owned if part.group == group]
        for part, _ in owned:
            if part.group == group:
                by_tenant[part.holder.tenant] += kind.page_bytes
        if not kind.page_bytes:
            continue
        twice = [page for page, count in Counter(held).items() if count > 1]
        assert not twice, f"{name} pages {twice} of group {group} have two owners"
        assert len(held) == pool.used(group), (
            f"{name}: {len(held)} pages of group {group} held, not {pool.used(group)}"
        )
        both = [page for page in held if pool.is_free(page, group)]
        assert not both, f"{name} pages {both} of group {group} are held and free"
    assert +Counter(pool.held) == +by_tenant, (
        f"{name}: bytes by tenant are {by_tenant}, not {dict(pool.held)}"
    )
    # A tier that was made smaller holds more than its size until enough was evicted, some in each plan.
    if pool.limits is None:
        assert pool.used_bytes + pool.free_bytes == pool.size_bytes, f"{name}: bytes do not add up"


def _check_slice(part: Slice, size: int) -> None:
    name = f"chunk {part.index}, group {part.group}"
    holder = part.holder
    owners = list(holder.owners) if isinstance(holder, SharedRun) else [holder]
    assert 0 <= part.filled <= size, f"{name}: filled {part.filled} of {size}"
    assert part.filled == 0 or part.cached, f"{name}: dropped but filled"
    if isinstance(part, OtherSlice):
        assert part.pins == sum(part in owner.held for owner in owners), f"{name}: {part.pins} pins"
        assert not (part.pins and part.filled) or part.device != NOWHERE, f"{name}: pinned without its page"
    else:
        assert part.pins == sum(owner.running for owner in owners), f"{name}: {part.pins} pins"
        assert not part.pins or part.device != NOWHERE, f"{name}: pinned without a device page"


def _check_second_group(
    sessions: Mapping[SessionKey, CachedSession], chunks: list[Chunk], tiers: Tiers
) -> None:
    """Leftovers are on the device alone, nothing is held by an idle session, and the promises add up."""
    others = [chunk.other for chunk in chunks if chunk.other is not None]
    assert set(tiers.leftovers) == {part for part in others if part.leftover}, (
        "the list of leftovers is wrong"
    )
    for part in tiers.leftovers:
        assert not part.pins and part.device != NOWHERE, (
            f"chunk {part.index}: a leftover is pinned or not on the device"
        )
        assert part.host == NOWHERE or part.saving, f"chunk {part.index}: a leftover has a host copy"
    for session in sessions.values():
        assert session.running or not (session.held or session.promised), (
            f"{session.key}: idle, but holds slices"
        )
    promised = sum(session.promised for session in sessions.values())
    assert tiers.promised == promised, f"{tiers.promised} pages promised, not {promised}"


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


def _check_session(session: CachedSession, size: int, moves: int) -> None:
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
    if session.running and session.table_moves == moves:
        pages = [chunk.device for chunk in session.chunks]
        assert list(session.table) == pages, f"{key}: page table {list(session.table)} is not {pages}"
