"""Real Sentinels, a primary and two replicas: what was acknowledged at ``replicated(1)`` survives a fail-over."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import redis
from redis.asyncio.sentinel import MasterNotFoundError

from pensieve.errors import (
    DataLoss,
    FailedPrecondition,
    NotFound,
    PensieveError,
    TurnFenced,
    TurnInProgress,
    Unavailable,
)
from pensieve.store import Began, HistoryStore, Replay
from pensieve.store._redis import clients, link
from pensieve.store._redis.clients import _Sentinels
from pensieve.store._redis.rows import session_keys
from pensieve.store.records import SessionRow
from pensieve.store.redis_store import RedisStore
from support.store.redis_groups import SERVICE, SentinelGroup, replace_primary, sentinel_group, until
from support.store.redis_server import RedisServer, before_scan
from support.store.store_bench import counts, first_record, key, opened_redis, request, row, turn_record

pytestmark = pytest.mark.redis

KEY = key()
TURNS = 30
"""Acknowledged before, and again after a fail-over."""
LIMIT_S = 60.0
LARGE = 1 << 20
LARGE_TURNS = 24
LAG_S = 1.5


@dataclass
class Load:
    """What the committing servers do now."""

    acknowledged: dict[str, int]
    text: str = "small"
    ended: bool = False


@pytest.fixture
def group() -> Iterator[SentinelGroup]:
    with sentinel_group() as one:
        yield one


@contextlib.asynccontextmanager
async def committing(stores: list[HistoryStore], acknowledged: dict[str, int]) -> AsyncIterator[Load]:
    """Turns of several servers in one session, one after another and as fast as they go, while the body runs."""
    load = Load(acknowledged)

    async def work(number: int, store: HistoryStore) -> None:
        turn = 0
        while not load.ended:
            turn += 1
            await one_turn(store, f"r{number}-{turn}", load.text, load)

    async with asyncio.TaskGroup() as tasks:
        for number, store in enumerate(stores):
            tasks.create_task(work(number, store))
        try:
            yield load
        finally:
            load.ended = True


async def one_turn(store: HistoryStore, name: str, text: str, load: Load) -> None:
    """Tries again, as a client does, until there is an answer or nobody asks any more."""
    attempt = 0
    while not load.ended:
        attempt += 1
        token = f"t-{name}-{attempt}"
        try:
            outcome = await store.begin(KEY, request(name, token, lease_ms=2000))
            if isinstance(outcome, Replay):
                load.acknowledged[name] = outcome.revision
                return
            if not isinstance(outcome, Began):
                raise TurnInProgress("its own earlier attempt")
            base = outcome.row.revision
            await store.commit(KEY, token, f"fp-{name}", turn_record(base, name, text), counts(base + 1))
            load.acknowledged[name] = base + 1
            return
        except (Unavailable, TurnInProgress, TurnFenced):
            await asyncio.sleep(0.02)


async def until_more(acknowledged: dict[str, int], count: int, *, limit_s: float = LIMIT_S) -> None:
    wanted = len(acknowledged) + count
    async with asyncio.timeout(limit_s):
        while len(acknowledged) < wanted:
            await asyncio.sleep(0.02)


@pytest.mark.fault(48)
@pytest.mark.parametrize("how", ["hung", "slow", "lagging"])
async def test_a_fail_over_loses_and_doubles_no_acknowledged_turn(group: SentinelGroup, how: str) -> None:
    """hung: the old primary comes back, takes itself for the primary still, and our connections to it are open.
    slow: it comes back while a replica is promoted, and the other replica still follows it.
    lagging: no replica takes anything for a while before the primary is killed; more than sockets hold is under way.
    """
    acknowledged: dict[str, int] = {}
    async with opened_redis(group.url(replicas=1)) as one, opened_redis(group.url(replicas=1)) as other:
        assert one.durability == "replicated(1)"
        await one.create(row(KEY), first_record(), "fp")
        async with committing([one, other], acknowledged) as load:
            await until_more(acknowledged, TURNS)
            old = group.primary()
            if how == "hung":
                old.pause()
            elif how == "slow":
                old.pause()
                await asyncio.to_thread(until, group.is_failing_over, "a fail-over begins")
                old.resume()
                await asyncio.to_thread(until, lambda: group.primary() is not old, "another primary is named")
            else:
                load.text = "x" * LARGE
                for server in group.servers[1:]:
                    server.pause()
                with contextlib.suppress(TimeoutError):
                    await until_more(acknowledged, LARGE_TURNS, limit_s=LAG_S)
                old.kill()
                load.text = "small"
                for server in group.servers[1:]:
                    server.resume()
            await until_more(acknowledged, TURNS)
            assert group.primary() is not old
            old.resume()
            await until_more(acknowledged, TURNS)
        log = await one.read(KEY)
        await one.ping()
    found = {logged.record.request_id: logged.record.revision for logged in log[1:]}
    assert len(found) == len(log) - 1, "a turn is there twice"
    assert acknowledged.items() <= found.items()
    assert len(found) <= len(acknowledged) + 2, "more than what was under way at the end"


@pytest.mark.fault(48)
async def test_what_no_replica_has_is_not_acknowledged(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(link, "WAIT_MS", 100)
    monkeypatch.setattr(link, "CALL_LIMIT_S", LIMIT_S)
    async with (
        opened_redis(group.url(replicas=1)) as store,
        opened_redis(group.url(replicas=1)) as again,  # the retry comes to another server
        opened_redis(group.url()) as fresh,
    ):
        await store.create(row(KEY), first_record(), "fp")
        await store.create(row(key("sure")), first_record(), "fp")
        await store.begin(KEY, request("r1", "t1"))
        for server in group.servers[1:]:
            server.pause()
        turn = turn_record(1, "r1")
        for attempt in (
            store.commit(KEY, "t1", "fp-r1", turn, counts(2)),
            store.commit(KEY, "t1", "fp-r1", turn, counts(2)),
            again.commit(KEY, "t1", "fp-r1", turn, counts(2)),
            again.begin(KEY, request("r1", "t2")),
            again.find_request(KEY, "r1"),
            again.load(KEY),
            again.read(KEY),
            again.delete(KEY),
            again.load(KEY),  # its deletion is not told
            again.find_subject(KEY.tenant, "ada"),
            again.begin(KEY, request("r2", "t3")),
            again.forget(KEY, ""),
            store.ping(),
        ):
            with pytest.raises(Unavailable, match=r"0 of \d replicas"):
                await attempt
            if attempt.__name__ == "find_request":
                assert await fresh.find_request(KEY, "r1") == 2, "it is there, and might be lost yet"
        assert (await again.load(key("sure"))).revision == len(await again.read(key("sure"))) == 1
        for server in group.servers[1:]:
            server.resume()
        async with asyncio.timeout(LIMIT_S):
            while True:
                try:
                    await store.ping()
                    break
                except PensieveError:
                    await asyncio.sleep(0.05)
        assert await again.find_subject(KEY.tenant, "ada") == []
        with pytest.raises(NotFound):
            await again.load(KEY)


@pytest.mark.fault(48)
async def test_a_replica_that_lost_its_primary_may_take_its_place(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is up and cannot connect. The Sentinels promote it when the primary ends; what only the other replica has is
    not acknowledged."""
    monkeypatch.setattr(link, "WAIT_MS", 100)
    acknowledged: dict[str, int] = {}
    old, first = group.servers[:2]

    def has_lost_it() -> bool:
        for port in group.sentinel_ports:
            with contextlib.closing(redis.Redis(port=port, socket_timeout=2)) as sentinel:
                states = {one["port"]: one for one in sentinel.sentinel_slaves(SERVICE)}
            if states[first.port]["master-link-status"] == "ok" or states[first.port]["slave-priority"] != 1:
                return False
        return True

    async with opened_redis(group.url(replicas=1)) as store:
        await store.create(row(KEY), first_record(), "fp")
        with contextlib.closing(first.client()) as plain, contextlib.closing(old.client()) as primary:
            plain.config_set("replica-priority", "1")
            plain.config_set("masteruser", "stranger")
            plain.config_set("masterauth", "nothing")
            primary.execute_command("CLIENT", "KILL", "TYPE", "replica")
        for port in group.sentinel_ports:  # ten times this is how long they promote a replica without a link
            with contextlib.closing(redis.Redis(port=port, socket_timeout=5)) as sentinel:
                sentinel.execute_command("SENTINEL", "SET", SERVICE, "down-after-milliseconds", 2000)
        await asyncio.to_thread(until, has_lost_it, "the Sentinels know that its link is broken")
        await asyncio.sleep(clients.OLDEST_S)  # so does the store, which asks again
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(LAG_S):
                await one_turn(store, "r1", "small", Load(acknowledged))
        old.kill()
        await asyncio.to_thread(until, lambda: group.primary() is first, "it takes the primary's place")
        await asyncio.wait_for(one_turn(store, "r2", "small", Load(acknowledged)), LIMIT_S)
        found = {logged.record.request_id: logged.record.revision for logged in await store.read(KEY)}
    assert acknowledged.items() <= found.items()


