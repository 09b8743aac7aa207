"""The loop around an engine, the same in a process of its own and in a thread of a test. No torch here.

One iteration: take the commands that have arrived, make one step if there is work, report. With work, nothing is
waited for; without, the loop sleeps until a command comes and reports every ``HEARTBEAT_S`` that it is alive. Each
iteration sends at most one ``Report``, so the cost of talking does not grow with the batch, and one before a step that
is unlike the step before (``announcing``).

An exception out of the engine leaves the loop: what a step has half done is unknown (on a GPU the whole context may
be poisoned), so nobody may carry on with this engine. Its owner starts another.
"""

from __future__ import annotations

from typing import Final, Protocol

from pensieve.engine.messages import Command, EngineReady, Event, Report, Stats, Stepping, Stop, Submit
from pensieve.engine.process.announcing import Announcer
from pensieve.engine.process.names import RequestNames

HEARTBEAT_S: Final = 0.5
_BLOCKED_S: Final = 0.005
"""Pause after a step that could do nothing although work waits, so that waiting does not burn a core."""


class HostedEngine(Protocol):
    """What the loop needs of an engine; ``engine.engine.Engine`` is the one that serves."""

    def ready(self) -> EngineReady: ...

    def handle(self, command: Command) -> list[Event]: ...

    def step(self) -> list[Event]:
        """Launch a step and commit one; [] when there is nothing to do."""
        ...

    @property
    def announcer(self) -> Announcer:
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


def run_engine(engine: HostedEngine, channel: CommandChannel, names: RequestNames | None = None) -> None:
    """Serve until ``Stop`` arrives. Raises PeerClosed when the other end is gone, else what the engine raises.

    ``names`` learns whose requests are at work.
    """
    names = names if names is not None else RequestNames()
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
            names.took(command)
            with engine.announcer.blaming([command.request] if isinstance(command, Submit) else []):
                events += engine.handle(command)
        waiting = engine.has_work
        if waiting:
            events += engine.step()
        steps_before, stats = stats.steps_total, engine.stats()
        # There is work, but no step was committed: pause before the next try, and don't repeat the same numbers.
        blocked = waiting and stats.steps_total == steps_before
        names.ended(events)
        if not blocked or events:
            channel.send(Report(events=tuple(events), stats=stats))
