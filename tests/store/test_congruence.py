"""The same random operations on the three stores and on the reference model must have the same outcomes."""

from __future__ import annotations

import contextlib
import random
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from pensieve.errors import PensieveError, TurnInProgress
from pensieve.server.history.cuts import erasing_record
from pensieve.store import Began, CalledOff, EndOrder, HeldLease, HistoryStore, Renewed, Replay
from pensieve.store.maintenance import Mode, backup, open_backup, restore
from pensieve.store.records import History, SessionRow
from support.lengths import FIRST_SEED, at_length
from support.store.redis_server import RedisServer
from support.store.store_bench import (
    LEASE_MS,
    TENANT,
    Bench,
    MemoryBench,
    RedisBench,
    SqliteBench,
    counts,
    first_record,
    key,
    listed,
    opened,
    raw,
    request,
    rewind_record,
    row,
    turn_record,
)
from support.store.store_model import Model, Outcome

MARKS = ["", "m1", "m2"]
SUBJECTS = ["", "ada", "bob"]
SLOTS = ["a", "a", "a", "b", "c"]
"""Sessions in use at one time; a slot gets a new name some while after its session was deleted or damaged."""
TTL_S = 86_400.0
SEEDS = at_length(4, 8)
OPERATIONS = 400
KINDS_SEEN_AT_LEAST = 38
"""Different (operation, outcome) pairs over all seeds: a run that only meets "not found" proves nothing."""

Call = Callable[[HistoryStore], Awaitable[object]]


def described(result: object) -> Outcome:
    """A store's result in the words of the model."""
    match result:
        case SessionRow():
            running = result.running.request_id if result.running is not None else None
            return ("row", result.state.value, result.revision, running)
        case Began():
            return ("began", result.row.revision, result.seed)
        case Replay():
            return ("replay", result.revision)
        case Renewed():
            return ("renewed", result.order and result.order.keep_tokens, result.followed)
        case CalledOff():
            return ("called off",)
        case bool():
            return ("asked", result)
        case None:
            return ("done",)
        case tuple():
            return result
    return ("elsewhere",)


def described_error(error: PensieveError) -> Outcome:
    # Redis cannot tell an expired session from none; the contract says that both are absent.
    reason = error.reason.replace("EXPIRED", "NOT_FOUND")
    busy = (error.metadata["active_request_id"],) if isinstance(error, TurnInProgress) else ()
    return (type(error).__name__, reason, *busy)


async def tagged(name: str, answer: Awaitable[Outcome]) -> Outcome:
    return (name, *await answer)


