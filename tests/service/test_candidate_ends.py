"""What ends one candidate of a turn, and what ends all: stop strings, cancels, time, disconnects, a dead engine."""

from __future__ import annotations

import os
import signal
from pathlib import Path

from google.protobuf.duration_pb2 import Duration

from pensieve.client import AsyncClient
from pensieve.core import FinishReason
from pensieve.server.failures import restarting
from pensieve.v1 import pensieve_pb2 as pb
from support.engine.fake_engine import Script
from support.service.drawn_turns import BEST, TOKENS, begun, drawing, ended, expected, rest, text_of
from support.service.server_process import launched
from support.service.service_rig import encode, refusal, serving, tokenizer


async def test_a_stop_string_ends_its_candidate_alone() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(3, stop=["fox"]))
        generation.emit(*encode("the fox"), candidate=1)
        generation.emit(*encode(" jumps"), candidate=1)  # was on its way already
        assert generation.cancelled_candidates == [1] and not generation.cancelled
        generation.emit(*encode("hello"), candidate=0)
        generation.emit(*encode("a fox"), candidate=2)
        assert generation.cancelled_candidates == [1, 2] and not generation.cancelled
        generation.finish_candidate(0, FinishReason.LENGTH)
        generation.finish(FinishReason.LENGTH)
        got = await rest(call)
        turn = got.completed
        assert [text_of(got, i) for i in range(3)] == ["hello", "the ", "a "]
        assert [one.text for one in turn.candidates] == ["hello", "the ", "a "]
        assert [one.stop_sequence for one in turn.candidates] == ["", "fox", "fox"]
        stopped = pb.FINISH_REASON_STOP_SEQUENCE
        assert [one.finish_reason for one in turn.candidates] == [pb.FINISH_REASON_LENGTH, stopped, stopped]
        assert (turn.finish_reason, turn.stop_sequence) == (pb.FINISH_REASON_LENGTH, "")


async def test_stop_strings_in_all_end_the_whole() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(2, stop=["fox"]))
        for candidate in (1, 0):
            generation.emit(*encode("the fox"), candidate=candidate)
        assert generation.cancelled
        turn = (await rest(call)).completed
        assert (turn.finish_reason, turn.stop_sequence) == (pb.FINISH_REASON_STOP_SEQUENCE, "fox")
        assert len(turn.candidates) == 2


async def test_an_end_that_crosses_the_stop_is_the_stop() -> None:
    """The engine ended the candidate by itself before it read that nobody wants it any more."""
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(2, stop=["fox"]))
        generation.emit(*encode("the fox"), candidate=1)
        generation.finish_candidate(1, FinishReason.LENGTH)
        generation.finish_candidate(0)
        generation.finish()
        turn = (await rest(call)).completed
        assert turn.candidates[1].finish_reason == pb.FINISH_REASON_STOP_SEQUENCE


async def test_cancel_keeps_the_first_and_drops_the_others() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), drawing(3)
        call, generation = await begun(rig, name, turn)
        for candidate in range(3):
            generation.emit(*TOKENS[candidate:], candidate=candidate)
        await anext(aiter(call))
        view = await rig.cancel(name, turn.request_id, keep_output_tokens=2)
        assert (view.state, view.finish_reason) == (pb.Turn.STATE_COMMITTED, pb.FINISH_REASON_CANCELLED)
        assert generation.cancelled and not view.candidates
        assert view.usage.output_tokens == 2 and view.output.text == tokenizer().decode(TOKENS[:2])
        resumed = await rig.stream(name, turn, resume_attempt="gone")
        assert {delta.candidate for delta in resumed.deltas} == {0}
        again = await rig.stream(
            name,
            turn,
            resume_attempt=resumed.accepted.attempt,
            resume_token_offset=9,
            resume_candidate_offsets=[5, 5],
        )
        assert not again.deltas and again.completed == view


