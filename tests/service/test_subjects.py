"""Personal data: EraseSubject leaves no byte, ExportSession and ExportSubject show all, ImportSession gives it back."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.errors import Unavailable
from pensieve.server.operations.metrics import Metrics
from pensieve.server.rpc import service
from pensieve.server.rpc.interceptor import AccessControl
from pensieve.server.sessions import exports
from pensieve.store import HistoryStore, Key, open_store
from pensieve.store.maintenance import Mode, backup, open_raw
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import drawing
from support.service.service_rig import ANSWER, Rig, refusal, serving, spec, uid
from support.store.places import Place
from support.store.redis_server import RedisServer

ADA, BOB = "ada@example.com", "bob"
CANARY = "canary"
OTHER = (("tenant", "other"),)


def about(subject: str, **fields: Any) -> pb.SessionConfig:
    return pb.SessionConfig(subject=subject, **fields)


async def erase(
    rig: Rig, subject: str = ADA, **fields: Any
) -> tuple[list[pb.ErasedSession], pb.SubjectErased]:
    events = [one async for one in rig.api.EraseSubject(pb.EraseSubjectRequest(subject=subject), **fields)]
    assert events[-1].HasField("completed")
    return [one.session for one in events[:-1]], events[-1].completed


async def exported(call: Any) -> bytes:
    return b"".join([one.data async for one in call])


def export(rig: Rig, name: str) -> Any:
    return exported(rig.api.ExportSession(pb.ExportSessionRequest(name=name)))


async def import_(rig: Rig, data: bytes, *, piece: int = 1000, **first: Any) -> pb.Session:
    parts = [data[at : at + piece] for at in range(0, len(data), piece)]
    requests = [pb.ImportSessionRequest(data=part) for part in parts]
    for name, value in first.items():
        setattr(requests[0], name, value)
    return (await rig.api.ImportSession(requests)).session


def lines_of(data: bytes) -> list[dict[str, Any]]:
    return [json.loads(line) for line in data.splitlines()]


async def talk(rig: Rig) -> tuple[str, str, str]:
    """A session about Ada with everything that a session may hold, a fork of it, and Bob's."""
    hers = await rig.create(
        config=about(ADA, system_prompt=f"You know {CANARY}."), labels={"k": CANARY}, session_id="hers"
    )
    await rig.run(hers, spec(f"my {CANARY}", mark="m", annotations={"k": CANARY}))
    await rig.stream(hers, drawing(3))
    await rig.run(hers, spec(f"cut {CANARY}"))
    await rig.api.RewindSession(pb.RewindSessionRequest(name=hers, item=3, request_id=uid()))
    fork = await rig.api.ForkSession(pb.ForkSessionRequest(name=hers, request_id=uid(), session_id="fork"))
    his = await rig.create(config=about(BOB))
    await rig.run(his, "hi")
    return hers, fork.session.name, his


# ---- erasing


async def test_nothing_about_the_person_is_left(place: Place, store: HistoryStore) -> None:
    async with serving(store=store, answer=f"{CANARY} says") as rig:
        hers, fork, his = await talk(rig)
        assert (await rig.session(fork)).config.subject == ADA, "a fork is about the same person"
        sessions, done = await erase(rig)
        assert {one.name: (one.forked_from, one.turns) for one in sessions} == {
            hers: ("", 3),
            fork: (hers, 0),
        }
        whole = next(one for one in sessions if one.name == hers)
        # The system prompt, and a question and an answer per turn; three candidates are kept beside the answer.
        assert (whole.items, whole.revision, whole.damaged) == (7, 5, False) and whole.tokens > 20
        assert (done.sessions, done.forks, done.turns, done.items) == (2, 1, 3, 10) and done.replica == "r1"
        assert list(done.undecided) == []
        assert bool(done.remnants) == place.url.startswith("redis")
        for name in (hers, fork):
            assert (await refusal(rig.session(name))).reason == "SESSION_DELETED"
            assert f"acme/{name.removeprefix('sessions/')}" in map(str, rig.link.evicted)
        assert [one.text for one in await rig.items(his)] == ["hi", f"{CANARY} says"]
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=his))
        assert CANARY not in repr(rig.conversations._transcript._cached)
        if place.url != "memory:":
            assert not [word for word in (CANARY, ADA) if word.encode() in place.files()]
            assert not [word for word in (CANARY, ADA) if word.encode() in await _backup_of(place)]
        again, done = await erase(rig)
        assert again == [] and done.sessions == 0


