"""Admission: whether a new turn may join, decided before anything is looked up, tokenised or written.

A turn that would wait too long is refused at once, with the time at which its turn would come: whoever is refused
after it is told a later one, so that those who come back do so one after another, as capacity frees.

The expected wait is work that waits (``Backlog``) ÷ measured speed (``DrainRate``). Work is tokens to compute: the
input, what of the history is likely to be computed again, and the expected answer; before a turn is rendered all of
that is an estimate from the turns before it. Between tenants the estimate follows the engine's fair queue: a tenant
waits for its own backlog and for as much of the others' as is due before it, so a newcomer is not refused for
another's flood. What a tenant may use whatever the load is its ``Account``'s to say.

An estimate can be wrong. A turn that was let in and has waited as long as any may is refused too (``overdue``).
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

from pensieve.core import TenantQos
from pensieve.errors import DeadlineExceeded, PensieveError, ResourceExhausted
from pensieve.server.tenants import TenantLimits, TenantTable, quota_exceeded
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


class AdmissionTicket:
    """An admitted turn. It waits until ``started``, and counts for its tenant until ``ended``."""

    __slots__ = ("_gate", "answers", "entered_at", "max_output", "tenant", "tokens", "waits", "work")

    def __init__(
        self, gate: AdmissionGate, tenant: str, tokens: int, answers: int, max_output: int | None
    ) -> None:
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

    def qos(self, priority: int) -> TenantQos:
        """How it stands in the engine, with a priority within its tenant."""
        return self._gate.qos(self.tenant, priority)

    def on_rendered(self, chars: int, input_tokens: int, new_tokens: int, history_tokens: int) -> None:
        """It is rendered: its input (``chars``: of its text, 0 if not all of it is), what of it was never computed, and
        what was there before."""
        self._gate.on_rendered(self, chars, input_tokens, new_tokens, history_tokens)

    def on_started(self, recomputed: int, history_tokens: int) -> None:
        """The engine computes it; nothing if it did before."""
        self._gate.on_started(self, recomputed, history_tokens)

    def on_ended(self, used_tokens: int, output_tokens: int) -> None:
        """It is over, whatever it came to. ``used_tokens``: computed and generated."""
        self._gate.on_ended(self, used_tokens, output_tokens)


class AdmissionGate:
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
        self._speed = DrainRate(clock())
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

    def qos(self, tenant: str, priority: int = 0) -> TenantQos:
        """How a tenant's request stands in the engine."""
        share = self._tenants.limits(tenant).cache_share or 0.0
        return TenantQos(tenant, self.weight(tenant), priority, share)

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

    def overdue(self, ticket: AdmissionTicket) -> PensieveError | None:
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

    def admit(self, tenant: str, spec: NewTurn) -> AdmissionTicket:
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
        self._leave(ticket)

    def on_ended(self, ticket: AdmissionTicket, used_tokens: int, output_tokens: int) -> None:
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
        self._speed.advance(self._clock(), loaded=self._was_loaded)
        # What begins when the engine was idle fills its batch at once, and says nothing of how fast that drains.
        self._was_loaded = self._queued() > 0 or self._backlog.turns > 4 * BURST

    def _leave(self, ticket: AdmissionTicket) -> None:
        ticket.waits = False
        self._backlog.add(ticket.tenant, -1, -ticket.tokens, -ticket.work)

    def _charge(self, ticket: AdmissionTicket, work: float) -> None:
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

    def _retry_s(self, ticket: AdmissionTicket, over_s: float, now: float) -> float:
        """When to come back: after those who were refused before, at the speed at which the tenant is served."""
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
    """Characters of a turn's input."""
    return sum(len(entry.text) for entry in spec.input if entry.tokens is None)


@dataclass(slots=True)
class _Line:
    """Of one tenant: what waits."""

    turns: int = 0
    tokens: int = 0
    """Of their inputs."""
    work: float = 0.0


class Backlog:
    """Sums, kept up to date turn by turn. ``weight`` says a tenant's part of a loaded engine."""

    def __init__(self, weight: Callable[[str], float]) -> None:
        self._weight = weight
        self._lines: dict[str, _Line] = {}
        self.turns = 0
        self.tokens = 0
        self.work = 0.0

    def add(self, tenant: str, turns: int, tokens: int, work: float) -> None:
        """More of a tenant's waits, or less."""
        line = self._lines.setdefault(tenant, _Line())
        line.turns += turns
        line.tokens += tokens
        line.work += work
        self.turns += turns
        self.tokens += tokens
        self.work += work
        if not line.turns:
            self.work -= line.work  # what rounding has left
            del self._lines[tenant]
        if not self._lines:
            self.work = 0.0

    def turns_of(self, tenant: str) -> int:
        return self._lines[tenant].turns if tenant in self._lines else 0

    def tokens_of(self, tenant: str) -> int:
        return self._lines[tenant].tokens if tenant in self._lines else 0

    def ahead_of(self, tenant: str) -> float:
        """Work that is done before a further turn of this tenant begins: its own, and of every other tenant's what
        fair queueing by weight lets go before that (Parekh and Gallager, 1993: generalised processor sharing)."""
        mine = self._lines[tenant].work if tenant in self._lines else 0.0
        level = mine / self._weight(tenant)
        others = ((name, line.work) for name, line in self._lines.items() if name != tenant)
        return mine + sum(min(work, level * self._weight(name)) for name, work in others)

    def share(self, tenant: str) -> float:
        """A tenant's part, 0 to 1, of what there is, if it waits beside those that do now."""
        waiting = {*self._lines, tenant}
        return self._weight(tenant) / sum(self._weight(other) for other in waiting)


