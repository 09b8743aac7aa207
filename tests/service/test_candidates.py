"""Turns with several candidates: what streams see, how they resume, and which one is committed."""

from __future__ import annotations

import asyncio

import pytest
from google.protobuf.duration_pb2 import Duration

from pensieve.store import Key
from pensieve.v1 import pensieve_pb2 as pb
from support.service.drawn_turns import BEST, TOKENS, begun, drawing, ended, expected, rest, text_of
from support.service.service_rig import ANSWER, Streamed, encode, refusal, serving, spec

# ---- what callers see


async def test_each_candidate_streams_by_its_own_number_and_offsets() -> None:
    async with serving() as rig:
        name = await rig.create("Be brief.")
        got = await rig.stream(name, drawing(3, seed=7, output=pb.OutputOptions(token_ids=True)))
        assert rig.link.generations[-1].sampling.candidates == 3
        for candidate in range(3):
            deltas = [delta for delta in got.deltas if delta.candidate == candidate]
            at = 0
            for delta in deltas:
                assert delta.token_offset == at
                at += delta.token_count
            assert [one for delta in deltas for one in delta.tokens.ids] == TOKENS[candidate:]
            assert text_of(got, candidate) == expected(candidate)
        turn = got.completed
        assert [one.candidate for one in turn.candidates] == [0, 1, 2]
        assert [one.text for one in turn.candidates] == [expected(i) for i in range(3)]
        assert [list(one.tokens.ids) for one in turn.candidates] == [TOKENS[i:] for i in range(3)]
        assert [one.output_tokens for one in turn.candidates] == [len(TOKENS) - i for i in range(3)]
        assert [one.seed for one in turn.candidates] == [7, 8, 9]
        assert {one.finish_reason for one in turn.candidates} == {pb.FINISH_REASON_EOS}
        assert not any(one.HasField("mean_logprob") for one in turn.candidates)
        assert (turn.chosen_candidate, turn.output.text, turn.seed) == (0, expected(0), 7)
        assert not rig.link.chosen, "candidate 0 is the session's without a word"


async def test_history_gets_one_answer_and_the_receipt_counts_it_alone() -> None:
    async with serving() as rig:
        name = await rig.create("Be brief.")
        turn = await rig.run(name, drawing(4))
        assert [item.text for item in await rig.items(name)] == ["Be brief.", "hi", expected(0)]
        assert turn.usage.output_tokens == len(TOKENS) and len(turn.candidates) == 4
        generation = rig.link.generations[-1]
        assert turn.usage.context_tokens == len(generation.tokens)
        await rig.run(name, "next")
        after = rig.link.generations[-1]
        assert after.tokens[: len(generation.tokens) + len(TOKENS)] == generation.tokens + TOKENS


async def test_a_turn_with_one_candidate_says_nothing_of_them() -> None:
    async with serving() as rig:
        name = await rig.create()
        for turn in (drawing(1), spec("hi")):
            done = await rig.run(name, turn)
            assert not done.candidates and done.chosen_candidate == 0
        row = await rig.store.read(Key("acme", name.removeprefix("sessions/")))
        assert row[-1].record.turn.candidates == ()


async def test_candidates_take_turns_on_a_slow_stream() -> None:
    """One that never ends must not keep the others from a reader that asks for small pieces."""
    async with serving(answer=None) as rig:
        name = await rig.create()
        turn = drawing(3, output=pb.OutputOptions(max_chunk_tokens=2))
        call, generation = await begun(rig, name, turn)
        for candidate in (2, 0, 1):
            generation.emit(*TOKENS, candidate=candidate)
        generation.finish()
        got = await rest(call)
        assert all(delta.token_count <= 2 for delta in got.deltas)
        assert [delta.candidate for delta in got.deltas][:6] == [0, 1, 2, 0, 1, 2]
        assert all(text_of(got, candidate) == ANSWER for candidate in range(3))


async def test_the_delay_of_chunks_is_waited_for_once_for_all() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        output = pb.OutputOptions(max_chunk_tokens=100, max_chunk_delay=Duration(nanos=200_000_000))
        call, generation = await begun(rig, name, drawing(16, output=output))
        began = asyncio.get_running_loop().time()
        for candidate in range(16):
            generation.emit(*encode("the"), candidate=candidate)
        seen = 0
        async for event in call:
            seen += bool(event.delta.token_count)
            if seen == 16:
                break
        took = asyncio.get_running_loop().time() - began
        assert 0.15 < took < 1.6, "16 delays in a row would take 3.2 s"
        call.cancel()


