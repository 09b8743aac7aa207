"""The gate that a new turn passes, before anything is looked up, tokenised or written.

A turn that would wait too long is refused at once, with the time at which its turn would come: whoever is refused
after it is told a later one, so that those who come back do so one after another, as capacity frees.

The expected wait is work that waits ÷ measured speed. Work is tokens to compute: the input, what of the history is
likely to be computed again, and the expected answer; before a turn is rendered all of that is an estimate from the
turns before it. Between tenants the estimate follows the engine's fair queue: a tenant waits for its own backlog and
for as much of the others' as is due before it, so a newcomer is not refused for another's flood.

An estimate can be wrong. A turn that was let in and has waited as long as any may is refused too (``overdue``).
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pensieve.core import Standing
from pensieve.errors import DeadlineExceeded, PensieveError, ResourceExhausted
from pensieve.server.admission.backlog import Backlog
from pensieve.server.admission.quotas import Account
from pensieve.server.admission.speed import DrainSpeed
from pensieve.server.tenants import TenantTable
from pensieve.server.values import NewTurn

MEANS: Final = 0.05
"""Weight of the newest turn in running means."""
BURST: Final = 32
"""So many turns on their way to an engine that takes all that comes are no queue."""
FEW: Final = 4
"""This few waiting turns are no overload, however long they wait: the engine is in a long step."""
SHORTEST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 30.0
JITTER: Final = 0.25
"""Part of the told wait by which it is lengthened at most, at random."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """How much may wait; 0: no limit of this kind."""

    max_wait_s: float
    max_queued: int
    """Turns."""
    max_queued_tokens: int
    """Of their inputs."""


class _Mean:
    """A running mean of what turns turn out to be."""

    def __init__(self, first: float) -> None:
        self.value = first

    def take(self, value: float) -> None:
        self.value += MEANS * (value - self.value)


class Ticket:
    """An admitted turn. It waits until ``started``, and counts for its tenant until ``ended``."""

    __slots__ = ("_gate", "answers", "entered_at", "max_output", "tenant", "tokens", "waits", "work")

    def __init__(self, gate: Gate, tenant: str, tokens: int, answers: int, max_output: int | None) -> None:
        self._gate = gate
        self.tenant = tenant
        self.tokens = tokens
        """Of its input."""
        self.answers = answers
        self.max_output = max_output
        self.work = 0.0
        self.waits = True
        self.entered_at = 0.0
        """On the gate's clock."""

    def standing(self, priority: int) -> Standing:
        """How it stands in the engine, with a priority within its tenant."""
        return self._gate.standing(self.tenant, priority)

    def rendered(self, chars: int, input_tokens: int, new_tokens: int, history_tokens: int) -> None:
        """It is rendered: its input (``chars``: of its text, 0 if not all of it is), what of it was never computed, and
        what was there before."""
        self._gate.rendered(self, chars, input_tokens, new_tokens, history_tokens)

    def started(self, recomputed: int, history_tokens: int) -> None:
        """The engine computes it; nothing if it did before."""
        self._gate.started(self, recomputed, history_tokens)

    def ended(self, used_tokens: int, output_tokens: int) -> None:
        """It is over, whatever it came to. ``used_tokens``: computed and generated."""
        self._gate.ended(self, used_tokens, output_tokens)


