"""Sessions from one place to another: store to backup, backup to store, store to store. Verified before and after."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Protocol

import msgspec

from pensieve.store._examine import examine
from pensieve.store._fix import fixed
from pensieve.store._raw import RawSession, RawStore, at_rest, is_over, is_running
from pensieve.store._rules import Meta
from pensieve.store.contract import Key
from pensieve.store.maintenance.archive import ArchiveWriter, Totals, read_sessions
from pensieve.store.maintenance.merge import MergeChoice, choose
from pensieve.store.records import State

Progress = Callable[[str, int, int | None], None]
"""What is being done, how many sessions are done, and of how many."""


def silent(_what: str, _done: int, _of: int | None) -> None:
    """Progress that nobody watches."""


class CopyRefused(Exception):
    """Nothing was written, or what was written is not what was to be; the message says what to do."""


class SessionOrigin(Protocol):
    """Where sessions come from; may be read several times."""

    def sessions(self) -> AsyncIterator[RawSession]: ...


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


class StoreOrigin:
    """An open store."""

    def __init__(self, store: RawStore) -> None:
        self._store = store

    async def sessions(self) -> AsyncIterator[RawSession]:
        for key in await self._store.keys():
            session = await self._store.session(key)
            if session is not None:
                yield session


@dataclass(slots=True)
class Copied:
    """What became of the sessions of a restore, a merge or a move."""

    written: int = 0
    kept: int = 0
    """The store had the same, or a newer one."""
    expired: int = 0
    damaged: list[str] = field(default_factory=list)
    """Written, and marked as damaged: they were not sound where they came from."""
    conflicts: list[str] = field(default_factory=list)


async def backup(
    source: RawStore, path: Path, *, replace_file: bool = False, progress: Progress = silent
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
            meta = None if session.meta is None else at_rest(session.meta)
            damage = tuple(one.detail for one in examine(session).findings)
            writer.add(replace(session, meta=meta), damage)
        progress("backing up", len(keys), len(keys))
        return writer.finish()


async def restore(
    source: WholeBackup,
    target: RawStore,
    *,
    merge: bool = False,
    skip: bool = False,
    progress: Progress = silent,
) -> Copied:
    """A backup to an open store. Raises CopyRefused, OSError, the store's errors, and BadBackup if the file changes."""
    return await copy(source, target, of=source.number, merge=merge, skip=skip, progress=progress)


async def move(
    source: RawStore,
    target: RawStore,
    *,
    merge: bool = False,
    skip: bool = False,
    progress: Progress = silent,
) -> Copied:
    """All of one open store to another; the source stays as it is. Raises as ``restore``."""
    origin, now, number = StoreOrigin(source), await source.now(), 0
    if source.store_id and source.store_id == target.store_id:
        raise CopyRefused("both are one and the same store")
    async for session in origin.sessions():
        number += 1
        progress("looking", number, None)
        if not source.alone and is_running(session.meta, now):
            raise CopyRefused(
                f"a turn is running in session {_name(session.key)}: stop the servers that use this store"
            )
    return await copy(origin, target, of=number, merge=merge, skip=skip, progress=progress)


async def copy(
    origin: SessionOrigin,
    target: RawStore,
    *,
    of: int | None,
    merge: bool,
    skip: bool,
    progress: Progress,
) -> Copied:
    """Decide about every session before the first is written; read every one back that was."""
    here = set(await target.keys())
    if here and not merge:
        raise CopyRefused(f"the store holds {len(here)} sessions: take an empty one, or --merge")
    now = await target.now()
    done = Copied()
    if here:
        async for session in origin.sessions():
            choice, why = await _choice(session, target, here, now)
            if choice is MergeChoice.CONFLICT:
                done.conflicts.append(f"{_name(session.key)}: {why}")
        if done.conflicts and not skip:
            return done
    written = await _write_all(origin, target, here, done, now, of, progress)
    checked = 0
    async for session in origin.sessions():
        if session.key in written:
            checked += 1
            progress("verifying", checked, len(written))
            await _verify(session, target, now)
    if checked != len(written):
        raise CopyRefused(
            "sessions went away while they were copied: stop the servers, and repeat with --merge"
        )
    await target.flush()
    return done


async def _write_all(
    origin: SessionOrigin,
    target: RawStore,
    here: set[Key],
    done: Copied,
    now: int,
    of: int | None,
    progress: Progress,
) -> set[Key]:
    """The keys of the sessions that were written."""
    written: set[Key] = set()
    number = 0
    async for session in origin.sessions():
        progress("writing", number, of)
        number += 1
        choice, _ = await _choice(session, target, here, now)
        if choice is MergeChoice.WRITE:
            before = await target.session(session.key) if session.key in here else None
            fit = as_restored(session, now)
            if fit is None:
                done.damaged.append(f"{_name(session.key)}: nothing of it can be read")
                continue
            if not await target.put(fit, over=None if before is None else before.stamp):
                raise CopyRefused(
                    f"session {_name(session.key)} was changed meanwhile: stop the servers, and repeat with --merge"
                )
            written.add(session.key)
            done.written += 1
            if fit.meta is not None and fit.meta.row.state is State.DAMAGED:
                done.damaged.append(_name(session.key))
        elif choice is MergeChoice.KEEP:
            done.kept += 1
        elif choice is MergeChoice.EXPIRED:
            done.expired += 1
    return written


async def _choice(session: RawSession, target: RawStore, here: set[Key], now: int) -> tuple[MergeChoice, str]:
    ours = await target.session(session.key) if session.key in here else None
    return choose(examine(session), None if ours is None else examine(ours), now=now, alone=target.alone)


async def _verify(session: RawSession, target: RawStore, since: int) -> None:
    """The target has what the origin has, also if that is read only now. ``since``: when the copying began."""
    wanted, found = as_restored(session, since), await target.session(session.key)
    if found is None and wanted is not None and is_over(wanted.meta, await target.now()):
        return
    if wanted is None or found is None or content(wanted) != content(found):
        raise CopyRefused(
            f"session {_name(session.key)} is not the same there and here: it was changed meanwhile, or a store "
            "does not keep what it is given; stop the servers, and repeat with --merge"
        )


def as_restored(session: RawSession, now: int) -> RawSession | None:
    """``session`` as it is written to another store; what is not sound is marked. None: nothing of it can be read."""
    examined = examine(session)
    if session.meta is None:
        fix = fixed(examined, truncate=False, now=now)
        return None if fix is None else fix.session
    meta = at_rest(session.meta)
    if examined.is_broken and meta.row.state is State.ACTIVE:
        row = msgspec.structs.replace(meta.row, state=State.DAMAGED)
        meta = Meta(row, meta.create_fingerprint, meta.lease)
    return RawSession(session.key, meta, session.log, dict(session.requests))


def content(session: RawSession) -> tuple[object, ...]:
    """What two copies of a session have in common."""
    meta = None if session.meta is None else at_rest(session.meta)
    return (session.key, meta, session.log, dict(session.requests))


def _name(key: Key) -> str:
    return f"{key.tenant}/{key.session_id}"
