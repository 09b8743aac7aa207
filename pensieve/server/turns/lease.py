"""Leases of running turns, and turns on other servers of the same store. The servers communicate only through
the store.

A server follows a turn that another server runs: it sees no output until the turn is committed. To end such a
turn, it leaves an order in the store, which the holder of the lease reads with its next renewal.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Final

from pensieve.debug import async_failpoint
from pensieve.errors import Cancelled, NotFound, PensieveError, TurnFenced, Unavailable
from pensieve.server.failures import running_elsewhere
from pensieve.server.turns.run import Order, TurnRun
from pensieve.store import (
    Began,
    BeginRequest,
    CalledOff,
    EndOrder,
    HeldLease,
    HistoryStore,
    Key,
    RenewalAnswer,
    Renewed,
    Replay,
    RunningElsewhere,
)

log = logging.getLogger(__name__)

MAX_ORDER_DELAY_S: Final = 1.0
"""The longest time between two renewals, and so the longest that an order waits in the store."""
MIN_RETRY_S: Final = 0.05
MAX_RETRY_S: Final = 0.5
"""Longest pause between two tries to release a lease."""
MIN_POLL_S: Final = 0.1
MAX_POLL_S: Final = 1.0
"""The pause between two reads of the store grows from ``MIN_POLL_S`` to this."""
ORDER_GRACE_S: Final = 5.0
"""Stop waiting for the holder this long after its lease must have expired."""


@dataclass(slots=True, eq=False)
class _LeaseEntry:
    lease: HeldLease
    on_lost: Callable[[], None]
    on_news: Callable[[Renewed], None]
    renewed: float
    """Start of the last successful renewal, on the event loop's clock."""


class LeaseKeeper:
    """Renews the leases of all turns of this server in one call, three times per lease, and at least every
    ``MAX_ORDER_DELAY_S``. Safety does not depend on it: the store refuses a commit without the lease."""

    def __init__(self, store: HistoryStore, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._entries: set[_LeaseEntry] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def renewing(
        self, key: Key, token: str, *, on_lost: Callable[[], None], on_renewed: Callable[[Renewed], None]
    ) -> Iterator[None]:
        """Renew this lease inside the block. ``on_renewed`` is called after each renewal, with orders of
        other servers. ``on_lost`` is called once, when the lease was taken over, the session is gone, or no
        renewal succeeded for two thirds of the lease (monotonic clock)."""
        entry = _LeaseEntry(HeldLease(key, token), on_lost, on_renewed, asyncio.get_running_loop().time())
        self._entries.add(entry)
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name="leases")
        try:
            yield
        finally:
            self._entries.discard(entry)
            if not self._entries and self._task is not None:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        pause = usual = min(self._lease_s / 3, MAX_ORDER_DELAY_S)
        while True:
            await asyncio.sleep(pause)
            pause = usual if await self._renew(list(self._entries)) else self._lease_s / 12

    async def _renew(self, batch: list[_LeaseEntry]) -> bool:
        """Returns whether each lease of the batch is renewed or known to be lost."""
        if not batch:
            return True
        now = asyncio.get_running_loop().time
        asked = now()
        call = asyncio.create_task(self._ask([entry.lease for entry in batch]), name="renewal")
        answers: Sequence[Renewed | Exception]
        try:
            # Wait for a slow answer while it can still save one of the leases: a second call would be as
            # slow.
            while not call.done() and (waiting := [entry for entry in batch if entry in self._entries]):
                patience = max(min(map(self._lost_at, waiting)) - now(), self._lease_s / 12)
                await asyncio.wait({call}, timeout=patience)
                if not call.done():
                    self._lose_overdue(waiting)
            answers = call.result() if call.done() else [TimeoutError()] * len(batch)
        except Exception as error:  # no lease was renewed
            answers = [error] * len(batch)
        finally:
            call.cancel()
        failed = list[_LeaseEntry]()
        reasons = set[str]()
        for entry, answer in zip(batch, answers, strict=True):
            if isinstance(answer, Renewed):
                entry.renewed = asked
                self._notify(entry, partial(entry.on_news, answer))
            elif isinstance(answer, TurnFenced | NotFound):
                self._lose(entry)
            else:
                failed.append(entry)
                reasons.add(type(answer).__name__)
        self._lose_overdue(failed)
        if failed:
            log.warning("%d of %d leases were not renewed: %s", len(failed), len(batch), ", ".join(reasons))
        return not failed

    async def _ask(self, leases: list[HeldLease]) -> list[RenewalAnswer]:
        await async_failpoint("in_renew")
        return await self._store.renew_leases(leases, round(self._lease_s * 1000))

    def _lose_overdue(self, some: Iterable[_LeaseEntry]) -> None:
        for entry in some:
            if asyncio.get_running_loop().time() >= self._lost_at(entry):
                self._lose(entry)

    def _lost_at(self, entry: _LeaseEntry) -> float:
        return entry.renewed + self._lease_s * 2 / 3

    def _lose(self, entry: _LeaseEntry) -> None:
        self._notify(entry, entry.on_lost)
        self._entries.discard(entry)

    def _notify(self, entry: _LeaseEntry, callback: Callable[[], None]) -> None:
        if entry not in self._entries:  # released meanwhile
            return
        try:
            callback()
        except Exception:
            # A bug of ours. This task serves all turns, which must not lose their leases because of one.
            log.exception("a turn could not be told of its lease")