class Gate:
    """One per front end. Used on one event loop. ``queued``: how many requests the engine said that it cannot take."""

    def __init__(
        self,
        limits: GateLimits,
        tenants: TenantTable,
        queued: Callable[[], int],
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self._limits = limits
        self._tenants = tenants
        self._queued = queued
        self._clock = clock
        self._rng = rng or random.Random()
        self._speed = DrainSpeed(clock())
        self._was_loaded = False
        self._backlog = Backlog(self.weight)
        self._accounts: dict[str, Account] = {}
        self._promised: dict[str, float] = {}
        """When the work of those who were refused will have been done, if all come back; by tenant."""
        self._chars_per_token = _Mean(4.0)
        self._output = _Mean(128.0)
        self._recomputed = _Mean(0.1)
        """Part of a history that is computed again."""
        self._history = _Mean(0.0)

    def weight(self, tenant: str) -> float:
        """A tenant's part of a loaded engine, in relation to the others'."""
        return self._tenants.limits(tenant).weight or 1.0

    def standing(self, tenant: str, priority: int = 0) -> Standing:
        """How a tenant's request stands in the engine."""
        share = self._tenants.limits(tenant).cache_share or 0.0
        return Standing(tenant, self.weight(tenant), priority, share)

    @property
    def waiting(self) -> int:
        """Turns that are not computed yet."""
        return self._backlog.turns

    @property
    def expected_wait_s(self) -> float:
        """How long it takes to begin all that waits; 0 when nothing is known of the speed."""
        self._tick()
        speed = self._speed.per_s
        return self._backlog.work / speed if speed and self._loaded else 0.0

    def wait_s(self, tenant: str) -> float:
        """How long a new turn of a tenant would wait; 0 when the engine takes all that comes, or is not known yet."""
        self._tick()
        speed = self._speed.per_s
        return self._backlog.ahead_of(tenant) / speed if speed and self._loaded else 0.0

    def refusal(self, tenant: str, spec: NewTurn, deadline_s: float | None) -> PensieveError | None:
        """Why a turn may not join now, if so. ``deadline_s``: seconds that its caller waits at most."""
        now, ticket = self._clock(), self._ticket(tenant, spec)
        limits, queued = self._tenants.limits(tenant), self._backlog.tokens_of(tenant)
        account = self._accounts.get(tenant) or Account(tenant, now)
        exceeded = account.refusal(limits, queued, ticket.tokens, ticket.work, now)
        if exceeded is not None:
            return exceeded
        wait = self.wait_s(tenant)
        if deadline_s is not None and wait > deadline_s:
            return DeadlineExceeded(
                f"the turn would wait about {wait:.1f} s, longer than its caller does",
                metadata={"estimate": f"{wait:.1f}"},
            )
        most = self._limits.max_wait_s
        if self._is_full(tenant, ticket.tokens) or 0 < most < wait:
            return ResourceExhausted(
                "too much waits to be computed", retry_after_s=self._retry_s(ticket, wait - most, now)
            )
        return None

    @property
    def max_wait_s(self) -> float:
        """How long a turn waits at most; 0: without a limit."""
        return self._limits.max_wait_s

    def overdue(self, ticket: Ticket) -> PensieveError | None:
        """Why a turn that has joined is refused after all: it has waited as long as any may, and so do others."""
        now, most = self._clock(), self._limits.max_wait_s
        if not ticket.waits or not 0 < most <= now - ticket.entered_at or self._backlog.turns <= FEW:
            return None
        if not self._loaded:
            return None
        return ResourceExhausted(
            f"the turn has waited {now - ticket.entered_at:.1f} s and was not begun",
            retry_after_s=self._retry_s(ticket, self.wait_s(ticket.tenant) - most, now),
        )

    def enter(self, tenant: str, spec: NewTurn) -> Ticket:
        """Let a turn join that ``refusal`` has nothing against."""
        self._tick()
        ticket, now = self._ticket(tenant, spec), self._clock()
        ticket.entered_at = now
        account = self._accounts.setdefault(tenant, Account(tenant, now))
        account.turns += 1
        self._charge(ticket, ticket.work)
        self._backlog.add(tenant, 1, ticket.tokens, ticket.work)
        return ticket

    # -- tickets call ------------------------------------------------------------------------------------------------

    def rendered(
        self, ticket: Ticket, chars: int, input_tokens: int, new_tokens: int, history_tokens: int
    ) -> None:
        if not ticket.waits:
            return
        if chars and input_tokens:
            self._chars_per_token.take(chars / input_tokens)
        self._history.take(history_tokens)
        work = self._work(new_tokens, history_tokens, ticket.answers, ticket.max_output)
        self._backlog.add(ticket.tenant, 0, input_tokens - ticket.tokens, work - ticket.work)
        self._charge(ticket, work - ticket.work)
        ticket.tokens, ticket.work = input_tokens, work

    def started(self, ticket: Ticket, recomputed: int, history_tokens: int) -> None:
        if not ticket.waits:
            return
        was_loaded = self._was_loaded
        self._tick()
        if history_tokens:
            self._recomputed.take(recomputed / history_tokens)
        if was_loaded:
            self._speed.began(ticket.work)
        self._leave(ticket)

    def ended(self, ticket: Ticket, used_tokens: int, output_tokens: int) -> None:
        self._tick()
        if ticket.waits:
            self._leave(ticket)
        account = self._accounts[ticket.tenant]
        account.turns -= 1
        self._charge(ticket, used_tokens - ticket.work)
        if output_tokens:
            self._output.take(output_tokens)
        if not account.turns and self._tenants.limits(ticket.tenant).tokens_per_minute is None:
            del self._accounts[ticket.tenant]

    # -- inside ------------------------------------------------------------------------------------------------------

    @property
    def _loaded(self) -> bool:
        return self._queued() > 0 or self._backlog.turns > BURST

    def _tick(self) -> None:
        self._speed.passed(self._clock(), loaded=self._was_loaded)
        # What begins when the engine was idle fills its batch at once, and says nothing of how fast that drains.
        self._was_loaded = self._queued() > 0 or self._backlog.turns > 4 * BURST

    def _leave(self, ticket: Ticket) -> None:
        ticket.waits = False
        self._backlog.add(ticket.tenant, -1, -ticket.tokens, -ticket.work)

    def _charge(self, ticket: Ticket, work: float) -> None:
        limit = self._tenants.limits(ticket.tenant).tokens_per_minute
        if limit is not None:
            self._accounts[ticket.tenant].minute.take(work, limit, self._clock())

    def _is_full(self, tenant: str, tokens: int) -> bool:
        """Whether the queue takes no more of this tenant: who waits with less than its share is not refused because of
        others."""
        turns, most = self._limits.max_queued, self._limits.max_queued_tokens
        share = self._backlog.share(tenant)
        mine = self._backlog.tokens_of(tenant)
        return bool(
            (turns and self._backlog.turns >= turns and self._backlog.turns_of(tenant) >= turns * share)
            or (most and mine and self._backlog.tokens + tokens > most and mine + tokens > most * share)
        )

    def _retry_s(self, ticket: Ticket, over_s: float, now: float) -> float:
        """When to come back: after those who were refused before, at the speed at which the tenant is served."""
        speed = (self._speed.per_s or ticket.work) * self._backlog.share(ticket.tenant)
        begin = max(self._promised.get(ticket.tenant, 0.0), now + max(over_s, 0.0))
        begin = min(begin + ticket.work / speed, now + LONGEST_RETRY_S)
        self._promised = {name: at for name, at in self._promised.items() if at > now}
        self._promised[ticket.tenant] = begin
        return max(begin - now, SHORTEST_RETRY_S) * (1 + JITTER * self._rng.random())

    def _ticket(self, tenant: str, spec: NewTurn) -> Ticket:
        tokens = sum(len(entry.tokens) // 4 for entry in spec.input if entry.tokens is not None)
        tokens += round(text_length(spec) / self._chars_per_token.value)
        sampling = spec.sampling
        answers = max(sampling.candidates or 1, sampling.beam_width or 1)
        ticket = Ticket(self, tenant, tokens, answers, sampling.max_output_tokens)
        ticket.work = self._work(tokens, self._history.value, answers, sampling.max_output_tokens)
        return ticket

    def _work(self, new: int, history: float, answers: int, max_output: int | None) -> float:
        output = self._output.value if max_output is None else min(self._output.value, max_output)
        return new + history * self._recomputed.value + answers * max(output, 1.0)


def text_length(spec: NewTurn) -> int:
    """Characters of a turn's input."""
    return sum(len(entry.text) for entry in spec.input if entry.tokens is None)
