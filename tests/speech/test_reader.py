"""Reading an answer: whole, in pieces of any size, and when the model writes nonsense."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pensieve.speech import (
    Answer,
    AnswerPart,
    CallForm,
    FunctionCall,
    SpeechForm,
    SpeechReader,
    Thought,
    Words,
    read,
    render_answer,
)
from pensieve.speech.reader import merge_parts

HERMES, LLAMA3, MISTRAL = (SpeechForm(form) for form in CallForm)
THINKING = SpeechForm(CallForm.HERMES, thinks=True)
OPENED = SpeechForm(CallForm.HERMES, thinks=True, begins_thinking=True)
FORMS = (SpeechForm(), SpeechForm(thinks=True), HERMES, LLAMA3, MISTRAL, THINKING, OPENED)
ADA = FunctionCall("find", '{"name": "Ada"}')
BOB = FunctionCall("find", '{"name": "Bob", "deep": [1, {"x": "}"}]}')


def call(one: FunctionCall, key: str = "arguments") -> str:
    return f'{{"name": "{one.name}", "{key}": {one.arguments}}}'


def hermes(one: FunctionCall) -> str:
    return f"<tool_call>\n{call(one)}\n</tool_call>"


def in_pieces(text: str, size: int, form: SpeechForm) -> Answer:
    reader = SpeechReader(form)
    told: list[AnswerPart] = []
    for at in range(0, len(text), size):
        told += reader.push(text[at : at + size])
    return Answer(merge_parts([*told, *reader.finish()]))


CASES: list[tuple[SpeechForm, str, tuple[AnswerPart, ...]]] = [
    (SpeechForm(), f" hi {hermes(ADA)}", (Words(f" hi {hermes(ADA)}"),)),
    (HERMES, " hi there \n", (Words(" hi there \n"),)),
    (HERMES, hermes(ADA), (ADA,)),
    (HERMES, f"Let me see.\n{hermes(ADA)}\n{hermes(BOB)}\n", (Words("Let me see."), ADA, BOB)),
    (HERMES, f"{hermes(ADA)} done", (ADA, Words("done"))),
    (HERMES, f"<tool_call>{call(ADA)}", (ADA,)),
    (HERMES, "<tool_call>{'name'}</tool_call> so", (Words("<tool_call>{'name'}</tool_call> so"),)),
    (HERMES, "a <tool_call>", (Words("a <tool_call>"),)),
    (HERMES, "1 < 2 and <tool", (Words("1 < 2 and <tool"),)),
    (HERMES, '<tool_call>{"name": "f", "arguments": [1]}</tool_call>',
     (Words('<tool_call>{"name": "f", "arguments": [1]}</tool_call>'),)),
    (HERMES, '<tool_call>{"name": "f"}</tool_call>', (FunctionCall("f", "{}"),)),
    (HERMES, '<tool_call>{"name": "f", "arguments": {"x": "</tool_call>"}}</tool_call>',
     (FunctionCall("f", '{"x": "</tool_call>"}'),)),
    (HERMES, f"<tool_call>nonsense</tool_call>{hermes(ADA)}",
     (Words("<tool_call>nonsense</tool_call>"), ADA)),
    (HERMES, '<tool_call>{"name": "f", "arguments": ' + "[" * 5000, (Words(
        '<tool_call>{"name": "f", "arguments": ' + "[" * 5000),)),
    (LLAMA3, call(ADA, "parameters"), (ADA,)),
    (LLAMA3, f"\n<|python_tag|>{call(ADA, 'parameters')}", (ADA,)),
    (LLAMA3, f"{call(ADA, 'parameters')}; {call(BOB, 'parameters')}", (ADA, BOB)),
    (LLAMA3, '{"name": "Ada"}', (Words('{"name": "Ada"}'),)),
    (LLAMA3, f"{call(ADA, 'parameters')} and so", (Words(f"{call(ADA, 'parameters')} and so"),)),
    (LLAMA3, "Say {x}", (Words("Say {x}"),)),
    (LLAMA3, "{" * 3000, (Words("{" * 3000),)),
    (MISTRAL, f"[TOOL_CALLS] [{call(ADA)}, {call(BOB)}]", (ADA, BOB)),
    (MISTRAL, f"Well. [TOOL_CALLS][{call(ADA)}]", (Words("Well."), ADA)),
    (MISTRAL, '[TOOL_CALLS] [{"name": "f", "arguments": {}, "id": "abcdef123"}]',
     (FunctionCall("f", "{}", "abcdef123"),)),
    (MISTRAL, f"[TOOL_CALLS]find[ARGS]{ADA.arguments}[TOOL_CALLS]find[CALL_ID]x1[ARGS]{BOB.arguments}",
     (ADA, FunctionCall("find", BOB.arguments, "x1"))),
    (MISTRAL, f"[TOOL_CALLS]find{ADA.arguments}", (ADA,)),
    (MISTRAL, "[TOOL_CALLS] [1, 2]", (Words("[TOOL_CALLS] [1, 2]"),)),
    (MISTRAL, "[1, 2] or [TOOL", (Words("[1, 2] or [TOOL"),)),
    (THINKING, "<think>\nHm. \n</think>\n\nYes.", (Thought("Hm."), Words("Yes."))),
    (THINKING, "<think>\n\n</think>\n\nYes.", (Words("Yes."),)),
    (THINKING, f" <think>a</think>{hermes(ADA)}", (Thought("a"), ADA)),
    (THINKING, "I <think> so", (Words("I <think> so"),)),
    (THINKING, "<think>cut in the mi", (Thought("cut in the mi"),)),
    (OPENED, "Hm.\n</think>\nYes.", (Thought("Hm."), Words("Yes."))),
    (OPENED, "\n<think>Hm.</think>Yes.", (Thought("Hm."), Words("Yes."))),
]  # fmt: skip


@pytest.mark.parametrize(("form", "text", "parts"), CASES)
def test_whole_and_cut_anywhere(form: SpeechForm, text: str, parts: tuple[AnswerPart, ...]) -> None:
    assert read(text, form).parts == parts
    for size in (1, 2, 3, 7) if len(text) < 1000 else (997,):
        assert in_pieces(text, size, form).parts == parts


PIECES = st.sampled_from(
    ["<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>", "\n", " ",
     call(ADA), call(ADA, "parameters"), f"[{call(BOB)}]", "{", "}", '"', "\\", ";", "f", "<", "[", "wörds"]
)  # fmt: skip


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(FORMS), st.data())
def test_pieces_give_what_the_whole_gives(text: str, form: SpeechForm, data: st.DataObject) -> None:
    reader, at = SpeechReader(form), 0
    told: list[AnswerPart] = []
    while at < len(text):
        size = data.draw(st.integers(1, 9))
        told += reader.push(text[at : at + size])
        at += size
    found = Answer(merge_parts([*told, *reader.finish()]))
    assert found == read(text, form)
    for one in found.calls:
        assert isinstance(json.loads(one.arguments), dict)
    if form.plain:
        assert found.words == text


WORDS = st.text(st.sampled_from("ab .\nü"), max_size=8).map(str.strip)
ARGUMENTS = st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=5), max_size=3).map(
    lambda value: json.dumps(value, ensure_ascii=False)
)
CALLS = st.lists(st.builds(FunctionCall, st.just("f_1"), ARGUMENTS), min_size=1, max_size=3)


@settings(max_examples=40)
@given(WORDS, CALLS, st.sampled_from(CallForm))
def test_what_is_written_is_read(words: str, calls: list[FunctionCall], form: CallForm) -> None:
    found = read(render_answer(words, calls, form), SpeechForm(form))
    assert (found.words, list(found.calls)) == (words, calls)
