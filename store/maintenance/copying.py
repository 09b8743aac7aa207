"""Sessions from one place to another: store to backup, backup to store, store to store. Verified before and after."""

from __future__ import annotations

import enum
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import msgspec

from pensieve.store._examine import Examination, examine, plan_fix
from pensieve.store._raw import (
    Problem,
    Progress,
    RawSession,
    RawStore,
    is_over,
    is_running,
    no_progress,
    without_lease_holder,
)
from pensieve.store._rules import CommittedRequest, Meta
from pensieve.store.contract import Key
from pensieve.store.maintenance.archive import ArchiveWriter, Totals, read_sessions
from pensieve.store.records import State


class CopyRefused(Exception):
    """Nothing was written, or what was written is not what was to be; the message says what to do."""


Origin = Callable[[], AsyncIterator[RawSession]]
"""Every session of a backup or a store; may be called several times."""


@dataclass(frozen=True, slots=True)
class WholeBackup:
    """A backup that was read to its end and found whole."""

    path: Path
    number: int
    """Sessions and tombstones in it."""

    async def sessions(self) -> AsyncIterator[RawSession]:
        for session in read_sessions(self.path):
            yield session


def open_backup(path: Path) -> WholeBackup:
    """Raises BadBackup or OSError."""
    return WholeBackup(path, sum(1 for _ in read_sessions(path)))


async def _of_store(store: RawStore) -> AsyncIterator[RawSession]:
    for key in await store.keys():
        session = await store.session(key)
        if session is not None:
            yield session


@dataclass(slots=True)
class CopyResult:
    """What became of the sessions of a restore, a merge or a move."""

    written: int = 0
    kept: int = 0
    """The store had the same, or a newer one."""
    expired: int = 0
    damaged: list[str] = field(default_factory=list)
    """Written, and marked as damaged: they were not sound where they came from."""
    conflicts: list[str] = field(default_factory=list)


async def backup(
    source: RawStore, path: Path, *, replace_file: bool = False, progress: Progress = no_progress
) -> Totals:
    """All of an open store to ``path``. Raises OSError, FileExistsError, and the store's errors.

    What is not sound goes along as it is, and is counted as damaged.
    """
    with ArchiveWriter(path, replace=replace_file) as writer:
        writer.begin(source.kind, source.store_id, await source.now())
        keys = await source.keys()
        for done, key in enumerate(keys):
            progress("backing up", done, len(keys))
            session = await source.session(key)
            if session is None:
                continue  # gone since the list was made
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
    """A backup to an open store. Raises CopyRefused, OSError, the store's errors, and BadBackup if the file changes."""
    return await copy(source.sessions, target, of=source.number, merge=merge, skip=skip, progress=progress)


async def move(
    source: RawStore,
    target: RawStore,
    *,
    merge: bool = False,
    skip: bool = False,
    progress: Progress = no_progress,
) -> CopyResult:
    """All of one open store to another; the source stays as it is. Raises as ``restore``."""
    now, number = await source.now(), 0
    if source.store_id and source.store_id == target.store_id:
        raise CopyRefused("both are one and the same store")
    async for session in _of_store(source):
        number += 1
        progress("looking", number, None)
        if not source.is_exclusive and is_running(session.meta, now):
            raise CopyRefused(
                f"a turn is running in session {_name(session.key)}: stop the servers that use this store"
            )
    return await copy(
        partial(_of_store, source), target, of=number, merge=merge, skip=skip, progress=progress
    )


