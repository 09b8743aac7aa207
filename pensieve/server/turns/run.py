"""One turn in this process, from its arrival to its end: the state machine that makes it happen exactly once.

``TurnRun`` owns the state and is its only writer; each event below is one of its methods. The store decides which
server may have the turn, and it appends the record atomically. This machine sees to the rest: what this process sends
to the store, and what it tells its callers, agree with each other whatever happens meanwhile.

::

    without the lease   BEGINNING, FOLLOWING --in history--> REPLAYING ---------------------> REPLAYED
                          |   (KEEP_PENDING, DISCARD_PENDING)     ` any of these, failed ---> REFUSED
    with the lease        v begun
                        GENERATING --keep--> TRUNCATING --.
                          |    `---------------commit------`-> COMMITTING ----------------> COMMITTED
                          |                                      `--failed----------------> UNCERTAIN
                          `--discard--> DISCARDING --failed-------------------------------> DISCARDED

States. Without the lease:

* ``BEGINNING``: the store has been asked, or will be, and has not answered.
* ``FOLLOWING``: another server has the turn. This run waits for its commit, or for the chance to begin it here.
* ``KEEP_PENDING``, ``DISCARD_PENDING``: either of the two, with an order to end early.
* ``REPLAYING``: the turn is in history; its output is read from there.

With the lease, which only this run has:

* ``GENERATING``: no order to end early has come.
* ``TRUNCATING``, ``DISCARDING``: it ends early; the history gets what there is, or nothing.
* ``COMMITTING``: the record is on its way to the store. No order is taken any more.

At the end, when callers are told the outcome:

* ``COMMITTED``: the store confirmed the record of this run.
* ``REPLAYED``: callers got the turn as the history has it.
* ``DISCARDED``: the turn had the lease, and no commit was sent.
* ``UNCERTAIN``: a commit was sent and not confirmed. Only the store knows; a retry with the same request id asks it.
* ``REFUSED``: the turn never had the lease.

Events, and who may send them (``TRANSITIONS`` has the state after each):

* ``BEGUN``, ``NAME_ADVICE``, ``IN_HISTORY``: ``TurnRunner``, as the store answers: ``begun``, ``elsewhere``,
  ``in_history``.
* ``KEEP``, ``DISCARD``: anything that wants the turn to end, by ``end_early`` with an ``Order``. The first order
  counts. ``Turns`` sends them for callers, a drain, a deleted session and an overdue turn; the runner when the lease is
  lost or when another server left an order; the run itself when its last listener has left and the grace time is over.
* ``COMMIT``: ``TurnRunner``, once it has all output: ``begin_commit``.
* ``SUCCEEDED``, ``FAILED``: ``Turns``, when the runner has returned or raised: ``end``.

The table makes it exactly once:

* A commit is sent in ``COMMITTING`` only. Only a run with the lease gets there, and it gets there once.
* No run that was told to discard gets there, and no run that is there can be discarded: no caller hears "discarded"
  about a turn that is then committed. A failed commit is ``UNCERTAIN``, never ``DISCARDED``.
* Nothing leads out of the last five states, and callers hear of the outcome only there.
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
"""A line for each state, a column for each event, in the cell the state after it. ``-``: the event is refused."""


class Event(enum.Enum):
    """See the module docstring."""

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
        """Whether the turn is or was this server's own, and not refused, followed or replayed."""
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
    """By a caller, who means the turn wherever it runs; not by this server, for its own part in it."""
    no_listeners: bool = False
    """Nobody listens to the turn here any more."""


