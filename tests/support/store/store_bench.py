"""The three history stores behind one face for tests: the same calls, and hands that reach behind the store.

A bench can do what a test cannot do through the store: let a lease lapse, let a session expire, damage a record.
"""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, Protocol

import redis

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.store import BeginRequest, Counts, HistoryStore, Key
from pensieve.store._redis.rows import session_keys, tenant_keys
from pensieve.store.maintenance import Mode, RawStore, open_raw
from pensieve.store.memory_store import MemoryStore
from pensieve.store.records import Item, Record, RecordKind, SessionConfig, SessionRow, TurnResult
from pensieve.store.redis_store import RedisStore
from pensieve.store.sqlite_store import SqliteStore

TENANT = "acme"
LEASE_MS = 600_000
START_MS = 1_700_000_000_000


def key(name: str = "s1", tenant: str = TENANT) -> Key:
    return Key(tenant, name)


def row(
    at: Key, *, labels: dict[str, str] | None = None, ttl_s: float = 0.0, subject: str = ""
) -> SessionRow:
    config = SessionConfig(model="tiny", system_prompt="Be brief.", ttl_s=ttl_s, subject=subject)
    return SessionRow(tenant=at.tenant, session_id=at.session_id, config=config, labels=labels or {})


def first_record() -> Record:
    return Record(revision=1, kind=RecordKind.CREATE, time_ms=1, config=SessionConfig(model="tiny"))


def turn_record(base: int, request_id: str, text: str = "hello", mark: str = "") -> Record:
    """A committed turn of two items on revision ``base``."""
    user = Item(
        number=2 * base, role=Role.USER, text=text, tokens=pack_tokens([1, 2, 3]), request_id=request_id
    )
    reply = Item(number=2 * base + 1, role=Role.ASSISTANT, text=text.upper(), tokens=pack_tokens([4, 5]))
    result = TurnResult(base_revision=base, finish_reason=FinishReason.EOS, seed=7, input_items=1, mark=mark)
    return Record(
        revision=base + 1,
        kind=RecordKind.TURN,
        time_ms=2,
        request_id=request_id,
        items=(user, reply),
        turn=result,
    )


def rewind_record(base: int, request_id: str, keep: int = 0) -> Record:
    return Record(
        revision=base + 1, kind=RecordKind.REWIND, time_ms=3, request_id=request_id, keep_items=keep
    )


def counts(revision: int) -> Counts:
    return Counts(head_item=2 * revision, item_count=2 * revision - 2, context_tokens=5 * revision)


def request(
    request_id: str,
    token: str,
    *,
    fingerprint: str = "",
    seed: int = 1,
    expected_revision: int | None = None,
    lease_ms: int = LEASE_MS,
    known: SessionRow | None = None,
    follows: bool = False,
) -> BeginRequest:
    return BeginRequest(
        request_id=request_id,
        fingerprint=fingerprint or f"fp-{request_id}",
        token=token,
        owner="replica-1",
        attempt=f"attempt-{token}",
        lease_ms=lease_ms,
        seed=seed,
        expected_revision=expected_revision,
        start_ms=5,
        known_revision=0 if known is None else known.revision,
        known_head="" if known is None else known.head_hash,
        known_create_ms=0 if known is None else known.create_ms,
        follows=follows,
    )


class Bench(Protocol):
    """A store, opened, and what tests do behind its back."""

    name: str
    store: HistoryStore

    def lapse_lease(self, at: Key) -> None:
        """Make it as if the pending turn's lease time had passed."""
        ...

    def expire(self, at: Key) -> None:
        """Make it as if the session's time to live had passed."""
        ...

    def damage(self, at: Key, revision: int) -> None:
        """Flip one bit in a stored record."""
        ...

    def drop_record(self, at: Key, revision: int) -> None: ...


def flipped(data: bytes) -> bytes:
    middle = len(data) // 2
    return data[:middle] + bytes((data[middle] ^ 0x10,)) + data[middle + 1 :]


class Clock:
    """Ms since the epoch, moved by hand; each reading is a ms later, so that no two updates are at one time."""

    def __init__(self) -> None:
        self.now = START_MS

    def __call__(self) -> int:
        self.now += 1
        return self.now


class MemoryBench:
    """Over ``MemoryStore``; reaches into its dicts."""

    name = "memory"

    def __init__(self) -> None:
        self.clock, self.wall = Clock(), Clock()
        self.memory = MemoryStore(clock=self.wall, steady=self.clock)
        self.store: HistoryStore = self.memory

    def lapse_lease(self, at: Key) -> None:
        self.clock.now += LEASE_MS + 1

    def expire(self, at: Key) -> None:
        self.wall.now = max(self.wall.now, self.memory._sessions[at].meta.row.expire_ms)

    def damage(self, at: Key, revision: int) -> None:
        log = self.memory._sessions[at].log
        log[revision - 1] = log[revision - 1]._replace(data=flipped(log[revision - 1].data))

    def drop_record(self, at: Key, revision: int) -> None:
        del self.memory._sessions[at].log[revision - 1]


