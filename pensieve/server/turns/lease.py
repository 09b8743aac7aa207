"""Leases of running turns, and turns on other servers of the same store. The servers know nothing of each other.

``LeaseKeeper`` keeps the leases of this server's turns alive, tells each turn of its loss, and hands it what another
server left in the store for its holder. ``LeaseReleaser`` gives leases back.

A turn that runs on another server is followed: nothing of its output is here before it is committed; then all of it is,
in the store. To end it, an order is left in the store until the holder of the lease renews it.
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
from pensieve.server.turns.run import Order, TurnRun
from pensieve.server.unavailable import running_elsewhere
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
"""An order that another server left in the store waits no longer than this."""
MIN_RETRY_S: Final = 0.05
MAX_RETRY_S: Final = 0.5
"""Between two tries to give a lease back to a store that is away."""
MIN_POLL_S: Final = 0.1
MAX_POLL_S: Final = 1.0
"""The pauses between two looks into the store grow from one to the other."""
ORDER_GRACE_S: Final = 5.0
"""So long after its lease must have lapsed, a turn that was told to end is taken for one that cannot hear."""


@dataclass(slots=True, eq=False)
class _LeaseEntry:
    lease: HeldLease
    on_lost: Callable[[], None]
    on_news: Callable[[Renewed], None]
    renewed: float
    """When the store was last asked for it with success, on the event loop's clock."""


class LeaseKeeper:
    """Renews the leases of all turns of this server together, three times in their length, and at least once in
    ``HEARS_WITHIN_S``: however many run, the store has one call more to answer.

    Safety does not rest on this (the store refuses the commit of a turn without its lease): it only keeps two replicas
    from talking to users about one turn.
    """

    def __init__(self, store: HistoryStore, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._entries: set[_LeaseEntry] = set()
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def renewing(
        self, key: Key, token: str, *, on_lost: Callable[[], None], on_renewed: Callable[[Renewed], None]
    ) -> Iterator[None]:
        """Inside of the block this lease is renewed; behind it neither function is called any more.

        ``on_news`` is called with each renewal, which may bring what another server left in the store.
        ``on_lost`` is called once, from the event loop, when the lease was taken over, the session is gone, or no
        renewal succeeded for two thirds of the lease by the monotonic clock.
        """
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
        """Until it is cancelled, with the last lease."""
        pause = usual = min(self._lease_s / 3, MAX_ORDER_DELAY_S)
        while True:
            await asyncio.sleep(pause)
            pause = usual if await self._renew(list(self._entries)) else self._lease_s / 12

    async def _renew(self, batch: list[_LeaseEntry]) -> bool:
        """Whether each lease of the batch is renewed or known to be lost."""
        if not batch:
            return True
        now = asyncio.get_running_loop().time
        asked = now()
        call = asyncio.create_task(self._ask([entry.lease for entry in batch]), name="renewal")
        answers: Sequence[Renewed | Exception]
        try:
            # A slow answer is waited for as long as it is good for one of them: asked again, it would be as slow.
            while not call.done() and (waiting := [entry for entry in batch if entry in self._entries]):
                patience = max(min(map(self._lost_at, waiting)) - now(), self._lease_s / 12)
                await asyncio.wait({call}, timeout=patience)
                if not call.done():
                    self._lose_overdue(waiting)
            answers = call.result() if call.done() else [TimeoutError()] * len(batch)
        except Exception as error:  # whatever it was, no lease was renewed
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
            # A bug of ours. The task is that of all turns, which must not lose their leases for one.
            log.exception("a turn could not be told of its lease")


class LeaseReleaser:
    """Gives leases back, also to a store that is away when their turns end: as soon as it is there again.

    Without it a turn whose begin reached the store, and whose answer did not come back, would keep its session from
    everybody, its own repetition included, until the lease has lapsed. However many wait, one try is made at a time.
    """

    def __init__(self, store: HistoryStore, lease_s: float) -> None:
        self._store = store
        self._lease_s = lease_s
        self._waiting: deque[tuple[float, Key, str, bool]] = deque()
        """When it has lapsed, whose, its token, and whether its turn was called off."""
        self._task: asyncio.Task[None] | None = None

    async def release(self, key: Key, token: str, *, cancelled: bool) -> None:
        """Give one back now, or later if the store is away."""
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
        """Leases that are still held lapse by themselves."""
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
    """Wait until this turn is committed elsewhere, or can be begun here because its server is gone or gave it up.

    Raises Cancelled when somebody called it off, and what ``HistoryStore.begin`` raises.
    """
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
    """Wait for the commit of a turn that runs elsewhere, for a caller that cannot begin it; the revision.

    Raises NotFound (TURN_NOT_FOUND) when it ends without.
    """
    for pause in _pauses():
        await asyncio.sleep(pause)
        running = (await store.load(key)).running
        # Asked second: a turn that does not run any more has been committed by now, if it ever is.
        revision = await store.find_request(key, request_id)
        if revision is not None:
            return revision
        if running is None or running.request_id != request_id:
            break
    raise NotFound("the turn ended and left no trace", reason="TURN_NOT_FOUND")


async def end_remote_turn(
    store: HistoryStore, key: Key, request_id: str, order: EndOrder, lease_s: float
) -> None:
    """Have a turn ended by its server. Returns when it does not run any more; Unavailable if it goes on regardless."""
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + lease_s + ORDER_GRACE_S, MIN_POLL_S
    while await store.ask_to_end(key, request_id, order):
        if loop.time() > until:
            raise running_elsewhere()
        await asyncio.sleep(pause)


def apply_renewal(run: TurnRun, news: Renewed) -> None:
    """Obey what other servers left in the store for the holder of the lease."""
    if news.followed:
        run.restart_grace()
    if news.order is not None:
        error = None if news.order.keep else turn_cancelled()
        run.end_early(Order(news.order.keep_tokens, error, by_caller=True))


def turn_cancelled() -> Cancelled:
    return Cancelled("the turn was cancelled and discarded")


def _pauses() -> Iterator[float]:
    """Seconds before each look into the store."""
    pause = MIN_POLL_S
    while True:
        yield pause
        pause = min(1.5 * pause, MAX_POLL_S)
