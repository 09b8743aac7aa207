"""Request ids of the caller's own making. On the wire they are UUIDs; here any name will do."""

from __future__ import annotations

import re
import uuid

from pensieve.errors import InvalidArgument

MOST_CHARS = 128
UUID = re.compile(r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}", re.ASCII)
_NAMES = uuid.UUID("5f0a4f0e-6b5c-5e0f-9d53-3e8b7f0a9c11")
"""Namespace of the ids that are made of names; another one would make other turns of the same names."""


def new_request_id() -> str:
    return str(uuid.uuid4())


def request_id(scope: str, given: str | uuid.UUID | None) -> str:
    """The UUID that stands for ``given`` in ``scope``, which is the name of a session, or "" where there is none yet.

    None: a fresh one. A UUID is itself. Any other text of 1 to 128 printable characters is a name: the same name in the
    same scope is always the same UUID (version 5), so that it may be used as one. Raises InvalidArgument.
    """
    if given is None:
        return new_request_id()
    text = str(given) if isinstance(given, uuid.UUID) else given
    if not isinstance(text, str) or not 1 <= len(text) <= MOST_CHARS or not text.isprintable():
        raise InvalidArgument.field("request_id", f"must be a UUID or 1 to {MOST_CHARS} printable characters")
    return text if UUID.fullmatch(text) else str(uuid.uuid5(_NAMES, f"{scope}\n{text}"))
