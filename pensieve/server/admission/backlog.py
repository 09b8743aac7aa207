"""What waits to be computed, by tenant, and how long a tenant's next turn would wait behind it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


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
