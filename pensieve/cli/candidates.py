"""Several answers to one question in ``pensieve chat``: their number, how they are shown, which one is gone on with."""

from __future__ import annotations

from rich.console import Console

from pensieve.client import SamplingOptions, Session, Turn


def set_number(argument: str, sampling: SamplingOptions, notes: Console) -> None:
    """``/candidates [N]``: so many answers from the next turn on; without a number it says how many it is."""
    if argument and not (argument.isdecimal() and int(argument) > 0):
        notes.print("/candidates takes the number of answers to draw")
        return
    if argument:
        sampling["candidates"] = int(argument)
    notes.print(f"answers to each question: {sampling.get('candidates', 1)}")


def choose(argument: str, session: Session, out: Console, notes: Console) -> None:
    """``/choose K``: the conversation goes on from answer K of the last turn. Raises what the server says to that."""
    turn = session.last_turn
    if turn is None or not turn.candidates:
        notes.print("the last turn has no other answers; /candidates N draws more of them")
    elif not argument.isdecimal():
        notes.print("/choose takes the number of an answer")
    else:
        show(session.choose(turn, int(argument)), out)


def show(turn: Turn, out: Console) -> None:
    """All answers by their numbers, and a mark at the one that is in the conversation."""
    if not turn.candidates:
        out.out(turn.text, highlight=False)  # cut short: the others were dropped
    for one in turn.candidates:
        mark = "*" if one.candidate == turn.chosen else " "
        out.out(f"{mark} {one.candidate}: {one.text}", highlight=False)
