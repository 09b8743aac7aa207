"""Where the overflow policy may cut a history."""

from __future__ import annotations

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.server.history.rendering import turn_starts
from pensieve.store.records import History, Item


def test_a_call_and_its_results_are_never_torn_apart() -> None:
    roles = [
        Role.SYSTEM,
        Role.USER,
        Role.ASSISTANT,
        Role.TOOL,
        Role.TOOL,
        Role.ASSISTANT,
        Role.USER,
        Role.ASSISTANT,
    ]
    items = tuple(
        Item(
            number=number,
            role=role,
            text="",
            tokens=pack_tokens([number]),
            finish_reason=FinishReason.EOS if role is Role.ASSISTANT else None,
        )
        for number, role in enumerate(roles, 1)
    )
    assert turn_starts(History(items=items)) == [2, 7]
