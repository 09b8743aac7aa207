"""Each line: a bad request, the code and reason it gets. None of them leaves a trace in the history."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from google.protobuf.duration_pb2 import Duration
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.errors import InvalidArgument
from pensieve.server.rpc.interceptor import decode
from pensieve.server.rpc.validation import RULES, Bounds, validate
from pensieve.server.settings import RequestLimits
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import Rig, refusal, serving, spec, tokenizer, uid, user

SERVICE = "/pensieve.v1.ConversationService/"
INVALID = ("INVALID_ARGUMENT", "FIELD_INVALID")
MALFORMED = ("INVALID_ARGUMENT", "REQUEST_MALFORMED")
TOO_LONG = ("OUT_OF_RANGE", "CONTEXT_LIMIT_EXCEEDED")
UNKNOWN = ("NOT_FOUND", "SESSION_NOT_FOUND")
NAN, INF = math.nan, math.inf


def tokens(*ids: int) -> pb.InputItem:
    return pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=ids))


def with_sampling(**values: Any) -> pb.TurnSpec:
    return spec("hi", sampling=pb.SamplingParams(**values))


def with_output(**values: Any) -> pb.TurnSpec:
    return spec("hi", output=pb.OutputOptions(**values))


BAD_TURNS: dict[str, tuple[pb.TurnSpec, tuple[str, str]]] = {
    "no request id": (pb.TurnSpec(input=[user("hi")]), INVALID),
    "request id not a uuid": (spec("hi", request_id="1234"), INVALID),
    "no input": (pb.TurnSpec(request_id=uid()), INVALID),
    "17 annotations": (spec("hi", annotations={f"k{i}": "" for i in range(17)}), INVALID),
    "annotation without a name": (spec("hi", annotations={"": "x"}), INVALID),
    "long annotations": (spec("hi", annotations={"a": "é" * 300_000, "b": "x" * 450_000}), INVALID),
    "long mark": (spec("hi", mark="x" * 257), INVALID),
    "65 items": (pb.TurnSpec(request_id=uid(), input=[user("x")] * 65), INVALID),
    "item without content": (pb.TurnSpec(request_id=uid(), input=[pb.InputItem(role=2)]), INVALID),
    "item without role": (pb.TurnSpec(request_id=uid(), input=[pb.InputItem(text="x")]), INVALID),
    "unknown role": (pb.TurnSpec(request_id=uid(), input=[pb.InputItem(role=99, text="x")]), INVALID),
    "too many characters": (spec("x" * 1_000_001), INVALID),
    "cannot fit whatever it tokenises to": (spec("x" * 900_000), TOO_LONG),
    "does not fit": (spec("word " * 400), TOO_LONG),
    "token id out of vocabulary": (pb.TurnSpec(request_id=uid(), input=[tokens(5, 420)]), INVALID),
    "negative token id": (pb.TurnSpec(request_id=uid(), input=[tokens(2**32 - 1)]), INVALID),
    "no token ids": (pb.TurnSpec(request_id=uid(), input=[tokens()]), INVALID),
    "too many token ids": (pb.TurnSpec(request_id=uid(), input=[tokens(*[5] * 1000)]), TOO_LONG),
    "edit after an item that is not there": (
        spec("x", replace_after_item=99),
        ("NOT_FOUND", "ITEM_NOT_FOUND"),
    ),
    "future revision": (spec("x", expected_revision=7), ("DATA_LOSS", "HISTORY_REGRESSED")),
    "temperature nan": (with_sampling(temperature=NAN), INVALID),
    "temperature inf": (with_sampling(temperature=INF), INVALID),
    "temperature negative": (with_sampling(temperature=-1), INVALID),
    "temperature tiny": (with_sampling(temperature=1e-45), INVALID),
    "temperature huge": (with_sampling(temperature=1e30), INVALID),
    "top_p zero": (with_sampling(top_p=0), INVALID),
    "top_p above one": (with_sampling(top_p=1.01), INVALID),
    "top_p nan": (with_sampling(top_p=NAN), INVALID),
    "top_k negative as uint32": (with_sampling(top_k=2**32 - 1), INVALID),
    "min_p nan": (with_sampling(min_p=NAN), INVALID),
    "min_p above one": (with_sampling(min_p=1.5), INVALID),
    "repetition_penalty zero": (with_sampling(repetition_penalty=0), INVALID),
    "repetition_penalty inf": (with_sampling(repetition_penalty=INF), INVALID),
    "frequency_penalty": (with_sampling(frequency_penalty=3), INVALID),
    "presence_penalty": (with_sampling(presence_penalty=-INF), INVALID),
    "max_output_tokens zero": (with_sampling(max_output_tokens=0), INVALID),
    "min above max": (with_sampling(min_output_tokens=3, max_output_tokens=2), INVALID),
    "17 stops": (with_sampling(stop=["x"] * 17), INVALID),
    "empty stop": (with_sampling(stop=[""]), INVALID),
    "long stop": (with_sampling(stop=["x" * 257]), INVALID),
    "stop token out of vocabulary": (with_sampling(stop_token_ids=[420]), INVALID),
    "many stop tokens": (with_sampling(stop_token_ids=[1] * 129), INVALID),
    "1025 biases": (with_sampling(logit_bias={i: 0.0 for i in range(1025)}), INVALID),
    "bias out of vocabulary": (with_sampling(logit_bias={420: 1.0}), INVALID),
    "bias nan": (with_sampling(logit_bias={1: NAN}), INVALID),
    "bias inf": (with_sampling(logit_bias={1: INF}), INVALID),
    "no candidates": (with_sampling(candidates=0), INVALID),
    "17 candidates": (with_sampling(candidates=17), INVALID),
    "unknown choice": (with_sampling(candidate_choice=9), INVALID),
    "unknown choice with beams": (with_sampling(candidate_choice=9, beam_width=2), INVALID),
    "no beams": (with_sampling(beam_width=0), INVALID),
    "17 beams": (with_sampling(beam_width=17), INVALID),
    "length_penalty nan": (with_sampling(length_penalty=NAN), INVALID),
    "length_penalty inf": (with_sampling(length_penalty=-INF), INVALID),
    "length_penalty huge": (with_sampling(length_penalty=11), INVALID),
    "beams with temperature": (with_sampling(beam_width=2, temperature=0.5), INVALID),
    "beams with candidates": (with_sampling(beam_width=2, candidates=2), INVALID),
    "beams with repetition_penalty": (with_sampling(beam_width=2, repetition_penalty=1.1), INVALID),
    "beams with frequency_penalty": (with_sampling(beam_width=2, frequency_penalty=0.5), INVALID),
    "beams with presence_penalty": (with_sampling(beam_width=2, presence_penalty=-0.5), INVALID),
    "beams with logit_bias": (with_sampling(beam_width=2, logit_bias={3: 1.0}), INVALID),
    "beams with min_output_tokens": (with_sampling(beam_width=2, min_output_tokens=1), INVALID),
    "beams with stop": (with_sampling(beam_width=2, stop=["x"]), INVALID),
    "beams with logprobs": (
        spec("hi", sampling=pb.SamplingParams(beam_width=2), output=pb.OutputOptions(top_logprobs=0)),
        INVALID,
    ),
    "21 logprobs": (with_output(top_logprobs=21), INVALID),
    "chunk of nothing": (with_output(max_chunk_tokens=0), INVALID),
    "chunk delay negative": (with_output(max_chunk_delay=Duration(seconds=-1)), INVALID),
    "duration zero": (spec("x", max_duration=Duration()), INVALID),
    "duration not valid": (spec("x", max_duration=Duration(seconds=1, nanos=-5)), INVALID),
    "duration out of range": (spec("x", max_duration=Duration(seconds=2**62)), INVALID),
}


@pytest.mark.fault(20, 21)
@pytest.mark.parametrize("case", BAD_TURNS)
async def test_bad_turn(case: str) -> None:
    turn, expected = BAD_TURNS[case]
    async with serving() as rig:
        name = await rig.create("Be brief.")
        before = (await rig.session(name), await rig.items(name))
        for call in (
            rig.call(name, turn),
            rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=turn)),
        ):
            error = await refusal(call)
            assert (error.code, error.reason) == expected
            if expected == INVALID:
                assert isinstance(error, InvalidArgument)
                assert all(path.startswith("turn") for path, _ in error.violations) and error.violations
        assert (await rig.session(name), await rig.items(name)) == before
        assert not rig.link.generations


async def test_an_attach_may_leave_its_spec_out_but_not_say_what_is_wrong() -> None:
    async with serving() as rig:
        name = await rig.create("Be brief.")
        for case, (turn, expected) in BAD_TURNS.items():
            if case != "no input" and expected == INVALID:
                error = await refusal(rig.call(name, turn, attach_only=True))
                assert (error.code, error.reason) == INVALID, case
        error = await refusal(rig.call(name, BAD_TURNS["no input"][0], attach_only=True))
        assert (error.code, error.reason) == ("NOT_FOUND", "TURN_NOT_FOUND")


BAD_NAMES = ["", "x", "sessions/", "sessions/A", "sessions/../etc", "sessions/{a}", "sessions/a%20b", "sessions/äbc",
             "sessions/" + "a" * 64, "sessions/-ab", "sessions/ab", "tenants/x/sessions/abc", "a" * 10_000]  # fmt: skip
BY_NAME: list[Callable[[Rig, str], Any]] = [
    lambda rig, name: rig.api.GetSession(pb.GetSessionRequest(name=name)),
    lambda rig, name: rig.api.UpdateSession(
        pb.UpdateSessionRequest(name=name, session=pb.Session(labels={"a": "b"}))
    ),
    lambda rig, name: rig.api.DeleteSession(pb.DeleteSessionRequest(name=name)),
    lambda rig, name: rig.api.ForkSession(pb.ForkSessionRequest(name=name)),
    lambda rig, name: rig.api.RewindSession(pb.RewindSessionRequest(name=name, item=0)),
    lambda rig, name: rig.api.AppendItems(pb.AppendItemsRequest(name=name, items=[user("x")])),
    lambda rig, name: rig.api.ListItems(pb.ListItemsRequest(name=name)),
    lambda rig, name: rig.call(name, spec("hi")),
    lambda rig, name: rig.call(name, spec("hi"), attach_only=True),
    lambda rig, name: rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hi"))),
    lambda rig, name: rig.api.GetTurn(pb.GetTurnRequest(session=name, request_id=uid())),
    lambda rig, name: rig.api.WarmSession(pb.WarmSessionRequest(session=name)),
    lambda rig, name: rig.api.CancelTurn(pb.CancelTurnRequest(session=name, request_id=uid())),
    lambda rig, name: rig.api.ChooseCandidate(pb.ChooseCandidateRequest(session=name, request_id=uid())),
    lambda rig, name: rig.api.CountTokens(pb.CountTokensRequest(session=name or "x", input=[user("hi")])),
]


@pytest.mark.fault(22)
async def test_bad_names_everywhere() -> None:
    async with serving() as rig:
        for name in BAD_NAMES:
            for method in BY_NAME:
                error = await refusal(method(rig, name))
                assert (error.code, error.reason) == INVALID, name


@pytest.mark.fault(22, 58)
async def test_unknown_and_foreign_sessions_look_the_same() -> None:
    async with serving() as rig:
        foreign = pb.CreateSessionRequest(session_id="theirs")
        await rig.api.CreateSession(foreign, metadata=(("tenant", "other"),))
        for method in BY_NAME:
            unknown, theirs = [await refusal(method(rig, f"sessions/{n}")) for n in ("nowhere", "theirs")]
            assert (unknown.code, unknown.reason) == UNKNOWN
            assert str(unknown) == str(theirs) and unknown.metadata == theirs.metadata


BAD_OTHERS: dict[str, Callable[[Rig], Any]] = {
    "create: id": lambda rig: rig.api.CreateSession(pb.CreateSessionRequest(session_id="A b")),
    "create: request id": lambda rig: rig.api.CreateSession(pb.CreateSessionRequest(request_id="x")),
    "create: model": lambda rig: rig.create(config=pb.SessionConfig(model="gpt-17")),
    "create: ttl": lambda rig: rig.create(config=pb.SessionConfig(ttl=Duration(seconds=-1))),
    "create: overflow": lambda rig: rig.create(config=pb.SessionConfig(overflow_policy=9)),
    "create: sampling": lambda rig: rig.create(
        config=pb.SessionConfig(default_sampling=pb.SamplingParams(top_p=NAN))
    ),
    "create: beams with temperature": lambda rig: rig.create(
        config=pb.SessionConfig(default_sampling=pb.SamplingParams(beam_width=2, temperature=1))
    ),
    "create: labels": lambda rig: rig.create(labels={"": "x"}),
    "create: many labels": lambda rig: rig.create(labels={f"k{i}": "x" for i in range(65)}),
    "create: items": lambda rig: rig.create(initial_items=[user("x")] * 1025),
    "list: page size": lambda rig: rig.api.ListSessions(pb.ListSessionsRequest(page_size=-1)),
    "list: selector": lambda rig: rig.api.ListSessions(pb.ListSessionsRequest(label_selector="nonsense")),
    "list: key twice": lambda rig: rig.api.ListSessions(pb.ListSessionsRequest(label_selector="a=1,a=2")),
    "list: page token": lambda rig: rig.api.ListSessions(pb.ListSessionsRequest(page_token="AAAA")),
    "list: page token bytes": lambda rig: rig.api.ListSessions(pb.ListSessionsRequest(page_token="é!")),
    "update: mask": lambda rig: rig.api.UpdateSession(
        pb.UpdateSessionRequest(
            name="sessions/abc", session=pb.Session(), update_mask={"paths": ["revision"]}
        )
    ),
    "update: other name": lambda rig: rig.api.UpdateSession(
        pb.UpdateSessionRequest(name="sessions/abc", session=pb.Session(name="sessions/def"))
    ),
    "update: no session": lambda rig: rig.api.UpdateSession(pb.UpdateSessionRequest(name="sessions/abc")),
    "stream: no turn": lambda rig: rig.api.StreamTurn(pb.StreamTurnRequest(session="sessions/abc")),
    "stream: 16 offsets beside the first": lambda rig: rig.api.StreamTurn(
        pb.StreamTurnRequest(session="sessions/abc", turn=spec("hi"), resume_candidate_offsets=[0] * 16)
    ),
    "append: nothing": lambda rig: rig.api.AppendItems(pb.AppendItemsRequest(name="sessions/abc")),
    "append: role": lambda rig: rig.api.AppendItems(
        pb.AppendItemsRequest(name="sessions/abc", items=[pb.InputItem(text="x")])
    ),
    "find: no mark": lambda rig: rig.api.FindTurn(pb.FindTurnRequest(answer="x")),
    "find: long mark": lambda rig: rig.api.FindTurn(pb.FindTurnRequest(mark="x" * 257)),
    "find: request id": lambda rig: rig.api.FindTurn(pb.FindTurnRequest(mark="x", request_id="1234")),
    "choose: request id": lambda rig: rig.api.ChooseCandidate(
        pb.ChooseCandidateRequest(session="sessions/abc", request_id="1234")
    ),
    "cancel: keep": lambda rig: rig.api.CancelTurn(
        pb.CancelTurnRequest(session="sessions/abc", request_id=uid(), keep=7)
    ),
}


@pytest.mark.parametrize("case", BAD_OTHERS)
async def test_bad_request(case: str) -> None:
    async with serving() as rig:
        error = await refusal(BAD_OTHERS[case](rig))
        assert (error.code, error.reason) == INVALID


async def test_a_system_prompt_that_can_never_fit() -> None:
    async with serving() as rig:
        error = await refusal(rig.create("word " * 400))
        assert (error.code, error.reason) == TOO_LONG


MALFORMED_BYTES = {
    "noise": b"\xff\xff\xff\xff",
    "cut short": pb.GetSessionRequest(name="sessions/abc").SerializeToString()[:-1],
    "bad utf-8": b"\x0a\x04\xff\xfe\xfd\xfc",
    "wrong wire type": b"\x0d\x01\x02",
    "nesting bomb": b"\x13" * 300,
}


@pytest.mark.fault(16)
@pytest.mark.parametrize("case", MALFORMED_BYTES)
async def test_malformed_bytes(case: str) -> None:
    async with serving() as rig:
        for method in ("GetSession", "RunTurn", "ListItems"):
            error = await refusal(rig.channel.unary_unary(SERVICE + method)(MALFORMED_BYTES[case]))
            assert (error.code, error.reason) == MALFORMED
        error = await refusal(rig.channel.unary_stream(SERVICE + "StreamTurn")(MALFORMED_BYTES[case]))
        assert (error.code, error.reason) == MALFORMED


async def test_unknown_fields_are_accepted() -> None:
    async with serving() as rig:
        name = await rig.create()
        data = pb.GetSessionRequest(name=name).SerializeToString() + b"\xf8\x07\x01"
        assert await rig.channel.unary_unary(SERVICE + "GetSession")(data)


@pytest.mark.fault(23)
async def test_page_tokens_are_bound_to_tenant_and_query() -> None:
    async with serving() as rig:
        for _ in range(3):
            await rig.create()
        token = (await rig.api.ListSessions(pb.ListSessionsRequest(page_size=1))).next_page_token
        again = pb.ListSessionsRequest(page_size=1, page_token=token)
        assert (await rig.api.ListSessions(again)).sessions
        foreign = rig.api.ListSessions(again, metadata=(("tenant", "other"),))
        assert (await refusal(foreign)).code == "INVALID_ARGUMENT"
        again.label_selector = "a=b"
        assert (await refusal(rig.api.ListSessions(again))).code == "INVALID_ARGUMENT"


BOUNDS = Bounds(RequestLimits(), lambda: tokenizer().vocab_size)


@pytest.mark.fault(16)
@given(st.sampled_from([kind for kind in RULES if kind.__name__.endswith("Request")]), st.binary(max_size=64))
@settings(max_examples=300)
def test_decode_and_validate_take_any_bytes(kind: Any, data: bytes) -> None:
    try:
        validate(decode(kind.FromString, data), BOUNDS)
    except InvalidArgument as error:
        assert error.reason in ("FIELD_INVALID", "REQUEST_MALFORMED")


@pytest.mark.fault(21)
@given(st.floats(width=32), st.floats(width=32), st.floats(width=32))
@settings(max_examples=300)
def test_no_strange_number_reaches_the_sampler(temperature: float, top_p: float, penalty: float) -> None:
    params = pb.SamplingParams(temperature=temperature, top_p=top_p, repetition_penalty=penalty)
    try:
        validate(spec("x", sampling=params), BOUNDS)
    except InvalidArgument:
        return
    assert temperature == 0 or 0.009 < temperature <= 10
    assert 0 < top_p <= 1 and 0 < penalty <= 10


def test_every_request_of_both_services_has_rules() -> None:
    for service in pb.DESCRIPTOR.services_by_name.values():
        for method in service.methods:
            assert any(kind.DESCRIPTOR is method.input_type for kind in RULES), method.full_name