def pool(store: RedisStore) -> Any:
    client: Any = store._link._client
    return client._client.connection_pool


def believes(store: RedisStore, server: RedisServer) -> bool:
    """Whether the store takes this server for the primary."""
    return bool(store._link.primary == ("127.0.0.1", server.port))


@pytest.mark.fault(48)
async def test_the_retry_of_a_command_goes_to_the_new_primary(group: SentinelGroup) -> None:
    """The store's connections were in use when its pool heard of the new primary."""
    async with opened_redis(group.url(replicas=1)) as store:
        await store.create(row(KEY), first_record(), "fp")
        old = await replace_primary(group)
        pool(store).master_address = ("127.0.0.1", group.primary().port)
        await store.apply(KEY, "fp-r1", turn_record(1, "r1"), counts(2))
        left = [one.port for one in pool(store)._available_connections if one.is_connected]
        assert left and old.port not in left
        with contextlib.closing(old.client()) as plain:
            assert plain.hget(session_keys(KEY)[0], "revision") == b"1", "the old one has none of it"


@pytest.mark.fault(48)
async def test_an_answer_that_was_waited_for_too_long_is_not_believed(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old primary stands still with a read in its socket, and answers when another has taken its place."""
    monkeypatch.setattr(clients, "ASK_AGAIN_S", LIMIT_S)
    async with opened_redis(group.url(replicas=1)) as store, opened_redis(group.url(replicas=1)) as late:
        await store.create(row(KEY), first_record(), "fp")
        await late.load(KEY)
        old = await replace_primary(group)
        await asyncio.wait_for(one_turn(store, "r1", "hello", Load({})), LIMIT_S)
        assert believes(late, old)
        old.pause()
        reading = asyncio.create_task(late.load(KEY))
        await asyncio.sleep(0.1)
        await pool(late).get_master_address()  # as another call of the same server does
        old.resume()
        assert (await reading).revision == 2


@pytest.mark.fault(48)
async def test_a_primary_that_was_replaced_is_no_store_that_went_back(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another server has used the new primary. This one has not heard of it, but its client has seen more than it."""
    monkeypatch.setattr(clients, "ASK_AGAIN_S", LIMIT_S)
    monkeypatch.setattr(link, "CALL_LIMIT_S", LIMIT_S)
    new = key("new")

    async def seen(late: RedisStore) -> SessionRow:
        outcome = await late.begin(KEY, dataclasses.replace(request("r3", "t3"), known_revision=3))
        await late.abort(KEY, "t3")
        return outcome.row

    async def expected(late: RedisStore) -> SessionRow:
        await asyncio.sleep(2.0)  # a lease that was taken at the old one ends
        outcome = await late.begin(KEY, request("r4", "t4", expected_revision=3))
        await late.abort(KEY, "t4")
        return outcome.row

    async def loaded(late: RedisStore) -> SessionRow:
        return await late.load(KEY, known_revision=3)

    async def created(late: RedisStore) -> SessionRow:
        return await late.load(new)

    async def asked_for(late: RedisStore) -> SessionRow:
        assert await late.find_request(KEY, "r2") == 3
        return await late.load(KEY)

    calls = (seen, expected, loaded, created, asked_for)
    async with contextlib.AsyncExitStack() as stack:
        store, *others = [
            await stack.enter_async_context(opened_redis(group.url(replicas=1))) for _ in (0, *calls)
        ]
        await store.create(row(KEY), first_record(), "fp")
        for late in others:
            await late.load(KEY)
        old = await replace_primary(group)
        for name in ("r1", "r2"):
            await asyncio.wait_for(one_turn(store, name, "hello", Load({})), LIMIT_S)
        await store.create(row(new), first_record(), "fp")
        for late, call in zip(others, calls, strict=True):
            assert believes(late, old), call.__name__
            found = await call(late)
            assert found.revision == (1 if call is created else 3), call.__name__


@pytest.mark.fault(48)
async def test_a_loss_is_believed_of_a_primary_with_replicas_only(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No Sentinel that this server reaches has heard of the new primary."""
    monkeypatch.setattr(clients, "ASK_AGAIN_S", LIMIT_S)
    async with opened_redis(group.url(replicas=1)) as store, opened_redis(group.url(replicas=1)) as late:
        await store.create(row(KEY), first_record(), "fp")
        await late.load(KEY)
        wanted = dataclasses.replace(request("r3", "t3"), known_revision=3)
        with pytest.raises(DataLoss):
            await late.begin(KEY, wanted)
        old = await replace_primary(group)

        async def lagging(service: str) -> tuple[str, int]:
            return "127.0.0.1", old.port

        monkeypatch.setattr(pool(late).sentinel_manager, "discover_master", lagging)
        assert believes(late, old)
        with pytest.raises(Unavailable, match=r"0 of \d replicas"):
            await late.begin(KEY, wanted)


async def test_a_right_that_a_sentinel_withholds_is_named(group: SentinelGroup) -> None:
    for port in group.sentinel_ports:
        with contextlib.closing(redis.Redis(port=port, socket_timeout=5)) as sentinel:
            sentinel.execute_command("ACL", "SETUSER", "default", "-sentinel|slaves")
    with pytest.raises(FailedPrecondition, match=r"sentinel\|slaves") as caught:
        async with opened_redis(group.url(replicas=1)):
            pass
    assert caught.value.reason == "STORE_FORBIDDEN"


FOLLOWS: dict[str, object] = {
    "is_sdown": False, "is_odown": False, "is_disconnected": False,
    "role-reported": "slave", "master-link-status": "ok",
    "slave-priority": 100, "slave-repl-offset": 7, "master-link-down-time": 0,
}  # fmt: skip
BROKEN = {**FOLLOWS, "master-link-status": "err", "master-link-down-time": 2000}
REPLICAS = {
    "f": FOLLOWS,
    "d": {**FOLLOWS, "is_sdown": True},
    "o": {**FOLLOWS, "is_odown": True},
    "c": {**FOLLOWS, "is_disconnected": True},
    "m": {**FOLLOWS, "role-reported": "master"},
    "l": BROKEN,
    "L": {**BROKEN, "master-link-down-time": 9000},
    "0": {**BROKEN, "slave-priority": 0},
    "n": {**BROKEN, "slave-repl-offset": 1, "master-link-down-time": -1000},
    "p": {**BROKEN, "slave-repl-offset": 1, "slave-priority": 99},
}


@pytest.mark.fault(48)
async def test_a_server_that_only_reads_hears_of_the_new_primary(group: SentinelGroup) -> None:
    async with opened_redis(group.url(replicas=1)) as store, opened_redis(group.url(replicas=1)) as reader:
        await store.create(row(KEY), first_record(), "fp")
        await reader.load(KEY)
        await replace_primary(group)
        for name in ("r1", "r2"):
            await asyncio.wait_for(one_turn(store, name, "hello", Load({})), LIMIT_S)
        async with asyncio.timeout(LIMIT_S):  # the old one is not demoted in this test
            while (await reader.load(KEY)).revision < 3:
                await asyncio.sleep(0.05)


@pytest.mark.fault(48)
async def test_all_sessions_are_found_amid_a_fail_over(
    group: SentinelGroup, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = {f"s{number}" for number in range(3000)}
    with contextlib.closing(group.primary().client()) as plain:
        filling = plain.pipeline(transaction=False)
        for name in names:
            filling.hset(session_keys(key(name))[0], "state", "active")
        filling.execute()
        assert plain.execute_command("WAIT", 2, 10_000) == 2
    async with opened_redis(group.url(replicas=1)) as store:

        async def replaced() -> None:
            await replace_primary(group)
            await pool(store).get_master_address()

        has_happened = before_scan(monkeypatch, 3, replaced)
        found = await store.dump().keys()
        assert has_happened() and {one.session_id for one in found} == names


class Told:
    """A Sentinel with a fixed answer."""

    def __init__(
        self, epoch: int, listed: int, named: int = 0, *, down: bool = False, replicas: str = ""
    ) -> None:
        """``listed``: port of the primary; ``named``: of the one that a fail-over has promoted. ``replicas``: a letter
        for the state of each."""
        self._replicas = [REPLICAS[letter] for letter in replicas]
        self._state = {"ip": "10.0.0.1", "port": listed, "config-epoch": epoch, "is_master": True}
        self._state |= {"is_sdown": down, "is_odown": False, "num-other-sentinels": 2}
        self._state |= {"down-after-milliseconds": 500}
        self._named = named or listed

    async def sentinel_masters(self) -> dict[str, dict[str, object]]:
        return {SERVICE: self._state}

    async def sentinel_get_master_addr_by_name(self, service: str) -> tuple[bytes, int]:
        return b"10.0.0.1", self._named

    async def sentinel_slaves(self, service: str) -> list[dict[str, object]]:
        return self._replicas


class Silent(Told):
    async def sentinel_masters(self) -> dict[str, dict[str, object]]:
        raise redis.TimeoutError


@pytest.mark.parametrize(
    ("told", "port"),
    [
        ([Told(1, 1), Told(1, 1), Told(1, 1)], 1),
        ([Told(1, 1), Told(1, 1), Told(2, 2)], 2),  # the last has heard of the fail-over
        ([Told(2, 1), Told(2, 1, 2), Told(2, 1)], 2),  # the second leads it
        ([Silent(3, 3), Told(1, 1), Silent(3, 3)], 1),
        ([Told(1, 1, down=True), Told(1, 1)], 1),  # opinions differ
        ([Told(1, 1, down=True), Told(1, 1, down=True)], None),
        ([Told(1, 1), Told(2, 2, down=True)], None),  # the old one is none again because the new one is down
        ([Silent(1, 1)], None),
    ],
)
async def test_the_newest_primary_that_any_sentinel_names(told: list[Told], port: int | None) -> None:
    sentinels = _Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = told
    if port is None:
        with pytest.raises(MasterNotFoundError, match="none a primary that is up"):
            await sentinels.discover_master(SERVICE)
    else:
        assert await sentinels.discover_master(SERVICE) == ("10.0.0.1", port)


@pytest.mark.parametrize(
    ("told", "following"),
    [
        ([Told(1, 1, replicas="ffdocmL0n")] * 3, 2),
        ([Told(1, 1, replicas="flp")] * 3, 3),  # whose link has just broken; whom the Sentinels prefer
        ([Told(1, 1, down=True, replicas="fL"), Told(1, 1, replicas="fL")], 2),
        (
            [Told(1, 1, replicas="f"), Told(1, 1, replicas="ff"), Told(1, 1)],
            2,
        ),  # whom one of them may promote
        (
            [Told(2, 1, replicas="ff"), Told(2, 1, 2, replicas="ff"), Silent(2, 1)],
            0,
        ),  # they leave the old one
        ([Told(1, 1, replicas="ff"), Told(2, 2, replicas="f"), Told(1, 1, replicas="ff")], 1),
    ],
)
async def test_the_replicas_that_may_take_over(told: list[Told], following: int) -> None:
    sentinels = _Sentinels([])  # type: ignore[no-untyped-call]
    sentinels.sentinels = told
    await sentinels.discover_master(SERVICE)
    assert sentinels.following == following


async def test_few_sentinels_take_no_replica_from_the_count() -> None:
    """The others may be cut off, and promote a replica that these do not reach."""
    sentinels = _Sentinels([])  # type: ignore[no-untyped-call]
    counts = []
    for told in (
        [Told(1, 1, replicas="ff")] * 3,
        [Told(1, 1, replicas="f"), Silent(1, 1), Silent(1, 1)],
        [Told(1, 1, replicas="f"), Told(1, 1, replicas="f"), Silent(1, 1)],
    ):
        sentinels.sentinels = told
        await sentinels.discover_master(SERVICE)
        counts.append(sentinels.following)
    assert counts == [2, 2, 1]
