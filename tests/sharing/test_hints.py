"""Hints: what the engine gets of them, and what the receipt says; now, later and from another process."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest
from google.protobuf.duration_pb2 import Duration

from pensieve.config import EngineOptions
from pensieve.core import Hints
from pensieve.engine.build import uses_hints
from pensieve.errors import InvalidArgument
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, spec

WEEK_S = 7 * 24 * 3600


def turn(request_id: str | None = None, **hints: Any) -> pb.TurnSpec:
    if (wait := hints.pop("next_turn_in", None)) is not None:
        hints["next_turn_in"] = Duration(seconds=int(wait), nanos=round(wait % 1 * 1e9))
    named = {} if request_id is None else {"request_id": request_id}
    return spec("hi", hints=pb.TurnHints(**hints), **named)


async def taken(rig: Rig, **hints: Any) -> tuple[Hints | None, pb.HintReceipt]:
    """What the engine got, and the receipt."""
    done = await rig.run(await rig.create(), turn(**hints))
    return rig.link.generations[-1].hints, done.hints


async def test_hints_reach_the_engine_and_the_receipt_says_so() -> None:
    async with serving() as rig:
        told, receipt = await taken(rig, next_turn_in=1.5, importance=2.0)
        assert told == Hints(next_turn_s=1.5, importance=2.0)
        assert (receipt.next_turn_in.ToMilliseconds(), receipt.importance) == (1500, 2.0)
        assert not receipt.session_finished and not receipt.ignored
        told, receipt = await taken(rig, session_finished=True)
        assert told == Hints(finished=True) and receipt == pb.HintReceipt(session_finished=True)
        told, receipt = await taken(rig, next_turn_in=0.0)
        assert told == Hints(next_turn_s=0.0) and receipt.HasField("next_turn_in")


async def test_a_turn_without_hints_has_no_receipt() -> None:
    async with serving() as rig:
        name = await rig.create()
        for without in (spec("hi"), spec("hi", hints=pb.TurnHints())):
            done = await rig.run(name, without)
            assert rig.link.generations[-1].hints is None and not done.HasField("hints")


async def test_values_are_clipped() -> None:
    async with serving() as rig:
        told, receipt = await taken(rig, next_turn_in=WEEK_S + 1, importance=1e30)
        assert told == Hints(next_turn_s=WEEK_S, importance=16.0)
        assert (receipt.next_turn_in.seconds, receipt.importance) == (WEEK_S, 16.0)
        told, receipt = await taken(rig, importance=1e-30)
        assert told == Hints(importance=1 / 16) and receipt.importance == 1 / 16


async def test_a_finished_session_has_no_next_turn() -> None:
    async with serving() as rig:
        told, receipt = await taken(rig, next_turn_in=3.0, session_finished=True, importance=4.0)
        assert told == Hints(importance=4.0, finished=True)
        assert list(receipt.ignored) == ["next_turn_in"] and not receipt.HasField("next_turn_in")
        assert receipt.session_finished and receipt.importance == 4.0


async def test_a_policy_that_knows_no_hints_ignores_all() -> None:
    async with serving() as rig:
        rig.link.info = msgspec.structs.replace(rig.link.info, uses_hints=False)
        told, receipt = await taken(rig, next_turn_in=3.0, session_finished=True, importance=4.0)
        assert told is None
        assert receipt == pb.HintReceipt(ignored=["next_turn_in", "importance", "session_finished"])


@pytest.mark.parametrize(
    ("policy", "stateless", "used"),
    [
        ("gittins", False, True),
        ("retention", False, True),
        ("lru", False, False),
        ("trailing-half", False, False),
        ("whole-session", False, False),
        ("gittins", True, False),
    ],
)
def test_which_engines_use_hints(policy: Any, stateless: bool, used: bool) -> None:
    assert uses_hints(EngineOptions(model="", policy=policy, stateless=stateless)) is used


async def test_the_receipt_is_kept_with_the_turn() -> None:
    async with serving() as one, serving(store=one.store) as other:
        name = await one.create()
        asked = turn(next_turn_in=9.0)
        first = (await one.stream(name, asked)).completed
        assert first.hints.next_turn_in.seconds == 9
        replayed = (await other.stream(name, asked)).completed
        assert replayed.hints == first.hints and not other.link.generations
        assert (await other.get_turn(name, asked.request_id)).hints == first.hints


async def test_hints_are_not_part_of_what_a_turn_is() -> None:
    async with serving() as rig:
        name = await rig.create()
        first = turn(next_turn_in=9.0)
        await rig.run(name, first)
        again = await rig.run(name, turn(first.request_id, importance=2.0))
        assert again.revision == 2 and len(rig.link.generations) == 1
        assert again.hints.next_turn_in.seconds == 9, "the receipt is that of the turn that ran"


@pytest.mark.parametrize(
    ("hints", "field"),
    [
        (pb.TurnHints(importance=0.0), "importance"),
        (pb.TurnHints(importance=-1.0), "importance"),
        (pb.TurnHints(importance=float("nan")), "importance"),
        (pb.TurnHints(importance=float("inf")), "importance"),
        (pb.TurnHints(next_turn_in=Duration(seconds=-1)), "next_turn_in"),
        (pb.TurnHints(next_turn_in=Duration(nanos=-1)), "next_turn_in"),
        (pb.TurnHints(next_turn_in=Duration(seconds=1, nanos=-1)), "next_turn_in"),
        (pb.TurnHints(next_turn_in=Duration(seconds=2**62)), "next_turn_in"),
    ],
)
async def test_bad_hints_are_refused(hints: pb.TurnHints, field: str) -> None:
    async with serving() as rig:
        name = await rig.create()
        error = await refusal(rig.call(name, spec("hi", hints=hints)))
        assert isinstance(error, InvalidArgument)
        assert [path for path, _ in error.violations] == [f"turn.hints.{field}"]
        assert not rig.link.generations