MEMORY_S: Final = 5.0
"""Time constant of forgetting, in seconds of loaded time: idle hours do not age what was measured before them."""
RECENT_S: Final = 1.5
"""Time constant of the figure that notices a machine that has become slower."""
ENOUGH_S: Final = 0.3
"""Loaded time before the first figure is believed."""


class _Window:
    """Sums over loaded time that forget with a time constant."""

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
        if self.seconds < ENOUGH_S or not self.work:
            return None
        return self.work / self.seconds


class DrainRate:
    """Work that left the queue to be computed, per second in which the engine had more than it could begin.

    Work is counted in the units of whoever says what waits, so an error in those units (answers that turn out shorter
    than expected, say) cancels out of "work that waits / speed". Nothing is learned while the engine takes whatever
    comes: it would be the speed of the load and not of the engine.

    Of a long and a short memory the slower counts. A machine that slows down is believed at once, one that speeds up
    only in a while: a wait that was promised too long costs less than one that was promised too short.
    """

    def __init__(self, now: float) -> None:
        self._windows = _Window(MEMORY_S), _Window(RECENT_S)
        self._at = now

    def advance(self, now: float, *, loaded: bool) -> None:
        """Time has gone by, and in it the engine was loaded or not."""
        elapsed, self._at = max(now - self._at, 0.0), max(now, self._at)
        if loaded:
            for window in self._windows:
                window.passed(elapsed)

    def record_started(self, work: float) -> None:
        """So much of what waited is being computed now. Called while the engine is loaded."""
        for window in self._windows:
            window.work += work

    @property
    def per_s(self) -> float | None:
        """Work per second; None as long as nothing is known."""
        return min((window.per_s for window in self._windows if window.per_s is not None), default=None)


WINDOW_S: Final = 60.0
TURN_RETRY_S: Final = 1.0
"""When to try again after a limit on what runs or waits: turns end at any time."""


class TokenBucket:
    """A limit per minute that may be used up at once, and comes back evenly. A debt is worked off."""

    def __init__(self, now: float) -> None:
        self._used = 0.0
        self._at = now

    def wait_s(self, tokens: float, limit: float, now: float) -> float:
        """Seconds until ``tokens`` may be taken; 0: now. Whatever asks for more than the limit waits for all of it."""
        self._flow(limit, now)
        return max(self._used + min(tokens, limit) - limit, 0.0) * WINDOW_S / limit

    def take(self, tokens: float, limit: float, now: float) -> None:
        """Count tokens as used; fewer than none gives some back."""
        self._flow(limit, now)
        self._used = max(self._used + tokens, 0.0)

    def _flow(self, limit: float, now: float) -> None:
        self._used = max(self._used - (now - self._at) * limit / WINDOW_S, 0.0)
        self._at = now


class Account:
    """One tenant's use of the server."""

    def __init__(self, tenant: str, now: float) -> None:
        self._tenant = tenant
        self.turns = 0
        """That run or wait."""
        self.minute = TokenBucket(now)

    def refusal(
        self, limits: TenantLimits, queued: int, tokens: int, work: float, now: float
    ) -> ResourceExhausted | None:
        """Why a further turn goes beyond a limit, if it does. ``queued``: input tokens that wait already.

        ``tokens``, ``work``: of the turn, its input and all that it is expected to use.
        """
        if limits.turns_at_once is not None and self.turns >= limits.turns_at_once:
            return quota_exceeded(
                self._tenant, "turns_at_once", f"{limits.turns_at_once} turns at once", TURN_RETRY_S
            )
        if limits.queued_tokens is not None and queued and queued + tokens > limits.queued_tokens:
            return quota_exceeded(
                self._tenant, "queued_tokens", f"{limits.queued_tokens} queued tokens", TURN_RETRY_S
            )
        if limits.tokens_per_minute is not None:
            wait = self.minute.wait_s(work, limits.tokens_per_minute, now)
            if wait > 0:
                return quota_exceeded(
                    self._tenant, "tokens_per_minute", f"{limits.tokens_per_minute} tokens a minute", wait
                )
        return None
