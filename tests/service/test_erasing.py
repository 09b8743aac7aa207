"""RewindSession with ``erase``: what is cut off can be read nowhere any more, and is never made again unasked."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from pensieve.store import HistoryStore, Key, open_store
from pensieve.store.maintenance import Mode, backup, check, open_backup, open_raw, restore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import drawing
from support.service.service_rig import ANSWER, Rig, refusal, serving, spec, uid
from support.store.places import Place

CANARY = "canary"
ERASED = ("NOT_FOUND", "CONTENT_ERASED")


async def rewind(rig: Rig, name: str, item: int, **fields: Any) -> pb.Session:
    asked = pb.RewindSessionRequest(name=name, item=item, **{"request_id": uid(), "erase": True, **fields})
    return (await rig.api.RewindSession(asked)).session


async def texts(rig: Rig, name: str, **fields: Any) -> list[str]:
    return [one.text for one in (await rig.api.ListItems(pb.ListItemsRequest(name=name, **fields))).items]


async def log_of(rig: Rig, name: str) -> str:
    return repr(await rig.store.read(Key("acme", name.removeprefix("sessions/"))))


async def test_what_was_cut_off_is_gone_everywhere(place: Place, store: HistoryStore) -> None:
    async with serving(store=store, answer=f"{CANARY} says") as rig:
        name = await rig.create()
        first = await rig.run(name, "hi")
        turn = spec(f"my {CANARY}", mark="m", annotations={"k": CANARY})
        await rig.run(name, turn)
        page = await rig.api.ListItems(pb.ListItemsRequest(name=name, page_size=1))
        after = await rewind(rig, name, 1)
        assert after.revision == 4 and await texts(rig, name) == ["hi"]
        assert CANARY not in await log_of(rig, name)
        assert await texts(rig, name, page_token=page.next_page_token) == []
        for call in (
            rig.get_turn(name, turn.request_id),
            rig.run(name, turn),
            rig.stream(name, turn),
            rig.get_turn(name, first.request_id),
            rig.api.FindTurn(pb.FindTurnRequest(mark="m")),
        ):
            error = await refusal(call)
            assert (error.code, error.reason) in (ERASED, ("NOT_FOUND", "TURN_NOT_FOUND"))
        error = await refusal(rig.run(name, spec("another", request_id=turn.request_id)))
        assert error.reason == "REQUEST_ID_REUSED"
        assert (await rig.run(name, "on")).revision == 5
        await rewind(rig, name, 1)
        assert rig.link.evicted, "the engine keeps nothing of it"
        if place.url != "memory:":
            assert CANARY.encode() not in place.files()


async def test_an_answer_goes_and_the_question_stays(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create("Be brief."), spec("hi")
        await rig.run(name, turn)
        await rewind(rig, name, 2)
        assert await texts(rig, name) == ["Be brief.", "hi"]
        assert "'hi'" in await log_of(rig, name) and ANSWER not in await log_of(rig, name)
        error = await refusal(rig.run(name, turn))
        assert (error.code, error.reason) == ERASED
        await rewind(rig, name, 0)
        assert "'hi'" not in await log_of(rig, name) and await texts(rig, name) == ["Be brief."]


async def test_copies_under_other_numbers_go_too(store: HistoryStore) -> None:
    """A changed system prompt appends all items again; a choice appends another answer."""
    async with serving(store=store) as rig:
        name, turn = await rig.create("Be brief."), drawing(3)
        kept = await rig.run(name, "stays here")
        drawn = (await rig.stream(name, turn)).completed
        choice = pb.ChooseCandidateRequest(session=name, request_id=turn.request_id, candidate=2)
        await rig.api.ChooseCandidate(choice)
        change = pb.UpdateSessionRequest(
            name=name, session=pb.Session(config=pb.SessionConfig(system_prompt="Be long."))
        )
        change.update_mask.paths.append("config.system_prompt")
        await rig.api.UpdateSession(change)
        items = (await rig.api.ListItems(pb.ListItemsRequest(name=name))).items
        await rewind(rig, name, items[2].item)
        log = await log_of(rig, name)
        assert not any(repr(one.text) in log for one in drawn.candidates[1:]), (
            "the first one was said before, too"
        )
        assert await rig.get_turn(name, kept.request_id) == kept and "'stays here'" in log
        error = await refusal(rig.api.ChooseCandidate(choice))
        assert (error.code, error.reason) == ERASED


async def test_a_fork_keeps_its_own_and_a_plain_rewind_keeps_history(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, turn = await rig.create(), spec("hi")
        made = await rig.run(name, turn)
        fork = (await rig.api.ForkSession(pb.ForkSessionRequest(name=name, request_id=uid()))).session.name
        await rewind(rig, name, 0, erase=False)
        assert await rig.get_turn(name, turn.request_id) == made
        other = await rig.run(name, "again")
        await rewind(rig, name, 0)
        assert await texts(rig, fork) == ["hi", ANSWER]
        assert await rig.get_turn(name, turn.request_id) == made, "it was cut off before, and not erased"
        assert (await refusal(rig.get_turn(name, other.request_id))).reason == "CONTENT_ERASED"


async def test_it_is_idempotent_and_guards_its_revision(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name, request_id = await rig.create(), uid()
        await rig.run(name, "hi")
        assert (await refusal(rewind(rig, name, 0, expected_revision=1))).reason == "REVISION_MISMATCH"
        assert ANSWER in await log_of(rig, name)
        both = [await rewind(rig, name, 0, request_id=request_id, expected_revision=2) for _ in range(2)]
        assert both[0].revision == both[1].revision == 3
        plain = rewind(rig, name, 0, request_id=request_id, expected_revision=2, erase=False)
        assert (await refusal(plain)).reason == "REQUEST_ID_REUSED"
        added = pb.AppendItemsRequest(name=name, request_id=uid())
        added.items.add(role=pb.ROLE_USER, text="note")
        await rig.api.AppendItems(added)
        await rewind(rig, name, 0)
        assert (await refusal(rig.api.AppendItems(added))).reason == "CONTENT_ERASED"


async def test_another_server_forgets_what_it_had_cached(place: Place, store: HistoryStore) -> None:
    if place.url.startswith("sqlite"):
        pytest.skip("one server has the file")
    async with serving(store=store) as one, serving(store=store) as other:
        name = await one.create()
        await one.run(name, f"my {CANARY}")
        page = await other.api.ListItems(pb.ListItemsRequest(name=name, page_size=1))
        await rewind(one, name, 0)
        assert await texts(other, name, page_token=page.next_page_token) == []
        cached = repr(other.conversations._transcript._cached)
        assert CANARY not in cached


async def test_maintenance_keeps_erased_as_erased(place: Place, tmp_path: Path) -> None:
    if place.url == "memory:":
        pytest.skip("only its own process sees a store in memory")
    store = open_store(place.url)
    await store.open()
    async with serving(store=store) as rig:
        name = await rig.create()
        turns = [spec(text) for text in ("one", f"my {CANARY}", "three")]
        for turn in turns[:2]:
            await rig.run(name, turn)
        await rewind(rig, name, 2)
        await rig.run(name, turns[2])
        log = await rig.store.read(Key("acme", name.removeprefix("sessions/")))
    await store.close()
    raw, file = open_raw(place.url), tmp_path / "backup.jsonl"
    await raw.open(Mode.READ)
    assert (await check(raw)).findings == []
    await backup(raw, file)
    await raw.close()
    assert CANARY.encode() not in file.read_bytes()
    target = open_raw(url := f"sqlite:///{tmp_path}/other.db")
    await target.open(Mode.WRITE)
    await restore(open_backup(file), target)
    assert (await check(target)).findings == []
    await target.close()
    moved = open_store(url)
    await moved.open()
    async with serving(store=moved) as rig:
        assert await rig.store.read(Key("acme", name.removeprefix("sessions/"))) == log
        assert (await refusal(rig.run(name, turns[1]))).reason == "CONTENT_ERASED"
        assert (await rig.run(name, turns[2])).revision == 5
        assert await texts(rig, name) == ["one", ANSWER, "three", ANSWER]
    await moved.close()


async def test_many_at_once_end_in_one_sound_log(store: HistoryStore) -> None:
    async with serving(store=store) as rig:
        name = await rig.create()
        for number in range(3):
            await rig.run(name, f"t{number}")
        results = await asyncio.gather(
            *(rewind(rig, name, item) for item in (4, 2, 0)), return_exceptions=True
        )
        assert not all(isinstance(one, BaseException) for one in results)
        log = await rig.store.read(Key("acme", name.removeprefix("sessions/")))
        assert log[-1].record.revision == len(log)
