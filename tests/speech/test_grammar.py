"""Whatever a composed grammar lets through is valid and read back as it was meant: random logits, another validator."""

from __future__ import annotations

import asyncio
import itertools
import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from llguidance import LLMatcher

from pensieve import AsyncClient, demo
from pensieve.client import FinishReason
from pensieve.server.grammars.check import find_problem
from pensieve.speech import (
    AnswerFormat,
    AnswerShape,
    CallForm,
    FormatKind,
    OfferedFunction,
    SpeechForm,
    answer_grammar,
    format_grammar,
    grammar_text,
    read,
)
from support.lengths import LONG, at_length
from support.service.real_engine import TinyModel, really_serving
from support.speech.walks import MARKED, SPELLED, random_answer, vocabulary
from support.tool_templates import LLAMA31, MISTRAL, QWEN25

SCHEMAS = at_length(25, 300)

# ---- schemas

_NAMES = st.sampled_from(["a", "b c", 'd"e', "f\\g", "ü", "name", "arguments", "<tool_call>"])
_BOUND = st.integers(0, 4)
_WORDS = st.sampled_from(["x", "<|im_end|>", 'q"', "\u2028", "</think>", "[TOOL_CALLS]", "long text\n"])
_LEAVES: st.SearchStrategy[dict[str, Any]] = st.one_of(
    st.just({}),
    st.sampled_from([{"type": "boolean"}, {"type": "null"}, {"type": ["string", "null"]}, {"type": "object"}]),
    st.builds(lambda low, more: {"type": "string", "minLength": low, "maxLength": low + more}, _BOUND, _BOUND),
    st.sampled_from(["^[a-f]{2,4}$", "^(yes|no)$", "[0-9]{3}"]).map(lambda one: {"type": "string", "pattern": one}),
    st.sampled_from(["date", "date-time", "uuid", "ipv4", "email"]).map(lambda one: {"type": "string", "format": one}),
    st.builds(lambda low, more: {"type": "integer", "minimum": low, "maximum": low + more}, st.integers(-9, 9), _BOUND),
    st.builds(lambda low: {"type": "number", "exclusiveMinimum": low, "maximum": low + 1}, st.floats(-9, 9)),
    st.integers(2, 7).map(lambda step: {"type": "integer", "multipleOf": step}),
    st.lists(_WORDS | st.integers() | st.none(), min_size=1, max_size=3, unique=True).map(lambda one: {"enum": one}),
    _WORDS.map(lambda one: {"const": one}),
)  # fmt: skip


def _object(properties: dict[str, Any], required: list[bool], more: bool) -> dict[str, Any]:
    wanted = [name for name, must in zip(properties, itertools.cycle(required), strict=False) if must]
    return {"type": "object", "properties": properties, "required": wanted, "additionalProperties": more}


def _bigger(inner: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    return st.one_of(
        st.builds(
            _object, st.dictionaries(_NAMES, inner, max_size=4), st.lists(st.booleans(), min_size=1, max_size=4),
            st.booleans(),
        ),
        st.builds(lambda one, n: {"type": "array", "items": one, "minItems": n, "maxItems": n + 2}, inner, _BOUND),
        st.lists(inner, min_size=1, max_size=3).map(lambda one: {"anyOf": one}),
        st.lists(inner, min_size=1, max_size=2).map(lambda one: {"type": "array", "prefixItems": one, "items": False}),
        inner.map(lambda one: {"$ref": "#/$defs/one", "$defs": {"one": one}}),
        inner.map(lambda one: {"type": "object", "patternProperties": {"^k": one}, "maxProperties": 2}),
    )  # fmt: skip


SCHEMA = st.recursive(_LEAVES, _bigger, max_leaves=6).map(
    lambda one: one if "$defs" not in json.dumps(one)[2:] else {**one}
)


def _in_form(schema: dict[str, Any] | bool) -> AnswerFormat:
    return AnswerFormat(FormatKind.JSON_SCHEMA, json.dumps(schema))


def _supported(schema: dict[str, Any]) -> bool:
    # A definition inside another schema is looked for at the root.
    return json.dumps(schema).count('"$defs"') == ("$defs" in schema) and find_problem(
        format_grammar(_in_form(schema))
    ) is None  # fmt: skip


_examples = settings(
    max_examples=SCHEMAS, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow]
)  # fmt: skip