async def _backup_of(place: Place) -> bytes:
    raw, file = open_raw(place.url), Path(place.url.removeprefix("sqlite:///")).parent / "backup.jsonl"
    if place.url.startswith("redis"):
        file = place.folder / "backup.jsonl"
    await raw.open(Mode.READ)
    await backup(raw, file)
    await raw.close()
    data = file.read_bytes()
    file.unlink()
    return data


@pytest.mark.redis
async def test_the_append_only_file_holds_nothing_once_it_is_rewritten(redis_server: RedisServer) -> None:
    with contextlib.closing(redis_server.client()) as client:
        client.flushall()
        store = open_store(redis_server.url)
        await store.open()
        async with serving(store=store) as rig:
            name = await rig.create(config=about(ADA))
            await rig.run(name, f"my {CANARY}")
            _, done = await erase(rig)
        await store.close()
        assert CANARY.encode() in _append_only(redis_server) and "BGREWRITEAOF" in done.remnants
        client.bgrewriteaof()
        until = time.monotonic() + 20
        while CANARY.encode() in _append_only(redis_server) and time.monotonic() < until:
            await asyncio.sleep(0.05)
        left = _append_only(redis_server)
        assert CANARY.encode() not in left and ADA.encode() not in left


def _append_only(server: RedisServer) -> bytes:
    return b"".join(file.read_bytes() for file in server.append_only_folder.iterdir())


