"""Ids of responses, items and conversations. Each encodes its session and turn or item, so the door stores
none.

Ids grant no access: every lookup uses the caller's own credential.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import struct
import uuid
from dataclasses import dataclass, replace
from typing import Final

_FORMS: Final = {1: struct.Struct(">BB16s16sI4s"), 2: struct.Struct(">BB16s16sI16s")}
"""Version → form. The first has no digest, or one of an earlier release, which could be that of other instructions."""
_ITEM: Final = struct.Struct(">B16sI")
FAMILIES: Final = ("resp-", "conv-", "chat-")
"""Prefixes of the names of sessions that the door makes; 32 hexadecimal digits follow."""


@dataclass(frozen=True, slots=True)
class ResponseId:
    """A turn of a session, and what the next turn needs to continue without a lookup."""

    session_id: str
    turn_id: str
    revision: int
    """The session's revision right after the turn."""
    instructions: bytes = b""
    """Digest of the instructions and tools in force; empty if there were none, or the conversation's."""
    drops_oldest: bool = False
    """Whether ``truncation`` was ``auto``."""
    background: bool = False
    """Whether its stream can be resumed: each of its tokens is an event."""
    calls: bool = False
    """Whether its answer is parsed for function calls."""

    def __str__(self) -> str:
        family, session = _split(self.session_id)
        flags = (
            self.calls << 7
            | FAMILIES.index(family) << 3
            | self.background << 2
            | self.drops_oldest << 1
            | bool(self.instructions)
        )
        turn = uuid.UUID(self.turn_id).bytes
        digest = self.instructions or bytes(4)
        version = 1 if len(digest) == 4 else 2
        return f"resp_{_text(_FORMS[version].pack(version, flags, session, turn, self.revision, digest))}"

    @classmethod
    def parse(cls, text: str) -> ResponseId | None:
        """Return None for anything else than a response id."""
        data = _bytes(text.removeprefix("resp_"))
        form = _FORMS.get(data[0]) if data else None
        if not text.startswith("resp_") or data is None or form is None or len(data) != form.size:
            return None
        _, flags, session, turn, revision, digest = form.unpack(data)
        family = flags >> 3 & 15
        if family >= len(FAMILIES):
            return None
        return cls(
            f"{FAMILIES[family]}{session.hex()}",
            str(uuid.UUID(bytes=turn)),
            revision,
            digest if flags & 1 else b"",
            bool(flags & 2),
            bool(flags & 4),
            bool(flags & 128),
        )

    @property
    def message(self) -> str:
        """Id of the answer's message. Derived from the turn, because the item's number is not known while it is
        generated."""
        return f"msg_{str(replace(self, revision=0)).removeprefix('resp_')}"


def instructions_digest(instructions: str | None, tools: str = "", size: int = 16) -> bytes:
    """Return a digest of instructions and tools; empty for none. ``size``: 4 for that of an earlier release."""
    if instructions is None and not tools:
        return b""
    said = (instructions or "") + (f"\0{instructions is None}\0{tools}" if tools else "")
    said = said if size == 4 else f"{len(instructions or '')}:{said}"
    return hashlib.blake2b(said.encode("utf-8", "surrogatepass"), digest_size=size).digest()


def item_id(session_id: str, item: int) -> str:
    family, session = _split(session_id)
    return f"msg_{_text(_ITEM.pack(FAMILIES.index(family), session, item))}"


def parse_item_id(name: str) -> tuple[str, int] | None:
    """Return session and item number of an id made by ``item_id``; None for anything else."""
    prefix, _, text = name.partition("_")
    data = _bytes(text)
    if prefix not in ("msg", "fco") or data is None or len(data) != _ITEM.size:
        return None
    family, session, item = _ITEM.unpack(data)
    return (f"{FAMILIES[family]}{session.hex()}", item) if family < len(FAMILIES) and item else None


def conversation_id(session_id: str) -> str | None:
    """Return the conversation id of a session; None if it is not a conversation."""
    return session_id.replace("conv-", "conv_", 1) if session_id.startswith("conv-") else None


def session_of_conversation(name: str) -> str | None:
    """Return the session name of a conversation id; None for anything else."""
    digits = name.removeprefix("conv_")
    sound = name.startswith("conv_") and len(digits) == 32 and set(digits) <= set("0123456789abcdef")
    return f"conv-{digits}" if sound else None


def _split(session_id: str) -> tuple[str, bytes]:
    family, digits = session_id[:5], session_id[5:]
    if family not in FAMILIES:
        raise ValueError(f"{session_id!r} is not a session that the door made")
    return family, bytes.fromhex(digits)


def _text(data: bytes) -> str:
    return base64.b32encode(data).decode().rstrip("=").lower()


def _bytes(text: str) -> bytes | None:
    try:
        return base64.b32decode(text.upper() + "=" * (-len(text) % 8))
    except (binascii.Error, ValueError):
        return None
