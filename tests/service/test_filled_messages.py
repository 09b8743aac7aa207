"""The server makes messages from values by the names of their fields. A field that no value has would stay empty."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.core import Usage
from pensieve.server.conversations import ServerFacts
from pensieve.server.operations.usage import TenantCounts
from pensieve.server.rpc import convert
from pensieve.server.sessions.subjects import SessionReceipt
from pensieve.server.settings import RequestLimits
from pensieve.server.values import Accepted, ProgressView, TurnView
from pensieve.store.records import CandidateAnswer, Item, SessionConfig, SessionRow
from support.filled_fields import named_fields

SOURCES: dict[str, tuple[type, set[str]]] = {
    "Session": (SessionRow, {"active_turn", "expire_time", "residency"}),
    "ErasedSession": (SessionReceipt, set()),
    "SessionConfig": (SessionConfig, {"default_sampling", "ttl"}),
    "Item": (Item, set()),
    "Turn": (TurnView, set()),
    "Candidate": (CandidateAnswer, set()),
    "Usage": (Usage, set()),
    "TurnAccepted": (Accepted, set()),
    "TurnProgress": (ProgressView, set()),
    "TenantUsage": (TenantCounts, {"sessions", "stored_bytes"}),
    "Limits": (RequestLimits, set()),
    "GetServerInfoResponse": (ServerFacts, set()),
}
"""The value that each message is made from, and the fields that are set in another way."""


def test_each_message_is_looked_at() -> None:
    assert named_fields(convert).keys() == SOURCES.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_each_field_has_a_source(name: str) -> None:
    source, otherwise = SOURCES[name]
    message: Any = getattr(convert.pb, name)
    found = named_fields(convert)[name] | set(convert._shared_names(message, source))
    assert set(message.DESCRIPTOR.fields_by_name) - found == otherwise
