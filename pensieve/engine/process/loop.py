"""The loop around an engine, the same in its own process and in a thread of a test. No torch.

Each iteration takes the commands that have arrived, makes one step if there is work, and reports. With work it never
waits; without, it sleeps until a command arrives and sends a heartbeat every ``HEARTBEAT_S``. It sends at most one
``Report`` per iteration, so the cost of communication does not grow with the batch. Before a step unlike the
previous one it sends another (``StepAnnouncer``), so that a watchdog knows how long the step may take.

An exception from the engine ends the loop: the state after half a step is unknown (on a GPU the whole context
may be poisoned), so this engine must not continue. Its owner starts another.
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


MAX_SESSIONS_NAMED: Final = 8


class StepAnnouncer:
    """Announces steps that differ from the one before in their requests or, by a factor of two, in their tokens."""

    def __init__(self, owner: Callable[[RequestKey], RequestKey] = lambda key: key) -> None:
        """``owner``: maps a request that the engine created to the one that the front end knows."""
        self.send: Callable[[Stepping], None] | None = None
        self.owner = owner
        self.requests: frozenset[RequestKey] = frozenset()
        """Requests of the current or latest step."""
        self._last: tuple[int, frozenset[RequestKey]] | None = None

    def announce_plan(self, plan: Plan, running: Plan | None = None) -> None:
        """Announce that ``plan`` is about to run, maybe after the ``running`` one."""
        if self.send is None:
            return
        plans = (plan,) if running is None else (plan, running)
        requests = frozenset(self.owner(span.request) for one in plans for span in one.spans)
        self.announce(max(one.num_tokens for one in plans), requests)

    def announce(self, tokens: int, requests: frozenset[RequestKey]) -> None:
        """Announce a step of ``tokens`` tokens for these requests."""
        self.requests = requests
        news = tokens.bit_length(), requests
        if self.send is not None and news != self._last:
            self._last = news
            self.send(Stepping(tokens, tuple(requests)))

    @contextmanager
    def attribute_failures(self, requests: Iterable[int]) -> Iterator[None]:
        """Attribute an exception inside the context to these requests."""
        try:
            yield
        except Exception:
            self.requests = blamed = frozenset(map(RequestKey, requests))
            if blamed:
                self.announce(0, blamed)
            raise


class RequestLogFilter(logging.Filter):
    """Replaces ``extra={"requests": …}`` in log records by ``session`` and ``tenant``, as in the front end's
    lines; or by the first ``sessions`` (as ``tenant/id``) and the number of ``requests``. Any thread may log."""

    def __init__(self) -> None:
        super().__init__()
        self._sessions: dict[int, str] = {}
        self.owner: Callable[[RequestKey], RequestKey] = lambda key: key
        """Maps a request that the engine created to the one that the front end knows."""

    def on_command(self, command: Command) -> None:
        """Note the session of a submitted request."""
        if isinstance(command, Submit):
            self._sessions[command.request] = command.session
        elif isinstance(command, Cancel) and command.candidate is None:
            self._sessions.pop(command.request, None)

    def on_events(self, events: Iterable[Event]) -> None:
        """Forget the requests that these events end."""
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
        return {"sessions": known[:MAX_SESSIONS_NAMED], "requests": len(owners)} if known else {}


class HostedEngine(Protocol):
    """The loop's view of an engine; ``engine.engine.Engine`` implements it."""

    def ready(self) -> EngineReady: ...

    def handle(self, command: Command) -> list[Event]: ...

    def step(self) -> list[Event]:
        """Launch a step and commit one; [] when there is nothing to do."""
        ...

    @property
    def announcer(self) -> StepAnnouncer: ...

    @property
    def has_work(self) -> bool: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class CommandChannel(Protocol):
    """The loop's end of the link to the front end: commands come in, reports go out."""

    def receive(self, timeout: float) -> list[Command]:
        """Return the commands that have arrived; wait up to ``timeout`` for the first. Raises PeerClosed."""
        ...

    def send(self, report: Report) -> None:
        """Send one report. Raises PeerClosed."""
        ...


def run_engine(engine: HostedEngine, channel: CommandChannel, names: RequestLogFilter | None = None) -> None:
    """Serve until ``Stop`` arrives. Raises PeerClosed when the other end is gone, else what the engine raises."""
    names = names if names is not None else RequestLogFilter()
    names.owner = engine.announcer.owner
    stats = engine.stats()
    # The front end learns what the engine can do before it sends the first command.
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
