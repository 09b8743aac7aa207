"""One turn in this process, from its arrival to its end: the state machine that makes it exactly-once.

The store decides which server runs the turn, and appends the record atomically. This machine keeps two things
consistent whatever happens: what this process sends to the store, and what it tells its callers.

::

    without the lease   BEGINNING, FOLLOWING --in history--> REPLAYING ---------------------> REPLAYED
                          |   (KEEP_PENDING, DISCARD_PENDING)     ` any of these, failed ---> REFUSED
    with the lease        v begun
                        GENERATING --keep--> TRUNCATING --.
                          |    `---------------commit------`-> COMMITTING ----------------> COMMITTED
                          |                                      `--failed----------------> UNCERTAIN
                          `--discard--> DISCARDING --failed-------------------------------> DISCARDED

States without the lease:

* ``BEGINNING``: the store has not answered yet.
* ``FOLLOWING``: another server runs the turn. This run waits for its commit, or for a chance to begin it
  here.
* ``KEEP_PENDING``, ``DISCARD_PENDING``: either of the two, with an order to end early.
* ``REPLAYING``: the turn is in history; its output is read from there.

States with the lease, which only this run holds:

* ``GENERATING``: no order to end early has arrived.
* ``TRUNCATING``, ``DISCARDING``: the turn ends early; the history gets the output so far, or nothing.
* ``COMMITTING``: the record is on its way to the store. Orders are refused from here on.

Final states, in which callers receive the outcome:

* ``COMMITTED``: the store confirmed this run's record.
* ``REPLAYED``: callers got the turn as the history has it.
* ``DISCARDED``: the run held the lease and sent no commit.
* ``UNCERTAIN``: a commit was sent and not confirmed. Only the store knows; a retry with the same request id
  asks it.
* ``REFUSED``: the run never held the lease.

Events (``TRANSITIONS`` has the state after each):

* ``BEGUN``, ``ELSEWHERE``, ``IN_HISTORY``: the store's answer to ``TurnRunner``.
* ``KEEP``, ``DISCARD``: ``end_early`` with an ``Order``, of which the first counts. Senders: ``Turns`` for
  callers, a drain, a deleted session and an overdue turn; the runner for a lost lease or another server's
  order; the run itself when its last listener has left and the grace time is over.
* ``COMMIT``: ``TurnRunner`` has all output.
* ``SUCCEEDED``, ``FAILED``: ``TurnRunner`` has returned or raised.

The table makes a turn exactly-once:

* A commit is sent in ``COMMITTING`` only. Only a run with the lease gets there, and only once.
* A run with an order to discard never gets there, and a run that is there cannot be discarded: a caller never
  hears "discarded" about a turn that is committed afterwards. A failed commit is ``UNCERTAIN``, never
  ``DISCARDED``.
* The last five states are final, and callers hear the outcome only there.
"""

from __future__ import annotations

import asyncio
import contextlib
import enum
from dataclasses import dataclass
from typing import Final

from pensieve.core import HintReceipt, TenantQos
from pensieve.errors import Cancelled, PensieveError
from pensieve.server import ids
from pensieve.server.admission import AdmissionTicket
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, NewTurn, OnDisconnect, TurnEnd, TurnStatus, TurnView
from pensieve.store import Key
from pensieve.store.records import History

_GRID: Final = """
                BEGUN      ELSEWHERE       IN_HISTORY KEEP            DISCARD         COMMIT     SUCCEEDED FAILED
BEGINNING       GENERATING FOLLOWING       REPLAYING  KEEP_PENDING    DISCARD_PENDING -          -         REFUSED
FOLLOWING       GENERATING -               REPLAYING  KEEP_PENDING    DISCARD_PENDING -          -         REFUSED
KEEP_PENDING    TRUNCATING KEEP_PENDING    REPLAYING  KEEP_PENDING    KEEP_PENDING    -          -         REFUSED
DISCARD_PENDING DISCARDING DISCARD_PENDING REPLAYING  DISCARD_PENDING DISCARD_PENDING -          -         REFUSED
REPLAYING       -          -               -          -               -               -          REPLAYED  REFUSED
GENERATING      -          -               -          TRUNCATING      DISCARDING      COMMITTING -         DISCARDED
TRUNCATING      -          -               -          TRUNCATING      TRUNCATING      COMMITTING -         DISCARDED
DISCARDING      -          -               -          DISCARDING      DISCARDING      -          -         DISCARDED
COMMITTING      -          -               -          -               -               -          COMMITTED UNCERTAIN
COMMITTED       -          -               -          -               -               -          -         -
REPLAYED        -          -               -          -               -               -          -         -
DISCARDED       -          -               -          -               -               -          -         -
UNCERTAIN       -          -               -          -               -               -          -         -
REFUSED         -          -               -          -               -               -          -         -
"""
"""One row per state, one column per event; each cell is the next state. ``-``: the event is refused."""


