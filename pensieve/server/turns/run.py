"""One generation attempt of one turn: what is known of it, and how others ask it to end early.

The run belongs to ``Turns``, not to a call: callers attach and leave. ``TurnRunner`` does its work. It ends in exactly
one of two ways, both final before any caller hears of them: committed, or discarded without a trace in the history.
Whoever wants it to end sooner calls ``end_early`` with an ``Order``, which is too late once the commit has begun.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from pensieve.core import HintReceipt, Standing
from pensieve.errors import Cancelled, PensieveError
from pensieve.server import ids
from pensieve.server.admission import Ticket
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, NewTurn, OnDisconnect, TurnEnd, TurnStatus, TurnView
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
        self.patience: asyncio.TimerHandle | None = None
        """Until it is looked at whether the turn has waited too long."""
        self.hints: HintReceipt | None = None
        """What was made of the turn's hints; None: it gave none."""
        self.task: asyncio.Task[None] | None = None
        """Does the work; kept here because the event loop itself holds tasks only weakly."""
        self.order: Order | None = None
        """The first that came in time."""
        self.asked_to_end = False
        """A caller ordered it to end, first or not: who waits to begin this turn anew is meant as well."""
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
        self.asked_to_end |= order.asked
        if self.order is None:
            self.order = order
            self._ordered.set()
            self.generation.interrupt()
        return True

    @property
    def called_off(self) -> bool:
        """It is discarded, and a caller wants it to end: it is not for others to begin it again."""
        return self.asked_to_end and self.order is not None and self.order.error is not None

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


def ended(run: TurnRun, outcome: TurnView | PensieveError) -> TurnEnd:
    """How a run ended, for who keeps count of turns."""
    accepted, outputs = run.buffer.accepted, run.buffer.outputs
    if isinstance(outcome, TurnView):
        name = outcome.finish_reason.name if outcome.finish_reason is not None else "unknown"
        usage = outcome.usage
    else:
        name, usage = outcome.reason, None
    return TurnEnd(
        key=run.key,
        outcome=name.lower(),
        committed=usage is not None,
        context_tokens=accepted.context_tokens if accepted is not None else 0,
        new_tokens=run.new_tokens,
        usage=usage or run.generation.usage(len(outputs[0].tokens) if outputs else 0),
        arrived_at=run.arrived_at,
        first_token_at=run.generation.first_token_at,
        ended_at=asyncio.get_running_loop().time(),
        request_id=run.spec.request_id,
        submitted_at=run.generation.submitted_at,
        generated_at=run.generation.ended_at,
    )


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


class CalledOffStreams:
    """Streams whose callers want nothing of their turns any more: what of them arrives late must begin nothing.

    A client that leaves sends CancelTurn. Its StreamTurn, or a repetition of it, may arrive after that: by another
    connection, through a proxy, or because it was held up on its way in. The turn's request id cannot tell such a
    request from one that starts the turn again on purpose; the stream's id does. "" names no stream.
    """

    def __init__(self, most: int) -> None:
        """The newest ``most`` are remembered."""
        self._most = most
        self._streams: OrderedDict[tuple[Key, str, str], None] = OrderedDict()

    def add(self, key: Key, request_id: str, stream_id: str) -> None:
        if not stream_id:
            return
        self._streams[key, request_id, stream_id] = None
        self._streams.move_to_end((key, request_id, stream_id))
        while len(self._streams) > self._most:
            self._streams.popitem(last=False)

    def forget(self, key: Key, request_id: str, stream_id: str) -> None:
        """The turn is in history, for all its streams to see."""
        self._streams.pop((key, request_id, stream_id), None)

    def has(self, key: Key, request_id: str, stream_id: str) -> bool:
        return (key, request_id, stream_id) in self._streams