async def copy(
    origin: Origin, target: RawStore, *, of: int | None, merge: bool, skip: bool, progress: Progress
) -> CopyResult:
    """Decide about every session before the first is written; read every one back that was.

    ``of``: the number of sessions, None: not known.
    """
    copying = _Copying(target, set(await target.keys()), await target.now())
    if copying.here and not merge:
        raise CopyRefused(f"the store holds {len(copying.here)} sessions: take an empty one, or --merge")
    if copying.here:
        async for session in origin():
            await copying.find_conflict(session)
        if copying.done.conflicts and not skip:
            return copying.done
    number = 0
    async for session in origin():
        progress("writing", number, of)
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
    """One copy to one store, under way."""

    target: RawStore
    here: set[Key]
    """What the store had before."""
    began_ms: int
    """By the store's time."""
    done: CopyResult = field(default_factory=CopyResult)
    written: set[Key] = field(default_factory=set)

    async def find_conflict(self, session: RawSession) -> None:
        choice, why = await self._choice(session)
        if choice is MergeChoice.CONFLICT:
            self.done.conflicts.append(f"{_name(session.key)}: {why}")

    async def write(self, session: RawSession) -> None:
        """Write the session if it is to be written. Raises CopyRefused."""
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
            self.done.damaged.append(f"{_name(session.key)}: nothing of it can be read")
            return
        if not await self.target.put(fit, expected_stamp=None if before is None else before.stamp):
            raise CopyRefused(
                f"session {_name(session.key)} was changed meanwhile: stop the servers, and repeat with --merge"
            )
        self.written.add(session.key)
        self.done.written += 1
        if fit.meta is not None and fit.meta.row.state is State.DAMAGED:
            self.done.damaged.append(_name(session.key))

    async def verify(self, session: RawSession) -> None:
        """Raises CopyRefused unless the target has what the origin has, also if that is read only now."""
        wanted, found = as_restored(session, self.began_ms), await self.target.session(session.key)
        if found is None and wanted is not None and is_over(wanted.meta, await self.target.now()):
            return
        if wanted is None or found is None or content(wanted) != content(found):
            raise CopyRefused(
                f"session {_name(session.key)} is not the same there and here: it was changed meanwhile, or a store "
                "does not keep what it is given; stop the servers, and repeat with --merge"
            )

    async def _choice(self, session: RawSession) -> tuple[MergeChoice, str]:
        ours = await self.target.session(session.key) if session.key in self.here else None
        return choose(
            examine(session),
            None if ours is None else examine(ours),
            now=self.began_ms,
            alone=self.target.is_exclusive,
        )


def as_backed_up(session: RawSession, now: int) -> tuple[RawSession, tuple[str, ...]]:
    """``session`` with what is derived made good, and what it has lost: nothing as long as its records are whole."""
    examined = examine(session)
    if examined.is_broken or any(one.problem is Problem.MARKED for one in examined.findings):
        return session, tuple(one.detail for one in examined.findings)
    fix = plan_fix(examined, truncate=False, now=now)
    return session if fix is None else fix.session, ()


def as_restored(session: RawSession, now: int) -> RawSession | None:
    """``session`` as it is written to another store; what is not sound is marked. None: nothing of it can be read."""
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
    """What two copies of a session have in common."""
    meta = None if session.meta is None else without_lease_holder(session.meta)
    return (session.key, meta, session.log, dict(session.requests))


def _name(key: Key) -> str:
    return f"{key.tenant}/{key.session_id}"


class MergeChoice(enum.Enum):
    """What becomes of a session that is copied."""

    WRITE = enum.auto()
    KEEP = enum.auto()
    """What is there is the same or newer."""
    CONFLICT = enum.auto()
    EXPIRED = enum.auto()
    """Its time is over."""


def choose(
    theirs: Examination, ours: Examination | None, *, now: int, alone: bool
) -> tuple[MergeChoice, str]:
    """Whether ``theirs`` takes the place of ``ours``; with a conflict, why not.

    The longer of two logs wins if the shorter is its beginning; chain hashes tell. A deletion is a newer state of what
    it deleted. A damaged session gives way to a sound one that has at least what its row names.
    """
    meta = theirs.session.meta
    if is_over(meta, now):
        return MergeChoice.EXPIRED, ""
    if ours is None or is_over(ours.session.meta, now):
        return MergeChoice.WRITE, ""
    if not alone and is_running(ours.session.meta, now):
        return MergeChoice.CONFLICT, "a turn is running"
    if _is_deleted(ours.session):
        return MergeChoice.KEEP, ""
    here = _revision(ours)
    if _is_deleted(theirs.session):
        behind = meta is not None and here <= meta.row.revision
        return (
            (MergeChoice.WRITE, "") if behind else (MergeChoice.CONFLICT, "deleted there, and continued here")
        )
    there = len(theirs.sound)
    if ours.is_broken:
        if _begins(theirs, ours) and not theirs.is_broken and there >= here:
            return MergeChoice.WRITE, ""
        return MergeChoice.CONFLICT, f"damaged here at revision {here}, and the other one ends at {there}"
    if _begins(ours, theirs):
        return MergeChoice.KEEP, ""
    if _begins(theirs, ours):
        return (MergeChoice.CONFLICT, "damaged there") if theirs.is_broken else (MergeChoice.WRITE, "")
    return MergeChoice.CONFLICT, f"two histories under one name, of {here} and {there} revisions"


def _is_deleted(session: RawSession) -> bool:
    return session.meta is not None and session.meta.row.state is State.DELETED


def _revision(examined: Examination) -> int:
    """The one that the row names, which may be more than what is left."""
    meta = examined.session.meta
    return len(examined.sound) if meta is None else meta.row.revision


def _begins(longer: Examination, shorter: Examination) -> bool:
    """Whether ``longer`` has every sound record of ``shorter``."""
    end = len(shorter.sound)
    if end > len(longer.sound):
        return False
    return end == 0 or longer.sound[end - 1].head_hash == shorter.sound[end - 1].head_hash
