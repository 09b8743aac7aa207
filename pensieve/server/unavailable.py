"""Errors of a front end that cannot serve a call now. A retry will succeed soon, here or on another replica."""

from __future__ import annotations

from typing import Final

from pensieve.errors import Unavailable

RETRY_AFTER_S: Final = 1.0


def starting() -> Unavailable:
    return Unavailable("the engine is starting", reason="STARTING", retry_after_s=RETRY_AFTER_S)


def restarting() -> Unavailable:
    return Unavailable(
        "the engine is restarting; nothing of this turn was committed",
        reason="ENGINE_RESTARTING",
        retry_after_s=RETRY_AFTER_S,
    )


def draining() -> Unavailable:
    return Unavailable("the server is shutting down", reason="DRAINING", retry_after_s=RETRY_AFTER_S)


def running_elsewhere() -> Unavailable:
    return Unavailable(
        "the turn runs on another server, which was asked to end it and has not",
        reason="TURN_RUNNING_ELSEWHERE",
        retry_after_s=RETRY_AFTER_S,
    )
