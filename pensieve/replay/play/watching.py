"""What a replay tells whoever watches it."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from pensieve.replay.records import TurnRecord


class RunWatcher:
    """Watches one run against one target; this one does nothing."""

    def sent(self) -> None:
        """A turn goes out. Every sent turn ends, fails, or is cut short."""

    def ended(self, record: TurnRecord) -> None:
        """A turn has ended; one whose conversation could not be opened was never sent."""


class ReplayWatcher:
    """Watches a whole replay; this one does nothing."""

    def starting(self, target: str) -> AbstractContextManager[None]:
        """A context around the start of a server, which may take minutes."""
        return nullcontext()

    def run(self, target: str, turns: int) -> RunWatcher:
        """A run of so many turns begins."""
        return RunWatcher()
