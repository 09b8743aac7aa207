"""Duplicates, retries and re-attaches: one turn in history, the same answer for everybody."""

from __future__ import annotations

import asyncio
from contextlib import aclosing

import pytest

from pensieve import debug
from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.server.failures import restarting
from pensieve.server.turns.buffer import TurnBuffer
from pensieve.server.turns.stream import StreamOptions, events
from pensieve.server.turns.text import OutputText
from pensieve.server.values import Accepted, InputEntry, NewTurn, OutputOptions, RawEntry
from pensieve.store.memory_store import MemoryStore
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import ANSWER, Streamed, encode, refusal, says, serving, spec, tokenizer, uid


@pytest.mark.fault(8)
async def test_fifty_concurrent_duplicates_are_one_turn() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        streams = await asyncio.gather(*(rig.stream(name, turn) for _ in range(50)))
        assert {one.text for one in streams} == {ANSWER}
        assert {one.completed.revision for one in streams} == {2}
        assert sum(not one.accepted.replayed for one in streams) == 1
        assert len(rig.link.generations) == 1
        assert len(await rig.items(name)) == 2


@pytest.mark.fault(9)
async def test_late_duplicate_replays_its_own_turn() -> None:
    async with serving() as rig:
        name = await rig.create()
        third = spec("turn 3", expected_revision=3)
        for number in range(1, 10):
            await rig.run(name, third if number == 3 else f"turn {number}")
        got = await rig.stream(name, third)
        assert got.accepted.replayed
        assert (got.completed.revision, got.completed.base_revision) == (4, 3)
        assert got.text == got.completed.output.text == ANSWER
        assert got.completed.input[0].text == "turn 3"
        assert (await rig.session(name)).revision == 10
        assert len(rig.link.generations) == 9


@pytest.mark.fault(10)
async def test_reused_id_with_other_text_is_refused() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        await rig.run(name, turn)
        error = await refusal(rig.call(name, spec("other", request_id=turn.request_id)))
        assert (error.code, error.reason) == ("ALREADY_EXISTS", "REQUEST_ID_REUSED")
        assert len(await rig.items(name)) == 2


async def test_reused_id_while_the_first_still_runs() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        turn = spec("hi")
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        error = await refusal(rig.call(name, spec("other", request_id=turn.request_id)))
        assert error.reason == "REQUEST_ID_REUSED"
        generation.finish()
        assert Streamed([event async for event in call]).completed.revision == 2


async def test_the_same_turn_with_another_delivery_is_the_same_turn() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        await rig.run(name, turn)
        turn.output.max_chunk_tokens = 1
        assert (await rig.stream(name, turn)).accepted.replayed


async def test_parallel_turn_is_refused_with_the_active_id() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        turn = spec("hi")
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        error = await refusal(rig.call(name, spec("me too")))
        assert (error.code, error.reason) == ("ABORTED", "TURN_IN_PROGRESS")
        assert error.metadata["active_request_id"] == turn.request_id
        assert error.retry_after_s is not None and error.retry_after_s > 0
        assert (await rig.session(name)).active_turn.request_id == turn.request_id
        generation.finish()
        assert Streamed([event async for event in call]).completed.revision == 2


WHOLE = "a😀b the quick fox"


@pytest.mark.fault(2)
@pytest.mark.parametrize("border", range(len(says(WHOLE)) + 1))
@pytest.mark.parametrize("committed", [False, True], ids=["running", "committed"])
async def test_resume_at_every_token_border(border: int, committed: bool) -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        tokens = says(WHOLE)
        turn = spec("hi", output=pb.OutputOptions(max_chunk_tokens=1))
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        generation.admit()
        for token in tokens[:border]:
            generation.emit(token)
        attempt, text, seen = "", "", 0
        clean = clean_borders(tokens)
        upto = max(n for n in clean if n <= border)
        async for event in call:
            attempt = attempt or event.accepted.attempt
            text, seen = text + event.delta.text, seen + event.delta.token_count
            if seen == upto:
                break
        call.cancel()
        for token in tokens[border:]:
            generation.emit(token)
        if committed:
            generation.finish()
            while (await rig.get_turn(name, turn.request_id)).state != pb.Turn.STATE_COMMITTED:
                await asyncio.sleep(0)
        again = rig.call(name, turn, resume_attempt=attempt, resume_token_offset=seen)
        first = await anext(aiter(again))
        assert first.accepted.replayed and first.accepted.attempt == attempt
        generation.finish()
        rest = Streamed([first, *[event async for event in again]])
        assert text + rest.text == WHOLE
        assert seen + rest.tokens == len(tokens)


