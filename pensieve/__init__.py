"""Pensieve: a stateful server for conversations with large language models, and its client.

A first conversation, with a server started by ``pensieve serve --model demo``::

    from pensieve import Client

    with Client("127.0.0.1:50051") as client:
        session = client.create_session(system_prompt="Be brief.")
        for piece in session.stream("My name is Ada."):
            print(piece.text, end="", flush=True)
        print(session.send("What is my name?").text)

The server keeps the history, so each turn sends only new input. A turn is in the history as a whole, exactly once, or
not at all. If the server is killed in the middle and restarted, the client waits and then goes on.

Where to read on:

* ``help(Client)``, ``help(AsyncClient)``: connecting, and calls beside conversations.
* ``help(Session)``, ``help(Session.send)`` of ``pensieve.client``: turns, with every option and what it means.
* ``help(pensieve.client)``: all values that calls return. ``help(pensieve.errors)``: all errors, one class each.
* ``pensieve --help``: the command line: ``serve``, ``chat``, ``demo``, ``doctor`` and more.
* The folder ``examples/``: programs of one page each, from streaming to a small web server.

``Client`` and ``AsyncClient`` are loaded on first use, so that ``import pensieve`` loads neither grpc nor torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from pensieve.errors import (
    Aborted,
    AlreadyExists,
    Cancelled,
    ContextLimitExceeded,
    DataLoss,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PensieveError,
    PermissionDenied,
    ResourceExhausted,
    RevisionMismatch,
    TurnFenced,
    TurnInProgress,
    Unauthenticated,
    Unavailable,
)

if TYPE_CHECKING:
    from pensieve.client import AsyncClient, Client

__version__ = "0.2.0"

__all__ = [
    "Aborted",
    "AlreadyExists",
    "AsyncClient",
    "Cancelled",
    "Client",
    "ContextLimitExceeded",
    "DataLoss",
    "DeadlineExceeded",
    "FailedPrecondition",
    "Internal",
    "InvalidArgument",
    "NotFound",
    "PensieveError",
    "PermissionDenied",
    "ResourceExhausted",
    "RevisionMismatch",
    "TurnFenced",
    "TurnInProgress",
    "Unauthenticated",
    "Unavailable",
    "__version__",
]

_LAZY = ("AsyncClient", "Client")


def __getattr__(name: str) -> Any:
    if name in _LAZY:
        return getattr(importlib.import_module("pensieve.client"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    """Include the lazy names, for ``help`` and completion."""
    return sorted({*globals(), *_LAZY})
