"""Both clients, each on a fake server that breaks on command."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from pensieve.client import RetryPolicy
from support.service.both_clients import KINDS, connected
from support.service.fake_conversations import FakeConversations

FAST = RetryPolicy(max_attempts=8, initial_s=0.001, max_s=0.002)


@pytest.fixture(params=KINDS)
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Any, FakeConversations]]:
    with connected(request.param, retry=FAST) as both:
        yield both


@pytest.fixture
def client(pair: tuple[Any, FakeConversations]) -> Any:
    return pair[0]


@pytest.fixture
def fake(pair: tuple[Any, FakeConversations]) -> FakeConversations:
    return pair[1]
