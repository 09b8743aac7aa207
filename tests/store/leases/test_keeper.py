"""The leases of all running turns are renewed together, and each turn hears of its own."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator, Sequence

import pytest

from pensieve.errors import Unavailable
from pensieve.server.turns import lease as lease_module
from pensieve.server.turns.lease import LeaseKeeper
from pensieve.store import EndOrder, HeldLease, RenewalAnswer, Renewed
from pensieve.store.memory_store import MemoryStore
from support.store.store_bench import first_record, key, request, row

TURNS = 2000
LIMIT_S = 30.0


class SlowStore(MemoryStore):
    """Makes one change after the other, as a disk does; each takes its time."""

    def __init__(self, change_s: float) -> None:
        super().__init__()
        self._change_s = change_s
        self._disk = asyncio.Lock()
        self.changes = 0
        self.given_up = 0
        self.away: set[HeldLease] = set()

    async def renew_leases(self, leases: Sequence[HeldLease], lease_ms: int) -> list[RenewalAnswer]:
        async with self._disk:
            try:
                await asyncio.sleep(self._change_s)
            except asyncio.CancelledError:
                self.given_up += 1
                raise
            self.changes += 1
            answers = await super().renew_leases(leases, lease_ms)
            return [
                Unavailable("away") if lease in self.away else answer
                for lease, answer in zip(leases, answers, strict=True)
            ]


class Turns:
    """Leases that are held and kept, and what was told of each."""

    def __init__(self, store: MemoryStore, keeper: LeaseKeeper) -> None:
        self.store = store
        self.keeper = keeper
        self.lost: list[str] = []
        self.news: dict[str, list[Renewed]] = {}

    async def begin(self, stack: contextlib.ExitStack, name: str) -> None:
        await self.store.create(row(key(name)), first_record(), "fp")
        await self.store.begin(key(name), request("r1", f"t-{name}"))
        self.news[name] = []
        stack.enter_context(self.keeping(name))

    @contextlib.contextmanager
    def keeping(self, name: str) -> Iterator[None]:
        news = self.news[name].append
        with self.keeper.renewing(
            key(name), f"t-{name}", on_lost=lambda: self.lost.append(name), on_renewed=news
        ):
            yield


async def until(met: Callable[[], bool]) -> None:
    async with asyncio.timeout(LIMIT_S):
        while not met():
            await asyncio.sleep(0.01)


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lease_module, "MAX_ORDER_DELAY_S", 0.02)


async def test_two_thousand_turns_are_one_change_at_each_heartbeat() -> None:
    store = SlowStore(change_s=0.05)
    turns = Turns(store, LeaseKeeper(store, lease_s=30))
    with contextlib.ExitStack() as stack:
        for number in range(TURNS):
            await turns.begin(stack, f"s{number}")
        before = {name: len(news) for name, news in turns.news.items()}
        changes = store.changes
        await until(lambda: store.changes >= changes + 4)
    heard = {len(news) - before[name] for name, news in turns.news.items()}
    assert turns.lost == [] and min(heard) >= 3, "each lease was renewed with each change"
    changes = store.changes
    await asyncio.sleep(0.1)
    assert store.changes == changes, "none is renewed that nobody holds"


async def test_each_turn_hears_of_its_own_lease() -> None:
    store = SlowStore(change_s=0)
    turns = Turns(store, LeaseKeeper(store, lease_s=30))
    with contextlib.ExitStack() as stack:
        for name in ("a", "b", "c"):
            await turns.begin(stack, name)
        await store.delete(key("b"))
        await until(lambda: turns.lost == ["b"])
        order = EndOrder(keep=True)
        assert await store.ask_to_end(key("c"), "r1", order)
        await until(lambda: Renewed(order) in turns.news["c"])
        await until(lambda: len(turns.news["a"]) > 10)
        assert Renewed(order) not in turns.news["a"] and turns.lost == ["b"]


async def test_only_the_lease_that_cannot_be_renewed_is_given_up() -> None:
    store = SlowStore(change_s=0)
    store.away = {HeldLease(key("b"), "t-b")}
    turns = Turns(store, LeaseKeeper(store, lease_s=0.9))
    with contextlib.ExitStack() as stack:
        for name in ("a", "b", "c"):
            await turns.begin(stack, name)
        await until(lambda: bool(turns.lost))
        heard = len(turns.news["a"])
        await until(lambda: len(turns.news["a"]) > heard + 3)
        assert turns.lost == ["b"] and turns.news["b"] == []


async def test_a_turn_that_fails_to_hear_costs_no_other_its_lease(caplog: pytest.LogCaptureFixture) -> None:
    store = SlowStore(change_s=0)
    keeper = LeaseKeeper(store, lease_s=30)
    turns = Turns(store, keeper)

    def fail(_: Renewed) -> None:
        raise ValueError("a bug")

    with contextlib.ExitStack() as stack:
        await turns.begin(stack, "a")
        await store.create(row(key("b")), first_record(), "fp")
        await store.begin(key("b"), request("r1", "t-b"))
        stack.enter_context(
            keeper.renewing(key("b"), "t-b", on_lost=lambda: turns.lost.append("b"), on_renewed=fail)
        )
        await until(lambda: len(turns.news["a"]) > 5 and "could not be told" in caplog.text)
        assert turns.lost == []


async def test_a_slow_answer_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """The lease that ends first decides about no other: asked for again, they would wait as long."""
    monkeypatch.setattr(lease_module, "MAX_ORDER_DELAY_S", 0.1)
    store = SlowStore(change_s=1.0)
    turns = Turns(store, LeaseKeeper(store, lease_s=6))
    with contextlib.ExitStack() as stack:
        for name in ("ending", "young"):
            await turns.begin(stack, name)
        next(one for one in turns.keeper._entries if one.lease.key == key("ending")).renewed -= 4
        await until(lambda: bool(turns.news["young"]))
        assert turns.lost == ["ending"] and store.given_up == 0
