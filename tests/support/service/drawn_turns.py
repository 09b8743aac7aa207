"""What tests of turns with several candidates are written in."""

from __future__ import annotations

import asyncio
from typing import Any

from pensieve.v1 import pensieve_pb2 as pb
from support.service.scripted_link import ScriptedGeneration
from support.service.service_rig import ANSWER, Rig, Streamed, says, spec, tokenizer

BEST = pb.CANDIDATE_CHOICE_BEST_LOGPROB
TOKENS = says(ANSWER)
"""What the script says as candidate 0; as candidate ``i`` it leaves out the first ``i`` of them."""


def drawing(
    count: int, text: str = "hi", output: pb.OutputOptions | None = None, **sampling: Any
) -> pb.TurnSpec:
    return spec(text, sampling=pb.SamplingParams(candidates=count, **sampling), output=output)


def text_of(got: Streamed, candidate: int) -> str:
    return "".join(delta.text for delta in got.deltas if delta.candidate == candidate)


def expected(candidate: int) -> str:
    """What the script says as this candidate."""
    return str(tokenizer().decode(TOKENS[candidate:]))


async def begun(rig: Rig, name: str, turn: pb.TurnSpec, **fields: Any) -> tuple[Any, ScriptedGeneration]:
    """A turn whose engine is the test's to play."""
    call = rig.call(name, turn, **fields)
    generation = await rig.link.next_generation()
    generation.admit()
    return call, generation


async def rest(call: Any) -> Streamed:
    return Streamed([event async for event in call])


async def ended(rig: Rig, name: str, turn: pb.TurnSpec) -> pb.Turn:
    while (view := await rig.get_turn(name, turn.request_id)).state == pb.Turn.STATE_RUNNING:
        await asyncio.sleep(0.005)
    return view
