"""The past played again: the policy that served it finds what it found, and one that knows the future does better."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from pensieve.client import AsyncClient
from pensieve.config import PolicyName
from pensieve.server.page import gap
from pensieve.simulate.hindsight import HindsightOrder, PastTurn, look_back, returns
from support.page.page_rig import page_rig


def order(turns: list[PastTurn], device: int, host: int, policy: PolicyName = "lru") -> HindsightOrder:
    return HindsightOrder(device, host, 8, policy, 0.0, ((0, 0.0), (1024, 1.0)), 0.2, tuple(turns))


def round_robin(sessions: int, rounds: int, each: int = 40) -> list[PastTurn]:
    """Each session in its turn: with a little too little room, LRU drops what is needed next."""
    turns = []
    for number in range(sessions * rounds):
        context = each * (number // sessions + 1)
        turns.append(
            PastTurn(
                f"s{number % sessions}", number, number + 0.5, context, context - each, 0, (0, 0, 0), True
            )
        )
    return turns


def test_when_each_session_comes_back() -> None:
    turns = round_robin(3, 2)
    assert returns(turns)[:3] == [3.0, 4.0, 5.0] and min(returns(turns)[3:]) > 1e6


def test_the_future_helps() -> None:
    found = look_back(order(round_robin(10, 5), device=100, host=0))
    replayed, clairvoyant = found["replayed"], found["clairvoyant"]
    assert isinstance(replayed, dict) and isinstance(clairvoyant, dict)
    assert found["turns"] == 40
    assert 0.0 < clairvoyant["recomputed"] < 0.8 * replayed["recomputed"]
    for one in (replayed, clairvoyant):
        assert sum(one.values()) == pytest.approx(1.0)


def test_with_room_for_all_nothing_is_lost() -> None:
    found = look_back(order(round_robin(4, 5), device=400, host=0))
    assert found["replayed"] == found["clairvoyant"] == {"device": 1.0, "host": 0.0, "recomputed": 0.0}


def test_turns_that_overlap_or_do_not_fit_are_got_over() -> None:
    turns = [
        PastTurn("a", 0.0, 9.0, 60, 0, 30, (0, 0, 0), True),
        PastTurn("b", 1.0, 9.5, 60, 0, 30, (0, 0, 0), True),
        PastTurn("c", 2.0, 3.0, 5000, 0, 1, (0, 0, 0), True),
        PastTurn("a", 3.0, 4.0, 90, 60, 1, (60, 0, 0), True),
    ]
    found = look_back(order(turns, device=12, host=4))
    assert found["turns"] == 1 and found["measured"] == {"device": 1.0, "host": 0.0, "recomputed": 0.0}


async def test_a_server_finds_its_own_gap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with page_rig(tmp_path) as rig:
        found = await rig.gap.settled()
        assert found.problem == "0 turns came back in the last 10 minutes; 20 are needed"
        monkeypatch.setattr(gap, "FRESH_S", 0.0)
        async with AsyncClient(rig.address) as client:
            chats = [await client.create_session() for _ in range(6)]
            for _ in range(6):
                for chat in chats:
                    await chat.send("some words that take a few chunks of room here", max_output_tokens=4)
                    while rig.engine.has_work:  # the chunks of the turn that has ended are given up by now
                        await asyncio.sleep(0.002)
        found = await rig.gap.settled()
        assert found.problem == "" and found.turns == 30, found
        totals = rig.engine.stats()
        again = totals.gpu_cached_total + totals.swapped_in_total + totals.recomputed_total
        assert found.history_tokens == again and found.measured is not None and found.replayed is not None
        # One turn after the other, and no sharing: played again it is what it was.
        for name in ("device", "host", "recomputed"):
            assert getattr(found.replayed, name) == pytest.approx(getattr(found.measured, name), abs=0.05), (
                found
            )
        assert found.measured.recomputed > 0.0, "nothing was lost: the test shows little"
        assert found.clairvoyant is not None
        assert found.clairvoyant.recomputed < found.replayed.recomputed


async def test_a_process_that_fails_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gap, "FEWEST", 1)
    monkeypatch.setattr(gap.sys, "executable", "/bin/false")
    async with page_rig(tmp_path) as rig:
        async with AsyncClient(rig.address) as client:
            chat = await client.create_session()
            for _ in range(2):
                await chat.send("a word", max_output_tokens=2)
        found = await rig.gap.settled()
        assert found.problem == "it could not be computed" and found.measured is None
