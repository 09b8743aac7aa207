"""CompactSession: a summary takes the place of older turns, in one change; the whole history stays in a fork."""

from __future__ import annotations

import asyncio
import io
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration

from pensieve import AsyncClient, Client
from pensieve.cli import main as cli
from pensieve.errors import Unavailable
from pensieve.store import HistoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import ANSWER, Rig, refusal, serving, spec, uid, user


async def compact(rig: Rig, name: str, **fields: Any) -> pb.CompactSessionResponse:
    request = pb.CompactSessionRequest(name=name, **{"request_id": uid(), "keep_turns": 1, **fields})
    return await rig.api.CompactSession(request)


async def test_the_older_turns_become_a_summary(store: HistoryStore) -> None:
    async with serving(store=store, context_limit=1000) as rig:
        name = await rig.create("Be brief.")
        for text in ("one", "two", "three"):
            await rig.run(name, text)
        before = await rig.items(name, tokens=True)
        request_id = uid()
        done = await compact(rig, name, request_id=request_id)
        assert done.summary == ANSWER and done.session.config.system_prompt == "Be brief."
        assert done.session.config.summary.endswith(ANSWER)
        texts = [one.text for one in await rig.items(name)]
        assert texts == [f"Be brief.\n\n{done.session.config.summary}", "three", ANSWER]
        assert (await rig.items(done.branch, tokens=True))[: len(before)] == before
        again = await compact(rig, name, request_id=request_id)
        assert (again.session.revision, again.branch, again.summary) == (5, done.branch, done.summary)
        assert (await rig.run(name, "four")).revision == 6
        twice = await compact(rig, name)
        assert [one.text for one in await rig.items(name)][1:] == ["four", ANSWER]
        assert twice.branch != done.branch
        assert (await refusal(compact(rig, name, keep_turns=9))).reason == "NOTHING_TO_COMPACT"


async def sessions(rig: Rig) -> list[pb.Session]:
    return list((await rig.api.ListSessions(pb.ListSessionsRequest())).sessions)


async def lasting(rig: Rig) -> list[str]:
    """The names of the sessions that never expire."""
    return sorted(one.name for one in await sessions(rig) if not one.HasField("expire_time"))


async def test_a_branch_lives_as_long_as_its_session() -> None:
    async with serving(context_limit=1000) as rig:
        for seconds in (0, 60, 10**6):
            name = await rig.create(config=pb.SessionConfig(ttl=Duration(seconds=seconds)))
            await rig.run(name, "one")
            done = await compact(rig, name, keep_turns=0)
            assert (await rig.session(done.branch)).config.ttl.seconds == seconds


