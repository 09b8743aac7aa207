"""ChooseCandidate: another answer of the latest turn becomes its answer, durably, and everything later builds on it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pensieve.core import pack_tokens
from pensieve.store import HistoryStore, Key, open_store
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import BEST, TOKENS, begun, drawing, expected, rest, text_of
from support.service.service_rig import Rig, refusal, serving, spec, uid
from support.store.redis_server import redis_server_fixture

redis_server = redis_server_fixture("module")


@pytest.fixture(params=["memory", "sqlite", pytest.param("redis", marks=pytest.mark.redis)])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryStore]:
    if request.param == "redis":
        url = request.getfixturevalue("redis_server").url
    else:
        url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path / 'history.db'}"}[request.param]
    made = open_store(url)
    await made.open()
    try:
        yield made
    finally:
        await made.close()


async def choose(rig: Rig, name: str, request_id: str, candidate: int, **fields: Any) -> pb.Turn:
    request = pb.ChooseCandidateRequest(session=name, request_id=request_id, candidate=candidate, **fields)
    return (await rig.api.ChooseCandidate(request)).turn


async def refused(rig: Rig, name: str, request_id: str, candidate: int, **fields: Any) -> tuple[str, str]:
    error = await refusal(choose(rig, name, request_id, candidate, **fields))
    return error.code, error.reason


async def records(rig: Rig, name: str) -> int:
    return len(await rig.store.read(Key("acme", name.removeprefix("sessions/"))))


async def test_another_answer_takes_the_place_of_the_first(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create("Be brief."), drawing(3)
        before = (await rig.stream(name, turn)).completed
        generation = rig.link.generations[-1]
        after = await choose(rig, name, turn.request_id, 2)
        assert (after.chosen_candidate, after.output.text) == (2, expected(2))
        assert (after.base_revision, after.revision) == (before.base_revision, before.revision + 1)
        assert after.usage.output_tokens == len(TOKENS) - 2
        assert after.usage.context_tokens == before.usage.context_tokens
        assert after.output.item == before.output.item + 1, "item numbers are never used again"
        items = await rig.items(name, tokens=True)
        assert [item.text for item in items] == ["Be brief.", "hi", expected(2)]
        assert items[-1] == pb.Item(
            item=after.output.item,
            role=pb.ROLE_ASSISTANT,
            text=expected(2),
            request_id=turn.request_id,
            finish_reason=pb.FINISH_REASON_EOS,
            create_time=items[-1].create_time,
            tokens=items[-1].tokens,
        )
        session = await rig.session(name)
        assert (session.revision, session.item_count) == (after.revision, 3)
        context = [token for item in items for token in item.tokens.ids]
        assert context == generation.tokens + TOKENS[2:], "token for token what the model saw and said"
        assert session.context_tokens == len(context)
        assert rig.link.chosen == [(generation.session, 2)]
        await rig.run(name, "next")
        assert rig.link.generations[-1].tokens[: len(context)] == context


async def test_it_survives_a_restart_and_replays(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.run(name, turn)
        chosen = await choose(rig, name, turn.request_id, 1)
    async with serving(store=store) as rig:
        assert await rig.get_turn(name, turn.request_id) == chosen
        again = await rig.stream(name, turn)
        assert again.accepted.replayed and again.completed == chosen
        assert [text_of(again, i) for i in range(3)] == [expected(i) for i in range(3)]
        assert [item.text for item in await rig.items(name)] == ["hi", expected(1)]
        back = await choose(rig, name, turn.request_id, 0)
        assert (back.chosen_candidate, back.output.text) == (0, expected(0))
        assert not rig.link.chosen, "the engine has the first one's KV as the session's, or not at all"
        assert (await choose(rig, name, turn.request_id, 2)).revision == chosen.revision + 2


async def test_choosing_the_chosen_one_changes_nothing(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create(), drawing(3)
        done = (await rig.stream(name, turn)).completed
        assert await choose(rig, name, turn.request_id, 0) == done
        chosen = await choose(rig, name, turn.request_id, 2, expected_revision=done.revision)
        count = await records(rig, name)
        again = await choose(rig, name, turn.request_id, 2, expected_revision=done.revision)
        assert again == chosen and await records(rig, name) == count, "a retry whose answer was lost"
        await rig.run(name, "next")
        assert await choose(rig, name, turn.request_id, 2) == chosen
        assert len(rig.link.chosen) == 1


async def test_a_candidate_that_is_not_there() -> None:
    unknown = ("NOT_FOUND", "CANDIDATE_NOT_FOUND")
    async with serving() as rig:
        name, turn, single = await rig.create(), drawing(3), spec("one answer")
        await rig.run(name, turn)
        for candidate in (3, 2**32 - 1):
            assert await refused(rig, name, turn.request_id, candidate) == unknown
        await rig.run(name, single)
        assert await refused(rig, name, single.request_id, 1) == unknown
        assert not (await choose(rig, name, single.request_id, 0)).candidates
        assert not rig.link.chosen


async def test_a_turn_that_is_not_there() -> None:
    unknown = ("NOT_FOUND", "TURN_NOT_FOUND")
    async with serving() as rig:
        name, rewind = await rig.create(), uid()
        assert await refused(rig, name, uid(), 0) == unknown
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, request_id=rewind, item=0))
        assert await refused(rig, name, rewind, 0) == unknown
        assert await refused(rig, "sessions/nowhere", uid(), 0) == ("NOT_FOUND", "SESSION_NOT_FOUND")
        bad = ("INVALID_ARGUMENT", "FIELD_INVALID")
        assert await refused(rig, name, "not-a-uuid", 0) == bad
        assert await refused(rig, "nonsense", uid(), 0) == bad


async def _next_turn(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    await rig.run(name, "next")


async def _regenerate(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    await rig.run(name, spec(replace_after_item=1))


async def _rewind(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    await rig.api.RewindSession(pb.RewindSessionRequest(name=name, request_id=uid(), item=1))


async def _update(rig: Rig, name: str, turn: pb.TurnSpec) -> None:
    session = pb.Session(config=pb.SessionConfig(system_prompt="Another."))
    await rig.api.UpdateSession(pb.UpdateSessionRequest(name=name, session=session))


@pytest.mark.parametrize("change", [_next_turn, _regenerate, _rewind, _update])
async def test_only_until_the_next_change_of_the_session(change: Any) -> None:
    async with serving() as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.run(name, turn)
        await choose(rig, name, turn.request_id, 1)
        await change(rig, name, turn)
        before = (await rig.session(name), await rig.items(name))
        late = ("FAILED_PRECONDITION", "TURN_NOT_LATEST")
        assert await refused(rig, name, turn.request_id, 2) == late
        assert (await rig.session(name), await rig.items(name)) == before
        assert (await rig.get_turn(name, turn.request_id)).chosen_candidate == 1


async def test_not_while_a_turn_runs(store: HistoryStore) -> None:
    async with serving(store=store, answer=None) as rig:
        name, turn, after = await rig.create(), drawing(2), spec("next")
        busy = ("ABORTED", "TURN_IN_PROGRESS")
        call, generation = await begun(rig, name, turn)
        assert await refused(rig, name, turn.request_id, 1) == busy
        for candidate in range(2):
            generation.emit(*TOKENS[candidate:], candidate=candidate)
        generation.finish()
        await rest(call)
        call, generation = await begun(rig, name, after)
        error = await refusal(choose(rig, name, turn.request_id, 1))
        assert (error.code, error.reason) == busy
        assert error.metadata["active_request_id"] == after.request_id
        await rig.cancel(name, after.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        # The discarded turn has left no trace: this one is the latest again.
        assert (await choose(rig, name, turn.request_id, 1)).output.text == expected(1)


async def test_the_expected_revision_is_honoured(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create(), drawing(3)
        revision = (await rig.run(name, turn)).revision
        behind = await refusal(choose(rig, name, turn.request_id, 1, expected_revision=revision - 1))
        assert (behind.code, behind.reason) == ("ABORTED", "REVISION_MISMATCH")
        assert behind.metadata["current_revision"] == str(revision)
        ahead = await refused(rig, name, turn.request_id, 1, expected_revision=revision + 1)
        assert ahead == ("DATA_LOSS", "HISTORY_REGRESSED")
        assert await records(rig, name) == revision
        await choose(rig, name, turn.request_id, 1, expected_revision=revision)
        assert await records(rig, name) == revision + 1


async def test_choices_at_once_are_one_after_the_other(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create(), drawing(6)
        revision = (await rig.run(name, turn)).revision
        got = await asyncio.gather(*(choose(rig, name, turn.request_id, number) for number in range(1, 6)))
        assert sorted(one.revision for one in got) == [revision + number for number in range(1, 6)]
        last = max(got, key=lambda one: one.revision)
        assert await rig.get_turn(name, turn.request_id) == last
        assert [item.text for item in await rig.items(name)] == ["hi", last.output.text]


@pytest.mark.parametrize("place", ["load", "apply"])
async def test_a_change_between_the_look_and_the_record_is_seen(place: str) -> None:
    """The turn was the latest when it was looked at, and is not any more when its record would be appended."""

    class Racing(MemoryStore):
        rig: Rig
        name = ""

        async def _race(self, at: str) -> None:
            if self.name and at == place:
                name, self.name = self.name, ""
                await self.rig.run(name, "in between")

        async def load(self, key: Key, **fields: Any) -> Any:
            await self._race("load")
            return await super().load(key, **fields)

        async def apply(self, key: Key, fingerprint: str, record: Any, counts: Any, **fields: Any) -> Any:
            await self._race("apply")
            return await super().apply(key, fingerprint, record, counts, **fields)

    store = Racing()
    async with serving(store=store) as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.run(name, turn)
        store.rig, store.name = rig, name
        late = ("FAILED_PRECONDITION", "TURN_NOT_LATEST")
        assert await refused(rig, name, turn.request_id, 1) == late
        assert [item.text for item in await rig.items(name)][-2:] == ["in between", expected(0)]
        assert not rig.link.chosen


async def test_forks_rewinds_and_regenerations_build_on_the_choice() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.run(name, turn)
        chosen = await choose(rig, name, turn.request_id, 2)
        copy = await rig.api.ForkSession(pb.ForkSessionRequest(name=name))
        assert [item.text for item in await rig.items(copy.session.name)] == ["hi", expected(2)]
        assert await refused(rig, copy.session.name, turn.request_id, 1) == ("NOT_FOUND", "TURN_NOT_FOUND")
        await rig.run(name, "next")
        rewind = pb.RewindSessionRequest(name=name, request_id=uid(), item=chosen.output.item)
        await rig.api.RewindSession(rewind)
        assert [item.text for item in await rig.items(name)] == ["hi", expected(2)]
        given_up = pb.RewindSessionRequest(name=name, request_id=uid(), item=chosen.output.item - 1)
        assert (await refusal(rig.api.RewindSession(given_up))).reason == "ITEM_NOT_FOUND"
    async with serving() as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.run(name, turn)
        await choose(rig, name, turn.request_id, 2)
        again = await rig.run(name, spec(replace_after_item=1))
        assert [item.text for item in await rig.items(name)] == ["hi", again.output.text]


async def test_the_best_may_be_chosen_away() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), drawing(2, candidate_choice=BEST)
        await rig.run(name, turn)
        first = await choose(rig, name, turn.request_id, 0)
        assert first.output.text == expected(0) and [number for _, number in rig.link.chosen] == [1]
        key = Key("acme", name.removeprefix("sessions/"))
        stored = (await rig.store.read(key))[-1].record
        assert stored.items[0].tokens.endswith(pack_tokens(TOKENS)) and stored.keep_items == 1


async def test_a_fork_ends_in_another_answer(store: HistoryStore) -> None:
    """Whatever the session has gone on with."""
    async with serving(store=store) as rig:
        name, turn = await rig.create("Be brief."), drawing(3)
        done = (await rig.stream(name, turn)).completed
        before = rig.link.generations[-1].tokens
        await rig.stream(name, "more")

        async def forked(candidate: int | None, **fields: Any) -> str:
            request = pb.ForkSessionRequest(name=name, item=done.output.item, candidate=candidate, **fields)
            return str((await rig.api.ForkSession(request)).session.name)

        ids = uid()
        copy = await forked(2, request_id=ids)
        assert await forked(2, request_id=ids) == copy
        for other in (None, 1):
            assert (await refusal(forked(other, request_id=ids))).reason == "REQUEST_ID_REUSED"
        items = await rig.items(copy, tokens=True)
        assert [item.text for item in items[-2:]] == [done.input[0].text, expected(2)]
        assert items[-1].item == done.output.item
        await rig.stream(copy, "and now")
        drawn = [*before, *TOKENS[2:]]
        assert rig.link.generations[-1].tokens[: len(drawn)] == drawn
        assert [item.text for item in await rig.items(await forked(0))][-1] == expected(0)
        assert (await refusal(forked(3))).reason == "CANDIDATE_NOT_FOUND"
        # Of what is no answer with several candidates, there is none.
        for item in (done.input[0].item, items[0].item):
            request = pb.ForkSessionRequest(name=name, item=item, candidate=0)
            assert (await refusal(rig.api.ForkSession(request))).reason == "CANDIDATE_NOT_FOUND"