def check(schema: dict[str, Any] | bool, seed: int) -> bool:
    """Whether an answer ended; if it did, it is valid."""
    text = random_answer(grammar_text(format_grammar(_in_form(schema))), seed)
    if text is None:
        return False
    check_valid(text, schema)
    return True


def check_valid(text: str, schema: dict[str, Any] | bool) -> None:
    checker = jsonschema.FormatChecker(["ipv4", "email", "uuid"])
    jsonschema.validate(json.loads(text), schema, jsonschema.Draft202012Validator, format_checker=checker)
    longest = max((len(list(run)) for space, run in itertools.groupby(text, str.isspace) if space), default=0)
    assert longest <= 8 or '"' in text, "only a string may hold more white space"


@_examples
@given(schema=SCHEMA.filter(_supported), seed=st.integers(0, 1 << 30))
def test_an_answer_that_ends_is_valid(schema: dict[str, Any], seed: int) -> None:
    check(schema, seed)


def some_schemas(count: int) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = []

    @settings(_examples, max_examples=count, phases=[Phase.generate])
    @given(schema=SCHEMA.filter(_supported))
    def collect(schema: dict[str, Any]) -> None:
        found.append(schema)

    collect()
    return found


@pytest.mark.timeout(at_length(120, 1800))
async def test_answers_of_the_demo_model_are_valid() -> None:
    """Streams, some of them of several candidates, many at a time."""
    model, ended, cut = Path(demo.__file__).parent / "model", 0, 0

    async def answer(client: AsyncClient, number: int, schema: dict[str, Any]) -> None:
        nonlocal ended, cut
        session, several = await client.create_session(), number % 3 == 0
        texts = [""] * (3 if several else 1)
        async with slots:
            stream = session.stream(
                "Tell me about your day.", schema=schema, seed=number, temperature=1.0,
                max_output_tokens=at_length(120, 300), **({"candidates": 3} if several else {}),
            )  # fmt: skip
            async for piece in stream:
                texts[piece.candidate] += piece.text
        answers: Any = stream.turn.candidates if several else [stream.turn]
        assert texts == [one.text for one in answers]
        for one in answers:
            if one.finish_reason is FinishReason.EOS:
                ended += 1
                check_valid(one.text, schema)
            else:
                cut += 1
                assert one.finish_reason is FinishReason.LENGTH
        await session.delete()

    schemas, slots = some_schemas(at_length(12, 300)), asyncio.Semaphore(12)
    async with (
        really_serving(TinyModel(model), device="16384tokens") as rig,
        AsyncClient(rig.target) as client,
        asyncio.TaskGroup() as group,
    ):
        for number, schema in enumerate(schemas):
            group.create_task(answer(client, number, schema))
    print(f"{len(schemas)} schemas, {ended} answers ended by themselves, {cut} were cut")
    assert ended >= len(schemas) // 2, "too few: the test shows little"


SUITE: dict[str, dict[str, Any]] = {
    "a tree": {
        "$ref": "#/$defs/node",
        "$defs": {
            "node": {
                "type": "object",
                "properties": {
                    "value": {"type": "integer"},
                    "left": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]},
                },
                "required": ["value", "left"],
                "additionalProperties": False,
            }
        },
    },
    "a union told apart": {
        "oneOf": [
            {"type": "object", "properties": {"k": {"const": k}, "v": v}, "required": ["k", "v"]}
            for k, v in (("text", {"type": "string", "maxLength": 3}), ("number", {"type": "integer"}))
        ]
    },
    "parts joined": {
        "allOf": [
            {"type": "object", "properties": {"a": {"type": "string", "maxLength": 9}}, "required": ["a"]},
            {"properties": {"a": {"minLength": 2}, "b": {"type": "boolean"}}},
        ]
    },
    "a map": {"type": "object", "additionalProperties": {"type": "integer"}, "minProperties": 1},
    "optional fields": {
        "type": "object",
        "properties": {f"field {n}": {"type": ["integer", "null"]} for n in range(40)},
        "additionalProperties": False,
    },
    "anything": {},
}
"""Shapes of common test suites."""


