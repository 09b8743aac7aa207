"""The form of an answer over gRPC: part of the turn, bound to a scope, checked before the engine gets it."""

from __future__ import annotations

import asyncio
import json
import os
import resource
import signal
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.client import AsyncClient
from pensieve.core import CandidateChoice
from pensieve.engine.messages import Failed
from pensieve.errors import Internal, InvalidArgument, PermissionDenied, ResourceExhausted
from pensieve.http.common.failures import failure_from_error
from pensieve.server.grammars.checker import MAX_DEPTH, GrammarChecker, is_too_deep
from pensieve.server.grammars.process import COMPILE_CPU_S
from pensieve.server.keys import READ, WRITE
from pensieve.server.links.generations import _failure as failure_of
from pensieve.server.rpc.auth import Identity
from pensieve.speech import AnswerFormat, FormatKind, format_grammar, grammar_text
from pensieve.v1 import pensieve_pb2 as pb
from support.service.service_rig import refusal, serving, spec

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}}
IN_JSON = pb.AnswerFormat(json_schema=json.dumps(SCHEMA))


class Scoped:
    """Lets everybody in, with the two default scopes only."""

    def check(self, method: str, metadata: Any, _shown: Any = None) -> Identity:
        return Identity(tenant="acme", key_id="k", scopes=frozenset({READ, WRITE}))


async def test_the_form_is_part_of_the_turn() -> None:
    async with serving() as rig:
        name = await rig.create()
        first = await rig.run(name, turn := spec("hi", format=IN_JSON))
        assert await rig.run(name, turn) == first, "a retry"
        for other in (None, pb.AnswerFormat(json_object={}), pb.AnswerFormat(json_schema="{}")):
            again = spec("hi", request_id=turn.request_id, format=other)
            error = await refusal(rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=again)))
            assert error.reason == "REQUEST_ID_REUSED"
        (generation,) = rig.link.generations
        grammar = generation.sampling.grammar
        assert grammar is not None and grammar.step_items == 2000
        await rig.run(name, "and now plain")
        assert rig.link.generations[-1].sampling.grammar is None, "it held for one turn"


async def test_patterns_and_grammars_need_the_scope() -> None:
    async with serving(authorizer=Scoped()) as rig:
        name = await rig.create()
        for wanted in (pb.AnswerFormat(regex="a+"), pb.AnswerFormat(lark='start: "a"')):
            for call in (
                rig.call(name, spec("hi", format=wanted)),
                rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hi", format=wanted))),
            ):
                error = await refusal(call)
                assert isinstance(error, PermissionDenied) and error.metadata["scope"] == "grammars"
        for wanted in (IN_JSON, pb.AnswerFormat(choice={"texts": ["a", "b"]})):
            await rig.run(name, spec("hi", format=wanted))
    async with serving() as rig:
        await rig.run(await rig.create(), spec("hi", format=pb.AnswerFormat(regex="a+")))
        grammar = rig.link.generations[-1].sampling.grammar
        assert grammar is not None and grammar.step_items == 500


BAD: dict[str, tuple[dict[str, Any], str, str]] = {
    "no form": ({"format": pb.AnswerFormat()}, "turn.format", "needs a form"),
    "beams": ({"format": IN_JSON, "sampling": {"beam_width": 2}}, "turn.format", "beam_width"),
    "a keyword": (
        {"format": pb.AnswerFormat(json_schema='{"items": {"not": {}}}')}, "turn.format.json_schema", "/items: the key"
    ),
    "no object": ({"format": pb.AnswerFormat(json_schema="[]")}, "turn.format.json_schema", "JSON object"),
    "nothing allowed": ({"format": pb.AnswerFormat(json_schema="false")}, "turn.format.json_schema", "'not'"),
    "infinite": ({"format": pb.AnswerFormat(json_schema='{"const": 1e999}')}, "turn.format.json_schema", "too large"),
    "no number": ({"format": pb.AnswerFormat(json_schema='{"const": NaN}')}, "turn.format.json_schema", "NaN"),
    "an empty pattern": ({"format": pb.AnswerFormat(regex="")}, "turn.format.regex", "is empty"),
    "a long grammar": ({"format": pb.AnswerFormat(lark="x" * 70_000)}, "turn.format.lark", "larger"),
    "no tools": ({"calls": {"strict": ["f"]}}, "turn.calls.strict", "no function"),
    "both": ({"calls": {"begin_with": "", "none": True}}, "turn.calls.none", "begin_with"),
}  # fmt: skip


