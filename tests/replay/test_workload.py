"""Datasets, shaping and schedules."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pensieve.replay.load.schedule import Arrivals, scripts
from pensieve.replay.load.workload import Conversation, DatasetError, Shaping, TurnLengths, load, shape

SHARE_GPT = [
    {
        "id": "a",
        "conversations": [
            {"from": "gpt", "value": "an answer to nothing"},
            {"from": "human", "value": "one two"},
            {"from": "human", "value": "three"},
            {"from": "gpt", "value": "four five six"},
            {"from": "human", "value": "seven"},
        ],
    },
    {"id": "empty", "conversations": [{"from": "human", "value": "no answer"}]},
    {"id": "b", "conversations": [{"from": "human", "value": "x"}, {"from": "gpt", "value": "y"}]},
]
TRACE = [
    {"session_id": "s", "turn": 1, "input_tokens": 5, "output_tokens": 6, "timestamp_s": 12.0},
    {"session_id": "s", "turn": 0, "input_tokens": 3, "output_tokens": 4, "timestamp_s": 10.0},
    {"session_id": "t", "turn": 0, "input_tokens": 1, "output_tokens": 2, "timestamp_s": 8.0},
]


def words(text: str) -> int:
    return len(text.split())


def lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def row(session: str, tokens: int, turn: int = 0, **more: Any) -> dict[str, Any]:
    return {"session_id": session, "turn": turn, "input_tokens": tokens, "output_tokens": 2, **more}


def test_share_gpt_pairs_inputs_with_answers(tmp_path: Path) -> None:
    plain = tmp_path / "d.json"
    plain.write_text(json.dumps(SHARE_GPT))
    packed = tmp_path / "d.json.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    for path in (plain, packed):
        data = load(path, words)
        assert data.conversations == (
            Conversation("a", (TurnLengths(3, 3),)),
            Conversation("b", (TurnLengths(1, 1),)),
        )
        assert not data.recorded_arrivals
    assert [talk.key for talk in load(plain, words, limit=1).conversations] == ["a"]


def test_length_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(TRACE))
    data = load(path)
    assert data.recorded_arrivals
    assert data.conversations[0] == Conversation("s", (TurnLengths(3, 4, 10.0), TurnLengths(5, 6, 12.0)))
    assert data.conversations[0].tokens == 18
    assert len(load(path, limit=1).conversations) == 1


def test_recorded_trace(tmp_path: Path) -> None:
    kept = {"session_id": "s", "input_tokens": 3, "output_tokens": 4, "timestamp_s": 1.0, "committed": True}
    path = tmp_path / "t.jsonl"
    path.write_text(
        lines(
            [
                {"schema": "pensieve.trace/1", "engine": {"chunk_tokens": 32}},
                kept | {"turn": 0, "context_tokens": 3},
                kept | {"turn": 1, "output_tokens": 0, "committed": False},
                kept | {"turn": 2, "output_tokens": 0, "timestamp_s": 2.0},
                kept | {"turn": 3, "timestamp_s": 3.0},
            ]
        )
    )
    data = load(path)
    assert data.conversations == (Conversation("s", (TurnLengths(3, 4, 1.0), TurnLengths(6, 4, 3.0))),)
    for extra, message in (
        ({"schema": "pensieve.trace/1"}, "line 6: a second recording"),
        ({"schema": "x"}, "line 6: schema 'x'"),
    ):
        other = tmp_path / "other.jsonl"
        other.write_text(path.read_text() + lines([extra]))
        with pytest.raises(DatasetError, match=message):
            load(other)


@pytest.mark.parametrize(
    ("text", "place"),
    [
        ("[1]", "entry 0"),
        ('[{"conversations": [{"from": "gpt"}]}]', "entry 0"),
        ("[", "d.json"),
        ("[]", "no conversation"),
        ('{"session_id": 1}\n', "line 1"),
        (lines([*TRACE, TRACE[0] | {"input_tokens": 0}]), "line 4"),
        ("nonsense", "line 1"),
        ("7", "line 1"),
    ],
)
def test_bad_datasets_name_the_place(tmp_path: Path, text: str, place: str) -> None:
    path = tmp_path / "d.json"
    path.write_text(text)
    with pytest.raises(DatasetError, match=place):
        load(path)


def test_broken_gzip(tmp_path: Path) -> None:
    path = tmp_path / "d.json.gz"
    path.write_bytes(b"no gzip")
    with pytest.raises(DatasetError):
        load(path)


def test_shape_counts_what_it_cuts() -> None:
    talks = [
        Conversation("fits", (TurnLengths(10, 10), TurnLengths(10, 9))),
        Conversation("cut", (TurnLengths(10, 10), TurnLengths(10, 10), TurnLengths(1, 1))),
        Conversation("never", (TurnLengths(40, 1),)),
    ]
    shaped = shape(talks, Shaping(), context_limit=40)
    assert [len(talk.turns) for talk in shaped.conversations] == [2, 1]
    assert (shaped.cut_conversations, shaped.dropped_conversations, shaped.dropped_turns) == (1, 1, 3)
    assert shaped.turns == 3
    assert all(talk.tokens < 40 for talk in shaped.conversations)


def test_shape_limits() -> None:
    talk = Conversation("a", (TurnLengths(100, 1), TurnLengths(4, 80), TurnLengths(1, 1)))
    (small,) = shape([talk], Shaping(0.5, 2, 20, 30), 1000).conversations
    assert small.turns == (TurnLengths(20, 1), TurnLengths(2, 30))


TALKS = [Conversation(str(i), (TurnLengths(5, 5),) * (1 + i % 4)) for i in range(400)]


def test_poisson_starts_offer_the_rate() -> None:
    script = scripts(TALKS, Arrivals(rate=8.0, think_time_s=3.0, seed=1))
    starts = np.array([s.due[0].at_s for s in script])
    gaps = np.diff(starts)
    assert starts[0] == 0 and (gaps > 0).all()
    assert 8.0 * 0.8 < sum(len(t.turns) for t in TALKS) / starts[-1] < 8.0 * 1.25
    assert 0.8 < gaps.std() / gaps.mean() < 1.2, "exponential: deviation equals mean"
    pauses = np.array([due.after_answer_s for s in script for due in s.due[1:]])
    assert 2.5 < pauses.mean() < 3.5
    assert all(s.due[0].after_answer_s == 0 for s in script)


def test_a_schedule_is_its_seed() -> None:
    arrivals = Arrivals(rate=8.0, think_time_s=3.0, seed=1)
    assert scripts(TALKS, arrivals) == scripts(TALKS, arrivals)
    assert scripts(TALKS, arrivals) != scripts(TALKS, Arrivals(rate=8.0, think_time_s=3.0, seed=2))
    (script,) = scripts(TALKS[1:2], Arrivals())
    first = script.input_ids(0, 100, 7)
    assert first.dtype == np.int32 and len(first) == 5 and first.max() < 100
    assert (first == script.input_ids(0, 100, 7)).all()
    assert (first != script.input_ids(1, 100, 7)).any()


def test_recorded_times_are_scaled(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines(TRACE))
    script = scripts(load(path).conversations, Arrivals(recorded=True, time_scale=0.5))
    assert [s.conversation.key for s in script] == ["t", "s"]
    assert [due.at_s for due in script[1].due] == [1.0, 2.0]


def test_a_trace_says_what_sessions_begin_with(tmp_path: Path) -> None:
    """Its first turn's row does, wherever it is in the file."""
    path = tmp_path / "t.jsonl"
    system = {"prefix": "system", "prefix_tokens": 9}
    path.write_text(lines([row("a", 4, 1), row("a", 10, **system), row("b", 12, **system), row("c", 10)]))
    begins = {talk.key: talk.prefix for talk in load(path).conversations}
    assert begins == {"a": (("system", 9),), "b": (("system", 9),), "c": ()}


