"""Where an answer with a stop string ends: its tokens are those of its text, and no stop string counts in a thought."""

from __future__ import annotations

import functools
import itertools
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from pensieve.core import FinishReason
from pensieve.server.turns.text import OutputText, replayed_text
from pensieve.speech import SpeechForm, Thought, ThoughtEnd, read
from pensieve.tokenizer import ChatTokenizer
from pensieve.v1 import pensieve_pb2 as pb
from support import tokenizers_ as tiny
from support import tool_templates
from support.service.drawn_turns import begun, drawing, rest
from support.service.real_engine import TinyModel, really_serving
from support.service.service_rig import Rig, encode, serving, spec, tokenizer, uid

KINDS = {
    "bytes": tiny.byte_level,
    "legacy": lambda: tiny.metaspace(True),
    "first": lambda: tiny.metaspace(False),
}
OPENS = tiny.CHATML.replace("assistant\n'", "assistant\n<think>\n'")
"""A template that opens a thought for each answer."""
STOPPED = pb.FINISH_REASON_STOP_SEQUENCE


@functools.cache
def speaker(template: str) -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        path = tool_templates.write_model(Path(folder) / "model", template, "<|im_end|>")
        return ChatTokenizer.from_folder(path, allow_rewriting=True)


@functools.cache
def plain(kind: str) -> ChatTokenizer:
    with tempfile.TemporaryDirectory() as folder:
        return ChatTokenizer.from_folder(tiny.write_folder(Path(folder), KINDS[kind](), vocab_size=700))


def words(text: str) -> list[int]:
    """Ids of an answer with ``<think>`` and ``</think>`` in it."""
    backend = Tokenizer.from_str(tool_templates.tokenizer_json())
    return list(backend.encode(text, add_special_tokens=False).ids)


def token(name: str) -> int:
    found = Tokenizer.from_str(tiny.byte_level()).token_to_id(name)
    assert found is not None
    return int(found)


# ---- the tokens of an answer are those of its text


@pytest.mark.parametrize("kind", sorted(KINDS))
@given(data=st.data())
def test_tokens_end_where_the_text_does(kind: str, data: st.DataObject) -> None:
    chat = plain(kind)
    backend = Tokenizer.from_str(KINDS[kind]())
    text = data.draw(
        st.sampled_from(tiny.SENTENCES) | st.text("ab \u20ac\U0001f600\n", min_size=1, max_size=30)
    )
    ids = [
        *backend.encode(text, add_special_tokens=False).ids,
        *data.draw(st.lists(st.integers(0, 300), max_size=6)),
    ]
    text = chat.decode(ids)
    starts = st.integers(0, max(0, len(text) - 1))
    cuts = data.draw(st.lists(st.tuples(starts, st.integers(1, 5)), min_size=1, max_size=3))
    stops = tuple({text[at : at + length] for at, length in cuts} - {""})
    output = OutputText(chat, stops)
    shown: list[int] = []
    for one in ids:
        output.push(one)
        assert output.tokens[: len(shown)] == shown, "what a stream has shown is taken back"
        shown = output.tokens[: output.ready]
    final = output.finish()
    ends = [(at + len(stop), at) for stop in stops for at in range(len(text)) if text.startswith(stop, at)]
    expected = text[: min(ends)[1]] if ends and output.stop is not None else text
    assert (final, "".join(output.pieces)) == (expected, expected)
    assert chat.decode(output.tokens) == expected
    drawn = len(output.tokens) if output.drawn is None else output.drawn
    assert output.tokens[:drawn] == ids[:drawn] and output.tokens[: len(shown)] == shown
    again = replayed_text(chat, output.tokens, final)
    assert (again.tokens, again.pieces) == (output.tokens, output.pieces)


def test_a_token_that_a_stop_string_begins_in_is_spelled_anew() -> None:
    hello = encode("hello")
    output = OutputText(tokenizer(), ("lo",))
    for one in [*hello, *encode(" world")]:
        output.push(one)
    assert output.finish() == "hel" and tokenizer().decode(output.tokens) == "hel"
    assert output.tokens != hello[: len(output.tokens)] and output.drawn == 0


async def stopped(rig: Rig, turn: pb.TurnSpec, tokens: list[int], name: str = "") -> tuple[str, pb.Turn]:
    """A turn whose engine says ``tokens``, token by token and more than is wanted."""
    name = name or await rig.create()
    call = rig.call(name, turn)
    generation = await rig.link.next_generation()
    generation.admit()
    for one in tokens:
        generation.emit(one)
    generation.finish(FinishReason.LENGTH, len(tokens))
    events = [event async for event in call]
    done = events[-1].completed
    assert "".join(event.delta.text for event in events) == done.output.text
    assert sum(event.delta.token_count for event in events) == done.usage.output_tokens
    again = await rig.stream(name, turn)
    assert (again.completed, again.text, again.tokens) == (done, done.output.text, done.usage.output_tokens)
    return name, done


