"""Choosing a conversation: the recent ones, or one by its id or a prefix of it."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime

from rich.cells import set_cell_size

from pensieve.cli.chat.dialogue import first_words
from pensieve.cli.chat.screen import Screen
from pensieve.cli.output import clean
from pensieve.client import Client, Item, Role, Session, SessionInfo
from pensieve.errors import InvalidArgument, NotFound

MAX_LISTED = 9
MAX_SCANNED = 200
TAIL_ITEMS = 4


class NoSuchSession(Exception):
    """No session matches. The message is one line with suggestions."""


@dataclass(frozen=True, slots=True)
class RecentSession:
    info: SessionInfo
    title: str
    turns: int


def recent(client: Client, limit: int = MAX_LISTED) -> list[RecentSession]:
    """Return conversations with at least one question, the last used first."""
    found: list[RecentSession] = []
    for info in by_use(client):
        if len(found) == limit:
            break
        if info.item_count == 0:
            continue
        try:
            items = client.session(info.name).items()
        except NotFound:
            continue  # erased since it was listed
        asked = [item for item in items if item.role == Role.USER]
        if asked:
            found.append(RecentSession(info, title(info, asked), len(asked)))
    return found


def by_use(client: Client) -> list[SessionInfo]:
    """Return the caller's sessions, the last used first."""
    beginning = datetime.min.replace(tzinfo=UTC)
    return sorted(
        client.sessions(limit=MAX_SCANNED), key=lambda info: info.update_time or beginning, reverse=True
    )


def title(info: SessionInfo, asked: Sequence[Item]) -> str:
    """Return the label ``title``, or the first words of the first question."""
    return first_words(info.labels.get("title") or (asked[0].text if asked else "") or info.id)


def age(when: datetime | None, now: datetime) -> str:
    seconds = 0.0 if when is None else (now - when).total_seconds()
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds // size:.0f} {unit} ago"
    return "just now"


def show_recent(listed: Sequence[RecentSession], screen: Screen, current: str = "") -> None:
    """Print one line per session. Titles are shortened on a narrow terminal."""
    now = datetime.now(UTC)
    width = min(48, max(12, screen.notes.width - 40))
    for number, session in enumerate(listed, 1):
        mark = "*" if session.info.name == current else " "
        turns = f"{session.turns} turn{'s' if session.turns != 1 else ''}"
        name = set_cell_size(clean(session.title), width)
        screen.note(
            f"{mark}{number:2}  {name}  {age(session.info.update_time, now):>10}  {turns:>8}  {session.info.id[:8]}"
        )


def find_session(client: Client, wanted: str) -> Session:
    """Return a session by its id, a unique prefix of one, or ``last``.

    Raises NoSuchSession, and InvalidArgument if ``wanted`` cannot be an id or a prefix.
    """
    invalid_id: InvalidArgument | None = None
    if wanted != "last":
        session = client.session(wanted)
        try:
            session.refresh()
        except NotFound as error:
            if error.reason != "SESSION_NOT_FOUND":
                raise
        except InvalidArgument as error:
            invalid_id = error  # too short for an id, but maybe a prefix
        else:
            return session
    known = by_use(client)
    if wanted == "last":
        matching = known[:1]
    else:
        matching = [info for info in known if info.id.startswith(wanted.removeprefix("sessions/"))]
    if len(matching) == 1:
        return _open(client, matching[0])
    if invalid_id is not None and not matching:
        raise invalid_id
    ids = [info.id for info in known]
    near = [info.id for info in matching] or difflib.get_close_matches(wanted, ids, n=5, cutoff=0.5)
    if wanted == "last":
        raise NoSuchSession("there is no session yet")
    what = "several sessions begin with" if matching else "there is no session"
    hint = f"similar: {', '.join(near[:5])}" if near else "no similar id"
    raise NoSuchSession(f"{what} {wanted} ({hint}); with --new it is created")


def _open(client: Client, info: SessionInfo) -> Session:
    session = client.session(info.name)
    session.refresh()
    return session


def show_tail(session: Session, screen: Screen) -> None:
    """Print the end of the conversation. Raises the server's errors."""
    items = screen.call_with_status(session.items)
    shown = [item for item in items if item.role in (Role.USER, Role.ASSISTANT)]
    if len(shown) > TAIL_ITEMS:
        screen.note(f"… {len(shown) - TAIL_ITEMS} earlier messages; /history shows all")
    for item in shown[-TAIL_ITEMS:]:
        screen.note("you:" if item.role == Role.USER else "answer:")
        screen.write_line(item.text)