@pytest.mark.parametrize("name", SUITE)
def test_common_shapes(name: str) -> None:
    assert any([check(SUITE[name], seed) for seed in range(4)])


_SAMPLES = {
    "date": "2026-11-26", "date-time": "2026-11-26T01:02:03Z", "uuid": "6c0cbb0c-6c43-4b0e-9f5c-2a4a52c0a3d1",
    "ipv4": "127.0.0.1", "email": "a.b@example.org",
}  # fmt: skip


def values(schema: dict[str, Any], root: dict[str, Any]) -> st.SearchStrategy[Any]:
    """Valid values of one of the schemas above, with properties in its order and others behind them."""
    match schema:
        case {"$ref": _}:
            return values(root["$defs"]["one"], root)
        case {"const": value}:
            return st.just(value)
        case {"enum": several}:
            return st.sampled_from(several)
        case {"anyOf": several}:
            return st.one_of([values(one, root) for one in several])
        case {"format": name}:
            return st.just(_SAMPLES[name])
        case {"pattern": pattern}:
            return st.from_regex(pattern, fullmatch=True, alphabet="abcdefyesno0123456789")
        case {"minLength": low, "maxLength": high}:
            return st.text('a"\\ü漢', min_size=low, max_size=high)
        case {"multipleOf": step}:
            return st.integers(-9, 9).map(lambda one: one * step)
        case {"type": "integer", "minimum": low, "maximum": high}:
            return st.integers(low, high)
        case {"type": "number", "maximum": high}:
            return st.just(high)
        case {"type": "boolean"}:
            return st.booleans()
        case {"type": "null"}:
            return st.none()
        case {"type": ["string", "null"]}:
            return st.sampled_from(["", None])
        case {"prefixItems": several}:
            return st.tuples(*(values(one, root) for one in several)).map(list)
        case {"items": one, "minItems": low, "maxItems": high}:
            return st.lists(values(one, root), min_size=low, max_size=high)
        case {"patternProperties": {"^k": one}}:
            return st.dictionaries(st.sampled_from(["k", "k1"]), values(one, root))
        case {"properties": named, "required": required, "additionalProperties": more}:
            return st.tuples(
                st.fixed_dictionaries({name: values(one, root) for name, one in named.items()}),
                st.sets(st.sampled_from(sorted(named)) if named else st.nothing()),
                st.sampled_from([{}, {"z": [1]}] if more else [{}]),
            ).map(
                lambda drawn: {
                    **{name: drawn[0][name] for name in named if name in required or name in drawn[1]},
                    **drawn[2],
                }
            )
        case {"type": "object"}:
            return st.sampled_from([{}, {"z": {}}])
    return st.sampled_from([None, True, 3, -0.5, "x", [], {}, {"k": [1, "y"]}])


@_examples
@given(data=st.data(), schema=SCHEMA.filter(_supported))
def test_what_is_valid_is_allowed(data: st.DataObject, schema: dict[str, Any]) -> None:
    value = data.draw(values(schema, schema))
    text = json.dumps(
        value, ensure_ascii=False, separators=data.draw(st.sampled_from([(",", ":"), (", ", ": ")]))
    )
    if "e-" in text:
        return  # numbers such as 1e-05 have several spellings
    tokenizer, masks = vocabulary(MARKED)
    matcher = LLMatcher(masks, grammar_text(format_grammar(_in_form(schema))), log_level=0)
    ids = tokenizer.spell(text, ())
    assert ids is not None and matcher.consume_tokens(list(ids)) and matcher.is_accepting(), (text, schema)


# ---- whole answers

TOWN = {"type": "object", "properties": {"town": {"type": "string", "maxLength": 4}, "n": {"type": "integer"}},
        "required": ["town"], "additionalProperties": False}  # fmt: skip
FUNCTIONS = (OfferedFunction("weather", TOWN, strict=True), OfferedFunction("traffic"))
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 4}, "arguments": {"type": "object"}},
          "required": ["name"]}  # fmt: skip
TEMPLATES = [
    (CallForm.HERMES, QWEN25), (CallForm.LLAMA3, LLAMA31), (CallForm.MISTRAL, MISTRAL),
    (CallForm.MISTRAL, "[TOOL_CALLS]f[ARGS]"), (CallForm.MISTRAL, "[TOOL_CALLS]f[CALL_ID]i[ARGS]"),
]  # fmt: skip


