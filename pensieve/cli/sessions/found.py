"""Sessions as they are read for the terminal and as JSON, and the session that the beginning of an id stands for."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import Any

import click

from pensieve.client import Client, FinishReason, Item, Residency, Role, SessionInfo, Turn
from pensieve.errors import InvalidArgument, NotFound

MOST_NAMED = 5
"""Of the sessions that a beginning may mean."""


def find(client: Client, given: str, *, whole: bool = False) -> SessionInfo:
    """The session of this id, or the only one whose id begins so, with where its context lies.

    ``whole``: a beginning does not do. Raises UsageError when there is none, or when there are several.
    """
    try:
        return client.session(given).refresh(residency=True)
    except (NotFound, InvalidArgument) as error:  # too short a beginning is no id
        if isinstance(error, NotFound) and error.reason != "SESSION_NOT_FOUND":
            raise
    beginning = given.removeprefix("sessions/")
    same = [info.id for info in client.sessions() if info.id.startswith(beginning)] if beginning else []
    if not same:
        raise click.UsageError(f"no session {given!r}; `pensieve sessions` lists them")
    if len(same) > 1:
        more = f" and {len(same) - MOST_NAMED} more" if len(same) > MOST_NAMED else ""
        raise click.UsageError(f"{given!r} may be {', '.join(sorted(same)[:MOST_NAMED])}{more}")
    if whole:
        raise click.UsageError(f"no session {given!r}; with --yes, write {same[0]} in full")
    return client.session(same[0]).refresh(residency=True)


def with_residency(client: Client, infos: list[SessionInfo]) -> list[SessionInfo]:
    """The same, with where their contexts lie; one that has gone meanwhile is left out."""
    found = []
    for info in infos:
        try:
            found.append(client.session(info.name).refresh(residency=True))
        except NotFound:
            continue
    return found


def session_json(info: SessionInfo) -> dict[str, Any]:
    """A session's facts; its system prompt is text and no part of them."""
    return {
        "id": info.id,
        "state": str(info.state),
        "revision": info.revision,
        "items": info.item_count,
        "context_tokens": info.context_tokens,
        "context_limit": info.context_limit,
        "model": info.model,
        "labels": dict(info.labels),
        "created": _time(info.create_time),
        "updated": _time(info.update_time),
        "expires": _time(info.expire_time),
        "forked_from": info.forked_from.removeprefix("sessions/"),
        "running_request": info.active_request_id,
        "residency": _residency(info.residency),
    }


def turn_json(turn: Turn) -> dict[str, Any]:
    """A turn's receipt."""
    usage = turn.usage
    return {
        "request_id": turn.request_id,
        "revision": turn.revision,
        "finish_reason": name_of(turn.finish_reason),
        "candidates": max(len(turn.candidates), 1),
        "context_tokens": usage.context_tokens,
        "device": usage.gpu_cached_tokens,
        "host": usage.swapped_in_tokens,
        "recomputed": usage.recomputed_tokens,
        "new": usage.new_tokens,
        "output_tokens": usage.output_tokens,
        "queue_s": usage.queue_s,
        "restore_s": usage.restore_s,
        "prefill_s": usage.prefill_s,
        "decode_s": usage.decode_s,
    }


def item_json(item: Item, *, text: bool) -> dict[str, Any]:
    """An entry of the history, with its text only where that is asked for."""
    return {
        "item": item.item,
        "role": name_of(item.role),
        "request_id": item.request_id,
        "created": _time(item.create_time),
    } | ({"text": item.text} if text else {})


def name_of(value: FinishReason | Role | int | None) -> str:
    """In small letters; a number that this version has no name for stays one."""
    if value is None:
        return ""
    return value.name.lower() if isinstance(value, FinishReason | Role) else str(value)


def place(residency: Residency | None) -> Mapping[str, int]:
    """Tokens by where they lie; nothing where that is unknown."""
    if residency is None:
        return {}
    return {
        "device": residency.gpu_tokens,
        "host": residency.host_tokens,
        "dropped": residency.dropped_tokens,
    }


def _residency(residency: Residency | None) -> dict[str, Any] | None:
    return {"replica": residency.replica, **place(residency)} if residency is not None else None


def _time(when: datetime | None) -> str | None:
    return when.isoformat() if when is not None else None