class Congruence:
    """One run: the stores, empty, a model, and a source of random operations."""

    def __init__(self, benches: list[Bench], seed: int, seen: Counter[tuple[str, object]]) -> None:
        self.benches = benches
        self.model = Model()
        self.random = random.Random(seed)
        self.seen = seen
        self.trace: list[str] = []
        self.generation: Counter[str] = Counter()
        self.rules = [
            *[self.create] * 2,
            *[self.begin] * 8,
            *[self.commit] * 3,
            *[self.commit_what_runs] * 4,
            *[self.apply] * 3,
            *[self.renew, self.abort, self.ask_to_end, self.find_request, self.read, self.read, self.lapse]
            * 2,
        ]
        self.ended = 0
        self.rules += [self.read_slice, self.renew_several, self.find, self.list_in_pages]
        self.rare = [
            *[self.erase] * 3,
            self.clocks_step,
            self.restored_from_backup,
            *[self.delete, self.forget, self.forget, self.mark_damaged, self.sessions_expire],
            self.server_restarts,
        ]

    async def step(self) -> None:
        act = self.random.choice(self.rare if self.random.random() < 0.06 else self.rules)
        name = await self.some_name()
        await act(name)
        await self.check("load", self.model.load(name), lambda s: s.load(key(name)))

    async def some_name(self) -> str:
        slot = self.random.choice(SLOTS)
        session = self.model.sessions.get(f"{slot}{self.generation[slot]}")
        if session is None or (session.state != "active" and self.random.random() < 0.15):
            if session is not None or self.random.random() < 0.5:  # a name that is free again is used again
                self.generation[slot] += 1
            await self.create(f"{slot}{self.generation[slot]}")
        return f"{slot}{self.generation[slot]}"

    async def check(self, operation: str, expected: Outcome, call: Call) -> None:
        """Run ``call`` on each store; each outcome must be the model's."""
        self.trace.append(f"{operation} -> {expected}")
        self.seen[operation, expected[:2] if str(expected[0])[0].isupper() else expected[0]] += 1
        for bench in self.benches:
            try:
                outcome = described(await call(bench.store))
            except PensieveError as error:
                outcome = described_error(error)
            recent = "\n".join(self.trace[-12:])
            assert outcome == expected, (
                f"{bench.name} answers {outcome}; the last operations and outcomes:\n{recent}"
            )

    def believed(self, name: str) -> int:
        """A revision as a caller believes it: mostly the true one."""
        return max(self.model.revision(name) + self.random.choice([0, 0, 0, 0, 0, -1, 1]), 0)

    def believed_or_none(self, name: str) -> int | None:
        return self.random.choice([None, self.believed(name)])

    def any_request(self) -> str:
        return f"r{self.random.randrange(12)}"

    def any_token(self) -> str:
        return f"t{self.random.randrange(4)}"

    def any_print(self) -> str:
        return self.random.choice(["f1", "f1", "f1", "f1", "f2"])

    async def create(self, name: str) -> None:
        fingerprint, ttl = self.any_print(), self.random.random() < 0.3
        subject = self.random.choice(SUBJECTS)
        given = row(key(name), ttl_s=TTL_S if ttl else 0.0, subject=subject)
        outcome = self.model.create(name, fingerprint, ttl, subject)
        first = msgspec.structs.replace(first_record(), config=given.config)
        await self.check("create", outcome, lambda s: s.create(given, first, fingerprint))

    async def begin(self, name: str) -> None:
        request_id, token, fingerprint = self.any_request(), self.any_token(), self.any_print()
        seed, expected = self.random.randrange(100), self.believed_or_none(name)
        asked = request(request_id, token, fingerprint=fingerprint, seed=seed, expected_revision=expected)
        follows = self.random.random() < 0.4
        asked = replace(asked, follows=follows)
        revision = self.random.choice([0, 0, self.believed(name)])
        head = await self.head_at(name, revision)
        asked = replace(asked, known_revision=revision, known_head=head[0])
        outcome = self.model.begin(
            name, request_id, fingerprint, token, seed, expected, follows, (revision, head[1])
        )
        await self.check("begin", outcome, lambda s: s.begin(key(name), asked))

    async def head_at(self, name: str, revision: int) -> tuple[str, bool]:
        """The chain hash at a revision, or none, or at the newest one at times a wrong one; and whether it is right."""
        newest = self.model.revision(name)
        if not 0 < revision <= newest or self.random.random() < 0.3:
            return "", True
        if revision == newest and self.random.random() < 0.3:
            return "0" * 64, False
        return (await self.benches[0].store.read(key(name)))[revision - 1].head_hash, True

    async def commit(self, name: str) -> None:
        await self._commit(name, self.any_request(), self.any_token(), self.any_print(), self.believed(name))

    async def commit_what_runs(self, name: str) -> None:
        session = self.model.sessions.get(name)
        if session is not None and session.turn is not None:
            turn = session.turn
            token = turn.token or self.any_token()
            await self._commit(name, turn.request_id, token, turn.fingerprint, self.believed(name))

    async def _commit(self, name: str, request_id: str, token: str, fingerprint: str, base: int) -> None:
        mark = self.random.choice(MARKS)
        outcome = self.model.commit(name, token, request_id, fingerprint, base, mark)
        record = turn_record(base, request_id, mark=mark)
        await self.check(
            "commit", outcome, lambda s: s.commit(key(name), token, fingerprint, record, counts(base + 1))
        )

    async def renew(self, name: str) -> None:
        token = self.any_token()
        await self.check(
            "renew", self.model.renew(name, token), lambda s: s.renew(key(name), token, LEASE_MS)
        )

    async def abort(self, name: str) -> None:
        token, called_off = self.any_token(), self.random.random() < 0.5
        outcome = self.model.abort(name, token, called_off)
        await self.check("abort", outcome, lambda s: s.abort(key(name), token, called_off=called_off))

    async def ask_to_end(self, name: str) -> None:
        request_id, keep = self.any_request(), self.random.randrange(9)
        outcome = self.model.ask_to_end(name, request_id, keep)
        order = EndOrder(keep=keep > 0, keep_tokens=keep)
        await self.check("ask", outcome, lambda s: s.ask_to_end(key(name), request_id, order))

    async def apply(self, name: str) -> None:
        base, expected = self.believed(name), self.believed_or_none(name)
        request_id, fingerprint = self.random.choice(["", self.any_request()]), self.any_print()
        outcome = self.model.apply(name, request_id, fingerprint, base, expected)
        record = rewind_record(base, request_id)
        await self.check(
            "apply",
            outcome,
            lambda s: s.apply(key(name), fingerprint, record, counts(base + 1), expected_revision=expected),
        )

    async def erase(self, name: str) -> None:
        """Rewind, and leave of the records what a rewind with erasing leaves."""
        if self.model.load(name)[:2] != ("row", "active"):
            return
        log = await self.benches[0].store.read(key(name))
        base = History().after((one.record, one.head_hash) for one in log)
        request_id, fingerprint = self.random.choice(["", self.any_request()]), self.any_print()
        rewind = rewind_record(len(log), request_id, self.random.choice([0, base.head_item // 2]))
        record, rests = erasing_record(base, rewind, log)
        outcome = self.model.apply(name, request_id, fingerprint, len(log), None, record.erases)
        await self.check(
            "erase",
            outcome,
            lambda s: s.apply(key(name), fingerprint, record, counts(record.revision), erased_records=rests),
        )

    async def delete(self, name: str) -> None:
        expected, allow_missing = self.believed_or_none(name), self.random.random() < 0.5
        outcome = self.model.delete(name, expected, allow_missing)
        await self.check(
            "delete",
            outcome,
            lambda s: s.delete(key(name), expected_revision=expected, allow_missing=allow_missing),
        )

    async def forget(self, name: str) -> None:
        knows_head = self.random.random() < 0.8
        there = self.model.load(name)[0] == "row"

        async def call(store: HistoryStore) -> None:
            head = (await store.load(key(name))).head_hash if there and knows_head else "0" * 64
            await store.forget(key(name), head)

        await self.check("forget", self.model.forget(name, knows_head), call)
        await self.listings_agree()

    async def mark_damaged(self, name: str) -> None:
        await self.check("damage", self.model.mark_damaged(name), lambda s: s.mark_damaged(key(name)))

    async def find_request(self, name: str) -> None:
        request_id = self.any_request()

        async def found(store: HistoryStore) -> Outcome:
            return ("found", await store.find_request(key(name), request_id))

        await self.check("find", self.model.find_request(name, request_id), found)

    async def read(self, name: str) -> None:
        after = self.random.choice([0, 1, self.believed(name)])

        async def log(store: HistoryStore) -> Outcome:
            found = await store.read(key(name), after_revision=after)
            return ("log", *(logged.record.request_id for logged in found))

        await self.check("read", self.model.read(name, after), log)

    async def read_slice(self, name: str) -> None:
        after, limit = self.random.choice([0, 1, self.believed(name)]), self.random.choice([1, 2, 9])
        head, right = await self.head_at(name, after) if after == self.model.revision(name) else ("", True)

        async def piece(store: HistoryStore) -> Outcome:
            found = await store.read_slice(key(name), after_revision=after, head_hash=head, limit=limit)
            return ("slice", found.row.revision, *(logged.record.request_id for logged in found.records))

        await self.check("slice", self.model.read_slice(name, after, limit, right), piece)

    async def renew_several(self, name: str) -> None:
        """In one call; sessions and tokens in any order, some of them twice."""
        names = [name, *self.random.choices(list(self.model.sessions) or [name], k=3)]
        tokens = [self.any_token() for _ in names]
        leases = [HeldLease(key(one), token) for one, token in zip(names, tokens, strict=True)]
        outcome = tuple(self.model.renew(one, token) for one, token in zip(names, tokens, strict=True))

        async def renewed(store: HistoryStore) -> Outcome:
            answers = await store.renew_leases(leases, LEASE_MS)
            return tuple(
                described_error(one) if isinstance(one, PensieveError) else described(one) for one in answers
            )

        await self.check("renew several", ("several", *outcome), lambda s: tagged("several", renewed(s)))

    async def find(self, name: str) -> None:
        """By mark and by subject. A mark is a hint: turns that were not committed, or have gone, may be found."""
        mark, subject = self.random.choice(MARKS[1:]), self.random.choice(SUBJECTS[1:])
        turns = self.model.marked(mark)

        async def marked(store: HistoryStore) -> Outcome:
            found = await store.find_marked(TENANT, mark, None, limit=1000)
            return ("marked", sorted({(one.session_id, one.revision) for one in found} & turns))

        await self.check("marked", ("marked", sorted(turns)), marked)

        async def about(store: HistoryStore) -> Outcome:
            return ("about", sorted(one.session_id for one in await store.find_subject(TENANT, subject)))

        await self.check("about", ("about", self.model.about(subject)), about)

    async def list_in_pages(self, _name: str) -> None:
        limit = self.random.choice([1, 2, 3])

        async def pages(store: HistoryStore) -> Outcome:
            return ("listed", sorted(await listed(store, limit)))

        await self.check("list", ("listed", self.model.live()), pages)

    async def clocks_step(self, _name: str) -> None:
        """The wall clock of one store, to and fro. Leases do not follow it, and no session is that old."""
        step = self.random.choice([-3_600_000, 3_600_000])
        for bench in self.benches:
            await bench.store.purge_expired()  # else an expired one is there again
            if isinstance(bench, MemoryBench):
                bench.wall.now += step

    async def restored_from_backup(self, name: str) -> None:
        """All turns end; then one store is made anew from a backup of another."""
        await self.lapse(name)
        for one in self.model.live():
            await self.end_turn(one)
        _, sqlite, redis = self.benches
        assert isinstance(sqlite, SqliteBench) and isinstance(redis, RedisBench)
        urls = [f"sqlite:///{sqlite.path}", redis.url]
        # Each server goes by its own clock: sessions from a later time, or that would be old in the other store, stay.
        ahead = sqlite.wall.now - time.time_ns() // 1_000_000
        if ahead > 60_000 and self.model.expiring():
            return
        if ahead > 60_000 or self.random.random() < 0.5:
            urls.reverse()
            sqlite.wall.now = time.time_ns() // 1_000_000
        file = sqlite.path.parent / "backup.jsonl.gz"
        for bench in (sqlite, redis):
            await bench.store.close()
        async with raw(urls[0], Mode.SNAPSHOT) as source:
            await backup(source, file, replace_file=True)
        if urls[1] == redis.url:
            redis._client.flushall()
        else:
            for path in sqlite.path.parent.glob(f"{sqlite.path.name}*"):
                path.unlink()
        async with raw(urls[1], Mode.WRITE) as target:
            await restore(open_backup(file), target)
        for bench in (sqlite, redis):
            bench.begin_anew()
            await bench.store.open()
        self.trace.append(f"restored {urls[1]}")
        await self.listings_agree()

    async def end_turn(self, name: str) -> None:
        """Leave no trace of a lapsed turn, which a backup has without the holder of its lease."""
        session, at = self.model.sessions[name], key(name)
        if session.turn is not None and not session.turn.token and session.state == "active":
            self.ended += 1
            asked = request(f"q{self.ended}", "q", fingerprint="q")
            outcome = self.model.begin(name, f"q{self.ended}", "q", "q", 1, None, False)
            await self.check("begin", outcome, lambda s: s.begin(at, asked))
        token = "" if session.turn is None else session.turn.token
        if token:
            outcome = self.model.abort(name, token, False)
            await self.check("abort", outcome, lambda s: s.abort(at, token))

    async def lapse(self, _name: str) -> None:
        for bench in self.benches:
            for name in self.model.sessions:
                bench.lapse_lease(key(name))
        self.model.lapse_all()

    async def sessions_expire(self, name: str) -> None:
        await self.lapse(name)  # while they are there: none expires that a turn runs in
        for bench in self.benches:
            for one in self.model.expiring():
                bench.expire(key(one))
        self.model.expire_all()

    async def server_restarts(self, name: str) -> None:
        for bench in self.benches:
            await bench.store.close()
            await bench.store.open()
            await bench.store.purge_expired()
        await self.lapse(name)
        await self.listings_agree()

    async def listings_agree(self) -> None:
        listings = []
        usages = {bench.name: await bench.store.usage(TENANT) for bench in self.benches}
        recent = "\n".join(self.trace[-12:])
        assert len({*usages.values()}) == 1, f"{usages} after\n{recent}"
        assert {usage.sessions for usage in usages.values()} == {len(self.model.live())}
        for bench in self.benches:
            page = await bench.store.list_sessions(TENANT, limit=1000)
            assert sorted(one.session_id for one in page.rows) == self.model.live(), bench.name
            listings.append({one.session_id: (one.head_hash, one.config) for one in page.rows})
        assert listings[0] == listings[1] == listings[2], "hash chains or counts differ"


@pytest.mark.redis
async def test_stores_and_model_agree(shared_redis: RedisServer, tmp_path: Path) -> None:
    seen: Counter[tuple[str, object]] = Counter()
    for seed in range(FIRST_SEED, FIRST_SEED + SEEDS):
        async with contextlib.AsyncExitStack() as stack:
            client = stack.enter_context(contextlib.closing(shared_redis.client()))
            client.flushall()
            benches: list[Bench] = [
                await stack.enter_async_context(opened(MemoryBench())),
                await stack.enter_async_context(opened(SqliteBench(tmp_path / f"{seed}.db"))),
                await stack.enter_async_context(opened(RedisBench(shared_redis.url, client))),
            ]
            for bench in benches[:2]:
                bench.wall.now = time.time_ns() // 1_000_000  # type: ignore[union-attr]
            run = Congruence(benches, seed, seen)
            for _ in range(OPERATIONS):
                await run.step()
            await run.listings_agree()
    assert len(seen) >= KINDS_SEEN_AT_LEAST, sorted(seen)