async def test_cancel_keeping_nothing_frees_the_group() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), drawing(3)
        call, generation = await begun(rig, name, turn)
        generation.emit(*TOKENS, candidate=2)
        view = await rig.cancel(name, turn.request_id, keep=pb.CancelTurnRequest.KEEP_NOTHING)
        assert view.state == pb.Turn.STATE_DISCARDED and generation.cancelled
        assert (await refusal(call)).code == "CANCELLED"
        assert await rig.items(name) == []


async def test_time_that_is_over_commits_what_there_is_of_all() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        turn = drawing(3, candidate_choice=BEST)
        turn.max_duration.CopyFrom(Duration(nanos=50_000_000))
        call, generation = await begun(rig, name, turn)
        generation.emit(*TOKENS[:3], candidate=0)
        generation.emit(*TOKENS[:2], candidate=2, logprob=-0.1)
        generation.finish_candidate(0)
        done = (await rest(call)).completed
        limit = pb.FINISH_REASON_TIME_LIMIT
        assert [one.finish_reason for one in done.candidates] == [pb.FINISH_REASON_EOS, limit, limit]
        assert [one.output_tokens for one in done.candidates] == [3, 0, 2]
        assert (done.chosen_candidate, done.finish_reason) == (2, limit)
        assert generation.cancelled


async def test_a_client_that_goes_away_frees_the_whole_group() -> None:
    async with serving(answer=None, disconnect_grace_s=0.02) as rig:
        name, turn = await rig.create(), drawing(3)
        call, generation = await begun(rig, name, turn)
        generation.emit(*TOKENS, candidate=1)
        await anext(aiter(call))
        call.cancel()
        view = await ended(rig, name, turn)
        assert (view.state, view.discard_reason) == (pb.Turn.STATE_DISCARDED, "CLIENT_DISCONNECTED")
        assert generation.cancelled and not generation.cancelled_candidates
        assert await rig.items(name) == []


async def test_an_engine_that_dies_in_the_middle_leaves_nothing() -> None:
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), drawing(3)
        call, generation = await begun(rig, name, turn)
        generation.emit(*TOKENS, candidate=0)
        generation.finish_candidate(0)
        generation.emit(*TOKENS[:1], candidate=1)
        generation.fail(restarting())
        assert (await refusal(call)).reason == "ENGINE_RESTARTING"
        assert await rig.items(name) == [] and (await rig.session(name)).revision == 1
        rig.link.answer = lambda _: TOKENS
        assert (await rig.run(name, turn)).candidates[2].text == expected(2)


async def test_a_candidate_that_was_not_asked_for_fails_the_turn_and_no_other() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(2))
        generation.emit(1, candidate=2)
        assert (await refusal(call)).reason == "BUG"
        assert generation.cancelled and await rig.items(name) == []


async def test_a_killed_engine_process_costs_a_restart_of_all_and_no_answer(tmp_path: Path) -> None:
    """Through a whole server, its link and the SDK."""
    with launched(tmp_path / "server", Script(step_s=0.01)) as server:
        async with AsyncClient(server.grpc) as client:
            chat = await client.create_session()
            stream = chat.stream("hi", candidates=3, max_output_tokens=60)
            texts, restarts, killed = [""] * 3, 0, False
            async for piece in stream:
                if piece.restarted:
                    texts, restarts = [""] * 3, restarts + 1
                if not killed and piece.candidate == 2:
                    os.kill(server.engine_pid, signal.SIGKILL)
                    killed = True
                texts[piece.candidate] += piece.text
            turn = stream.turn
            assert restarts == 1 and texts == [one.text for one in turn.candidates]
            assert [one.output_tokens for one in turn.candidates] == [60] * 3
            assert len(await chat.items()) == 2 and turn.revision == 2
            chosen = await chat.choose(turn, 1)
            assert (chosen.chosen, chosen.revision) == (1, 3)
            assert (await chat.send("next", max_output_tokens=2)).revision == 4