class SqliteBench:
    """Over ``SqliteStore``; reaches in through a second connection to the file."""

    name = "sqlite"

    def __init__(self, path: Path) -> None:
        self.clock, self.wall = Clock(), Clock()
        self.path = path
        self.begin_anew()

    def begin_anew(self) -> None:
        """As in another process: nothing is known of what the file was."""
        self.store: HistoryStore = SqliteStore(self.path, clock=self.wall, steady=self.clock)

    def lapse_lease(self, at: Key) -> None:
        self.clock.now += LEASE_MS + 1

    def expire(self, at: Key) -> None:
        found = self._execute("SELECT expire_ms FROM sessions WHERE tenant = ? AND session_id = ?", at)
        self.wall.now = max(self.wall.now, found[0][0])

    def damage(self, at: Key, revision: int) -> None:
        where = (
            "WHERE revision = ? AND session = (SELECT id FROM sessions WHERE tenant = ? AND session_id = ?)"
        )
        ((data,),) = self._execute(f"SELECT data FROM records {where}", at, revision)
        self._execute(f"UPDATE records SET data = ? {where}", at, flipped(data), revision)

    def drop_record(self, at: Key, revision: int) -> None:
        where = (
            "WHERE revision = ? AND session = (SELECT id FROM sessions WHERE tenant = ? AND session_id = ?)"
        )
        self._execute(f"DELETE FROM records {where}", at, revision)

    def _execute(self, statement: str, at: Key, *values: object) -> list[tuple[Any, ...]]:
        with contextlib.closing(sqlite3.connect(self.path, timeout=5)) as connection, connection:
            return connection.execute(statement, (*values, at.tenant, at.session_id)).fetchall()


class RedisBench:
    """Over ``RedisStore``; reaches in through a client of its own."""

    name = "redis"

    def __init__(self, url: str, client: redis.Redis | redis.RedisCluster) -> None:
        self.url = url
        self._client: Any = client  # its reply types cover every option; only bytes come here
        self.begin_anew()

    def begin_anew(self) -> None:
        """As in another process: nothing is known of what the server had."""
        self.store: HistoryStore = RedisStore.from_url(self.url)

    def lapse_lease(self, at: Key) -> None:
        meta = session_keys(at)[0]
        if self._client.hexists(meta, "run_until_ms"):
            self._client.hset(meta, "run_until_ms", "1")

    def expire(self, at: Key) -> None:
        """The expiry that the store set is asserted, then brought forward."""
        for name in session_keys(at):
            if self._client.exists(name):
                assert self._client.pttl(name) > 0, f"{name} has no expiry"
                self._client.pexpireat(name, 1)
        ends = tenant_keys(at.tenant)[2]
        assert self._client.zscore(ends, at.session_id), "the listing knows no expiry"
        self._client.zadd(ends, {at.session_id: 1})

    def damage(self, at: Key, revision: int) -> None:
        def change(number: int, fields: dict[bytes, bytes]) -> dict[bytes, bytes] | None:
            return {**fields, b"d": flipped(fields[b"d"])} if number == revision else fields

        self._rewrite(at, change)

    def drop_record(self, at: Key, revision: int) -> None:
        self._rewrite(at, lambda number, fields: None if number == revision else fields)

    def _rewrite(
        self, at: Key, change: Callable[[int, dict[bytes, bytes]], dict[bytes, bytes] | None]
    ) -> None:
        """A stream's entries cannot be edited, so all are written again."""
        stream = session_keys(at)[2]
        entries = self._client.xrange(stream)
        self._client.delete(stream)
        for entry_id, fields in entries:
            after = change(int(entry_id.partition(b"-")[0]), fields)
            if after is not None:
                self._client.xadd(stream, after, id=entry_id)


@contextlib.asynccontextmanager
async def opened(bench: Bench) -> AsyncIterator[Bench]:
    await bench.store.open()
    try:
        yield bench
    finally:
        await bench.store.close()


@contextlib.asynccontextmanager
async def opened_sqlite(path: Path) -> AsyncIterator[SqliteStore]:
    store = SqliteStore(path)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def opened_redis(url: str, on_error: Callable[[], None] = lambda: None) -> AsyncIterator[RedisStore]:
    store = RedisStore.from_url(url, on_error=on_error)
    await store.open()
    try:
        yield store
    finally:
        await store.close()


@contextlib.asynccontextmanager
async def raw(url: str, mode: Mode) -> AsyncIterator[RawStore]:
    store = open_raw(url)
    await store.open(mode)
    try:
        yield store
    finally:
        await store.close()


async def listed(store: HistoryStore, limit: int) -> list[str]:
    """All session ids of ``TENANT``, in pages."""
    found, cursor = list[str](), ""
    while True:
        page = await store.list_sessions(TENANT, limit=limit, cursor=cursor)
        found += [one.session_id for one in page.rows]
        cursor = page.cursor
        if not cursor:
            return found


async def whole_turn(store: HistoryStore, at: Key, base: int, text: str = "hello") -> SessionRow:
    """Begin and commit request ``r<base>`` under token ``t<base>``, on revision ``base``."""
    await store.begin(at, request(f"r{base}", f"t{base}"))
    record = turn_record(base, f"r{base}", text)
    return await store.commit(at, f"t{base}", f"fp-r{base}", record, counts(base + 1))
