"""The log's line of a turn. Session, request, tenant and trace are bound to the turn's task, and so stand in it."""

from __future__ import annotations

import logging
from typing import Final

from pensieve.server.values import TurnEnd

log = logging.getLogger(__name__)

OURS: Final = frozenset(
    {
        "bug", "engine_failed", "engine_restarting", "history_corrupt", "history_regressed", "request_quarantined",
        "session_quarantined", "store_full", "store_replaced", "store_unavailable", "turn_fenced",
    }
)  # fmt: skip
"""Outcomes that are no wish of a caller and no limit: they are logged as warnings, all others for debugging."""


def log_turn(end: TurnEnd) -> None:
    """Called in the turn's task."""
    level = logging.WARNING if end.outcome in OURS else logging.DEBUG
    if not log.isEnabledFor(level):
        return
    fields = {
        "outcome": end.outcome,
        "seconds": round(end.ended_at - end.arrived_at, 4),
        "context_tokens": end.context_tokens,
        "output_tokens": end.usage.output_tokens,
        "recomputed_tokens": end.usage.recomputed_tokens,
    }
    log.log(level, "turn ended", extra=fields)
