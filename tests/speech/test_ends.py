"""Where an answer with one call ends: found as it comes, and read as one call then."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from speech.test_reader import ADA, BOB, CALLS, FORMS, PIECES, WORDS, call, hermes

from pensieve.speech import CallForm, FirstCall, SpeechForm, read, render_answer
from pensieve.speech.calls import StringState

HERMES, LLAMA3, MISTRAL = (SpeechForm(form) for form in CallForm)
OPENED = SpeechForm(CallForm.HERMES, thinks=True, begins_thinking=True)
THINKING = SpeechForm(CallForm.MISTRAL, thinks=True)
TRICKY = '<tool_call>{"name": "f", "arguments": {"x": "\\"</tool_call>"}}</tool_call>'


@pytest.mark.parametrize(
    ("form", "kept", "rest"),
    [
        (HERMES, f"Let me see.\n{hermes(ADA)}", f"\n{hermes(BOB)}"),
        (HERMES, f"<tool_call>nonsense</tool_call>{hermes(ADA)}", hermes(BOB)),
        (HERMES, TRICKY, TRICKY),
        (OPENED, f"Or {hermes(BOB)}?\n</think>{hermes(ADA)}", hermes(BOB)),
        (LLAMA3, call(BOB, "parameters"), f"; {call(ADA, 'parameters')}"),
        (LLAMA3, f" I look.<|python_tag|>{call(ADA, 'parameters')}", " and so on"),
        (MISTRAL, f"[TOOL_CALLS] [{call(BOB)}", f" , {call(ADA)}]"),
        (MISTRAL, f"[TOOL_CALLS][{call(BOB)}\n]", "[TOOL_CALLS]"),
        (MISTRAL, f"[TOOL_CALLS]find[ARGS]{BOB.arguments}", f"[TOOL_CALLS]find[ARGS]{ADA.arguments}"),
        (THINKING, f"<think>[TOOL_CALLS]?</think>[TOOL_CALLS]find{ADA.arguments}", "!"),
        (THINKING, f"<thin [TOOL_CALLS][{call(ADA)}]", "!"),
    ],
)
def test_the_end_is_where_the_first_call_ends(form: SpeechForm, kept: str, rest: str) -> None:
    found = FirstCall(form)
    ends = [(at, found.push(char)) for at, char in enumerate(kept + rest)]
    assert [end for _, end in ends if end is not None] == [len(kept)]
    assert FirstCall(form).push(kept + rest) == len(kept)
    assert len(read(kept, form).calls) == 1


@pytest.mark.parametrize(
    ("form", "text"),
    [
        (HERMES, f"<tool_call>{call(ADA)}"),
        (HERMES, "<tool_call>{}</tool_call>"),
        (LLAMA3, f"Say {call(ADA, 'parameters')}"),
        (LLAMA3, '{"name": "Ada"}'),
        (LLAMA3, f"<|python_tag|>x = {call(ADA, 'parameters')}"),
        (MISTRAL, f"[{call(ADA)}]"),
        (MISTRAL, f"[TOOL_CALLS] [1, {call(ADA)}]"),
        (MISTRAL, f"[TOOL_CALLS] [{call(ADA)} and"),
        (MISTRAL, '[TOOL_CALLS] [{"x": 1}]'),
        (OPENED, hermes(ADA)),
        (SpeechForm(), hermes(ADA)),
    ],
)
def test_what_is_no_call_goes_on(form: SpeechForm, text: str) -> None:
    assert FirstCall(form).push(text) is None


@given(st.lists(PIECES, max_size=12).map("".join), st.sampled_from(FORMS))
def test_whatever_comes_there_is_one_call_up_to_the_end(text: str, form: SpeechForm) -> None:
    end = FirstCall(form).push(text)
    if end is not None:
        assert len(read(text[:end], form).calls) == 1
    else:
        # Only a call that the end of the answer makes one is left alone, or calls in a tail with words behind.
        assert len(read(text, form).calls) <= 1


@given(WORDS, CALLS, st.sampled_from(CallForm))
def test_of_what_is_written_the_first_is_kept(words: str, calls: list[object], form: CallForm) -> None:
    text = render_answer(words, calls, form)  # type: ignore[arg-type]
    end = FirstCall(SpeechForm(form)).push(text)
    assert end is not None
    assert list(read(text[:end], SpeechForm(form)).calls) == calls[:1]


def test_closings_without_end_in_a_string_cost_no_more_than_others(monkeypatch: pytest.MonkeyPatch) -> None:
    looked_at, push = 0, StringState.push

    def counting(quotes: StringState, text: str) -> None:
        nonlocal looked_at
        looked_at += len(text)
        push(quotes, text)

    monkeypatch.setattr(StringState, "push", counting)
    text = '<tool_call>{"name": "' + "</tool_call>" * 500
    assert read(text, HERMES).words == text
    assert looked_at <= len(text)
    assert FirstCall(HERMES).push(text) is None
    assert looked_at <= 2 * len(text)
