"""Leases of running turns are renewed while they are kept, and not for a moment longer."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import cast

import pytest

from pensieve.errors import Unavailable
from pensieve.server.turns import lease
from pensieve.server.turns.lease import LeaseKeeper, LeaseReleaser
from pensieve.store import HeldLease, HistoryStore, Key, RenewalAnswer, Renewed

KEY = Key("acme", "one")


class Store:
    """Counts the calls. ``away``: it answers none of them."""

    def __init__(self) -> None:
        self.renewed: list[list[str]] = []
        self.aborted: list[str] = []
        self.called = asyncio.Event()
        self.away = False

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        self.renewed.append([held.token for held in leases])
        self.called.set()
        return [Renewed()] * len(leases)

    async def abort(self, key: Key, token: str, *, called_off: bool = False) -> None:
        self.called.set()
        if self.away:
            raise Unavailable("away")
        self.aborted.append(token)


def tasks(name: str) -> list[asyncio.Task[object]]:
    return [task for task in asyncio.all_tasks() if task.get_name() == name]


def ignore(*_: object) -> None:
    pass


async def test_the_last_lease_ends_the_task_and_the_next_one_starts_it() -> None:
    store = Store()
    keeper = LeaseKeeper(cast("HistoryStore", store), lease_s=0.03)
    for round_ in range(2):
        with keeper.renewing(KEY, "a", on_lost=ignore, on_renewed=ignore):
            with keeper.renewing(KEY, "b", on_lost=ignore, on_renewed=ignore):
                store.called.clear()
                await store.called.wait()
                assert sorted(store.renewed[-1]) == ["a", "b"]
                assert len(tasks("leases")) == 1, "one task renews them all"
            store.called.clear()
            await store.called.wait()
            assert store.renewed[-1] == ["a"], round_
        await asyncio.gather(*tasks("leases"), return_exceptions=True)  # would hang if one went on
        assert tasks("leases") == []


async def test_closing_leaves_no_task_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease, "MIN_RETRY_S", 60.0)
    store = Store()
    store.away = True
    releaser = LeaseReleaser(cast("HistoryStore", store), lease_s=600)
    await releaser.release(KEY, "a", cancelled=False)
    assert len(tasks("releases")) == 1
    async with asyncio.timeout(30):
        await releaser.close()
    assert tasks("releases") == [] and store.aborted == []
