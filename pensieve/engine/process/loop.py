"""The engine's loop, the same in its own process and in a thread of a test. No torch here.

One iteration: take the commands that have arrived, make one step if there is work, report. With work, nothing is
waited for; without, the loop sleeps until a command comes and reports every ``HEARTBEAT_S`` that it is alive. Each
iteration sends at most one ``Report``, so the cost of talking does not grow with the batch.

An exception out of the engine leaves the loop: what a step has half done is unknown (on a GPU the whole context may
be poisoned), so nobody may carry on with this engine. Its owner starts another.
"""

from __future__ import annotations

from typing import Final, Protocol

from pensieve.engine.messages import Command, EngineReady, Event, Report, Stats, Stop

HEARTBEAT_S: Final = 0.5
_BLOCKED_S: Final = 0.005
"""Pause after a step that could do nothing although work waits, so that waiting does not burn a core."""


class HostedEngine(Protocol):
    """What the loop needs of an engine (``pensieve.engine.engine.Engine``)."""

    def ready(self) -> EngineReady: ...

    def handle(self, command: Command) -> list[Event]: ...

    def step(self) -> list[Event]:
        """Plan, run, commit once; [] when there is nothing to do."""
        ...

    @property
    def has_work(self) -> bool: ...

    def stats(self) -> Stats: ...

    def close(self) -> None: ...


class CommandChannel(Protocol):
    """The loop's end of the link."""

    def receive(self, timeout: float) -> list[Command]:
        """Commands that have arrived; waits up to ``timeout`` for the first. Raises PeerClosed."""
        ...

    def send(self, report: Report) -> None:
        """Raises PeerClosed."""
        ...


def run_engine(engine: HostedEngine, channel: CommandChannel) -> None:
    """Serve until ``Stop`` arrives. Raises PeerClosed when the other end is gone, else what the engine raises."""
    stats = engine.stats()
    channel.send(Report(events=(engine.ready(),), stats=stats))
    blocked = False
    while True:
        has_work = engine.has_work
        commands = channel.receive(HEARTBEAT_S if not has_work else _BLOCKED_S if blocked else 0)
        events: list[Event] = []
        for command in commands:
            if isinstance(command, Stop):
                return
            events += engine.handle(command)
        waiting = engine.has_work
        if waiting:
            events += engine.step()
        steps_before, stats = stats.steps_total, engine.stats()
        blocked = waiting and stats.steps_total == steps_before
        if not blocked or events:
            channel.send(Report(events=tuple(events), stats=stats))