class LeaseReleaser:
    """Gives leases back, retrying until the store is back or they expire. Otherwise a turn whose begin
    reached the store, but whose reply was lost, would block its session, its own retry included, until the
    lease expires."""

    def __init__(self, store: HistoryStore, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._waiting: deque[tuple[float, Key, str, bool]] = deque()
        """Expiry on the event loop's clock, session, token, and whether the turn was cancelled."""
        self._task: asyncio.Task[None] | None = None

    async def release(self, key: Key, token: str, *, cancelled: bool) -> None:
        try:
            await self._store.abort(key, token, called_off=cancelled)
        except Unavailable as error:
            log.warning("lease not released (%s): it is when the store is back", error.reason)
            expires_at = asyncio.get_running_loop().time() + self._lease_s
            self._waiting.append((expires_at, key, token, cancelled))
            if self._task is None or self._task.done():
                self._task = asyncio.create_task(self._run(), name="releases")
        except PensieveError as error:
            log.warning("lease not released (%s): it lapses by itself", error.reason)

    async def close(self) -> None:
        """Stop retrying; leases still held expire by themselves."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    async def _run(self) -> None:
        loop, pause = asyncio.get_running_loop(), MIN_RETRY_S
        while self._waiting:
            expires_at, key, token, called_off = self._waiting[0]
            if loop.time() < expires_at:
                await asyncio.sleep(pause)
                try:
                    await self._store.abort(key, token, called_off=called_off)
                except Unavailable:
                    pause = min(2 * pause, MAX_RETRY_S)
                    continue
                except PensieveError as error:
                    log.warning("lease not released (%s): it lapses by itself", error.reason)
                pause = 0.0
            self._waiting.popleft()


async def follow_remote_turn(store: HistoryStore, run: TurnRun, request: BeginRequest) -> Began | Replay:
    """Wait until another server commits this turn, or this run can begin it because that server gave it up.
    Raises Cancelled when a caller cancelled it, and the errors of ``HistoryStore.begin``."""
    request = dataclasses.replace(request, follows=True)
    run.on_elsewhere()
    pauses = _pauses()
    while True:
        if run.order is None:
            await run.wait_for_order(next(pauses))
        else:
            await asyncio.sleep(MIN_POLL_S)
        order = run.order
        if order is not None:
            if not order.by_caller:
                assert order.error is not None
                raise order.error
            end = EndOrder(keep=order.error is None, keep_tokens=order.keep_tokens)
            await store.ask_to_end(run.key, run.spec.request_id, end)
        outcome = await store.begin(run.key, request)
        if isinstance(outcome, CalledOff):
            raise turn_cancelled()
        if not isinstance(outcome, RunningElsewhere):
            return outcome


async def wait_for_remote_commit(store: HistoryStore, key: Key, request_id: str) -> int:
    """Wait for another server to commit a turn; return the revision. Raises NotFound (TURN_NOT_FOUND) without
    a commit."""
    for pause in _pauses():
        await asyncio.sleep(pause)
        running = (await store.load(key)).running
        # Read second: a turn that no longer runs has been committed by now, if it ever will be.
        revision = await store.find_request(key, request_id)
        if revision is not None:
            return revision
        if running is None or running.request_id != request_id:
            break
    raise NotFound("the turn ended without a commit", reason="TURN_NOT_FOUND")


async def end_remote_turn(
    store: HistoryStore, key: Key, request_id: str, order: EndOrder, lease_s: float
) -> None:
    """Ask another server to end a turn, and wait until it has. Raises Unavailable if the turn goes on regardless."""
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + lease_s + ORDER_GRACE_S, MIN_POLL_S
    while await store.ask_to_end(key, request_id, order):
        if loop.time() > until:
            raise running_elsewhere()
        await asyncio.sleep(pause)


def apply_renewal(run: TurnRun, news: Renewed) -> None:
    """Act on what other servers left in the store for the holder of the lease."""
    if news.followed:
        run.restart_grace()
    if news.order is not None:
        error = None if news.order.keep else turn_cancelled()
        run.end_early(Order(news.order.keep_tokens, error, by_caller=True))


def turn_cancelled() -> Cancelled:
    return Cancelled("the turn was cancelled and discarded")


def _pauses() -> Iterator[float]:
    pause = MIN_POLL_S
    while True:
        yield pause
        pause = min(1.5 * pause, MAX_POLL_S)