@pytest.mark.parametrize("kind", [MARKED, SPELLED])
@pytest.mark.parametrize(("calls", "template"), TEMPLATES)
def test_whole_answers_are_read_back(calls: CallForm, template: str, kind: str) -> None:
    tokenizer, _ = vocabulary(kind)
    ended = 0
    thoughts = [(False, False), (True, False), (True, True)]
    if kind == SPELLED and not LONG:
        del thoughts[1]
    for number, (thinks, must, one, wanted) in enumerate(
        itertools.product(thoughts, (False, True), (False, True), (None, _in_form(PERSON)))
    ):
        form = SpeechForm(calls, *thinks, tagged=wanted is not None)
        shape = AnswerShape(form, FUNCTIONS, must, one, wanted, template)
        for seed in range(at_length(1, 8)):
            text = random_answer(answer_grammar(shape, tokenizer.mark_id), 100 * number + seed, kind)
            if text is not None:
                ended += 1
                check_answer(text, shape)
    assert ended > 5


def check_answer(text: str, shape: AnswerShape) -> None:
    answer = read(text, shape.form)
    assert not (shape.must_call and (answer.words or not answer.calls)), text
    assert not (shape.one_call and len(answer.calls) > 1), text
    assert not answer.thoughts or shape.form.thinks
    for call in answer.calls:
        if call.name == "traffic":
            assert json.loads(call.arguments) == {}
        else:
            assert call.name == "weather"
            jsonschema.validate(json.loads(call.arguments), TOWN)
    if shape.format is not None and not answer.calls:
        jsonschema.validate(json.loads(answer.words), PERSON)


@pytest.mark.parametrize(
    ("wanted", "good", "bad"),
    [
        (AnswerFormat(FormatKind.REGEX, r"a/b\d{2}|\\"), ["a/b12", "\\"], ["a/b1", "a\\/b12", ""]),
        (AnswerFormat(FormatKind.REGEX, "x\ny"), ["x\ny"], ["xy"]),
        (AnswerFormat(FormatKind.LARK, 'start: a+\na: "x" | "<|im_end|>"'), ["x", "xx<|im_end|>"], ["", "y"]),
        (
            AnswerFormat(FormatKind.CHOICE, choices=('"q"', "back\\slash", "new\nline", "ü", "\u2028", "<think>")),
            ['"q"', "back\\slash", "new\nline", "ü", "\u2028", "<think>"],
            ["q", "", "new"],
        ),
        (
            AnswerFormat(FormatKind.JSON_OBJECT),
            ["{}", '{"a": [1]}', '{ "a":\n\t1}'],
            ["[]", "{}x", " {}", f"{{{' ' * 9}}}"],
        ),
    ],
)  # fmt: skip
def test_other_forms(wanted: AnswerFormat, good: list[str], bad: list[str]) -> None:
    tokenizer, masks = vocabulary(MARKED)
    for thinks in (False, True):
        shape = AnswerShape(SpeechForm(None, thinks, thinks), format=wanted)
        for text in (*good, *bad):
            matcher = LLMatcher(masks, answer_grammar(shape, tokenizer.mark_id), log_level=0)
            ids = tokenizer.spell(text, ()) or ()
            if thinks:
                mark = tokenizer.mark_id("</think>")
                assert mark is not None and matcher.consume_tokens([*(tokenizer.spell("hm", ()) or ()), mark])
            accepted = matcher.consume_tokens(list(ids)) and matcher.is_accepting()
            assert accepted is (text in good or (thinks and text == " {}")), text


def test_text_before_a_call_is_free() -> None:
    tokenizer, masks = vocabulary(MARKED)
    shape = AnswerShape(SpeechForm(CallForm.HERMES), FUNCTIONS)
    matcher = LLMatcher(masks, answer_grammar(shape, tokenizer.mark_id), log_level=0)
    assert matcher.consume_tokens(list(tokenizer.spell("Let me <tool_cal", ()) or ()))
    assert matcher.is_accepting()
    (mark,) = (tokenizer.mark_id("<tool_call>"),)
    assert mark is not None and matcher.consume_token(mark) and not matcher.is_accepting()