@pytest.mark.parametrize("stop", ["world", "lo", "hello", "o w", "h", " fox"])
async def test_the_next_turn_builds_on_what_the_client_was_given(stop: str) -> None:
    async with serving(answer=None) as rig:
        asked = spec("hi", sampling=pb.SamplingParams(stop=[stop]), output=pb.OutputOptions(token_ids=True))
        name, done = await stopped(rig, asked, encode("hello world, the quick brown fox jumps"))
        assert done.stop_sequence == stop and stop not in done.output.text
        items = [one for item in await rig.items(name, tokens=True) for one in item.tokens.ids]
        assert (
            items[len(items) - done.usage.output_tokens :] == items[-done.usage.output_tokens or len(items) :]
        )
        said = items[len(items) - done.usage.output_tokens :]
        assert tokenizer().decode(said) == done.output.text
        call = rig.call(name, spec("and?"))
        second = await rig.link.next_generation()
        call.cancel()
        assert second.tokens[: len(items)] == items
        assert tokenizer().decode(second.tokens[len(items) :]).startswith("\nuser\nand?")


async def test_each_candidate_ends_before_its_stop_string() -> None:
    async with serving(answer=None) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(2, stop=["fox", "ld"]))
        generation.emit(*encode("the quick fox jumps"), candidate=1)
        generation.emit(*encode("hello world, the"), candidate=0)
        turn = (await rest(call)).completed
        assert [one.text for one in turn.candidates] == ["hello wor", "the quick "]
        request = pb.ChooseCandidateRequest(session=name, request_id=turn.request_id, candidate=1)
        await rig.api.ChooseCandidate(request)
        last = (await rig.items(name, tokens=True))[-1]
        assert tokenizer().decode(last.tokens.ids).endswith("the quick ")
        assert "fox" not in tokenizer().decode(last.tokens.ids)


async def test_log_probabilities_are_those_of_drawn_tokens() -> None:
    async with serving(answer=None) as rig:
        options = pb.OutputOptions(top_logprobs=0, token_ids=True)
        turn = spec("hi", sampling=pb.SamplingParams(stop=["ox"]), output=options)
        name = await rig.create()
        call = rig.call(name, turn)
        generation = await rig.link.next_generation()
        generation.admit()
        tokens = encode("the quick fox")
        generation.emit(*tokens)
        deltas = [event.delta for event in [event async for event in call] if event.HasField("delta")]
        scored = [one.token_id for delta in deltas for one in delta.logprobs]
        shown = [one for delta in deltas for one in delta.tokens.ids]
        assert scored == tokens[: len(scored)] == shown[: len(scored)]
        assert tokenizer().decode(shown) == "the quick f"


