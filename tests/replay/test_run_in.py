"""A replay that begins in the middle has the load of one that has run for a long time."""

from __future__ import annotations

import numpy as np
import pytest

from pensieve.replay.load.generators import generate
from pensieve.replay.load.schedule import Arrivals, Due, Script, apply_run_in, scripts
from pensieve.replay.load.workload import Conversation, TurnLengths

RATE, THINK_S, TOKEN_S = 20.0, 6.0, 0.01


def _script(*turns: tuple[int, int], pauses: tuple[float, ...], start: float = 0.0) -> Script:
    talk = Conversation("c", tuple(TurnLengths(*turn) for turn in turns))
    return Script(7, talk, tuple(Due(start, pause) for pause in pauses))


def test_what_was_said_before_is_played_beforehand() -> None:
    script = _script((5, 100), (7, 200), (9, 300), pauses=(0.0, 4.0, 10.0))
    # Turn 0 at 0 s, answered at 1 s; turn 1 at 5 s, answered at 7 s; turn 2 at 17 s.
    (rest,) = apply_run_in([script], 6.0, TOKEN_S)
    # 5 + 100 + 7 + 200 tokens, of which the last one is an answer.
    assert [(turn.input_tokens, turn.output_tokens) for turn in rest.conversation.turns] == [
        (311, 1),
        (9, 300),
    ]
    assert (rest.number, rest.has_history, rest.first_turn) == (7, True, 1)
    assert rest.due == (Due(0.0, 0.0), Due(11.0, 0.0)), "the answer at 7 s would still be going on"
    assert rest.start_s == 11.0


def test_what_was_said_before_begins_as_the_conversation_did() -> None:
    talk = Conversation("c", (TurnLengths(9, 100), TurnLengths(7, 200)), (("system", 8),))
    (rest,) = apply_run_in([Script(7, talk, (Due(0.0, 0.0), Due(0.0, 4.0)))], 2.0, TOKEN_S)
    assert rest.has_history and rest.conversation.prefix == talk.prefix


def test_turns_to_come_keep_their_pauses() -> None:
    script = _script((5, 100), (7, 200), (9, 300), pauses=(0.0, 4.0, 10.0))
    (rest,) = apply_run_in([script], 2.0, TOKEN_S)
    assert [turn.input_tokens for turn in rest.conversation.turns] == [104, 7, 9]
    assert rest.due == (Due(-1.0, 0.0), Due(3.0, 0.0), Due(3.0, 10.0))


def test_conversations_that_are_to_come_are_whole() -> None:
    to_come = _script((5, 100), (7, 200), pauses=(0.0, 3.0), start=9.0)
    (rest,) = apply_run_in([to_come], 4.0, TOKEN_S)
    assert (rest.due, rest.conversation) == ((Due(5.0, 0.0), Due(5.0, 3.0)), to_come.conversation)
    assert not rest.has_history and not rest.first_turn


def test_of_conversations_that_are_over_the_history_is_left() -> None:
    """Nobody tells a server that they are; those that ended in the first half of the time before are left out."""
    over = _script((5, 100), (7, 200), pauses=(0.0, 4.0))  # the last answer ends at 7 s
    (rest,) = apply_run_in([over], 10.0, TOKEN_S)
    assert [(turn.input_tokens, turn.output_tokens) for turn in rest.conversation.turns] == [(311, 1)]
    assert (rest.due, rest.first_turn, rest.is_over, rest.start_s) == ((Due(-3.0, 0.0),), 1, True, 0.0)
    assert apply_run_in([over], 14.0, TOKEN_S) and not apply_run_in([over], 14.5, TOKEN_S)


def _offered(found: list[Script], start: float, end: float) -> tuple[float, float]:
    """Turns per second due in a time, and their mean history in tokens, if answers take ``TOKEN_S`` a token."""
    histories = []
    for script in found:
        history, answered = 0, 0.0
        for turn, due in zip(script.conversation.turns, script.due, strict=True):
            at = max(due.at_s, answered + due.after_answer_s)
            if start <= at < end and due.at_s > 0:  # not one that is played beforehand
                histories.append(history + turn.input_tokens)
            history += turn.input_tokens + turn.output_tokens
            answered = at + turn.output_tokens * TOKEN_S
    return len(histories) / (end - start), float(np.mean(histories))


@pytest.mark.parametrize("seed", [0, 1])
def test_the_load_is_steady_from_the_start(seed: int) -> None:
    """Rate and history length are those of the same process a long time after its start, which it has not itself."""
    talks = generate("sharegpt", 4000, seed).conversations
    drawn = scripts(talks, Arrivals(rate=RATE, think_time_s=THINK_S, seed=seed))
    late = _offered(drawn, 400.0, 700.0)
    begun = _offered(apply_run_in(drawn, 400.0, TOKEN_S), 0.0, 30.0)
    cold = _offered(drawn, 0.0, 30.0)
    assert begun == pytest.approx(late, rel=0.2)
    assert cold[0] < 0.7 * late[0] and cold[1] < 0.7 * late[1]
