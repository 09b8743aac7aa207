"""Several answers to one question in ``pensieve chat``: their number, how they are shown, which one is gone on with."""

from __future__ import annotations

from pensieve.cli.chat.screen import Screen
from pensieve.client import SamplingOptions, Session, Turn


def set_number(argument: str, sampling: SamplingOptions, screen: Screen) -> None:
    """``/candidates [N]``: so many answers from the next turn on; without a number it says how many it is."""
    if argument and not (argument.isdecimal() and int(argument) > 0):
        screen.note("/candidates takes the number of answers to draw")
        return
    if argument:
        sampling["candidates"] = int(argument)
    screen.note(f"answers to each question: {sampling.get('candidates', 1)}")


def choose(argument: str, session: Session, screen: Screen) -> None:
    """``/choose K``: the conversation goes on from answer K of the last turn. Raises what the server says to that."""
    turn = session.last_turn
    if turn is None or not turn.candidates:
        screen.note("the last turn has no other answers; /candidates N draws more of them")
    elif not argument.isdecimal():
        screen.note("/choose takes the number of an answer")
    else:
        show(screen.patiently(lambda: session.choose(turn, int(argument))), screen)


def show(turn: Turn, screen: Screen) -> None:
    """All answers by their numbers, and a mark at the one that is in the conversation."""
    if not turn.candidates:
        screen.say(turn.text)  # cut short: the others were dropped
    for one in turn.candidates:
        mark = "*" if one.candidate == turn.chosen else " "
        screen.say(f"{mark} {one.candidate}: {one.text}")
    if turn.candidates and screen.interactive:
        screen.note("/choose K goes on from another one")
