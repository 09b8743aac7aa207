"""A replay that begins in the middle: as if its load had been running for a while already.

A Poisson process of conversation starts takes as long to become steady as conversations last, most of it pauses, and
until then histories are too short. So the conversations that would be in progress begin in the middle: what they would
have said and heard before is one turn, with an answer of one token, that is played before time 0. So are whole
conversations that ended not long before: a server does not know that nobody comes back to them, and without them its
cache would have more room than in the long run. A server that keeps conversations then has them; what it would hold of
them by now is for it to decide, in the order in which they were last active. Of idle times only the order is right:
they all begin with the replay.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from pensieve.replay.load.schedule import Due, Script
from pensieve.replay.load.workload import TurnLengths

NOMINAL_TOKEN_S = 0.015
"""Seconds per output token in the time before the replay: all that depends on it is how far conversations have got."""
ENDED_SHARE = 0.5
"""Conversations that ended in this last part of the time before the replay are played, too. In
simulation of a load near the limit (28 turns/s, 120 s), those of the last 20 s raised the latency from 13.8
to 14.3 ms a token, and all of them to 14.5."""


def run_in(scripts: Sequence[Script], elapsed_s: float, token_s: float = NOMINAL_TOKEN_S) -> list[Script]:
    """What is left of ``scripts`` after ``elapsed_s`` seconds, in order of their next turn; times count from there.

    Of conversations that are over by then only the history is left, and of those that ended early nothing. An answer
    takes ``token_s`` per token in the time before. A history is due when its last answer ended, at or before 0.
    """
    left = (_rest(script, elapsed_s, token_s) for script in scripts)
    return sorted((script for script in left if script is not None), key=lambda script: script.begins_s)


def _rest(script: Script, elapsed_s: float, token_s: float) -> Script | None:
    """The conversation from its first turn on that is due at ``elapsed_s`` or later; None if it is long over."""
    turns = script.conversation.turns
    history, answered = 0, 0.0
    for index, (turn, due) in enumerate(zip(turns, script.due, strict=True)):
        at = max(due.at_s, answered + due.after_answer_s)
        if at >= elapsed_s:
            start = at - elapsed_s
            dues = (Due(start, 0.0), *(Due(start, pause.after_answer_s) for pause in script.due[index + 1 :]))
            if not index:
                return Script(script.number, script.conversation, dues)
            return _after(history, answered - elapsed_s, script, index, dues)
        history += turn.input_tokens + turn.output_tokens
        answered = at + turn.output_tokens * token_s
    if answered < (1 - ENDED_SHARE) * elapsed_s:
        return None
    return _after(history, answered - elapsed_s, script, len(turns), ())


def _after(tokens: int, answered_s: float, script: Script, index: int, dues: tuple[Due, ...]) -> Script:
    """``script`` from turn ``index`` on, after ``tokens`` of history whose last answer ended at ``answered_s``."""
    said = TurnLengths(tokens - 1, 1)
    talk = replace(script.conversation, turns=(said, *script.conversation.turns[index:]))
    before = Due(min(0.0, answered_s), 0.0)
    return Script(script.number, talk, (before, *dues), first_turn=index - 1, beforehand=True)