class Event(enum.Enum):
    BEGUN = enum.auto()
    ELSEWHERE = enum.auto()
    IN_HISTORY = enum.auto()
    KEEP = enum.auto()
    DISCARD = enum.auto()
    COMMIT = enum.auto()
    SUCCEEDED = enum.auto()
    FAILED = enum.auto()


class RunState(enum.Enum):
    """See the module docstring."""

    BEGINNING = enum.auto()
    FOLLOWING = enum.auto()
    KEEP_PENDING = enum.auto()
    DISCARD_PENDING = enum.auto()
    REPLAYING = enum.auto()
    GENERATING = enum.auto()
    TRUNCATING = enum.auto()
    DISCARDING = enum.auto()
    COMMITTING = enum.auto()
    COMMITTED = enum.auto()
    REPLAYED = enum.auto()
    DISCARDED = enum.auto()
    UNCERTAIN = enum.auto()
    REFUSED = enum.auto()

    @property
    def had_lease(self) -> bool:
        """Whether this server held the lease, rather than refusing, following or replaying the turn."""
        return self in _HAD_LEASE


def _table() -> dict[tuple[RunState, Event], RunState | None]:
    header, *lines = (line.split() for line in _GRID.strip().splitlines())
    return {
        (RunState[state], Event[event]): None if after == "-" else RunState[after]
        for state, *cells in lines
        for event, after in zip(header, cells, strict=True)
    }


TRANSITIONS: Final = _table()
_HAD_LEASE: Final = {
    RunState.GENERATING,
    RunState.TRUNCATING,
    RunState.DISCARDING,
    RunState.COMMITTING,
    RunState.COMMITTED,
    RunState.DISCARDED,
    RunState.UNCERTAIN,
}


@dataclass(frozen=True, slots=True)
class Order:
    """End the turn early: commit what there is (the first ``keep_tokens``), or discard it with ``error``."""

    keep_tokens: int | None = None
    error: PensieveError | None = None
    by_caller: bool = False
    """A caller wants the turn to end wherever it runs. Otherwise this server ends only its own part."""
    no_listeners: bool = False
    """The last listener has left."""