def test_hash_ids_are_blocks_of_512_tokens(tmp_path: Path) -> None:
    """What only one session has is its own, and a token of the first input always is."""
    path = tmp_path / "t.jsonl"
    path.write_text(
        lines([
            row("a", 1100, hash_ids=[0, 1, 2]),
            row("b", 1024, hash_ids=[0, 1]),
            row("c", 2000, hash_ids=[0, 7, 8, 9]),
            row("c", 30, 1, hash_ids=[0, 7, 8, 9, 1]),
        ])
    )  # fmt: skip
    begins = {talk.key: talk.prefix for talk in load(path).conversations}
    first = ("block 0", 512)
    assert begins == {"a": (first, ("block 1", 512)), "b": (first, ("block 1", 511)), "c": (first,)}


@pytest.mark.parametrize(
    "bad",
    [
        {"prefix": "p"},
        {"prefix": "p", "prefix_tokens": 0},
        {"prefix": "p", "prefix_tokens": 10},
        {"prefix": "p", "prefix_tokens": "many"},
        {"hash_ids": 7},
    ],
)
def test_an_impossible_beginning_is_refused(bad: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(lines([row("a", 10, **bad)]))
    with pytest.raises(DatasetError, match=r"t\.jsonl, session a: "):
        load(path)


def test_common_beginnings_are_the_same_ids_and_nothing_else_is() -> None:
    system, document = ("system", 40), ("document", 30)
    turns = (TurnLengths(100, 1), TurnLengths(100, 1))
    talks = [
        Conversation("a", turns, (system, document)),
        Conversation("b", turns, (system, ("letter", 30))),
        Conversation("c", turns, (("system", 55),)),
        Conversation("d", turns),
    ]
    a, b, c, d = found = scripts(talks, Arrivals())
    first = [script.input_ids(0, 50_000, 7) for script in found]

    def common(one: int, other: int) -> int:
        return int((first[one] == first[other]).argmin())

    assert (common(0, 1), common(0, 2), common(1, 2), common(0, 3)) == (40, 40, 40, 0)
    assert (first[0] != a.input_ids(0, 50_000, 7, run=1)).mean() > 0.9, "a run finds nothing of another"
    assert (a.input_ids(1, 50_000, 7) != b.input_ids(1, 50_000, 7)).mean() > 0.9, "only first inputs begin"
    longer = scripts([Conversation("e", turns, (("system", 90),))], Arrivals())[0].input_ids(0, 50_000, 7)
    assert (longer[:55] == c.input_ids(0, 50_000, 7)[:55]).all()
    alone = Conversation("d", turns)
    assert (scripts([alone] * 4, Arrivals())[3].input_ids(0, 50_000, 7) == d.input_ids(0, 50_000, 7)).all()


def test_a_beginning_is_cut_with_the_first_input() -> None:
    talk = Conversation("a", (TurnLengths(100, 4), TurnLengths(8, 4)), (("p", 60), ("q", 30)))

    def prefix(wanted: Shaping) -> tuple[tuple[str, int], ...]:
        return shape([talk], wanted, 10_000).conversations[0].prefix

    assert prefix(Shaping()) == talk.prefix
    assert prefix(Shaping(scale_lengths=0.5)) == (("p", 30), ("q", 15))
    assert prefix(Shaping(max_input_tokens=70)) == (("p", 60), ("q", 9))
    assert prefix(Shaping(max_input_tokens=1)) == ()


def test_a_system_prompt_for_all_comes_before_everything() -> None:
    talks = [Conversation("a", (TurnLengths(10, 4),), (("p", 6),)), Conversation("b", (TurnLengths(1, 4),))]
    shaped = shape(talks, Shaping(system_tokens=50), 10_000).conversations
    assert [talk.turns[0].input_tokens for talk in shaped] == [60, 51]
    assert shaped[0].prefix[0] == shaped[1].prefix[0] and shaped[0].prefix[1:] == (("p", 6),)
    first, second = (script.input_ids(0, 50_000, 1) for script in scripts(shaped, Arrivals()))
    assert (first[:50] == second[:50]).all()
