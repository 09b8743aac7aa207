"""Check, count and repair a whole store, session by session."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pensieve.store import _refusals
from pensieve.store._raw import (
    Examination,
    Finding,
    Progress,
    RawSession,
    RawStore,
    Remedy,
    examine,
    no_progress,
    plan_fix,
)
from pensieve.store.contract import Key
from pensieve.store.maintenance.archive import ArchiveWriter, Totals
from pensieve.store.records import Record


class Survey(msgspec.Struct):
    total: Totals
    findings: list[Finding]


class TenantTotal(msgspec.Struct, frozen=True):
    tenant: str
    total: Totals


class MendedSession(msgspec.Struct, frozen=True):
    """The repairs of one session, done or proposed."""

    tenant: str
    session: str
    actions: tuple[str, ...]
    records_cut: int


@dataclass(slots=True)
class RepairResult:
    """The result of a repair, done or proposed."""

    findings: list[Finding] = field(default_factory=list)
    mended: list[MendedSession] = field(default_factory=list)
    busy: list[Key] = field(default_factory=list)
    """Sessions that were skipped, because a turn ran in them or they changed meanwhile."""

    @property
    def remaining(self) -> list[Finding]:
        """The faults that remain."""
        done = {(one.tenant, one.session) for one in self.mended}
        done -= {(key.tenant, key.session_id) for key in self.busy}
        return [
            one
            for one in self.findings
            if (one.tenant, one.session) not in done and (one.session or one.remedy is not Remedy.REBUILD)
        ]


async def check(store: RawStore, only: Key | None = None, progress: Progress = no_progress) -> Survey:
    """Check an open store, or one session. Raises NotFound and the store's errors."""
    survey = Survey(Totals(), [])
    if only is None:
        progress("checking the storage", 0, None)
        survey.findings += await store.check_storage()
    async for examined in _examined(store, only, "checking", progress):
        survey.findings += examined.findings
        survey.total = survey.total.plus(examined.session, damaged=not examined.is_sound)
    return survey


async def usage(store: RawStore, progress: Progress = no_progress) -> list[TenantTotal]:
    """Return each tenant's totals, by name. Raises the store's errors."""
    totals: dict[str, Totals] = {}
    async for session in _sessions(store, None, "counting", progress):
        totals[session.key.tenant] = totals.get(session.key.tenant, Totals()).plus(session)
    return [TenantTotal(tenant, totals[tenant]) for tenant in sorted(totals)]


async def iter_logs(store: RawStore) -> AsyncIterator[tuple[Key, tuple[Record, ...]]]:
    """Yield each session's records before the first unproven one, oldest first. Raises the store's errors."""
    async for examined in _examined(store, None, "reading", no_progress):
        yield examined.session.key, tuple(one.record for one in examined.sound)


async def repair(
    store: RawStore,
    *,
    apply: bool,
    cut_to: Path | None = None,
    only: Key | None = None,
    progress: Progress = no_progress,
) -> RepairResult:
    """Repair what the records prove, or without ``apply`` only say what would be done.

    The store must be open for writing if ``apply``. ``cut_to``: cut damaged sessions after their last sound
    record, and save them unchanged to this backup first. Raises FileExistsError, OSError, and the store's
    errors.
    """
    done, now = RepairResult(), await store.now()
    if only is None:
        done.findings += await store.check_storage()
        if apply and any(one.remedy is Remedy.REBUILD for one in done.findings):
            await store.repair_storage(progress)
            await store.flush()
    stamps: dict[Key, str] = {}
    with contextlib.ExitStack() as stack:
        kept: ArchiveWriter | None = None
        async for examined in _examined(store, only, "looking", progress):
            done.findings += examined.findings
            fix = plan_fix(examined, truncate=cut_to is not None, now=now)
            if fix is None:
                continue
            key = fix.session.key
            done.mended.append(MendedSession(key.tenant, key.session_id, fix.actions, fix.records_cut))
            stamps[key] = examined.session.stamp
            if apply and cut_to is not None and examined.is_broken:
                if kept is None:
                    kept = stack.enter_context(ArchiveWriter(cut_to))
                    kept.begin(store.kind, store.store_id, now)
                kept.add(examined.session, tuple(one.detail for one in examined.findings))
        if kept is not None:
            kept.finish()
    for number, (key, stamp) in enumerate(stamps.items() if apply else ()):
        progress("repairing", number, len(stamps))
        if not await _mend(store, key, stamp, truncate=cut_to is not None, now=now):
            done.busy.append(key)
    if apply:
        await store.flush()
    return done


async def _mend(store: RawStore, key: Key, stamp: str, *, truncate: bool, now: int) -> bool:
    """Repair one session. False if it changed since it was examined, or a turn runs in it."""
    session = await store.session(key)
    if session is None or session.stamp != stamp:
        return False
    fix = plan_fix(examine(session), truncate=truncate, now=now)
    return fix is not None and await store.put(fix.session, expected_stamp=stamp)


async def _examined(
    store: RawStore, only: Key | None, what: str, progress: Progress
) -> AsyncIterator[Examination]:
    async for session in _sessions(store, only, what, progress):
        yield examine(session)


async def _sessions(
    store: RawStore, only: Key | None, what: str, progress: Progress
) -> AsyncIterator[RawSession]:
    keys = await store.keys() if only is None else [only]
    for number, key in enumerate(keys):
        progress(what, number, len(keys))
        session = await store.session(key)
        if session is not None:
            yield session
        elif only is not None:
            raise _refusals.not_found()
    progress(what, len(keys), len(keys))