async def test_the_answer_behind_a_stop_string_is_that_of_a_stateless_run(tmp_path: Path) -> None:
    """A real engine has computed more than was kept; what it holds of that must not count."""
    model = TinyModel.make(tmp_path)
    async with really_serving(model) as rig:
        name = await rig.create()
        greedy = pb.SamplingParams(temperature=0.0, max_output_tokens=24, ignore_eos=True)
        first = (await rig.run(name, spec("one", sampling=greedy))).output.text
        await rig.api.RewindSession(pb.RewindSessionRequest(name=name, request_id=uid(), item=0))
        for at in (len(first) // 2, 1):
            limited = pb.SamplingParams(
                stop=[first[at : at + 2]], **{"temperature": 0.0, "max_output_tokens": 24}
            )
            limited.ignore_eos = True
            before = (await rig.run(name, spec("one", sampling=limited))).output.text
            assert before == first[: first.index(first[at : at + 2])]
            after = await rig.run(name, spec("two", sampling=greedy))
            items = await rig.items(name, tokens=True)
            said = list(items[-1].tokens.ids)[-after.usage.output_tokens :]
            context = [one for item in items for one in item.tokens.ids][: -len(said)]
            for one in said:
                best = model.expected(context)[-1]
                assert float(best.max() - best[one]) < 1e-3
                context.append(one)
            await rig.api.RewindSession(pb.RewindSessionRequest(name=name, request_id=uid(), item=0))


# ---- thoughts


@given(
    text=st.lists(
        st.sampled_from(["<think>", "</think>", " ", "\n", "<", "a", "</thi", "nk>", "<th"]), max_size=12
    ).map("".join),
    begins=st.booleans(),
    at=st.lists(st.integers(0, 40), max_size=6),
)
def test_the_end_of_a_thought_is_where_the_reader_has_it(text: str, begins: bool, at: list[int]) -> None:
    form = SpeechForm(None, True, begins)
    borders = sorted({0, len(text), *(min(one, len(text)) for one in at)})
    end, found = ThoughtEnd(form), None
    for start, stop in itertools.pairwise(borders):
        found = end.push(text[start:stop])
        if found is not None:
            break
    parts = read(text, form).parts
    thought = begins or text.lstrip().startswith("<think>")
    if not thought:
        assert found in (0, None) and not end.inside
    elif found is None:
        assert end.inside and not any(not isinstance(part, Thought) for part in parts)
    else:
        assert text[found:] == read(text, form).words


@pytest.mark.parametrize(
    ("template", "head"),
    [
        (OPENS, ""),
        (OPENS, "<think>"),
        (tool_templates.THINKING, "<think>\n"),
        (tool_templates.THINKING, " <think>"),
    ],
)
async def test_stop_strings_count_from_the_end_of_the_thought_on(template: str, head: str) -> None:
    async with serving(answer=None, speaks=speaker(template)) as rig:
        thought = f"{head}the fox\n\n</think>\n\n"
        turn = spec("hi", sampling=pb.SamplingParams(stop=["fox", "\n"]))
        _, done = await stopped(rig, turn, words(thought + "hello world, fox jumps"))
        assert (done.output.text, done.stop_sequence) == (thought + "hello world, ", "fox")


async def test_a_thought_that_never_ends_meets_no_stop_string() -> None:
    async with serving(answer=None, speaks=speaker(OPENS)) as rig:
        turn = spec("hi", sampling=pb.SamplingParams(stop=["fox"]))
        _, done = await stopped(rig, turn, words("the fox, the fox"))
        assert (done.output.text, done.finish_reason) == ("the fox, the fox", pb.FINISH_REASON_LENGTH)


@pytest.mark.parametrize("text", ["<th fox", "fox <think>", " fox", "<", "<think"])
async def test_an_answer_without_a_thought_has_stop_strings_from_its_start(text: str) -> None:
    async with serving(answer=None, speaks=speaker(tool_templates.THINKING)) as rig:
        turn = spec("hi", sampling=pb.SamplingParams(stop=["fox"]))
        _, done = await stopped(rig, turn, words(text))
        assert done.output.text == text.partition("fox")[0]


async def test_a_stop_string_counts_everywhere_behind_verbatim_input() -> None:
    """No template has opened a thought there: the answer is text like any other."""
    async with serving(answer=None, speaks=speaker(OPENS)) as rig:
        raw = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=encode("the")))
        turn = pb.TurnSpec(request_id=uid(), input=[raw], sampling=pb.SamplingParams(stop=["fox"]))
        _, done = await stopped(rig, turn, words("a fox"))
        assert done.output.text == "a "


async def test_candidates_think_each_for_itself() -> None:
    async with serving(answer=None, speaks=speaker(tool_templates.THINKING)) as rig:
        name = await rig.create()
        call, generation = await begun(rig, name, drawing(2, stop=["fox"]))
        generation.emit(*words("<think>fox</think>the quick fox"), candidate=1)
        generation.emit(*words("the fox"), candidate=0)
        turn = (await rest(call)).completed
        assert [one.text for one in turn.candidates] == ["the ", "<think>fox</think>the quick "]


# ---- control tokens


@pytest.mark.parametrize("answer", ["the quick ", "", "the fo"])
async def test_a_stop_string_that_names_a_control_token_means_the_token(answer: str) -> None:
    async with serving(answer=None) as rig:
        turn = spec("hi", sampling=pb.SamplingParams(stop=["<|eot_id|>", "fox"]))
        name, done = await stopped(rig, turn, [*encode(answer), token("<|eot_id|>"), *encode("lazy")])
        assert (done.output.text, done.finish_reason) == (answer, STOPPED)
        assert done.stop_sequence == "<|eot_id|>" and done.usage.output_tokens == len(encode(answer))
        kept = [one for item in await rig.items(name, tokens=True) for one in item.tokens.ids]
        assert token("<|eot_id|>") not in kept


async def test_the_name_of_a_control_token_in_letters_stops_too() -> None:
    async with serving(answer=None) as rig:
        turn = spec("hi", sampling=pb.SamplingParams(stop=["<|eot_id|>"]))
        plain_letters = Tokenizer.from_str(tiny.byte_level())
        plain_letters.encode_special_tokens = True
        letters = plain_letters.encode("a <|eot_id|> b", add_special_tokens=False).ids
        _, done = await stopped(rig, turn, list(letters))
        assert (done.output.text, done.finish_reason) == ("a ", STOPPED)


async def test_a_control_token_ends_a_thought_too_and_counts_from_the_least_length_on() -> None:
    async with serving(answer=None, speaks=speaker(OPENS)) as rig:
        sampling = pb.SamplingParams(stop=["<|eot_id|>"], min_output_tokens=2)
        end = token("<|eot_id|>")
        _, done = await stopped(rig, spec("hi", sampling=sampling), [end, *encode("a"), end, *encode("b")])
        assert (done.output.text, done.usage.output_tokens) == ("a", 2)