class TurnRun:
    """One attempt at a turn, and the only writer of its state. ``Turns`` owns it; callers ``join`` and ``leave``."""

    def __init__(
        self, key: Key, spec: NewTurn, fingerprint: str, ticket: AdmissionTicket | None = None
    ) -> None:
        """``ticket``: from the admission gate; None for a turn that bypassed it because it is in history."""
        self.key = key
        self.spec = spec
        self.fingerprint = fingerprint
        self.ticket = ticket
        self.attempt = ids.new_attempt()
        self.lease_token = ids.new_token()
        self.buffer = TurnBuffer()
        self.generation = TurnGeneration(self.buffer)
        self.state = RunState.BEGINNING
        self.orders: tuple[Order, ...] = ()
        """The first counts; the others show whether a caller also wants the turn to end."""
        self.seed = 0
        self.base_revision = 0
        self.compact_at = 0
        """See ``SessionConfig``; known once the history is read."""
        self.new_tokens = 0
        """Input tokens of this turn, known once it is rendered."""
        self.hints: HintReceipt | None = None
        self.arrived_at = asyncio.get_running_loop().time()
        """On the event loop's clock."""
        self._order_given = asyncio.Event()
        self._listeners = 0
        self._finishes_unattended = False
        self._grace_s = 0.0
        self._grace: asyncio.TimerHandle | None = None

    # ---- events: the runner, as the store answers

    def on_begun(self) -> None:
        self._transition(Event.BEGUN)

    def on_elsewhere(self) -> None:
        self._transition(Event.ELSEWHERE)

    def on_in_history(self) -> None:
        self._transition(Event.IN_HISTORY)

    def begin_commit(self) -> Order | None:
        """Refuse orders from here on. Returns the order in force, or raises its error if it discards the turn."""
        order = self.order
        if order is not None and order.error is not None:
            raise order.error
        self._transition(Event.COMMIT)
        return order

    # ---- events: any caller

    def end_early(self, order: Order) -> bool:
        """End as ``order`` says. The first order counts; returns False when it is too late for any."""
        if not self._try_transition(Event.KEEP if order.error is None else Event.DISCARD):
            return False
        self.orders += (order,)
        if order is self.order:
            self._order_given.set()
            self.generation.interrupt()
        return True

    # ---- events: the registry

    def end(self, outcome: TurnView | PensieveError) -> None:
        """Deliver the outcome to all listeners. Nothing changes afterwards."""
        self._transition(Event.FAILED if isinstance(outcome, PensieveError) else Event.SUCCEEDED)
        self._stop_grace()
        self.buffer.end(outcome)

    # ---- results of the runner

    def set_base(self, base: History, seed: int) -> None:
        self.base_revision = base.revision
        self.compact_at = base.config.compact_at
        self.seed = seed

    def accept(
        self, context_tokens: int, new_tokens: int, hints: HintReceipt | None, outputs: list[OutputText]
    ) -> None:
        """Publish the rendered turn. Streams read the output of each candidate from ``outputs``."""
        self.new_tokens = new_tokens
        self.hints = hints
        accepted = Accepted(
            request_id=self.spec.request_id,
            base_revision=self.base_revision,
            context_tokens=context_tokens,
            seed=self.seed,
            attempt=self.attempt,
            replayed=False,
        )
        self.buffer.accept(accepted, *outputs)

    # ---- listeners: the run outlives the last one by a grace time

    def join(self, policy: OnDisconnect) -> None:
        self._listeners += 1
        self._finishes_unattended |= policy is OnDisconnect.FINISH
        self._stop_grace()

    def leave(self, grace_s: float) -> None:
        self._listeners -= 1
        if self._listeners or self._finishes_unattended or self.buffer.ended:
            return
        self._grace_s = grace_s
        if grace_s > 0:
            self._grace = asyncio.get_running_loop().call_later(grace_s, self._abandon)
        else:
            self._abandon()

    def restart_grace(self) -> None:
        """Restart the grace time if it runs: a caller waits for the turn at another server."""
        if self._grace is not None:
            self._stop_grace()
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._abandon)

    # ---- queries

    @property
    def order(self) -> Order | None:
        return self.orders[0] if self.orders else None

    @property
    def cancelled_by_caller(self) -> bool:
        """Discarded because a caller wants the turn to end, wherever it runs: no follower may begin it again."""
        return self._is_discarded and any(order.by_caller for order in self.orders)

    @property
    def abandoned(self) -> bool:
        """Discarded without a listener: a new caller waits for its end and begins another attempt."""
        return self._is_discarded and any(order.no_listeners for order in self.orders)

    @property
    def qos(self) -> TenantQos:
        if self.ticket is None:
            return TenantQos(self.key.tenant, priority=self.spec.priority)
        return self.ticket.qos(self.spec.priority)

    @property
    def view(self) -> TurnView:
        return TurnView(
            session_id=self.key.session_id,
            request_id=self.spec.request_id,
            state=TurnStatus.RUNNING,
            base_revision=self.base_revision,
            seed=self.seed,
            hints=self.hints,
            annotations=self.spec.annotations,
        )

    async def wait_for_order(self, timeout_s: float) -> None:
        """Wait for an order; returns without one after ``timeout_s``."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._order_given.wait()

    def summary(self, outcome: TurnView | PensieveError) -> TurnEnd:
        """The end of the turn, for metrics, traces and the status page."""
        accepted, outputs = self.buffer.accepted, self.buffer.outputs
        if isinstance(outcome, TurnView):
            name = outcome.finish_reason.name if outcome.finish_reason is not None else "unknown"
            usage = outcome.usage
        else:
            name, usage = outcome.reason, None
        return TurnEnd(
            key=self.key,
            outcome=name.lower(),
            committed=usage is not None,
            context_tokens=accepted.context_tokens if accepted is not None else 0,
            new_tokens=self.new_tokens,
            usage=usage or self.generation.usage(len(outputs[0].tokens) if outputs else 0),
            arrived_at=self.arrived_at,
            first_token_at=self.generation.first_token_at,
            ended_at=asyncio.get_running_loop().time(),
            request_id=self.spec.request_id,
            submitted_at=self.generation.submitted_at,
            generated_at=self.generation.ended_at,
            compact_at=self.compact_at,
            generated_tokens=self.generation.generated_tokens,
        )

    # ---- parts

    @property
    def _is_discarded(self) -> bool:
        return self.order is not None and self.order.error is not None

    def _try_transition(self, event: Event) -> bool:
        """Change the state as the table says. False: the event is refused and nothing has changed."""
        after = TRANSITIONS[self.state, event]
        if after is None:
            return False
        self.state = after
        return True

    def _transition(self, event: Event) -> None:
        if not self._try_transition(event):
            raise AssertionError(f"a turn cannot take {event.name} in {self.state.name}")

    def _abandon(self) -> None:
        error = Cancelled("the turn's last caller disconnected", reason="CLIENT_DISCONNECTED")
        self.end_early(Order(error=error, no_listeners=True))

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
