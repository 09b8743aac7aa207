"""Copy sessions from store to backup, backup to store, or store to store. Verified before and after."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from pensieve.store._raw import (
    Examination,
    Problem,
    Progress,
    RawSession,
    RawStore,
    examine,
    has_expired,
    has_running_turn,
    no_progress,
    plan_fix,
    without_lease_holder,
)
from pensieve.store._rules import CommittedRequest, Meta
from pensieve.store.contract import Key
from pensieve.store.maintenance.archive import ArchiveWriter, Totals, read_sessions
from pensieve.store.records import State


class CopyRefused(Exception):
    """Nothing was written, or the copy differs from its source; the message says what to do."""


Origin = Callable[[], AsyncIterator[RawSession]]
"""Yields every session of a backup or a store; may be called several times."""


@dataclass(frozen=True, slots=True)
class WholeBackup:
    """A backup that was read to its end and found whole."""

    path: Path
    number: int
    """Sessions and tombstones."""

    async def sessions(self) -> AsyncIterator[RawSession]:
        for session in read_sessions(self.path):
            yield session


def open_backup(path: Path) -> WholeBackup:
    """Verify a whole backup. Raises BadBackup or OSError."""
    return WholeBackup(path, sum(1 for _ in read_sessions(path)))


async def _sessions_of(store: RawStore) -> AsyncIterator[RawSession]:
    for key in await store.keys():
        session = await store.session(key)
        if session is not None:
            yield session


@dataclass(slots=True)
class CopyResult:
    """The result of a restore, a merge or a move."""

    written: int = 0
    kept: int = 0
    """Sessions that the store already had in the same or a newer version."""
    expired: int = 0
    damaged: list[str] = field(default_factory=list)
    """Sessions that were written and marked as damaged, because they were not sound at the source."""
    conflicts: list[str] = field(default_factory=list)


async def backup(
    source: RawStore, path: Path, *, replace_file: bool = False, progress: Progress = no_progress
) -> Totals:
    """Write all sessions of an open store to ``path``, damaged ones as they are.

    Raises OSError, FileExistsError, and the store's errors.
    """
    with ArchiveWriter(path, replace=replace_file) as writer:
        writer.begin(source.kind, source.store_id, await source.now())
        keys = await source.keys()
        for done, key in enumerate(keys):
            progress("backing up", done, len(keys))
            session = await source.session(key)
            if session is None:
                continue  # removed since the keys were listed
            session, damage = as_backed_up(session, await source.now())
            meta = None if session.meta is None else without_lease_holder(session.meta)
            writer.add(replace(session, meta=meta), damage)
        progress("backing up", len(keys), len(keys))
        return writer.finish()


async def restore(
    source: WholeBackup,
    target: RawStore,
    *,
    merge: bool = False,
    skip: bool = False,
    progress: Progress = no_progress,
) -> CopyResult:
    """Copy a backup to an open store. Raises CopyRefused, OSError, BadBackup, and the store's errors."""
    return await copy(source.sessions, target, total=source.number, merge=merge, skip=skip, progress=progress)


async def move(
    source: RawStore,
    target: RawStore,
    *,
    merge: bool = False,
    skip: bool = False,
    progress: Progress = no_progress,
) -> CopyResult:
    """Copy an open store to another; the source is unchanged. Raises as ``restore``."""
    now, number = await source.now(), 0
    if source.store_id and source.store_id == target.store_id:
        raise CopyRefused("both are one and the same store")
    async for session in _sessions_of(source):
        number += 1
        progress("looking", number, None)
        if not source.is_exclusive and has_running_turn(session.meta, now):
            raise CopyRefused(
                f"a turn is running in session {_name(session.key)}: stop the servers that use this store"
            )
    return await copy(
        partial(_sessions_of, source), target, total=number, merge=merge, skip=skip, progress=progress
    )


async def copy(
    origin: Origin, target: RawStore, *, total: int | None, merge: bool, skip: bool, progress: Progress
) -> CopyResult:
    """Decide about every session before writing the first; read back every session that was written.

    ``total``: number of sessions, None if unknown.
    """
    copying = _Copying(target, set(await target.keys()), await target.now())
    if copying.here and not merge:
        raise CopyRefused(f"the store holds {len(copying.here)} sessions: use an empty store, or --merge")
    if copying.here:
        async for session in origin():
            await copying.find_conflict(session)
        if copying.done.conflicts and not skip:
            return copying.done
    number = 0
    async for session in origin():
        progress("writing", number, total)
        number += 1
        await copying.write(session)
    checked = 0
    async for session in origin():
        if session.key in copying.written:
            checked += 1
            progress("verifying", checked, len(copying.written))
            await copying.verify(session)
    if checked != len(copying.written):
        raise CopyRefused(
            "sessions went away while they were copied: stop the servers, and repeat with --merge"
        )
    await target.flush()
    return copying.done