def clean_borders(tokens: list[int]) -> list[int]:
    """Numbers of tokens that end with a whole code point."""
    from support.service.service_rig import tokenizer

    stream, clean = tokenizer().detokenizer(), [0]
    for number, token in enumerate(tokens, 1):
        stream.push([token])
        if not stream.pending:
            clean.append(number)
    return clean


async def test_another_attempt_starts_at_token_zero() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        await rig.run(name, turn)
        got = await rig.stream(name, turn, resume_attempt="gone", resume_token_offset=3)
        assert got.text == ANSWER and got.deltas[0].token_offset == 0
        assert got.accepted.attempt != "gone"


async def test_offset_beyond_the_attempt_is_refused() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        attempt = (await rig.stream(name, turn)).accepted.attempt
        error = await refusal(rig.call(name, turn, resume_attempt=attempt, resume_token_offset=10_000))
        assert error.code == "INVALID_ARGUMENT"


async def test_a_resume_behind_what_a_cancel_kept_ends_well() -> None:
    """Somebody else's Stop button took tokens back that this client had received before its connection broke."""
    async with serving(answer=None) as rig:
        name, turn = await rig.create(), spec("hi")
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        generation.admit()
        generation.emit(*encode("hello world, the fox"))
        attempt = (await call.read()).accepted.attempt
        while not (await call.read()).delta.token_count:
            pass
        view = await rig.cancel(name, turn.request_id, keep_output_tokens=1)
        got = await rig.stream(name, turn, resume_attempt=attempt, resume_token_offset=3)
        assert not got.deltas and got.completed == view


async def test_the_same_while_the_cancelled_turn_is_being_committed() -> None:
    buffer, output = TurnBuffer(), OutputText(tokenizer())
    for token in encode("hello world, the fox"):
        output.push(token)
    output.finish(keep=1)
    buffer.accept(Accepted("id", 1, 10, 7, "attempt", False), output)
    async with aclosing(events(buffer, StreamOptions(OutputOptions(), 5.0, "attempt", (3,)))) as stream:
        assert await anext(stream) == buffer.accepted


async def test_biases_are_part_of_what_a_turn_is_in_any_order() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi", sampling=pb.SamplingParams(logit_bias={3: 1.0, 20: -1.0}))
        await rig.run(name, turn)
        assert rig.link.generations[-1].sampling.logit_bias == {3: 1.0, 20: -1.0}
        again = pb.TurnSpec()
        again.CopyFrom(turn)
        again.sampling.logit_bias.clear()
        again.sampling.logit_bias.update({20: -1.0, 3: 1.0})
        assert (await rig.stream(name, again)).accepted.replayed
        again.sampling.logit_bias[3] = 2.0
        assert (await refusal(rig.call(name, again))).reason == "REQUEST_ID_REUSED"
        defaults = pb.SessionConfig(default_sampling=pb.SamplingParams(logit_bias={5: 1.0}))
        request_id = uid()
        first = await rig.create(config=defaults, request_id=request_id)
        assert await rig.create(config=defaults, request_id=request_id) == first


async def test_attach_only_never_starts() -> None:
    async with serving() as rig:
        name = await rig.create()
        bare = pb.TurnSpec(request_id=uid())
        error = await refusal(rig.call(name, bare, attach_only=True))
        assert (error.code, error.reason) == ("NOT_FOUND", "TURN_NOT_FOUND")
        assert not rig.link.generations
        turn = spec("hi")
        await rig.run(name, turn)
        got = await rig.stream(name, pb.TurnSpec(request_id=turn.request_id), attach_only=True)
        assert got.text == ANSWER and got.accepted.replayed