async def test_a_form_that_cannot_be_followed_is_refused_and_leaves_no_trace() -> None:
    async with serving() as rig:
        name = await rig.create()
        before = await rig.session(name)
        for case, (fields, path, problem) in BAD.items():
            error = await refusal(rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hi", **fields))))
            assert isinstance(error, InvalidArgument), (case, error)
            assert error.violations[0][0] == path and problem in error.violations[0][1], (case, error)
        assert not rig.link.generations and await rig.session(name) == before
        inherited = await rig.create(config=pb.SessionConfig(default_sampling={"beam_width": 2}))
        error = await refusal(
            rig.api.RunTurn(pb.RunTurnRequest(session=inherited, turn=spec("hi", format=IN_JSON)))
        )
        assert isinstance(error, InvalidArgument) and "beam_width" in error.message


async def test_without_the_library_the_refusal_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(GrammarChecker, "installed", staticmethod(lambda: False))
    async with serving() as rig:
        name = await rig.create()
        error = await refusal(
            rig.api.RunTurn(pb.RunTurnRequest(session=name, turn=spec("hi", format=IN_JSON)))
        )
        assert isinstance(error, InvalidArgument) and "pip install 'pensieve[server]'" in error.message
        await rig.run(name, "plain turns are served")


async def test_candidates_share_the_form() -> None:
    async with serving() as rig:
        sampling = pb.SamplingParams(candidates=2, temperature=1.0, candidate_choice=CandidateChoice.FIRST)
        await rig.run(await rig.create(), spec("hi", format=IN_JSON, sampling=sampling))
        values = rig.link.generations[-1].sampling
        assert values.candidates == 2 and values.grammar is not None


async def test_the_sdk_sends_models_and_mappings() -> None:
    from pydantic import BaseModel

    class Thing(BaseModel):
        a: int

    async with serving() as rig, AsyncClient(rig.target) as client:
        session = await client.create_session()
        for wanted in (Thing, SCHEMA, json.dumps(SCHEMA)):
            await session.send("hi", schema=wanted)
            grammar = rig.link.generations[-1].sampling.grammar
            assert grammar is not None and '"a"' in grammar.text
        await session.send("hi", choice=["x", "y"])
        with pytest.raises(TypeError, match="here it is 'schema'"):
            await session.send("hi", response_format={})  # type: ignore[call-arg]


_PARTS = st.sampled_from(['"', '\\"', "\\\\", "[[[", "]", "{", "a\n"])


@given(text=st.lists(_PARTS, max_size=12).map("".join), levels=st.integers(0, 4))
def test_brackets_are_counted_outside_of_strings(text: str, levels: int) -> None:
    text = (MAX_DEPTH - 2 + levels) * "[" + text
    depth = deepest = 0
    quoted = escaped = False
    for char in text:
        if quoted:
            quoted, escaped = escaped or char != '"', char == "\\" and not escaped
        elif char == '"':
            quoted = True
        elif char in "[]{}":
            depth += 1 if char in "[{" else -1
            deepest = max(deepest, depth)
    assert is_too_deep(text) is (deepest > MAX_DEPTH)


def test_a_grammar_that_costs_too_much_for_a_token_is_the_callers() -> None:
    error = failure_of(Failed(1, "GRAMMAR_TOO_COSTLY", "3 tokens took long"))
    assert isinstance(error, InvalidArgument) and error.reason == "GRAMMAR_TOO_COSTLY"
    assert failure_from_error(error).status == 400 and failure_from_error(error).code == "grammar_too_costly"


# ---- the process that compiles


def in_form(kind: FormatKind, text: str) -> str:
    return grammar_text(format_grammar(AnswerFormat(kind, text)))


def product(factors: int) -> str:
    """A schema that multiplies out: each of its parts has two alternatives."""
    parts = [
        {"anyOf": [{"properties": {f"{side}{n}": {"type": "string"}}} for side in "ab"]}
        for n in range(factors)
    ]
    return in_form(FormatKind.JSON_SCHEMA, json.dumps({"type": "object", "allOf": parts}))


@pytest.fixture
async def checker() -> Any:
    made = GrammarChecker()
    yield made
    await made.close()


async def test_a_grammar_without_end_costs_its_caller_only(checker: GrammarChecker) -> None:
    sides = [in_form(FormatKind.JSON_OBJECT, ""), in_form(FormatKind.REGEX, "(a|b)+")]
    found = await asyncio.gather(
        *(checker.problem("hostile", product(n)) for n in (11, 30)),
        *(checker.problem("other", text) for text in sides),
    )
    assert found[2:] == [None, None]
    assert all(one is not None for one in found[:2]), found


async def test_a_process_that_cannot_be_started_now_is_told(checker: GrammarChecker) -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    grammar = in_form(FormatKind.REGEX, "a")
    resource.setrlimit(resource.RLIMIT_NOFILE, (3, hard))
    try:
        with pytest.raises(ResourceExhausted, match="Too many open files") as refused:
            await checker.problem("t", grammar)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    assert refused.value.retry_after_s is not None
    assert await checker.problem("t", grammar) is None


async def test_the_process_is_replaced_when_a_grammar_ends_it(
    checker: GrammarChecker, monkeypatch: pytest.MonkeyPatch
) -> None:
    good = in_form(FormatKind.REGEX, "a")
    assert await checker.problem("t", good) is None
    compiler = checker._compiler
    assert compiler is not None
    killed_in = in_form(FormatKind.REGEX, "b")
    os.kill(compiler.pid, signal.SIGSTOP)  # so that it cannot answer before
    asking = asyncio.create_task(checker.problem("t", killed_in))
    await asyncio.sleep(0)
    compiler.kill()
    with pytest.raises(Internal):
        await asking
    assert await checker.problem("t", killed_in) is None, "it may be good: the kill is not remembered"
    assert await checker.problem("t", in_form(FormatKind.REGEX, "c")) is None
    assert checker._compiler is not compiler
    assert await checker.problem("t", good) is None and 0 < COMPILE_CPU_S < 10
