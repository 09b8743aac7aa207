"""Turns of a chat: each line that was typed is kept until its answer is in history."""

from __future__ import annotations

import uuid
from typing import Any

from pensieve.cli.chat.screen import Screen
from pensieve.cli.chat.turn_display import TurnDisplay
from pensieve.cli.chat.unsent import Unsent, UnsentFolder
from pensieve.client import Client, FinishReason, SamplingOptions, Session, Turn, TurnState, TurnStream
from pensieve.errors import NotFound, PensieveError


def set_candidates(argument: str, sampling: SamplingOptions, screen: Screen) -> None:
    """``/candidates [N]``: from the next turn on the model gives N answers; without N, the present number is shown."""
    if argument and not (argument.isdecimal() and int(argument) > 0):
        screen.note("/candidates takes the number of answers to draw")
        return
    if argument:
        sampling["candidates"] = int(argument)
    screen.note(f"answers to each question: {sampling.get('candidates', 1)}")


def choose_candidate(argument: str, session: Session, screen: Screen) -> None:
    """``/choose K``: the conversation goes on from answer K of the last turn. Raises what the server says to that."""
    turn = session.last_turn
    if turn is None or not turn.candidates:
        screen.note("the last turn has no other answers; /candidates N draws more of them")
    elif not argument.isdecimal():
        screen.note("/choose takes the number of an answer")
    else:
        show_candidates(screen.call_with_status(lambda: session.choose(turn, int(argument))), screen)


def show_candidates(turn: Turn, screen: Screen) -> None:
    """All answers by their numbers, and a mark at the one that is in the conversation."""
    if not turn.candidates:
        screen.write_line(turn.text)  # cut short: the others were dropped
    for one in turn.candidates:
        mark = "*" if one.candidate == turn.chosen else " "
        screen.write_line(f"{mark} {one.candidate}: {one.text}")
    if turn.candidates and screen.interactive:
        screen.note("/choose K goes on from another one")


ENDS = (FinishReason.EOS, FinishReason.STOP_SEQUENCE, FinishReason.STOP_TOKEN)


class Dialogue:
    """A session, how its answers are drawn, and the line that is not answered yet."""

    def __init__(
        self,
        client: Client,
        session: Session,
        sampling: SamplingOptions,
        screen: Screen,
        unsent: UnsentFolder,
    ) -> None:
        self.client = client
        self.session = session
        self.sampling = sampling
        self.screen = screen
        self._unsent = unsent
        self.is_warm = False
        """A turn has just ended: what it left is where the next one wants it."""

    @property
    def unsent(self) -> Unsent | None:
        """What was typed in this session and is not answered."""
        return self._unsent.get(self.session.id)

    def move_to(self, session: Session) -> None:
        """Talk in a new session from here on. What was not answered in the old one goes along."""
        kept = self.unsent
        self.drop_unsent()
        self.session = session
        self.is_warm = False
        if kept is not None:
            self._keep(kept.text, {})

    def drop_unsent(self) -> None:
        """The user does not want it any more."""
        self._unsent.drop(self.session.id)

    def ask(self, text: str, **options: Any) -> None:
        """One turn. What was kept goes out as it was, under its own request id. Raises what the server says to it."""
        kept = self.unsent
        if kept is None or kept.text != text or options:
            before = kept
            if before is not None and "replace_after_item" in before.options:
                # Still the edit that was begun.
                options.setdefault("replace_after_item", before.options["replace_after_item"])
            kept = self._keep(text, options)
            if before is not None and not self._settled(before):
                return  # offered again, now that the answer to the one before is known
        stream = self.session.stream(text, request_id=kept.request_id, **kept.options)
        if self._fly(stream, kept.options.get("candidates", 1) > 1):
            self._unsent.drop(self.session.id)

    def regenerate(self) -> None:
        """Another answer to the last question."""
        last = self.screen.call_with_status(self.session.last_user_item)
        stream = self.session.stream(replace_after_item=last, **self.sampling)
        self._fly(stream, self.sampling.get("candidates", 1) > 1)

    def resume_unsent(self) -> None:
        """What an earlier chat left in this session: its answer, if it is there or on its way, or else the line."""
        kept = self.unsent
        if kept is None:
            return
        state = self._state(kept)
        if state is TurnState.RUNNING:
            self.screen.note(f"still being answered: {first_words(kept.text)}")
            if self._fly(self.session.attach(kept.request_id), False):
                self._unsent.drop(self.session.id)
        elif state is TurnState.COMMITTED:
            self._unsent.drop(self.session.id)
        if self.unsent is not None:
            self.screen.note("this was not answered last time; Enter sends it, an empty line drops it")

    def _keep(self, text: str, options: dict[str, Any]) -> Unsent:
        kept = Unsent(text, str(uuid.uuid4()), {**self.sampling, **options})
        self._unsent.put(self.session.id, kept)
        return kept

    def _state(self, kept: Unsent) -> TurnState:
        try:
            return self.screen.call_with_status(lambda: self.session.get_turn(kept.request_id)).state
        except NotFound:
            return TurnState.DISCARDED

    def _settled(self, kept: Unsent) -> bool:
        """Whether what was kept can be given up for another text; not if it was answered without our knowing."""
        state = self._state(kept)
        if state is TurnState.COMMITTED:
            turn = self.screen.call_with_status(lambda: self.session.get_turn(kept.request_id))
            self.screen.note("the message before had arrived; its answer:")
            self.screen.write_line(turn.text)
            return False
        if state is TurnState.RUNNING:
            self.screen.call_with_status(lambda: self.session.cancel(kept.request_id, keep="nothing"))
        return True

    def _fly(self, stream: TurnStream, several: bool) -> bool:
        """Whether the turn is in history."""
        screen = self.screen
        flight = TurnDisplay(stream, screen, show=not several)
        flight.run()
        if not stream.done or stream.turn.state is TurnState.DISCARDED:
            screen.note("(stopped; nothing was kept)")
            return False
        turn = stream.turn
        self.is_warm = True
        if several or turn.candidates:
            show_candidates(turn, screen)
        elif not screen.interactive:
            flight.finish_piped(turn.text)
        if screen.interactive:
            if turn.finish_reason not in ENDS:
                screen.note(f"({reason(turn)})")
            screen.note(summary(turn))
        return True


def warm(session: Session) -> str:
    """Ask for the session's state on the device; what came of it. A wish: without it the next turn takes longer."""
    try:
        return f"warmed: {session.warm()}"
    except PensieveError as error:
        return f"not warmed: {error}"


def reason(turn: Turn) -> str:
    """Why the answer ended."""
    known = isinstance(turn.finish_reason, FinishReason)
    return turn.finish_reason.name.lower() if known else f"reason {turn.finish_reason}"  # type: ignore[union-attr]


def summary(turn: Turn) -> str:
    """Where the context came from, in one line."""
    usage = turn.usage
    return (
        f"{usage.context_tokens} tokens of context = {usage.gpu_cached_tokens} on the device + "
        f"{usage.swapped_in_tokens} swapped in + {usage.recomputed_tokens} recomputed + {usage.new_tokens} new"
    )


def first_words(text: str, width: int = 48) -> str:
    """The beginning of a text, in one line."""
    words = " ".join(text.split())
    return words if len(words) <= width else f"{words[: width - 1]}…"