@pytest.mark.fault(13)
async def test_answer_lost_after_commit_is_replayed() -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        debug.arm("after_commit_before_ack=raise")
        try:
            error = await refusal(rig.call(name, turn))
        finally:
            debug.arm("")
        assert error.reason == "BUG"
        got = await rig.stream(name, turn)
        assert got.accepted.replayed and got.completed.revision == 2
        assert len(rig.link.generations) == 1


@pytest.mark.parametrize("place", ["before_begin", "after_begin", "mid_decode", "before_commit"])
async def test_failure_before_commit_leaves_no_trace(place: str) -> None:
    async with serving() as rig:
        name = await rig.create()
        turn = spec("hi")
        debug.arm(f"{place}=raise")
        try:
            error = await refusal(rig.call(name, turn))
        finally:
            debug.arm("")
        assert error.reason == "BUG" and set(error.metadata) == {"error_id"}
        session = await rig.session(name)
        assert session.revision == 1 and not session.HasField("active_turn")
        assert (await rig.stream(name, turn)).completed.revision == 2


async def test_seed_of_an_earlier_attempt_is_kept() -> None:
    """A replica that died left its lease behind: the retry takes over, with the seed."""
    async with serving(lease_s=0.05) as rig:
        name = await rig.create()
        turn = spec("hi")
        from pensieve.server.rpc.convert import turn_spec
        from pensieve.store import BeginRequest, Key

        dead = BeginRequest(
            turn.request_id, turn_spec(turn).fingerprint(), "token", "dead", "attempt", 50, 77
        )
        await rig.store.begin(Key("acme", name.removeprefix("sessions/")), dead)
        assert (await rig.run(name, turn)).seed == 77


@pytest.mark.fault(27)
async def test_all_tries_of_a_turn_have_one_seed_on_every_server() -> None:
    """An answer that was streamed in part goes on as it began, though nobody has kept its seed."""
    store = MemoryStore()
    async with serving(answer=None, store=store) as rig, serving(answer=None, store=store) as other:
        name = await rig.create()
        turn = spec("hi", sampling=pb.SamplingParams(temperature=1.0))
        seeds = []
        for server in (rig, rig, other):
            call = asyncio.ensure_future(refusal(server.call(name, turn)))
            generation = await server.link.next_generation()
            generation.admit()
            generation.emit(*encode("the"))
            generation.fail(restarting())
            assert (await call).reason == "ENGINE_RESTARTING"
            seeds.append(generation.sampling.seed)
        another = asyncio.ensure_future(refusal(rig.call(name, spec("hi"))))
        generation = await rig.link.next_generation()
        generation.fail(restarting())
        await another
        assert len(set(seeds)) == 1 and generation.sampling.seed != seeds[0]


@pytest.mark.fault(6)
async def test_slow_reader_gets_few_large_deltas_and_holds_nobody_up() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        turn = spec("hi")
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        generation.admit()
        tokens = encode("the quick brown fox jumps over the lazy dog") * 20
        generation.emit(*tokens)
        generation.finish(FinishReason.LENGTH, len(tokens))
        while (await rig.get_turn(name, turn.request_id)).state != pb.Turn.STATE_COMMITTED:
            await asyncio.sleep(0)
        got = Streamed([event async for event in call])
        assert got.tokens == len(tokens) and len(got.deltas) < 10


def test_raw_text_is_another_turn_and_others_are_what_they_were() -> None:
    """A turn that was begun by an older server is known by its hash."""
    entries = (InputEntry(Role.USER, "hi"), InputEntry(Role.USER, tokens=pack_tokens([1])))
    assert NewTurn("r", input=entries).fingerprint() == "77ece6c963a50ba64efab3612db33e52"
    raw = NewTurn("r", input=(RawEntry(Role.USER, "hi"), entries[1]))
    assert raw.fingerprint() != NewTurn("r", input=entries).fingerprint()
