"""Pensieve: a stateful server for multi-turn conversations with large language models.

``Client`` and ``AsyncClient`` are loaded when first used, so that ``import pensieve`` costs neither grpc nor torch.
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

__version__ = "0.1.0"

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
