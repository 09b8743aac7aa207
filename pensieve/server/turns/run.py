"""One generation attempt of one turn: what is known of it, and how others ask it to end early.

The run belongs to ``Turns``, not to a call: callers attach and leave. ``TurnRunner`` does its work. It ends in exactly
one of two ways, both final before any caller hears of them: committed, or discarded without a trace in the history.
Whoever wants it to end sooner calls ``end_early`` with an ``Order``, which is too late once the commit has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from dataclasses import dataclass

from pensieve.core import HintReceipt, Standing
from pensieve.errors import Cancelled, PensieveError
from pensieve.server import ids
from pensieve.server.admission.gate import Ticket
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, NewTurn, OnDisconnect, TurnStatus, TurnView
from pensieve.store import Key


@dataclass(frozen=True, slots=True)
class Order:
    """End the turn early: commit what there is (the first ``keep_tokens``), or discard it with ``error``."""

    keep_tokens: int | None = None
    error: PensieveError | None = None
    asked: bool = False
    """By a caller, who means the turn wherever it runs; not by this server, for its own part in it."""


class TurnRun:
    """See the module docstring. Its output and its outcome are in ``buffer``."""

    def __init__(
        self,
        key: Key,
        spec: NewTurn,
        fingerprint: str,
        committed_at: int | None = None,
        onlooker: bool = False,
    ) -> None:
        """``committed_at``: the turn is in history with this revision, and is only to be replayed.

        ``onlooker``: it runs elsewhere, and is to be replayed when it is committed; it is never begun here.
        """
        self.key = key
        self.spec = spec
        self.fingerprint = fingerprint
        self.committed_at = committed_at
        self.onlooker = onlooker
        self.following = False
        """Waits for the same turn on another server."""
        self.on_followed: Callable[[], None] | None = None
        """Called when somebody is known to wait for this turn at another server."""
        self.attempt = ids.new_attempt()
        self.lease_token = ids.new_token()
        self.buffer = TurnBuffer()
        self.generation = TurnGeneration(self.buffer)
        self.seed = 0
        self.base_revision = 0
        self.began = False
        """Whether it holds or held the lease: a turn of its own, not the replay of an older one."""
        self.arrived_at = asyncio.get_running_loop().time()
        """On the event loop's clock."""
        self.new_tokens = 0
        """Input tokens of this turn, known once it is rendered."""
        self.ticket: Ticket | None = None
        """Of the gate; a turn that is only replayed has none."""
        self.hints: HintReceipt | None = None
        """What was made of the turn's hints; None: it gave none."""
        self.task: asyncio.Task[None] | None = None
        """Does the work; kept here because the event loop itself holds tasks only weakly."""
        self.order: Order | None = None
        """The first that came in time."""
        self._ordered = asyncio.Event()
        self._committing = False

    @property
    def standing(self) -> Standing:
        """How it stands in the engine."""
        if self.ticket is None:
            return Standing(self.key.tenant, priority=self.spec.priority)
        return self.ticket.standing(self.spec.priority)

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

    def accept(self, context_tokens: int, *outputs: OutputText, replayed: bool) -> None:
        """Tell streams that the turn holds its session and fits, and where the output of each candidate will be."""
        accepted = Accepted(
            request_id=self.spec.request_id,
            base_revision=self.base_revision,
            context_tokens=context_tokens,
            seed=self.seed,
            attempt=self.attempt,
            replayed=replayed,
        )
        self.buffer.accept(accepted, *outputs)

    def end_early(self, order: Order) -> bool:
        """Stop generating and end as ``order`` says. The first order counts; False when it is too late for any."""
        if self._committing or self.buffer.ended:
            return False
        if self.order is None:
            self.order = order
            self._ordered.set()
            self.generation.interrupt()
        return True

    @property
    def called_off(self) -> bool:
        """A caller wants it discarded."""
        return self.order is not None and self.order.asked and self.order.error is not None

    async def ordered_within(self, timeout_s: float) -> None:
        """Wait for an order; returns without one when the time is over."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._ordered.wait()

    def begin_commit(self) -> Order | None:
        """From here on orders are too late. Returns the one that came before; raises the error it discards with."""
        order = self.order
        if order is not None and order.error is not None:
            raise order.error
        self._committing = True
        return order


class TurnAudience:
    """The callers that listen to a run. When the last one leaves, the run has a grace time left to live."""

    def __init__(self, run: TurnRun) -> None:
        self._run = run
        self._listeners = 0
        self._finishes_alone = False
        self.abandoned = False
        """The run is being discarded because nobody listened: it is not for new callers."""
        self._timer: asyncio.TimerHandle | None = None
        self._grace_s = 0.0

    def join(self, policy: OnDisconnect) -> None:
        self._listeners += 1
        self._finishes_alone |= policy is OnDisconnect.FINISH
        self.stop_timer()

    def leave(self, grace_s: float) -> None:
        self._listeners -= 1
        if self._listeners or self._finishes_alone or self._run.buffer.ended:
            return
        if grace_s > 0:
            self._grace_s = grace_s
            self._timer = asyncio.get_running_loop().call_later(grace_s, self._abandon)
        else:
            self._abandon()

    def listened_elsewhere(self) -> None:
        """Somebody waits at another server: the grace time, if it runs, starts again."""
        if self._timer is not None:
            delay = self._grace_s
            self.stop_timer()
            self._timer = asyncio.get_running_loop().call_later(delay, self._abandon)

    def stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _abandon(self) -> None:
        self.abandoned = self._run.end_early(
            Order(error=Cancelled("nobody listened to the turn any more", reason="CLIENT_DISCONNECTED"))
        )
