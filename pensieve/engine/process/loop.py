"""The loop around an engine, the same in a process of its own and in a thread of a test. No torch here.

One iteration: take the commands that have arrived, make one step if there is work, report. With work, nothing is
waited for; without, the loop sleeps until a command comes and reports every ``HEARTBEAT_S`` that it is alive. Each
iteration sends at most one ``Report``, so the cost of talking does not grow with the batch, and one before a step that
is unlike the step before (``StepAnnouncer``), so that whoever watches knows how long it may take.

An exception out of the engine leaves the loop: what a step has half done is unknown (on a GPU the whole context may
be poisoned), so nobody may carry on with this engine. Its owner starts another.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final, Protocol

from pensieve.core import RequestKey
from pensieve.engine.messages import (
    Cancel,
    Command,
    EngineReady,
    Event,
    Failed,
    Finished,
    Report,
    Stats,
    Stepping,
    Stop,
    Submit,
)
from pensieve.engine.plan import Plan

HEARTBEAT_S: Final = 0.5
_BLOCKED_S: Final = 0.005
"""Pause after a step that could do nothing although work waits, so that waiting does not burn a core."""


MOST_NAMED: Final = 8


class StepAnnouncer:
    """One per engine. Silent until ``send`` is set, and while a step is like the one before: the same requests, and as
    many tokens within a factor of two."""

    def __init__(self, owner: Callable[[RequestKey], RequestKey] = lambda key: key) -> None:
        """``owner``: the request that a front end knows, of one that the engine made for it."""
        self.send: Callable[[Stepping], None] | None = None
        self.owner = owner
        self.requests: frozenset[RequestKey] = frozenset()
        """Those that the engine is, or was last, at work on."""
        self._last: tuple[int, frozenset[RequestKey]] | None = None

    def announce_plan(self, plan: Plan, running: Plan | None = None) -> None:
        """``plan`` is about to run, maybe behind another that is ``running`` still."""
        if self.send is None:
            return
        plans = (plan,) if running is None else (plan, running)
        requests = frozenset(self.owner(span.request) for one in plans for span in one.spans)
        self.announce(max(one.num_tokens for one in plans), requests)

    def announce(self, tokens: int, requests: frozenset[RequestKey]) -> None:
        """A step of so many tokens, for these requests, is about to run."""
        self.requests = requests
        news = tokens.bit_length(), requests
        if self.send is not None and news != self._last:
            self._last = news
            self.send(Stepping(tokens, tuple(requests)))

    @contextmanager
    def attribute_failures(self, requests: Iterable[int]) -> Iterator[None]:
        """What goes wrong inside may be the fault of each of these."""
        try:
            yield
        except Exception:
            self.requests = blamed = frozenset(map(RequestKey, requests))
            if blamed:
                self.announce(0, blamed)
            raise


class RequestLogFilter(logging.Filter):
    """A filter for log handlers: ``extra={"requests": …}`` becomes ``session`` and ``tenant``, as in lines of the front
    end, or ``sessions`` (the first of them, as ``tenant/id``) and how many ``requests`` there are.

    Any thread may log. Told of requests by the engine's loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sessions: dict[int, str] = {}
        self.owner: Callable[[RequestKey], RequestKey] = lambda key: key
        """The request that a front end knows, of one that the engine made for it."""

    def on_command(self, command: Command) -> None:
        """The engine takes this in."""
        if isinstance(command, Submit):
            self._sessions[command.request] = command.session
        elif isinstance(command, Cancel) and command.candidate is None:
            self._sessions.pop(command.request, None)

    def on_events(self, events: Iterable[Event]) -> None:
        """The engine tells this."""
        for event in events:
            if isinstance(event, Finished | Failed):
                self._sessions.pop(event.request, None)

    def filter(self, record: logging.LogRecord) -> bool:
        requests = record.__dict__.pop("requests", None)
        if requests:
            record.__dict__.update(self._fields(requests))
        return True

    def _fields(self, requests: Iterable[RequestKey]) -> dict[str, object]:
        owners = sorted({self.owner(request) for request in requests})
        known = [self._sessions[owner] for owner in owners if owner in self._sessions]
        if len(known) == 1:
            tenant, _, session = known[0].partition("/")
            return {"session": session, "tenant": tenant}
        return {"sessions": known[:MOST_NAMED], "requests": len(owners)} if known else {}


class HostedEngine(Protocol):
    """What the loop needs of an engine; ``engine.engine.Engine`` is the one that serves."""

    def ready(self) -> EngineReady: ...

    def handle(self, command: Command) -> list[Event]: ...

    def step(self) -> list[Event]:
        """Launch a step and commit one; [] when there is nothing to do."""
        ...

    @property
    def announcer(self) -> StepAnnouncer:
        """Through it the engine says what each step is about to do."""
        ...

    @property
    def has_work(self) -> bool: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class CommandChannel(Protocol):
    """The loop's end of the link to the front end: commands come in, reports go out."""

    def receive(self, timeout: float) -> list[Command]:
        """Commands that have arrived; waits up to ``timeout`` for the first. Raises PeerClosed."""
        ...

    def send(self, report: Report) -> None:
        """Hand over one report. Raises PeerClosed."""
        ...


def run_engine(engine: HostedEngine, channel: CommandChannel, names: RequestLogFilter | None = None) -> None:
    """Serve until ``Stop`` arrives. Raises PeerClosed when the other end is gone, else what the engine raises.

    ``names`` learns whose requests are at work.
    """
    names = names if names is not None else RequestLogFilter()
    names.owner = engine.announcer.owner
    stats = engine.stats()
    # So that whoever waits for the engine knows what it can do before it sends the first command.
    channel.send(Report(events=(engine.ready(),), stats=stats))

    def announce(event: Stepping) -> None:
        channel.send(Report(events=(event,), stats=stats))

    engine.announcer.send = announce
    blocked = False
    while True:
        has_work = engine.has_work
        commands = channel.receive(HEARTBEAT_S if not has_work else _BLOCKED_S if blocked else 0)
        events: list[Event] = []
        for command in commands:
            if isinstance(command, Stop):
                return
            names.on_command(command)
            with engine.announcer.attribute_failures(
                [command.request] if isinstance(command, Submit) else []
            ):
                events += engine.handle(command)
        waiting = engine.has_work
        if waiting:
            events += engine.step()
        steps_before, stats = stats.steps_total, engine.stats()
        # There is work, but no step was committed: pause before the next try, and don't repeat the same numbers.
        blocked = waiting and stats.steps_total == steps_before
        names.on_events(events)
        if not blocked or events:
            channel.send(Report(events=tuple(events), stats=stats))
