"""Values of sampling that a turn has from its session or the server, and what beam search excludes."""

from __future__ import annotations

from typing import Any

import pytest

from pensieve.core import Sampling
from pensieve.server.turns.sampling import BEAM_CONFLICTS
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import BEST, TOKENS, begun, drawing, rest
from support.service.service_rig import ANSWER, refusal, serving, spec


async def test_a_session_may_draw_several_by_default() -> None:
    async with serving() as rig:
        defaults = pb.SamplingParams(candidates=2, candidate_choice=BEST, length_penalty=0.5)
        name = await rig.create(config=pb.SessionConfig(default_sampling=defaults))
        assert (await rig.session(name)).config.default_sampling == defaults
        assert (await rig.run(name, "hi")).chosen_candidate == 1
        assert not (await rig.run(name, drawing(1))).candidates


async def test_beams_reach_the_engine_and_answer_whole() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        beams = pb.SamplingParams(beam_width=4, length_penalty=-0.5, early_stopping=True)
        call, generation = await begun(rig, name, spec("hi", sampling=beams))
        asked = generation.sampling
        assert (asked.beam_width, asked.length_penalty, asked.early_stopping) == (4, -0.5, True)
        assert (asked.temperature, asked.top_logprobs, asked.candidates) == (0.0, None, 1)
        generation.emit(*TOKENS)
        generation.finish(output=len(TOKENS))
        got = await rest(call)
        assert (got.text, len(got.deltas)) == (ANSWER, 1) and not got.completed.candidates


DRAWN = pb.SamplingParams(temperature=0.7, candidates=2, repetition_penalty=1.1, presence_penalty=0.5)


async def test_what_a_session_says_of_drawing_gives_way_to_beams() -> None:
    async with serving() as rig:
        name = await rig.create(config=pb.SessionConfig(default_sampling=DRAWN))
        await rig.run(name, spec("hi", sampling=pb.SamplingParams(beam_width=3)))
        asked = rig.link.generations[-1].sampling
        assert (asked.temperature, asked.candidates, asked.needs_context) == (0.0, 1, False)
        await rig.run(name, spec("hi", sampling=pb.SamplingParams(beam_width=1)))
        asked = rig.link.generations[-1].sampling
        assert (asked.temperature, asked.candidates) == (pytest.approx(0.7), 2)


@pytest.mark.parametrize("inherited", ["stop", "logit_bias", "min_output_tokens"])
async def test_what_a_session_promises_of_answers_does_not(inherited: str) -> None:
    values: dict[str, Any] = {"stop": ["x"], "logit_bias": {3: 1.0}, "min_output_tokens": 2}
    async with serving() as rig:
        defaults = pb.SamplingParams(**{inherited: values[inherited]})
        name = await rig.create(config=pb.SessionConfig(default_sampling=defaults))
        error = await refusal(rig.call(name, spec("hi", sampling=pb.SamplingParams(beam_width=3))))
        assert (error.code, [path for path, _ in error.violations]) == (  # type: ignore[attr-defined]
            "INVALID_ARGUMENT",
            [f"turn.sampling.{inherited}"],
        )
        assert not rig.link.generations and (await rig.session(name)).revision == 1


async def test_a_turn_that_contradicts_its_sessions_beams_is_refused() -> None:
    async with serving() as rig:
        beams = pb.SessionConfig(default_sampling=pb.SamplingParams(beam_width=3))
        name = await rig.create(config=beams)
        for turn, path in (
            (spec("hi", sampling=pb.SamplingParams(temperature=0.5)), "turn.sampling.temperature"),
            (drawing(2), "turn.sampling.candidates"),
            (spec("hi", output=pb.OutputOptions(top_logprobs=0)), "turn.output.top_logprobs"),
        ):
            error = await refusal(rig.call(name, turn))
            assert [one for one, _ in error.violations] == [path]  # type: ignore[attr-defined]
        assert not rig.link.generations
        await rig.run(name, spec("hi", sampling=pb.SamplingParams(temperature=0.5, beam_width=1)))


async def test_the_server_says_how_many() -> None:
    async with serving() as rig:
        limits = (await rig.api.GetServerInfo(pb.GetServerInfoRequest())).limits
        assert (limits.max_candidates, limits.max_beam_width) == (16, 16)


SERVED_WITH_BEAMS = {
    "beam_width", "length_penalty", "early_stopping", "max_output_tokens", "stop_token_ids", "ignore_eos", "seed",
    "top_p", "top_k", "min_p",
}  # fmt: skip


def test_each_field_of_sampling_goes_with_beams_or_is_refused() -> None:
    # A grammar is no field of a client's: what makes it is refused with beams.
    assert {*BEAM_CONFLICTS, "top_logprobs", "grammar"} | SERVED_WITH_BEAMS == set(Sampling.__struct_fields__)