class TurnRun:
    """One attempt at a turn. See the module docstring; output and outcome are in ``buffer``.

    It belongs to ``Turns``, not to a call: callers ``join`` and ``leave``, and ``TurnRunner`` does its work. No other
    module writes its fields.
    """

    def __init__(
        self, key: Key, spec: NewTurn, fingerprint: str, ticket: AdmissionTicket | None = None
    ) -> None:
        """``ticket``: the gate's; a turn that came past the gate because it is in history has none."""
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
        """All that came in time. The first counts; the others tell whether a caller wants the turn to end as well."""
        self.seed = 0
        self.base_revision = 0
        self.new_tokens = 0
        """Input tokens of this turn, known once it is rendered."""
        self.hints: HintReceipt | None = None
        """The receipt of the turn's hints; None: it gave none."""
        self.arrived_at = asyncio.get_running_loop().time()
        """On the event loop's clock."""
        self._order_given = asyncio.Event()
        self._listeners = 0
        self._finishes_unattended = False
        self._grace_s = 0.0
        self._grace: asyncio.TimerHandle | None = None
        """Runs since the last listener has left."""

    # ---- events: the runner, as the store answers

    def on_begun(self) -> None:
        """The store gave this run the lease."""
        self._transition(Event.BEGUN)

    def on_elsewhere(self) -> None:
        """The turn runs at another server."""
        self._transition(Event.ELSEWHERE)

    def on_in_history(self) -> None:
        """The turn was committed before."""
        self._transition(Event.IN_HISTORY)

    def begin_commit(self) -> Order | None:
        """From here on orders are too late. Returns the one that came before; raises the error of one that discards."""
        order = self.order
        if order is not None and order.error is not None:
            raise order.error
        self._transition(Event.COMMIT)
        return order

    # ---- events: any caller

    def end_early(self, order: Order) -> bool:
        """Stop generating and end as ``order`` says. The first order counts; False when it is too late for any."""
        if not self._try_transition(Event.KEEP if order.error is None else Event.DISCARD):
            return False
        self.orders += (order,)
        if order is self.order:
            self._order_given.set()
            self.generation.interrupt()
        return True

    # ---- events: the registry

    def end(self, outcome: TurnView | PensieveError) -> None:
        """The work is over: tell all listeners. Nothing changes afterwards."""
        self._transition(Event.FAILED if isinstance(outcome, PensieveError) else Event.SUCCEEDED)
        self._stop_grace()
        self.buffer.end(outcome)

    # ---- results of the runner

    def set_base(self, base_revision: int, seed: int) -> None:
        """The history is read: which revision the turn builds on, and the seed in force."""
        self.base_revision = base_revision
        self.seed = seed

    def accept(
        self, context_tokens: int, new_tokens: int, hints: HintReceipt | None, outputs: list[OutputText]
    ) -> None:
        """The turn is rendered and fits. Streams hear of it, and read the output of each candidate from ``outputs``."""
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

    # ---- listeners: when the last one leaves, the run has a grace time left to live

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
        """A caller waits for the turn at another server: the grace time, if it runs, starts again."""
        if self._grace is not None:
            self._stop_grace()
            self._grace = asyncio.get_running_loop().call_later(self._grace_s, self._abandon)

    # ---- to read

    @property
    def order(self) -> Order | None:
        """The order in force: the first."""
        return self.orders[0] if self.orders else None

    @property
    def cancelled_by_caller(self) -> bool:
        """It is discarded because a caller wants it to end, wherever it runs: no waiting caller begins it again."""
        return self._is_discarded and any(order.by_caller for order in self.orders)

    @property
    def abandoned(self) -> bool:
        """It is discarded, and nobody listens any more: a caller that comes now begins anew when this has ended."""
        return self._is_discarded and any(order.no_listeners for order in self.orders)

    @property
    def qos(self) -> TenantQos:
        """How it stands in the engine."""
        if self.ticket is None:
            return TenantQos(self.key.tenant, priority=self.spec.priority)
        return self.ticket.qos(self.spec.priority)

    @property
    def view(self) -> TurnView:
        """The turn while it runs."""
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
        """Wait for an order; returns without one when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._order_given.wait()

    def summary(self, outcome: TurnView | PensieveError) -> TurnEnd:
        """The end of the turn, for all that keep count of turns."""
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
        )

    # ---- parts

    @property
    def _is_discarded(self) -> bool:
        return self.order is not None and self.order.error is not None

    def _try_transition(self, event: Event) -> bool:
        """Change the state as the table says. False: the event is refused, and nothing has changed."""
        after = TRANSITIONS[self.state, event]
        if after is None:
            return False
        self.state = after
        return True

    def _transition(self, event: Event) -> None:
        if not self._try_transition(event):
            raise AssertionError(f"a turn cannot take {event.name} in {self.state.name}")

    def _abandon(self) -> None:
        error = Cancelled("nobody listened to the turn any more", reason="CLIENT_DISCONNECTED")
        self.end_early(Order(error=error, no_listeners=True))

    def _stop_grace(self) -> None:
        if self._grace is not None:
            self._grace.cancel()
            self._grace = None
