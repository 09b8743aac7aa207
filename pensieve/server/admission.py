"""Admission control: decide whether a new turn may join, before anything is looked up, tokenised or written.

A turn that would wait too long is refused at once, with a time to retry. Each further refused turn gets a later time,
so that the retries arrive one after another as capacity frees.

The expected wait is waiting work (``Backlog``) ÷ measured speed (``DrainRate``). Work counts tokens to compute: the
input, the part of the history likely to be recomputed, and the expected answer. Before a turn is rendered, all of
that is estimated from earlier turns. Between tenants the estimate follows the engine's fair queue: a tenant waits for
its own backlog and for the part of the others' that is due before it, so a newcomer is not refused because another
tenant floods the queue. Limits that hold under any load are checked by the tenant's ``Account``.

Estimates can be wrong. An admitted turn that has waited for the maximum is refused too (``overdue``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pensieve.core import TenantQos
from pensieve.engine.messages import Stats
from pensieve.errors import DeadlineExceeded, PensieveError, ResourceExhausted
from pensieve.server.keys import TenantLimits, TenantTable, quota_exceeded
from pensieve.server.values import NewTurn

MEAN_WEIGHT: Final = 0.05
"""Weight of the newest turn in running means."""
BURST: Final = 32
"""This many turns in transit to an engine that takes everything do not count as a queue."""
MIN_OVERLOAD_TURNS: Final = 4
"""Up to this many waiting turns are not an overload, however long they wait: the engine is in a long step."""
SHORTEST_RETRY_S: Final = 0.1
LONGEST_RETRY_S: Final = 30.0
JITTER: Final = 0.25
"""Largest random extension of a retry time, as a fraction of it."""


@dataclass(frozen=True, slots=True)
class GateLimits:
    """Limits on the queue; 0: no limit."""

    max_wait_s: float
    max_queued: int
    max_queued_tokens: int
    """Tokens of the inputs."""


class _Mean:
    def __init__(self, first: float) -> None:
        self.value = first

    def take(self, value: float) -> None:
        self.value += MEAN_WEIGHT * (value - self.value)


class AdmissionTicket:
    """An admitted turn. It waits until ``on_started``, and counts for its tenant until ``on_ended``."""

    __slots__ = ("_gate", "answers", "entered_at", "max_output", "tenant", "tokens", "waits", "work")

    def __init__(
        self, gate: AdmissionGate, tenant: str, tokens: int, answers: int, max_output: int | None
    ) -> None:
        self._gate = gate
        self.tenant = tenant
        self.tokens = tokens
        self.answers = answers
        self.max_output = max_output
        self.work = 0.0
        self.waits = True
        self.entered_at = 0.0

    def qos(self, priority: int) -> TenantQos:
        return self._gate.qos(self.tenant, priority)

    def on_rendered(self, chars: int, input_tokens: int, new_tokens: int, history_tokens: int) -> None:
        """Correct the estimate after rendering. ``chars``: length of the input's text, 0 if part of it is not text.

        ``new_tokens``: input tokens that were never computed. ``history_tokens``: tokens of the context before them.
        """
        self._gate.on_rendered(self, chars, input_tokens, new_tokens, history_tokens)

    def on_started(self, recomputed: int, history_tokens: int) -> None:
        """The engine computes the turn. Later calls have no effect."""
        self._gate.on_started(self, recomputed, history_tokens)

    def on_ended(self, used_tokens: int, output_tokens: int) -> None:
        """The turn is over. ``used_tokens``: computed and generated."""
        self._gate.on_ended(self, used_tokens, output_tokens)


class AdmissionGate:
    """Admission control of one front end. Used on one event loop. ``stats``: as the engine reported them last."""

    def __init__(
        self,
        limits: GateLimits,
        tenants: TenantTable,
        stats: Callable[[], Stats],
        clock: Callable[[], float],
        rng: random.Random | None = None,
    ) -> None:
        self._limits = limits
        self._tenants = tenants
        self._stats = stats
        self._clock = clock
        self._rng = rng or random.Random()
        self._speed = DrainRate(clock())
        self._was_loaded = False
        self._backlog = Backlog(self.weight)
        self._accounts: dict[str, Account] = {}
        self._promised: dict[str, float] = {}
        """Tenant → time at which the work of its refused turns will be done if all of them return."""
        self._chars_per_token = _Mean(4.0)
        self._output = _Mean(128.0)
        self._recomputed = _Mean(0.1)
        """Fraction of a history that is recomputed."""
        self._history = _Mean(0.0)

    def weight(self, tenant: str) -> float:
        """Return a tenant's weight in sharing a loaded engine."""
        return self._tenants.limits(tenant).weight or 1.0

    def qos(self, tenant: str, priority: int = 0) -> TenantQos:
        share = self._tenants.limits(tenant).cache_share or 0.0
        return TenantQos(tenant, self.weight(tenant), priority, share)

    @property
    def waiting(self) -> int:
        """Turns admitted and not yet computed."""
        return self._backlog.turns

    @property
    def expected_wait_s(self) -> float:
        """Seconds until all waiting work has begun; 0 while the speed is unknown."""
        self._tick()
        speed = self._speed.per_s
        return self._backlog.work / speed if speed and self._loaded else 0.0

    def wait_s(self, tenant: str) -> float:
        """Return how long a new turn would wait; 0 if the engine takes everything or its speed is unknown."""
        self._tick()
        speed = self._speed.per_s
        return self._backlog.ahead_of(tenant) / speed if speed and self._loaded else 0.0

    def refusal(self, tenant: str, spec: NewTurn, deadline_s: float | None) -> PensieveError | None:
        """Return why a turn may not join now, or None if it may. ``deadline_s``: the caller's remaining time."""
        now, ticket = self._clock(), self._ticket(tenant, spec)
        limits, queued = self._tenants.limits(tenant), self._backlog.tokens_of(tenant)
        account = self._accounts.get(tenant) or Account(tenant, now)
        self._charge_warm_ups(account, now)
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
                "too much work is waiting to be computed",
                retry_after_s=self._retry_s(ticket, wait - most, now),
            )
        return None

    def may_warm(self, tenant: str) -> bool:
        """Whether the tenant's tokens per minute leave some for a warm-up. The tokens that it computes are charged when
        the engine has reported them."""
        limit = self._tenants.limits(tenant).tokens_per_minute
        if limit is None:
            return True
        now = self._clock()
        account = self._accounts.setdefault(tenant, Account(tenant, now))
        self._charge_warm_ups(account, now)
        if account.minute.wait_s(1, limit, now) > 0:
            return False
        account.warmed_at = now
        return True

    @property
    def max_wait_s(self) -> float:
        return self._limits.max_wait_s

    def overdue(self, ticket: AdmissionTicket) -> PensieveError | None:
        """Return the error for an admitted turn that has waited for the maximum while others wait too, or None."""
        now, most = self._clock(), self._limits.max_wait_s
        waited = now - ticket.entered_at
        is_overload = self._backlog.turns > MIN_OVERLOAD_TURNS and self._loaded
        if not (ticket.waits and 0 < most <= waited and is_overload):
            return None
        return ResourceExhausted(
            f"the turn has waited {waited:.1f} s and has not begun",
            retry_after_s=self._retry_s(ticket, self.wait_s(ticket.tenant) - most, now),
        )

    def admit(self, tenant: str, spec: NewTurn) -> AdmissionTicket:
        """Admit a turn for which ``refusal`` returned None."""
        self._tick()
        ticket, now = self._ticket(tenant, spec), self._clock()
        ticket.entered_at = now
        account = self._accounts.setdefault(tenant, Account(tenant, now))
        account.turns += 1
        self._charge(ticket, ticket.work)
        self._backlog.add(tenant, 1, ticket.tokens, ticket.work)
        return ticket

    # -- called by tickets -------------------------------------------------------------------------------------------

    def on_rendered(
        self, ticket: AdmissionTicket, chars: int, input_tokens: int, new_tokens: int, history_tokens: int
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

    def on_started(self, ticket: AdmissionTicket, recomputed: int, history_tokens: int) -> None:
        if not ticket.waits:
            return
        was_loaded = self._was_loaded
        self._tick()
        if history_tokens:
            self._recomputed.take(recomputed / history_tokens)
        if was_loaded:
            self._speed.record_started(ticket.work)
        self._stop_waiting(ticket)

    def on_ended(self, ticket: AdmissionTicket, used_tokens: int, output_tokens: int) -> None:
        self._tick()
        if ticket.waits:
            self._stop_waiting(ticket)
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
        return self._stats().queued > 0 or self._backlog.turns > BURST

    def _tick(self) -> None:
        self._speed.advance(self._clock(), loaded=self._was_loaded)
        # Work that begins on an idle engine fills its batch at once and tells nothing about the drain rate.
        self._was_loaded = self._stats().queued > 0 or self._backlog.turns > 4 * BURST

    def _stop_waiting(self, ticket: AdmissionTicket) -> None:
        ticket.waits = False
        self._backlog.add(ticket.tenant, -1, -ticket.tokens, -ticket.work)

    def _charge_warm_ups(self, account: Account, now: float) -> None:
        """Charge the tokens that warm-ups have computed since the last call, as of the last warm-up."""
        limit = self._tenants.limits(account.tenant).tokens_per_minute
        total = (self._stats().computed_ahead or {}).get(account.tenant, 0)
        # Another engine begins to count at 0.
        new = total - account.warmed_tokens if total >= account.warmed_tokens else total
        account.warmed_tokens = total
        if new and limit is not None:
            paid_off = (now - account.warmed_at) * limit / WINDOW_S
            account.minute.take(max(new - paid_off, 0.0), limit, now)

    def _charge(self, ticket: AdmissionTicket, work: float) -> None:
        limit = self._tenants.limits(ticket.tenant).tokens_per_minute
        if limit is not None:
            self._accounts[ticket.tenant].minute.take(work, limit, self._clock())

    def _is_full(self, tenant: str, tokens: int) -> bool:
        """Return whether the queue is full for this tenant. A tenant below its share is not refused because of
        others."""
        turns, most = self._limits.max_queued, self._limits.max_queued_tokens
        share = self._backlog.share(tenant)
        mine = self._backlog.tokens_of(tenant)
        return bool(
            (turns and self._backlog.turns >= turns and self._backlog.turns_of(tenant) >= turns * share)
            or (most and mine and self._backlog.tokens + tokens > most and mine + tokens > most * share)
        )

    def _retry_s(self, ticket: AdmissionTicket, over_s: float, now: float) -> float:
        """Return when to retry: after the tenant's earlier refused turns, at the tenant's share of the speed."""
        speed = (self._speed.per_s or ticket.work) * self._backlog.share(ticket.tenant)
        begin = max(self._promised.get(ticket.tenant, 0.0), now + max(over_s, 0.0))
        begin = min(begin + ticket.work / speed, now + LONGEST_RETRY_S)
        self._promised = {name: at for name, at in self._promised.items() if at > now}
        self._promised[ticket.tenant] = begin
        return max(begin - now, SHORTEST_RETRY_S) * (1 + JITTER * self._rng.random())

    def _ticket(self, tenant: str, spec: NewTurn) -> AdmissionTicket:
        tokens = sum(len(entry.tokens) // 4 for entry in spec.input if entry.tokens is not None)
        tokens += round(text_length(spec) / self._chars_per_token.value)
        sampling = spec.sampling
        answers = max(sampling.candidates or 1, sampling.beam_width or 1)
        ticket = AdmissionTicket(self, tenant, tokens, answers, sampling.max_output_tokens)
        ticket.work = self._work(tokens, self._history.value, answers, sampling.max_output_tokens)
        return ticket

    def _work(self, new: int, history: float, answers: int, max_output: int | None) -> float:
        output = self._output.value if max_output is None else min(self._output.value, max_output)
        return new + history * self._recomputed.value + answers * max(output, 1.0)


def text_length(spec: NewTurn) -> int:
    return sum(len(entry.text) for entry in spec.input if entry.tokens is None)


@dataclass(slots=True)
class _TenantBacklog:
    turns: int = 0
    tokens: int = 0
    work: float = 0.0


class Backlog:
    """Sums over waiting turns, per tenant and in total. ``weight``: a tenant's weight in sharing a loaded engine."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._per_tenant: dict[str, _TenantBacklog] = {}
        self.turns = 0
        self.tokens = 0
        self.work = 0.0

    def add(self, tenant: str, turns: int, tokens: int, work: float) -> None:
        """Add to a tenant's waiting work; negative numbers subtract."""
        line = self._per_tenant.setdefault(tenant, _TenantBacklog())
        line.turns += turns
        line.tokens += tokens
        line.work += work
        self.turns += turns
        self.tokens += tokens
        self.work += work
        if not line.turns:
            self.work -= line.work  # rounding residue
            del self._per_tenant[tenant]
        if not self._per_tenant:
            self.work = 0.0

    def turns_of(self, tenant: str) -> int:
        return self._per_tenant[tenant].turns if tenant in self._per_tenant else 0

    def tokens_of(self, tenant: str) -> int:
        return self._per_tenant[tenant].tokens if tenant in self._per_tenant else 0

    def ahead_of(self, tenant: str) -> float:
        """Return the work done before a further turn of this tenant begins: the tenant's own, plus the others' work
        that fair queueing by weight puts before it (Parekh and Gallager, 1993: generalised processor sharing)."""
        mine = self._per_tenant[tenant].work if tenant in self._per_tenant else 0.0
        level = mine / self._weight(tenant)
        others = ((name, line.work) for name, line in self._per_tenant.items() if name != tenant)
        return mine + sum(min(work, level * self._weight(name)) for name, work in others)

    def share(self, tenant: str) -> float:
        """Return the tenant's share, 0 to 1, among the tenants that wait, itself included."""
        waiting = {*self._per_tenant, tenant}
        return self._weight(tenant) / sum(self._weight(other) for other in waiting)


MEMORY_S: Final = 5.0
"""Time constant of the long memory in seconds of loaded time: idle hours do not age the measurement."""
RECENT_S: Final = 1.5
"""Time constant of the short memory, which detects a machine that has become slower."""
MIN_MEASURED_S: Final = 0.3


class _Window:
    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        self.work = 0.0
        self.seconds = 0.0

    def passed(self, elapsed_s: float) -> None:
        kept = math.exp(-elapsed_s / self._memory_s)
        self.work *= kept
        self.seconds = self.seconds * kept + elapsed_s

    @property
    def per_s(self) -> float | None:
        if self.seconds < MIN_MEASURED_S or not self.work:
            return None
        return self.work / self.seconds


class DrainRate:
    """Work that leaves the queue to be computed, per second in which the engine had more than it could begin.

    Work is in the units of the waiting work, so a systematic error in those units (answers shorter than expected,
    say) cancels out in "waiting work / rate". Nothing is learned while the engine takes everything that comes: that
    would measure the load, not the engine.

    The lower rate of a long and a short memory counts. A slowdown takes effect at once, a speed-up only after a
    while: overestimating a wait costs less than underestimating it.
    """

    def __init__(self, now: float) -> None:
        self._windows = _Window(MEMORY_S), _Window(RECENT_S)
        self._at = now

    def advance(self, now: float, *, loaded: bool) -> None:
        """Advance the clock. ``loaded``: whether the engine was loaded since the last call."""
        elapsed, self._at = max(now - self._at, 0.0), max(now, self._at)
        if loaded:
            for window in self._windows:
                window.passed(elapsed)

    def record_started(self, work: float) -> None:
        """Count waiting work that is being computed now. Call while the engine is loaded."""
        for window in self._windows:
            window.work += work

    @property
    def per_s(self) -> float | None:
        """Work per second; None until it is known."""
        return min((window.per_s for window in self._windows if window.per_s is not None), default=None)


WINDOW_S: Final = 60.0
TURN_RETRY_S: Final = 1.0
"""Retry delay after a limit on running or waiting turns: turns end at any time."""


class TokenBucket:
    """A limit per minute that may be used up at once and refills evenly. Overdrafts are paid off."""

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._at = now

    def wait_s(self, tokens: float, limit: float, now: float) -> float:
        """Seconds until ``tokens`` may be taken; 0: now. A request above the limit waits for a full bucket."""
        self._refill(limit, now)
        return max(self._used + min(tokens, limit) - limit, 0.0) * WINDOW_S / limit

    def take(self, tokens: float, limit: float, now: float) -> None:
        """Count tokens as used; a negative number returns some."""
        self._refill(limit, now)
        self._used = max(self._used + tokens, 0.0)

    def _refill(self, limit: float, now: float) -> None:
        self._used = max(self._used - (now - self._at) * limit / WINDOW_S, 0.0)
        self._at = now


class Account:
    """A tenant's turns and tokens, for limits that hold under any load."""

    def __init__(self, tenant: str, now: float) -> None:
        self.tenant = tenant
        self.turns = 0
        self.minute = TokenBucket(now)
        self.warmed_at = 0.0
        self.warmed_tokens = 0
        """Tokens that the tenant's warm-ups had computed when they were charged last."""

    def refusal(
        self, limits: TenantLimits, queued: int, tokens: int, work: float, now: float
    ) -> ResourceExhausted | None:
        """Return the error if a further turn exceeds a limit, or None. ``queued``: input tokens already waiting.
        ``tokens``: the turn's input. ``work``: all that it is expected to use."""
        if limits.turns_at_once is not None and self.turns >= limits.turns_at_once:
            return quota_exceeded(
                self.tenant, "turns_at_once", f"{limits.turns_at_once} turns at once", TURN_RETRY_S
            )
        if limits.queued_tokens is not None and queued and queued + tokens > limits.queued_tokens:
            return quota_exceeded(
                self.tenant, "queued_tokens", f"{limits.queued_tokens} queued tokens", TURN_RETRY_S
            )
        if limits.tokens_per_minute is not None:
            wait = self.minute.wait_s(work, limits.tokens_per_minute, now)
            if wait > 0:
                return quota_exceeded(
                    self.tenant, "tokens_per_minute", f"{limits.tokens_per_minute} tokens a minute", wait
                )
        return None
