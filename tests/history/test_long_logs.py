"""What is asked of a long log is read from where it is needed: the work does not grow with the log."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.core import Role, pack_tokens
from pensieve.store import HistoryStore, _codec, open_store
from pensieve.store.records import History, Item, Record, RecordKind
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import drawing
from support.service.service_rig import Rig, serving, spec, uid


class Decoded:
    """Counts the records that stores decode."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.records = 0
        decode = _codec.decode_record

        def counting(data: bytes) -> Record:
            self.records += 1
            return decode(data)

        monkeypatch.setattr(_codec, "decode_record", counting)

    def since(self) -> int:
        found, self.records = self.records, 0
        return found


def forgetful(rig: Rig) -> None:
    """Nothing is cached, as after a start."""
    transcript = rig.conversations._transcript
    for key in list(transcript._cached):
        transcript._drop(key)


@pytest.fixture(params=["memory", "sqlite"])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[HistoryStore]:
    url = {"memory": "memory:", "sqlite": f"sqlite:///{tmp_path / 'history.db'}"}[request.param]
    made = open_store(url)
    await made.open()
    yield made
    await made.close()


async def test_the_first_turn_of_a_session_that_was_made_here_reads_no_log(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the session was made of is known already."""
    decoded = Decoded(monkeypatch)
    async with serving(store=store) as rig:
        name = await rig.create("You are kind.")
        fork = (await rig.api.ForkSession(pb.ForkSessionRequest(name=name))).session.name
        decoded.since()
        for made in (name, fork):
            assert (await rig.run(made, "one")).revision == 2
        assert decoded.since() == 0
        items = [await rig.items(made) for made in (name, fork)]
        forgetful(rig)
        assert [await rig.items(made) for made in (name, fork)] == items, "the log says what was cached"


async def test_an_early_turn_costs_the_same_in_any_log(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Decoded(monkeypatch)
    async with serving(store=store) as rig:
        name = await rig.create()
        first = spec("one", mark="the-beginning")
        await rig.run(name, first)
        costs = []
        for turns in (2, 6):
            for number in range(turns):
                await rig.run(name, f"t{number}")
            forgetful(rig)
            decoded.since()
            turn = (await rig.api.GetTurn(pb.GetTurnRequest(session=name, request_id=first.request_id))).turn
            assert turn.revision == 2
            got = decoded.since()
            assert (await rig.run(name, first)).revision == 2, "the retry of an old turn"
            retried = decoded.since()
            await rig.api.FindTurn(pb.FindTurnRequest(mark="the-beginning"))
            costs.append((got, retried, decoded.since()))
        assert costs[0] == costs[1] and max(costs[0]) <= 2


async def test_the_last_of_many_choices_is_found_in_few_looks(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Decoded(monkeypatch)
    async with serving(store=store) as rig:
        name, turn = await rig.create(), drawing(3)
        await rig.run(name, turn)
        for number in range(1, 33):
            wish = pb.ChooseCandidateRequest(session=name, request_id=turn.request_id, candidate=number % 3)
            chosen = (await rig.api.ChooseCandidate(wish)).turn
            decoded.since()
            found = (await rig.api.GetTurn(pb.GetTurnRequest(session=name, request_id=turn.request_id))).turn
            assert found == chosen and found.chosen_candidate == number % 3
            assert decoded.since() <= 12
        await rig.run(name, "next")
        again = (await rig.api.GetTurn(pb.GetTurnRequest(session=name, request_id=turn.request_id))).turn
        assert again == chosen


async def test_pages_of_a_revision_that_has_passed_are_not_read_again(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    decoded = Decoded(monkeypatch)
    async with serving(store=store) as rig:
        name = await rig.create()
        for number in range(4):
            await rig.run(name, f"t{number}")
        first = await rig.api.ListItems(pb.ListItemsRequest(name=name, page_size=3))
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=2, request_id=uid()))
        decoded.since()
        page = pb.ListItemsRequest(name=name, page_size=10, page_token=first.next_page_token)
        rest = await rig.api.ListItems(page)
        assert [one.item for one in rest.items] == [4, 5, 6, 7, 8] and decoded.since() == 0
        forgetful(rig)
        pages = await asyncio.gather(*(rig.api.ListItems(page) for _ in range(8)))
        assert all(one == rest for one in pages)
        assert decoded.since() <= 2 * 6, "the log is read once for the session and once for the revision"


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 12), st.integers(0, 3)), max_size=12))
def test_records_add_up_together_as_one_by_one(changes: list[tuple[bool, int, int]]) -> None:
    one_by_one, records = History(), []
    for number, (cuts, keep, items) in enumerate(changes, 1):
        head = one_by_one.head_item
        record = Record(
            number,
            RecordKind.UPDATE,
            1,
            keep_items=keep if cuts else None,
            items=tuple(Item(head + 1 + i, Role.USER, "x", pack_tokens([1])) for i in range(items)),
        )
        records.append((record, f"{number:040x}"))
        kept = [item for item in one_by_one.items if not cuts or item.number <= keep]
        one_by_one = one_by_one.apply(*records[-1])
        assert one_by_one.items == (*kept, *record.items)
    assert History().after(records) == one_by_one


async def test_what_is_known_of_a_log_is_not_read_again(
    store: HistoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another replica has gone on: only its records are read."""
    async with serving(store=store) as one, serving(store=store) as two:
        name = await one.create()
        for number in range(6):
            await one.stream(name, spec(f"word {number}"))
        decoded = Decoded(monkeypatch)
        await two.stream(name, spec("and now"))
        assert decoded.since() > 6, "it has to read all of it"
        await one.stream(name, spec("again"))
        assert decoded.since() <= 3
