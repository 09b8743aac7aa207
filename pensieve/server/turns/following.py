"""A turn that runs on another server of the same store: waiting for its end, and having it ended.

Nothing of its output is here before it is committed; then all of it is, in the store. The servers know nothing of each
other: whoever follows looks into the store, and an order to end lies there until the holder of the lease renews it.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Iterator
from typing import Final

from pensieve.errors import Cancelled, NotFound
from pensieve.server.turns.run import Order, TurnRun
from pensieve.server.unavailable import running_elsewhere
from pensieve.store import (
    Began,
    BeginRequest,
    CalledOff,
    EndOrder,
    HistoryStore,
    Key,
    Renewed,
    Replay,
    RunningElsewhere,
)

FIRST_LOOK_S: Final = 0.1
LONGEST_LOOK_S: Final = 1.0
"""The pauses between two looks into the store grow from one to the other."""
UNHEARD_S: Final = 5.0
"""So long after its lease must have lapsed, a turn that was told to end is taken for one that cannot hear."""


async def follow(store: HistoryStore, run: TurnRun, request: BeginRequest) -> Began | Replay:
    """Wait until this turn is committed elsewhere, or can be begun here because its server is gone or gave it up.

    Raises Cancelled when somebody called it off, and what ``HistoryStore.begin`` raises.
    """
    request = dataclasses.replace(request, follows=True)
    run.elsewhere()
    pauses = _pauses()
    while True:
        if run.order is None:
            await run.ordered_within(next(pauses))
        else:
            await asyncio.sleep(FIRST_LOOK_S)
        order = run.order
        if order is not None:
            if not order.asked:
                assert order.error is not None
                raise order.error
            end = EndOrder(keep=order.error is None, keep_tokens=order.keep_tokens)
            await store.ask_to_end(run.key, run.spec.request_id, end)
        outcome = await store.begin(run.key, request)
        if isinstance(outcome, CalledOff):
            raise called_off()
        if not isinstance(outcome, RunningElsewhere):
            return outcome


async def committed_elsewhere(store: HistoryStore, key: Key, request_id: str) -> int:
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


async def end_elsewhere(
    store: HistoryStore, key: Key, request_id: str, order: EndOrder, lease_s: float
) -> None:
    """Have a turn ended by its server. Returns when it does not run any more; Unavailable if it goes on regardless."""
    loop = asyncio.get_running_loop()
    until, pause = loop.time() + lease_s + UNHEARD_S, FIRST_LOOK_S
    while await store.ask_to_end(key, request_id, order):
        if loop.time() > until:
            raise running_elsewhere()
        await asyncio.sleep(pause)


def hear(run: TurnRun, news: Renewed) -> None:
    """What other servers left in the store for the one that holds the lease: it obeys."""
    if news.followed:
        run.listened_elsewhere()
    if news.order is not None:
        error = None if news.order.keep else called_off()
        run.end_early(Order(news.order.keep_tokens, error, asked=True))


def called_off() -> Cancelled:
    return Cancelled("the turn was cancelled and discarded")


def _pauses() -> Iterator[float]:
    """Seconds before each look into the store."""
    pause = FIRST_LOOK_S
    while True:
        yield pause
        pause = min(1.5 * pause, LONGEST_LOOK_S)
