"""Bodies of ``/v1/conversations``, checked."""

from __future__ import annotations

from typing import Final

import msgspec

from pensieve.http.common.contents import Said
from pensieve.http.common.failures import bad
from pensieve.http.responses.requests import InputItem, check_metadata, messages_of

MAX_ITEMS: Final = 20
"""Of one create."""


class ConversationRequest(msgspec.Struct):
    """A new conversation."""

    items: list[InputItem] | None = None
    metadata: dict[str, str] | None = None

    def asked(self) -> tuple[ConversationRequest, list[Said], dict[str, str] | None]:
        """Itself, messages and metadata. Raises HttpFailure."""
        check_metadata(self.metadata or {})
        if len(self.items or ()) > MAX_ITEMS:
            raise bad("items", f"at most {MAX_ITEMS}")
        return self, messages_of(self.items or [], "items"), self.metadata


class ItemsRequest(msgspec.Struct):
    """Items that were said elsewhere, to be added."""

    items: list[InputItem]

    def asked(self) -> tuple[ItemsRequest, list[Said]]:
        """Itself, and the messages. Raises HttpFailure."""
        if not 0 < len(self.items) <= MAX_ITEMS:
            raise bad("items", f"must be 1 to {MAX_ITEMS}")
        return self, messages_of(self.items, "items")


class MetadataRequest(msgspec.Struct):
    """New metadata of a conversation, in place of the old."""

    metadata: dict[str, str] | None = None

    def asked(self) -> dict[str, str]:
        """The metadata. Raises HttpFailure."""
        check_metadata(self.metadata or {})
        return self.metadata or {}
