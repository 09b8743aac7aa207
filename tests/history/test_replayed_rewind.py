"""A rewind that is sent again while another server commits a turn: the history that is cached must be the store's."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import serving, uid


class Meddling(MemoryStore):
    """Has something done elsewhere just before a change is applied."""

    before_apply: Any = None

    async def apply(self, *arguments: Any, **options: Any) -> Any:
        act, self.before_apply = self.before_apply, None
        if act is not None:
            await act()
        return await super().apply(*arguments, **options)


@pytest.mark.fault(13)
async def test_a_replayed_rewind_meets_a_turn_of_another_server() -> None:
    store = Meddling()
    async with serving(store=store) as ours, serving(store=store) as other:
        name = await ours.create("Be brief.")
        await ours.run(name, "one")
        await ours.run(name, "two")
        rewind = pb.RewindSessionRequest(name=name, request_id=uid(), item=3)
        await ours.api.RewindSession(rewind)  # and its answer is lost

        async def elsewhere() -> None:
            await other.run(name, "three")

        store.before_apply = elsewhere
        await ours.api.RewindSession(rewind)
        assert [item.text for item in await ours.items(name)] == [
            item.text for item in await other.items(name)
        ]
