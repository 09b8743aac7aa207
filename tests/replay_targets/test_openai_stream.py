"""Server-sent events of a completion: nothing depends on how the network cuts them."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve.replay.targets.base import TurnFailed
from pensieve.replay.targets.openai_target import Completion

EVENTS = (
    {"id": "x", "choices": [{"index": 0, "text": "one", "token_ids": [7], "prompt_token_ids": [1, 2]}]},
    {"choices": [{"text": "zwei €", "token_ids": [8, 9], "logprobs": None}], "usage": None},
    {"choices": [{"text": "", "token_ids": []}]},
    {"choices": [], "usage": {"prompt_tokens": 4, "completion_tokens": 3}},
)


@given(st.lists(st.integers(0, 500)), st.sampled_from(["\n", "\r\n"]))
def test_events_are_found_however_they_are_cut(cuts: list[int], end: str) -> None:
    events = [": a comment", *(f"data: {json.dumps(event)}" for event in EVENTS), "data: [DONE]"]
    stream = "".join(event + end + end for event in events).encode()
    answer = Completion()
    for at, (begin, stop) in enumerate(itertools.pairwise(sorted({0, *cuts, len(stream)}))):
        answer.feed(stream[begin:stop], float(at))
    assert [count for count, _ in answer.pieces] == [1, 2]
    assert answer.ids == [7, 8, 9] and "".join(answer.texts) == "onezwei €"
    assert answer.usage == {"prompt_tokens": 4, "completion_tokens": 3}


def test_an_error_in_the_stream_is_the_servers() -> None:
    with pytest.raises(TurnFailed, match=r"SERVER_ERROR: .*out of memory"):
        Completion().feed(b'data: {"error": {"message": "out of memory"}}\n\n', 0.0)


def test_the_servers_count_decides_where_no_ids_come() -> None:
    for total, expected in ((3, [1, 2]), (2, [1, 1]), (1, [1])):
        answer = Completion()
        for event in ({"choices": [{"text": "a"}]}, {"choices": [{"delta": {"content": "b"}}]}):
            answer.feed(f"data: {json.dumps(event)}\n\n".encode(), 1.0)
        answer.feed(f'data: {{"usage": {{"completion_tokens": {total}}}}}\n\n'.encode(), 2.0)
        answer.settle()
        assert [count for count, _ in answer.pieces] == expected
        assert "".join(answer.texts) == "ab"
