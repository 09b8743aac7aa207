"""Whose requests they are: log lines of an engine process that carry ``requests`` name sessions instead."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from typing import Final

from pensieve.core import RequestKey
from pensieve.engine.messages import Cancel, Command, Event, Failed, Finished, Submit

MOST_NAMED: Final = 8


class RequestNames(logging.Filter):
    """A filter for log handlers: ``extra={"requests": …}`` becomes ``session`` and ``tenant``, as in lines of the front
    end, or ``sessions`` (the first of them, as ``tenant/id``) and how many ``requests`` there are.

    Any thread may log. Told of requests by the engine's loop.
    """

    def __init__(self) -> None:
        super().__init__()
        self._sessions: dict[int, str] = {}
        self.owner: Callable[[RequestKey], RequestKey] = lambda key: key
        """The request that a front end knows, of one that the engine made for it."""

    def took(self, command: Command) -> None:
        """The engine takes this in."""
        if isinstance(command, Submit):
            self._sessions[command.request] = command.session
        elif isinstance(command, Cancel) and command.candidate is None:
            self._sessions.pop(command.request, None)

    def ended(self, events: Iterable[Event]) -> None:
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