async def test_another_tenant_finds_nothing(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name = await rig.create(config=about(ADA))
        sessions, done = await erase(rig, metadata=OTHER)
        assert (sessions, done.sessions) == ([], 0) and (await rig.session(name)).config.subject == ADA
        call = rig.api.ExportSubject(pb.ExportSubjectRequest(subject=ADA), metadata=OTHER)
        assert lines_of(await exported(call)) == [{"line": "end", "sessions": 0}]
        foreign = rig.api.ExportSession(pb.ExportSessionRequest(name=name), metadata=OTHER)
        assert (await refusal(foreign)).reason == "SESSION_NOT_FOUND"


async def test_a_running_turn_loses_its_session() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create(config=about(ADA))
        call = asyncio.ensure_future(refusal(rig.call(name, spec("hi"))))
        (await rig.link.next_generation()).admit()
        sessions, _ = await erase(rig)
        assert [one.name for one in sessions] == [name]
        assert (await call).reason == "SESSION_DELETED"


async def test_an_erasure_that_was_broken_off_is_ended_by_the_next(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The receipt names what is gone; the rest is there and is erased later."""
    async with serving(store=store) as rig:
        names = {await rig.create(config=about(ADA)) for _ in range(3)}
        whole, calls = store.delete, 0

        async def failing(key: Key, **fields: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 2:
                raise Unavailable("the disk is away")
            await whole(key, **fields)

        monkeypatch.setattr(store, "delete", failing)
        events = list[pb.EraseSubjectResponse]()
        with pytest.raises(Exception, match="the disk is away"):
            async for event in rig.api.EraseSubject(pb.EraseSubjectRequest(subject=ADA)):
                events.append(event)
        gone = {one.session.name for one in events}
        assert len(gone) == 1 and not events[-1].HasField("completed")
        for name in names - gone:
            assert (await rig.session(name)).config.subject == ADA
        sessions, _ = await erase(rig)
        assert {one.name for one in sessions} == names - gone


async def test_a_fork_made_during_an_erasure_does_not_escape(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        name = await rig.create(config=about(ADA))
        create = rig.store.create

        async def late(*given: Any) -> Any:
            await erase(rig)
            return await create(*given)

        monkeypatch.setattr(rig.store, "create", late)
        fork = rig.api.ForkSession(pb.ForkSessionRequest(name=name, request_id=uid(), session_id="fork"))
        assert (await refusal(fork)).reason == "SESSION_DELETED"
        assert (await refusal(rig.session("sessions/fork"))).reason == "SESSION_DELETED"


async def test_turns_committed_meanwhile_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        name = await rig.create(config=about(ADA))
        residency, committed = rig.link.residency, 0

        async def late(session: Any) -> Any:
            nonlocal committed
            if not committed:
                committed = (await rig.run(name, "one more")).revision
            return await residency(session)

        monkeypatch.setattr(rig.link, "residency", late)
        (session,), _ = await erase(rig)
        assert (session.turns, session.revision) == (1, committed)


async def test_a_caller_that_goes_away_leaves_no_cache_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        await rig.create(config=about(ADA), session_id="hers")
        deleted, goes_on = asyncio.Event(), asyncio.Event()
        end_session = rig.conversations.turns.end_session

        async def slow(*given: Any) -> None:
            deleted.set()
            await goes_on.wait()
            await end_session(*given)

        monkeypatch.setattr(rig.conversations.turns, "end_session", slow)
        call = rig.api.EraseSubject(pb.EraseSubjectRequest(subject=ADA))
        await asyncio.wait_for(deleted.wait(), 20)
        call.cancel()
        await asyncio.sleep(0.2)  # the server hears of it
        goes_on.set()
        for _ in range(200):
            if rig.link.evicted:
                break
            await asyncio.sleep(0.05)
        assert rig.link.evicted == ["acme/hers"]


async def test_damaged_sessions_are_erased_or_named(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        hers, unknown = await rig.create(config=about(ADA)), await rig.create()
        for name in (hers, unknown):
            await store.mark_damaged(Key("acme", name.removeprefix("sessions/")))
        sessions, done = await erase(rig)
        assert [one.name for one in sessions] == [hers] and list(done.undecided) == [unknown]


async def test_expired_sessions_go_too(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        purged = 0

        async def purge() -> int:
            nonlocal purged
            purged += 1
            return 0

        monkeypatch.setattr(rig.store, "purge_expired", purge)
        await erase(rig)
        assert purged == 1


async def test_the_scope_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "keys.toml"
    entry = '[[key]]\nid = "{}"\nsha256 = "{}"\ntenant = "acme"\nscopes = {}\n'
    digest = "88d4266fd4e6338d13b845fcf289579d209c897823b9217da3e161936f031589"  # of "abcd"
    file.write_text(
        entry.format("all", digest, '["sessions.read", "sessions.write", "admin", "grammars"]')
        + entry.format("eraser", digest, '["erase"]')
    )
    door = AccessControl(file, Metrics())
    async with serving(door=door) as rig:
        request = pb.EraseSubjectRequest(subject=ADA)
        error = await refusal(rig.api.EraseSubject(request, metadata=_key("all")))
        assert (error.code, error.reason, error.metadata["scope"]) == (
            "PERMISSION_DENIED",
            "SCOPE_MISSING",
            "erase",
        )
        await erase(rig, metadata=_key("eraser"))


def _key(name: str) -> Any:
    return (("authorization", f"Bearer ck_{name}_abcd"),)


@pytest.mark.parametrize("subject", ["", "x" * 257, "é" * 129], ids=["empty", "long", "long in bytes"])
async def test_impossible_subjects(subject: str) -> None:
    async with serving() as rig:
        calls = [
            rig.api.EraseSubject(pb.EraseSubjectRequest(subject=subject)),
            rig.api.ExportSubject(pb.ExportSubjectRequest(subject=subject)),
        ]
        if subject:
            calls.append(rig.api.CreateSession(pb.CreateSessionRequest(config=about(subject))))
        for call in calls:
            assert (await refusal(call)).code == "INVALID_ARGUMENT"
        assert await rig.create(config=about("é" * 128))


async def test_a_mask_of_an_older_client_keeps_the_subject() -> None:
    """Its ``config`` has no subject. Without one, an erasure would miss the session."""
    async with serving() as rig:
        name = await rig.create(config=about(ADA))
        for config, mask, subject in (
            (pb.SessionConfig(system_prompt="x"), "config", ADA),
            (about(BOB), "config", BOB),
            (pb.SessionConfig(), "config.subject", ""),
        ):
            change = pb.UpdateSessionRequest(name=name, session=pb.Session(config=config))
            change.update_mask.paths.append(mask)
            assert (await rig.api.UpdateSession(change)).session.config.subject == subject


# ---- exporting and importing


async def test_an_export_shows_everything(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        hers, fork, _ = await talk(rig)
        await rig.create()
        data = await exported(rig.api.ExportSubject(pb.ExportSubjectRequest(subject=ADA)))
        lines = lines_of(data)
        assert {line["session"] for line in lines if line["line"] == "session"} == {"hers", "fork"}
        assert lines[-1] == {"line": "end", "sessions": 2} and f"cut {CANARY}" in data.decode(), "superseded"
        parts = [await export(rig, name) for name in (hers, fork)]
        assert sorted(b"".join(parts).splitlines()) == sorted(
            [*data.splitlines()[:-1], *[b'{"line":"end","sessions":1}'] * 2]
        )


async def test_an_import_gives_an_equal_session(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        hers, *_ = await talk(rig)
        data, before = await export(rig, hers), await rig.items(hers, tokens=True)
        session = await rig.session(hers)
    async with serving() as there:
        imported = await import_(there, data, piece=7)
        assert (
            imported.name == hers and imported.config == session.config and imported.labels == session.labels
        )
        assert imported.context_tokens == session.context_tokens
        assert await there.items(hers, tokens=True) == before
        assert await import_(there, data) == await there.session(hers), "the same lines again"
        assert (await there.run(hers, "on")).usage.context_tokens > session.context_tokens
        copy = await import_(there, data, new_id=True)
        assert copy.name not in (hers, "") and copy == await import_(there, data, new_id=True)
        assert (await import_(there, data, session_id="mine")).name == "sessions/mine"
        assert await there.items("sessions/mine", tokens=True) == before
        error = await refusal(there.api.ImportSession([pb.ImportSessionRequest(data=data, session_id="x")]))
        assert error.code == "INVALID_ARGUMENT"


async def test_an_id_that_is_taken(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name = await rig.create(session_id="mine")
        await rig.run(name, "hi")
        data = await export(rig, name)
        assert (await refusal(import_(rig, data))).reason == "SESSION_EXISTS"
        await erase(rig, BOB)
        await rig.api.DeleteSession(pb.DeleteSessionRequest(name=name))
        assert (await refusal(import_(rig, data))).reason == "SESSION_DELETED"
        assert await rig.items((await import_(rig, data, new_id=True)).name)


async def test_a_cut_or_changed_import_leaves_nothing(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name = await rig.create("Be brief.", session_id="mine")
        await rig.run(name, "hi")
        data = await export(rig, name)
        whole = data[: data.index(b'{"line":"end"')]
        first, *_, last = whole.splitlines(keepends=True)
        wrong = {
            "nothing": b"",
            "no ends": whole.removesuffix(last),
            "half a line": whole[:-10],
            "a record less": first + last,
            "a changed text": whole.replace(b"Be brief.", b"Be rude.."),
            "another order": last + first,
            "two sessions": whole + whole,
            "not JSON": b"\xff" * 100 + b"\n",
            "not ours": b'{"line":"record"}\n',
            "damaged": whole.replace(b'"line":"session-end"', b'"line":"session-end","damage":"x"'),
            "a newer server's": whole.replace(b'"format":1', b'"format":2'),
        }
        for what, lines in wrong.items():
            error = await refusal(import_(rig, lines or b" ", new_id=True))
            assert error.code == "INVALID_ARGUMENT", what
            assert "Be" not in error.message and ANSWER not in error.message
        assert "upgrade" in error.message
        call = rig.api.ImportSession(_stalled(whole))
        await asyncio.sleep(0.1)
        call.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await call
        listed = (await rig.api.ListSessions(pb.ListSessionsRequest())).sessions
        assert [one.name for one in listed] == [name]


async def _stalled(data: bytes) -> AsyncIterator[pb.ImportSessionRequest]:
    yield pb.ImportSessionRequest(data=data[:-10])
    await asyncio.sleep(60)


def _forged(data: bytes, change: Any) -> bytes:
    """The lines with ``change`` applied to the first record, and ends that fit."""
    session, record, *_ = lines_of(data)
    change(record["record"])
    lines = b"".join(json.dumps(line).encode() + b"\n" for line in (session, record))
    end = {"line": "session-end", "records": 1, "sha256": hashlib.sha256(lines).hexdigest()}
    return lines + json.dumps(end).encode() + b"\n"


async def test_lines_that_a_client_made_up_are_checked_as_requests_are() -> None:
    async with serving() as rig:
        data = await export(rig, await rig.create("Be brief.", session_id="mine"))
        changes: dict[str, Any] = {
            "a negative number": lambda record: record["items"][0].update(number=-1),
            "half a token": lambda record: record["items"][0].update(tokens="AAA="),
            "glue beyond the tokens": lambda record: record["items"][0].update(prefix_tokens=1000),
            "an unknown role": lambda record: record["items"][0].update(role=9),
            "a temperature": lambda record: record["config"].update(sampling={"temperature": -1}),
            "a huge count": lambda record: record["config"].update(sampling={"top_k": 1 << 40}),
            "tools": lambda record: record["config"].update(tools="{"),
            "a label": lambda record: record.update(labels={"!": "x"}),
            "a long subject": lambda record: record["config"].update(subject="x" * 300),
            "a revision": lambda record: record.update(revision=3),
        }
        for what, change in changes.items():
            error = await refusal(import_(rig, _forged(data, change), new_id=True))
            assert error.code == "INVALID_ARGUMENT", what
        beyond = _forged(data, lambda record: record["items"][0].update(tokens="////fw=="))
        name = (await import_(rig, beyond, new_id=True)).name
        assert (await refusal(rig.run(name, "hi"))).reason == "MODEL_MISMATCH", (
            "its ids never reach the engine"
        )


async def test_imports_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        data = await export(rig, await rig.create("Be brief."))
        monkeypatch.setattr(exports, "MAX_IMPORT_BYTES", 100)
        assert "100 bytes" in (await refusal(import_(rig, data, new_id=True))).message
        monkeypatch.undo()
        monkeypatch.setattr(service, "IMPORT_TIMEOUT_S", 0.2)
        slow, full = "REQUEST_TOO_SLOW", "SERVER_OVERLOADED"
        whole = [pb.ImportSessionRequest(data=data, new_id=True)]
        calls = [refusal(rig.api.ImportSession(_stalled(data))) for _ in range(3)]
        *stalled, other = await asyncio.gather(
            *calls, rig.api.ImportSession(whole, metadata=(("tenant", "other"),))
        )
        assert sorted(error.reason for error in stalled) == sorted([slow, slow, full])
        assert other.session.name, "another tenant has places of its own"
        assert await import_(rig, data, new_id=True), "the place is free again"
        monkeypatch.setattr(service, "MAX_IMPORTS", 1)
        full_house = [refusal(rig.api.ImportSession(_stalled(data))) for _ in range(2)]
        assert {error.reason for error in await asyncio.gather(*full_house)} == {slow, full}


async def test_an_export_of_a_damaged_session_ends_at_the_damage(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:
        name = await rig.create(config=about(ADA))
        await rig.run(name, "hi")
        session = rig.store._sessions[Key("acme", name.removeprefix("sessions/"))]
        session.log[1] = session.log[1]._replace(data=b"\x01bad")
        data = await exported(rig.api.ExportSubject(pb.ExportSubjectRequest(subject=ADA)))
        *_, session_end, end = lines_of(data)
        assert session_end["damage"] and end == {"line": "end", "sessions": 1}
        assert (await refusal(import_(rig, data, new_id=True))).code == "INVALID_ARGUMENT"
        (erased,), _ = await erase(rig)
        assert erased.damaged
