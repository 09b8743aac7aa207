"""Says what a step is about to do, before it does it: whoever watches knows how long it may take, and whom to ask if it
never ends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from pensieve.core import RequestKey
from pensieve.engine.messages import Stepping
from pensieve.engine.plan import Plan


class Announcer:
    """One per engine. Silent until ``send`` is set, and while a step is like the one before: the same requests, and as
    many tokens within a factor of two."""

    def __init__(self, owner: Callable[[RequestKey], RequestKey] = lambda key: key) -> None:
        """``owner``: the request that a front end knows, of one that the engine made for it."""
        self.send: Callable[[Stepping], None] | None = None
        self.owner = owner
        self.requests: frozenset[RequestKey] = frozenset()
        """Those that the engine is, or was last, at work on."""
        self._last: tuple[int, frozenset[RequestKey]] | None = None

    def launching(self, plan: Plan, running: Plan | None = None) -> None:
        """``plan`` is about to run, maybe behind another that is ``running`` still."""
        if self.send is None:
            return
        plans = (plan,) if running is None else (plan, running)
        requests = frozenset(self.owner(span.request) for one in plans for span in one.spans)
        self.step(max(one.num_tokens for one in plans), requests)

    def step(self, tokens: int, requests: frozenset[RequestKey]) -> None:
        """A step of so many tokens, for these requests, is about to run."""
        self.requests = requests
        news = tokens.bit_length(), requests
        if self.send is not None and news != self._last:
            self._last = news
            self.send(Stepping(tokens, tuple(requests)))

    @contextmanager
    def blaming(self, requests: Iterable[int]) -> Iterator[None]:
        """What goes wrong inside may be the fault of each of these."""
        try:
            yield
        except Exception:
            self.requests = blamed = frozenset(map(RequestKey, requests))
            if blamed:
                self.step(0, blamed)
            raise
