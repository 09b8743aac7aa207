"""What the settings of a Redis say of the changes that it acknowledges."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from pensieve.errors import FailedPrecondition

log = logging.getLogger(__name__)

_LEVELS = {"always": "fsync", "everysec": "local"}


def weakest_of(replies: Iterable[Any], place: str) -> str:
    """What a change survives at least: ``none``, ``local`` or ``fsync``.

    ``replies``: of every server at ``place`` to CONFIG GET. Raises FailedPrecondition (STORE_UNSAFE) if one may evict.
    """
    found = [{_text(name): _text(value) for name, value in _pairs(reply)} for reply in replies]
    for settings in found:
        policy = settings.get("maxmemory-policy", "noeviction")
        if policy != "noeviction":
            raise FailedPrecondition(
                f"the Redis at {place} has maxmemory-policy {policy} and may evict conversations: "
                "set maxmemory-policy noeviction",
                reason="STORE_UNSAFE",
            )
    levels = {_level(settings, place) for settings in found}
    return next(level for level in ("none", "local", "fsync") if level in levels)


def _level(settings: dict[str, str], place: str) -> str:
    """What a write survives on one server; said in the log where that is not the server's end."""
    if settings.get("appendonly") == "yes":
        return _LEVELS.get(settings.get("appendfsync", ""), "none")
    kept = "only snapshots: it forgets what came after the last one" if settings.get("save") else "nothing"
    log.warning(
        "Redis at %s has no append-only file and keeps %s when it ends. Conversations WILL be lost: "
        "set appendonly yes",
        *(place, kept),
    )
    return "none"


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _pairs(reply: Any) -> Iterable[tuple[Any, Any]]:
    """A map reply, in the form that this connection's protocol gives it."""
    if isinstance(reply, dict):
        items: Iterable[tuple[Any, Any]] = reply.items()
        return items
    return zip(reply[::2], reply[1::2], strict=True)