@pytest.mark.parametrize("step", ["fork", "turn", "apply"])
async def test_what_fails_leaves_the_old_context(step: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(context_limit=1000, commit_retry_s=0.1) as rig:
        name = await rig.create("Be brief.")
        for text in ("one", "two"):
            await rig.run(name, text)
        before, request_id = await rig.items(name, tokens=True), uid()
        method = {"fork": "create", "turn": "commit", "apply": "apply"}[step]

        async def failing(*_: Any, **__: Any) -> Any:
            raise Unavailable("the disk is away")

        monkeypatch.setattr(rig.store, method, failing)
        monkeypatch.setattr(
            rig.conversations.turns._runner._settings.__class__, "commit_retry_s", 0.1, raising=False
        )
        assert (await refusal(compact(rig, name, request_id=request_id))).reason
        monkeypatch.undo()
        assert await rig.items(name, tokens=True) == before
        # A repeated call needs what is left over. Without one it goes away by itself.
        assert await lasting(rig) == [name] and len(await sessions(rig)) == 1 + (step != "fork")
        done = await compact(rig, name, request_id=request_id)
        assert done.session.revision == 4
        assert await lasting(rig) == sorted((name, done.branch))


@pytest.mark.fault(66)
async def test_a_turn_that_comes_first_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    """The summary does not know of it: the session goes on uncompacted."""
    async with serving(context_limit=1000) as rig:
        name = await rig.create()
        for text in ("one", "two"):
            await rig.run(name, text)
        fork, request_id = rig.conversations.sessions.fork, uid()

        async def slow(*given: Any, **named: Any) -> Any:
            made = await fork(*given, **named)
            await rig.run(name, "three")
            return made

        monkeypatch.setattr(rig.conversations.sessions, "fork", slow)
        assert (await refusal(compact(rig, name, request_id=request_id))).reason == "REVISION_MISMATCH"
        monkeypatch.undo()
        assert [one.text for one in await rig.items(name)][-2:] == ["three", ANSWER]
        listed = await rig.api.ListSessions(pb.ListSessionsRequest())
        assert [one.name for one in listed.sessions] == [name], "a branch that nothing will use"
        done = await compact(rig, name, request_id=request_id)
        assert [one.text for one in await rig.items(done.branch)][4:6] == ["three", ANSWER], (
            "a fork of its own"
        )
        other = await refusal(compact(rig, name, request_id=request_id, keep_turns=0))
        assert other.reason == "REQUEST_ID_REUSED"


async def test_a_repeated_request_keeps_to_its_revision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its branch is there from a try that failed, and a turn has come that neither branch nor summary knows."""
    async with serving(context_limit=1000) as rig:
        name, fields = await rig.create(), {"request_id": uid(), "expected_revision": 2, "keep_turns": 0}
        await rig.run(name, "one")

        async def failing(*_: Any, **__: Any) -> Any:
            raise Unavailable("the disk is away")

        monkeypatch.setattr(rig.store, "apply", failing)
        await refusal(compact(rig, name, **fields))
        monkeypatch.undo()
        await rig.run(name, "two")
        assert (await refusal(compact(rig, name, **fields))).reason == "REVISION_MISMATCH"
        assert [one.text for one in await rig.items(name)] == ["one", ANSWER, "two", ANSWER]


async def test_what_cannot_be_compacted(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(context_limit=1000) as rig:
        name = await rig.create()
        await rig.run(name, "one")
        for fields, reason in (
            ({"keep_turns": 1}, "NOTHING_TO_COMPACT"),
            ({"request_id": ""}, "FIELD_INVALID"),
            ({"max_summary_tokens": 0}, "FIELD_INVALID"),
            ({"keep_turns": 0, "expected_revision": 1}, "REVISION_MISMATCH"),
            ({"keep_turns": 0, "instruction": "x " * 2000}, "CONTEXT_LIMIT_EXCEEDED"),
        ):
            assert (await refusal(compact(rig, name, **fields))).reason == reason
        assert (await refusal(compact(rig, "sessions/nowhere"))).reason == "SESSION_NOT_FOUND"
        assert (await rig.session(name)).revision == 2
    async with serving(answer=" ", context_limit=1000) as rig:
        name = await rig.create()
        await rig.run(name, "one")
        assert (await refusal(compact(rig, name, keep_turns=0))).reason == "SUMMARY_EMPTY"
        assert await lasting(rig) == [name]
    async with serving(answer=None) as rig:
        name = await rig.create()
        call = rig.call(name, spec("hi"))
        (await rig.link.next_generation()).admit()
        assert (await refusal(compact(rig, name, keep_turns=0))).reason == "TURN_IN_PROGRESS"
        call.cancel()


async def test_what_stays_is_as_the_template_writes_it() -> None:
    """The compacted context is that of a session that begins with the summary and the turns that stay."""
    async with serving(context_limit=1000) as rig:
        name = await rig.create("Be brief.")
        for text in ("one", "two", "three"):
            await rig.run(name, text)
        done = await compact(rig, name, keep_turns=2)
        said = [user("two"), pb.InputItem(role=pb.ROLE_ASSISTANT, text=ANSWER)]
        said += [user("three"), pb.InputItem(role=pb.ROLE_ASSISTANT, text=ANSWER)]
        prompt = f"Be brief.\n\n{done.session.config.summary}"
        fresh = await rig.create(prompt, initial_items=said, followed_by=[pb.ROLE_USER])
        compacted, whole = [await rig.items(one, tokens=True) for one in (name, fresh)]
        assert [one.tokens.ids for one in compacted] == [one.tokens.ids for one in whole]
        change = pb.UpdateSessionRequest(
            name=name, session=pb.Session(config=pb.SessionConfig(system_prompt="Be long."))
        )
        change.update_mask.paths.append("config.system_prompt")
        await rig.api.UpdateSession(change)
        first = (await rig.items(name))[0].text
        assert first == f"Be long.\n\n{done.session.config.summary}", "a new system prompt keeps the summary"


async def test_both_clients_and_the_chat(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serving(context_limit=1000) as rig, AsyncClient(rig.target) as client:
        chat = await client.create_session(session_id="talk")
        for text in ("one", "two", "three"):
            await chat.send(text)
        done = await chat.compact(keep_turns=1, request_id="first")
        assert (done.summary, done.session.revision) == (ANSWER, 5) and done.usage is not None
        assert (await chat.compact(keep_turns=1, request_id="first")).branch == done.branch

        def blocking() -> None:
            with Client(rig.target) as same:
                assert same.session(done.branch).items()[0].text == "one"
                again = same.session("talk").compact(
                    keep_turns=0, instruction="Say it.", max_summary_tokens=50
                )
                assert again.session.item_count == 1 and again.session.summary.endswith(ANSWER)
            monkeypatch.setattr("sys.stdin", io.StringIO("four\n/compact 0\n/compact x\n/quit\n"))
            cli.main(["chat", "--target", rig.target, "--session", "talk"])

        with pytest.raises(SystemExit):
            await asyncio.to_thread(blocking)
        said = capsys.readouterr()
        assert "tokens of context now" in said.out + said.err and "/compact takes" in said.out + said.err
        assert [item.role for item in await chat.items()] == ["system"]


async def test_the_summary_of_a_session_without_a_system_prompt() -> None:
    """Its item belongs to the settings: a new system prompt replaces it, and a rewind keeps it."""
    async with serving(context_limit=1000) as rig:
        name = await rig.create()
        for text in ("one", "two"):
            await rig.run(name, text)
        summary = (await compact(rig, name)).session.config.summary
        assert [one.text for one in await rig.items(name)] == [summary, "two", ANSWER]
        change = pb.UpdateSessionRequest(
            name=name, session=pb.Session(config=pb.SessionConfig(system_prompt="x"))
        )
        change.update_mask.paths.append("config.system_prompt")
        await rig.api.UpdateSession(change)
        assert [one.text for one in await rig.items(name)] == [f"x\n\n{summary}", "two", ANSWER]
        change.session.config.system_prompt = ""
        await rig.api.UpdateSession(change)
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=0, request_id=uid()))
        assert [one.text for one in await rig.items(name)] == [summary]


async def settled(rig: Rig) -> None:
    """Wait for the compactions that settings began."""
    while tasks := list(rig.conversations._idle_compaction._tasks.values()):
        await asyncio.wait(tasks)


def outcomes(rig: Rig) -> list[str]:
    """The outcomes of such compactions, from now on."""
    found: list[str] = []
    rig.conversations._idle_compaction._on_compacted = found.append
    return found


async def test_a_session_compacts_itself_when_its_context_is_long(store: HistoryStore) -> None:
    async with serving(store=store, context_limit=1000) as rig, AsyncClient(rig.target) as client:
        found = outcomes(rig)
        chat = await client.create_session(system_prompt="Be brief.", compact_at=10**6, keep_turns=1)
        for text in ("one", "two"):
            await chat.send(text)
        await settled(rig)
        info = await chat.refresh()
        assert (info.compact_at, info.keep_turns, info.summary) == (10**6, 1, "")
        await chat.update(compact_at=info.context_tokens)
        await chat.send("three")
        await settled(rig)
        info = await chat.refresh()
        assert info.summary.endswith(ANSWER)
        texts = [item.text for item in await chat.items()]
        assert texts == [f"Be brief.\n\n{info.summary}", "three", ANSWER]
        forks = [one for one in await client.sessions() if one.id != chat.id]
        assert [one.forked_from for one in forks] == [chat.name], "the fork is not compacted in turn"
        await chat.update(compact_at=0)
        for text in ("four", "five"):
            await chat.send(text)
        await settled(rig)
        assert len(await client.sessions()) == 2 and len(await chat.items()) == 7
    assert found == ["compacted"]


async def test_a_policy_that_fails_hurts_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving(context_limit=1000) as rig, AsyncClient(rig.target) as client:
        found = outcomes(rig)
        chat = await client.create_session(compact_at=1, keep_turns=0)
        fork = rig.conversations.sessions.fork

        async def away(*_: Any, **__: Any) -> Any:
            raise Unavailable("the disk is away")

        async def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("a bug")

        async def overtaken(*given: Any, **named: Any) -> Any:
            made = await fork(*given, **named)
            await rig.run(chat.name, "quick")
            return made

        for failing in (away, broken, overtaken):
            monkeypatch.setattr(rig.conversations.sessions, "fork", failing)
            await chat.send("one")
            await settled(rig)
        monkeypatch.undo()
        assert [item.text for item in await chat.items()] == ["one", ANSWER] * 3 + ["quick", ANSWER]
        await chat.send("two")
        await settled(rig)
        assert [item.role for item in await chat.items()] == ["system"]
    assert found == ["store_unavailable", "bug", "revision_mismatch", "compacted"]


async def test_a_session_begins_with_a_summary() -> None:
    async with serving(context_limit=1000) as rig, AsyncClient(rig.target) as client:
        given: Any = {"initial_items": [("user", "two"), ("assistant", "Yes."), ("user", "three")]}
        whole = await client.create_session(system_prompt="Be brief.\n\nOne.", **given)
        parts = await client.create_session(system_prompt="Be brief.", summary="One.", **given)
        first, second = [
            [(one.text, one.tokens) for one in await rig.items(each.name, tokens=True)]
            for each in (whole, parts)
        ]
        assert first == second
        assert (await parts.update(system_prompt="Go on.")).summary == "One."
        assert (await parts.items())[0].text == "Go on.\n\nOne."