@pytest.mark.parametrize("committed", [False, True], ids=["running", "committed"])
async def test_resume_continues_each_candidate_where_it_was(committed: bool) -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        turn = drawing(3, output=pb.OutputOptions(max_chunk_tokens=1))
        call, generation = await begun(rig, name, turn)
        for candidate, count in enumerate((2, 0, 5)):
            generation.emit(*TOKENS[:count], candidate=candidate)
        attempt, had = "", [0, 0, 0]
        texts = ["", "", ""]
        async for event in call:
            attempt = attempt or event.accepted.attempt
            had[event.delta.candidate] += event.delta.token_count
            texts[event.delta.candidate] += event.delta.text
            if had == [2, 0, 5]:
                break
        call.cancel()
        for candidate, count in enumerate((2, 0, 5)):
            generation.emit(*TOKENS[count:], candidate=candidate)
        if committed:
            generation.finish()
            await ended(rig, name, turn)
        again = rig.call(
            name, turn, resume_attempt=attempt, resume_token_offset=2, resume_candidate_offsets=[0, 5]
        )
        first = await anext(aiter(again))
        assert first.accepted.replayed and first.accepted.attempt == attempt
        generation.finish()
        got = Streamed([first, *[event async for event in again]])
        for candidate in range(3):
            mine = [delta for delta in got.deltas if delta.candidate == candidate]
            assert mine[0].token_offset == had[candidate]
            assert texts[candidate] + text_of(got, candidate) == ANSWER


@pytest.mark.parametrize("offsets", [[10_000], [0, 10_000], [0, 0, 1]])
async def test_offsets_that_never_were_are_refused(offsets: list[int]) -> None:
    async with serving() as rig:
        name, turn = await rig.create(), drawing(3)
        attempt = (await rig.stream(name, turn)).accepted.attempt
        call = rig.call(name, turn, resume_attempt=attempt, resume_candidate_offsets=offsets)
        error = await refusal(call)
        assert (error.code, error.reason) == ("INVALID_ARGUMENT", "FIELD_INVALID")
        again = await rig.stream(name, turn, resume_attempt="gone", resume_candidate_offsets=offsets)
        assert text_of(again, 2) == expected(2), "offsets of another attempt mean nothing"


async def test_a_duplicate_replays_all_and_another_number_is_another_turn() -> None:
    async with serving() as rig:
        name, turn = await rig.create(), drawing(3)
        first = await rig.stream(name, turn)
        again = await rig.stream(name, turn)
        assert again.accepted.replayed and again.completed == first.completed
        assert [text_of(again, i) for i in range(3)] == [expected(i) for i in range(3)]
        for other in (drawing(4), spec("hi"), drawing(3, candidate_choice=BEST)):
            other.request_id = turn.request_id
            assert (await refusal(rig.call(name, other))).reason == "REQUEST_ID_REUSED"
        assert len(rig.link.generations) == 1


# ---- which one is committed


async def test_the_best_by_mean_logprob() -> None:
    async with serving() as rig:
        name = await rig.create()
        got = await rig.stream(name, drawing(3, candidate_choice=BEST))
        assert rig.link.generations[-1].sampling.top_logprobs == 0
        assert not any(delta.logprobs for delta in got.deltas), "nobody asked to see them"
        turn = got.completed
        assert [one.mean_logprob for one in turn.candidates] == pytest.approx([-1.0, -1 / 2, -1 / 3])
        assert (turn.chosen_candidate, turn.output.text) == (2, expected(2))
        assert turn.usage.output_tokens == len(TOKENS) - 2
        assert rig.link.chosen == [(f"acme/{name.removeprefix('sessions/')}", 2)]
        await rig.run(name, "next")
        assert (await rig.items(name))[1].text == expected(2)


async def test_the_best_with_logprobs_that_are_shown() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = drawing(2, candidate_choice=BEST, output=pb.OutputOptions(top_logprobs=1))
        got = await rig.stream(name, turn)
        assert rig.link.generations[-1].sampling.top_logprobs == 1
        assert all(len(delta.logprobs) == delta.token_count for delta in got.deltas)
        assert got.completed.chosen_candidate == 1


async def test_the_best_of_answers_that_are_as_good_or_empty() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(3, candidate_choice=BEST))
        generation.emit(*TOKENS[:2], candidate=1)
        generation.emit(*TOKENS[:5], candidate=2)
        generation.finish()
        turn = (await rest(call)).completed
        assert [one.HasField("mean_logprob") for one in turn.candidates] == [False, True, True]
        assert turn.chosen_candidate == 1
        call, generation = await begun(rig, name, drawing(2, candidate_choice=BEST))
        generation.finish()
        assert (await rest(call)).completed.chosen_candidate == 0


async def test_the_first_of_answers_with_the_same_tokens_is_the_best() -> None:
    """Whatever noise their log-probabilities have."""
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(4, candidate_choice=BEST))
        generation.emit(*TOKENS[:3], candidate=0, logprob=-0.7)
        for candidate in (1, 2, 3):  # each a little better than the one before
            generation.emit(*TOKENS[:2], candidate=candidate, logprob=-0.5 + 1e-7 * candidate)
        generation.finish()
        turn = (await rest(call)).completed
        assert turn.chosen_candidate == 1
        assert len({one.mean_logprob for one in turn.candidates}) == 2


async def test_a_choice_without_candidates_costs_nothing() -> None:
    async with serving() as rig:
        name = await rig.create()
        await rig.run(name, spec("hi", sampling=pb.SamplingParams(candidate_choice=BEST)))
        assert rig.link.generations[-1].sampling.top_logprobs is None


async def test_the_last_seeds_wrap() -> None:
    async with serving() as rig:
        turn = await rig.run(await rig.create(), drawing(3, seed=2**64 - 2))
        assert [one.seed for one in turn.candidates] == [2**64 - 2, 2**64 - 1, 0]
