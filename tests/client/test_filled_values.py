"""The SDK makes values from messages by the names of their fields. A field without a source would keep its default."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.client import _values, decode
from pensieve.core import Usage
from pensieve.v1 import pensieve_pb2 as pb
from support.filled_fields import named_fields

SOURCES: dict[str, tuple[type, Any, set[str], set[str]]] = {
    "Item": (_values.Item, pb.Item, set(), {"tokens"}),
    "Usage": (Usage, pb.Usage, set(), {"queue_time", "restore_time", "prefill_time", "decode_time"}),
    "Turn": (_values.Turn, pb.Turn, {"logprobs"}, {"chosen_candidate"}),
    "Candidate": (_values.Candidate, pb.Candidate, {"logprobs"}, {"tokens"}),
    "Progress": (_values.Progress, pb.TurnProgress, set(), set()),
    "SessionInfo": (_values.SessionInfo, pb.Session, set(), {"config", "active_turn"}),
    "ErasedSession": (_values.ErasedSession, pb.ErasedSession, set(), set()),
    "Residency": (_values.Residency, pb.CacheResidency, set(), {"as_of_time"}),
    "TokenCount": (_values.TokenCount, pb.CountTokensResponse, set(), set()),
    "TenantTotals": (_values.TenantTotals, pb.TenantUsage, set(), set()),
    "Limits": (_values.Limits, pb.Limits, set(), {"max_ttl", "request_id_retention", "disconnect_grace"}),
    "ServerInfo": (_values.ServerInfo, pb.GetServerInfoResponse, set(), set()),
}
"""Class, message, fields that no message has, and fields of the message that the value has under another name or not at
all. Log-probabilities come with the pieces of an answer."""


def test_each_value_is_looked_at() -> None:
    assert named_fields(decode).keys() == SOURCES.keys()


@pytest.mark.parametrize("name", SOURCES)
def test_each_field_has_a_source_and_no_message_loses_one(name: str) -> None:
    kind, message, otherwise, renamed = SOURCES[name]
    found = named_fields(decode)[name] | set(decode._shared_names(kind, message))
    assert set(kind.__annotations__) - found == otherwise
    assert set(message.DESCRIPTOR.fields_by_name) - found == renamed