@dataclass(slots=True)
class _Copying:
    target: RawStore
    here: set[Key]
    """The target's sessions before the copy."""
    began_ms: int
    """By the target's clock."""
    done: CopyResult = field(default_factory=CopyResult)
    written: set[Key] = field(default_factory=set)

    async def find_conflict(self, session: RawSession) -> None:
        choice, why = await self._choice(session)
        if choice is MergeChoice.CONFLICT:
            self.done.conflicts.append(f"{_name(session.key)}: {why}")

    async def write(self, session: RawSession) -> None:
        """Write the session if it was chosen. Raises CopyRefused."""
        choice, _ = await self._choice(session)
        if choice is MergeChoice.KEEP:
            self.done.kept += 1
        elif choice is MergeChoice.EXPIRED:
            self.done.expired += 1
        if choice is not MergeChoice.WRITE:
            return
        before = await self.target.session(session.key) if session.key in self.here else None
        fit = as_restored(session, self.began_ms)
        if fit is None:
            self.done.damaged.append(f"{_name(session.key)}: no part of it can be read")
            return
        if not await self.target.put(fit, expected_stamp=None if before is None else before.stamp):
            raise CopyRefused(
                f"session {_name(session.key)} has changed since: stop the servers, and repeat with --merge"
            )
        self.written.add(session.key)
        self.done.written += 1
        if fit.meta is not None and fit.meta.row.state is State.DAMAGED:
            self.done.damaged.append(_name(session.key))

    async def verify(self, session: RawSession) -> None:
        """Raise CopyRefused unless the target holds what the source holds now."""
        wanted, found = as_restored(session, self.began_ms), await self.target.session(session.key)
        if found is None and wanted is not None and has_expired(wanted.meta, await self.target.now()):
            return
        if wanted is None or found is None or content(wanted) != content(found):
            raise CopyRefused(
                f"session {_name(session.key)} differs between source and target: it was changed meanwhile, or a "
                "store does not keep what is written to it; stop the servers, and repeat with --merge"
            )

    async def _choice(self, session: RawSession) -> tuple[MergeChoice, str]:
        ours = await self.target.session(session.key) if session.key in self.here else None
        return choose_merge(
            examine(session),
            None if ours is None else examine(ours),
            now=self.began_ms,
            alone=self.target.is_exclusive,
        )


def as_backed_up(session: RawSession, now: int) -> tuple[RawSession, tuple[str, ...]]:
    """Return ``session`` with its derived data repaired, and its faults; none if its records are whole."""
    examined = examine(session)
    if examined.is_broken or any(one.problem is Problem.MARKED for one in examined.findings):
        return session, tuple(one.detail for one in examined.findings)
    fix = plan_fix(examined, truncate=False, now=now)
    return session if fix is None else fix.session, ()


def as_restored(session: RawSession, now: int) -> RawSession | None:
    """Return ``session`` as written to another store, marked if damaged; None if none of it is readable."""
    examined = examine(session)
    if session.meta is None:
        fix = plan_fix(examined, truncate=False, now=now)
        return None if fix is None else fix.session
    meta = without_lease_holder(session.meta)
    if examined.is_broken and meta.row.state is State.ACTIVE:
        row = msgspec.structs.replace(meta.row, state=State.DAMAGED)
        meta = Meta(row, meta.create_fingerprint, meta.lease)
    requests = dict(session.requests)
    for (
        request_id,
        revision,
    ) in examined.request_ids().items():  # a backup may lack some that its records name
        if request_id not in requests or requests[request_id].revision != revision:
            requests[request_id] = CommittedRequest("", revision)
    return RawSession(session.key, meta, session.log, requests)


def content(session: RawSession) -> tuple[object, ...]:
    """Return the parts that are equal in all copies of a session."""
    meta = None if session.meta is None else without_lease_holder(session.meta)
    return (session.key, meta, session.log, dict(session.requests))


def _name(key: Key) -> str:
    return f"{key.tenant}/{key.session_id}"


class MergeChoice(enum.Enum):
    WRITE = enum.auto()
    KEEP = enum.auto()
    """The target has the same version or a newer one."""
    CONFLICT = enum.auto()
    EXPIRED = enum.auto()


def choose_merge(
    theirs: Examination, ours: Examination | None, *, now: int, alone: bool
) -> tuple[MergeChoice, str]:
    """Decide whether ``theirs`` replaces ``ours``; with a conflict, say why.

    The longer of two logs wins if the shorter is its beginning. A deletion is newer than the state that it
    deleted. A damaged session yields to a sound one that has at least the revision in its row.
    """
    meta = theirs.session.meta
    if has_expired(meta, now):
        return MergeChoice.EXPIRED, ""
    if ours is None or has_expired(ours.session.meta, now):
        return MergeChoice.WRITE, ""
    if not alone and has_running_turn(ours.session.meta, now):
        return MergeChoice.CONFLICT, "a turn is running"
    if _is_deleted(ours.session):
        return MergeChoice.KEEP, ""
    here = _revision(ours)
    if _is_deleted(theirs.session):
        behind = meta is not None and here <= meta.row.revision
        return (
            (MergeChoice.WRITE, "")
            if behind
            else (MergeChoice.CONFLICT, "deleted in the source, continued in the target")
        )
    there = len(theirs.sound)
    if ours.is_broken:
        if _starts_with(theirs, ours) and not theirs.is_broken and there >= here:
            return MergeChoice.WRITE, ""
        return MergeChoice.CONFLICT, f"damaged in the target at revision {here}; the source ends at {there}"
    if _starts_with(ours, theirs):
        return MergeChoice.KEEP, ""
    if _starts_with(theirs, ours):
        return (
            (MergeChoice.CONFLICT, "damaged in the source") if theirs.is_broken else (MergeChoice.WRITE, "")
        )
    return (
        MergeChoice.CONFLICT,
        f"two different histories, {here} revisions in the target and {there} in the source",
    )


def _is_deleted(session: RawSession) -> bool:
    return session.meta is not None and session.meta.row.state is State.DELETED


def _revision(examined: Examination) -> int:
    """Return the row's revision, which may be larger than the number of remaining records."""
    meta = examined.session.meta
    return len(examined.sound) if meta is None else meta.row.revision


def _starts_with(longer: Examination, shorter: Examination) -> bool:
    """Whether ``longer`` has every sound record of ``shorter``."""
    end = len(shorter.sound)
    if end > len(longer.sound):
        return False
    return end == 0 or longer.sound[end - 1].head_hash == shorter.sound[end - 1].head_hash
