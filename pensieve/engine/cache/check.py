"""The invariants of the cache: checked after each step in debug mode, and after operations and steps in tests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

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
    groups: list[Sequence[Slice]] = [
        chunks,
        [chunk.other for chunk in chunks if chunk.other is not None],
    ]
    for name, pool in (("device", tiers.device), ("host", tiers.host)):
        _check_pool(name, pool, groups)
    held = [[part for part in parts if part.pins] for parts in groups]
    pinned = [len(parts) for parts in held]
    assert tiers.pinned == pinned, f"{tiers.pinned} pinned, but the slices say {pinned}"
    # A tier that was made smaller holds more than its limits until enough was evicted, some in each plan.
    fits = tiers.device.spare(*tiers.claimed) >= 0
    assert fits, (
        f"no room for the {tiers.claimed} pages pinned or promised, with limits {tiers.device.limits}"
    )
    repeated = sum([part.pins - 1 for part in held[1]])
    assert tiers.repeated == repeated, f"{tiers.repeated} pins repeated, but the slices say {repeated}"
    by_tenant: Counter[int] = Counter()
    for part in (*held[0], *held[1]):
        by_tenant[part.holder.tenant] += tiers.page_bytes(part)
    assert +Counter(tiers.pinned_by) == +by_tenant, "pins by tenant contradict the slices"
    for parts in groups:
        _check_slices(parts, size)
    spare = {part for part in (*held[0], *held[1]) if part.host != NOWHERE}
    assert set(tiers.spare) == spare, "the list of spare host copies is wrong"
    _check_second_group(sessions, chunks, tiers)
    for session in sessions.values():
        _check_session(session, size, tiers.moves)
        assert session.running == (session.key in running), f"{session.key}: running flag is wrong"
    _check_owners(sessions, chunks)
    shared.check(chunks)
    index.check()


def _check_pool(name: str, pool: PagePool, groups: Sequence[Sequence[Slice]]) -> None:
    """``groups``: the slices of each group. Those with a page in the tier own it."""
    by_tenant: Counter[int] = Counter()
    for group, kind in enumerate(pool.groups):
        if name == "device":
            owned = [(part, part.device) for part in groups[group] if part.device != NOWHERE]
        else:
            owned = [(part, part.host) for part in groups[group] if part.host != NOWHERE]
        for part, _ in owned:
            by_tenant[part.holder.tenant] += kind.page_bytes
        if not kind.page_bytes:
            continue
        held = [page for _, page in owned]
        assert len(set(held)) == len(held), f"{name} pages {sorted(held)} of group {group} have two owners"
        assert len(held) == pool.used(group), (
            f"{name}: {len(held)} pages of group {group} held, not {pool.used(group)}"
        )
        both = [page for page in held if pool.is_free(page, group)]
        assert not both, f"{name} pages {both} of group {group} are held and free"
    assert +Counter(pool.held) == +by_tenant, (
        f"{name}: bytes by tenant are {by_tenant}, not {dict(pool.held)}"
    )
    if pool.limits is None:
        assert pool.used_bytes + pool.free_bytes == pool.size_bytes, f"{name}: bytes do not add up"


def _check_slices(parts: Sequence[Slice], size: int) -> None:
    for part in parts:
        holder, pins, filled = part.holder, part.pins, part.filled
        assert 0 <= filled <= size, f"{_name(part)}: filled {filled} of {size}"
        assert filled == 0 or part.cached, f"{_name(part)}: dropped but filled"
        owners = holder.owners if isinstance(holder, SharedRun) else (holder,)
        if isinstance(part, OtherSlice):
            using = [owner for owner in owners if part in owner.held]
            assert not (pins and filled) or part.device != NOWHERE, f"{_name(part)}: pinned without its page"
        else:
            using = [owner for owner in owners if owner.running]
            assert not pins or part.device != NOWHERE, f"{_name(part)}: pinned without a device page"
        assert pins == len(using), f"{_name(part)}: {pins} pins, {len(using)} requests"


def _name(part: Slice) -> str:
    return f"chunk {part.index}, group {part.group}"


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
    """A chunk's owners are the sessions that have it in their lists, each once."""
    lists = Counter([id(chunk) for session in sessions.values() for chunk in session.chunks])
    for session in sessions.values():
        for chunk in session.chunks:
            holder = chunk.holder
            owned = session in holder.owners if isinstance(holder, SharedRun) else session is holder
            assert owned, f"chunk {chunk.index}: {session.key} has it, but is no owner"
    for chunk in chunks:
        holder, found = chunk.holder, lists[id(chunk)]
        owners = len(holder.owners) if isinstance(holder, SharedRun) else 1
        assert owners == found, f"chunk {chunk.index}: {owners} owners, {found} lists"
        assert not isinstance(holder, SharedRun) or owners > 1, f"chunk {chunk.index}: shared by one session"


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
