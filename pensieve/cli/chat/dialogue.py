"""Turns of a chat. Each typed line is kept until its answer is in history."""

from __future__ import annotations

import json
import uuid
from typing import Any

from pensieve.cli.chat.prompt import Unsent, UnsentFolder
from pensieve.cli.chat.screen import Screen, TurnDisplay
from pensieve.client import Client, FinishReason, SamplingOptions, Session, Turn, TurnState, TurnStream
from pensieve.errors import NotFound, PensieveError
from pensieve.machine import user_path


def set_candidates(argument: str, sampling: SamplingOptions, screen: Screen) -> None:
    """Run ``/candidates [N]``: generate N answers from the next turn on; without N, show the current number."""
    if argument and not (argument.isdecimal() and int(argument) > 0):
        screen.note("/candidates takes the number of answers to generate")
        return
    if argument:
        sampling["candidates"] = int(argument)
    screen.note(f"answers to each question: {sampling.get('candidates', 1)}")


def set_schema(argument: str, dialogue: Dialogue) -> None:
    """Run ``/schema [FILE|off]``: answers follow the file's JSON schema from the next turn on."""
    screen = dialogue.screen
    if argument == "off":
        dialogue.schema = ""
    elif argument:
        try:
            text = user_path(argument).read_text(encoding="utf-8-sig")
            json.loads(text)
        except (OSError, ValueError, RecursionError) as error:
            screen.error(f"no schema was read from {argument}: {error}")
            return
        dialogue.schema = text
    screen.note("answers follow the schema" if dialogue.schema else "answers are any text")


def choose_candidate(argument: str, session: Session, screen: Screen) -> None:
    """Run ``/choose K``: continue from answer K of the last turn. Raises the server's errors."""
    turn = session.last_turn
    if turn is None or not turn.candidates:
        screen.note("the last turn has no other answers; /candidates N generates several")
    elif not argument.isdecimal():
        screen.note("/choose takes the number of an answer")
    else:
        show_candidates(screen.call_with_status(lambda: session.choose(turn, int(argument))), screen)


def show_candidates(turn: Turn, screen: Screen) -> None:
    """Print all answers with their numbers, and mark the one in the conversation."""
    if not turn.candidates:
        screen.write_line(turn.text)  # stopped early: the others were dropped
    for answer in turn.candidates:
        mark = "*" if answer.candidate == turn.chosen else " "
        screen.write_line(f"{mark} {answer.candidate}: {answer.text}")
    if turn.candidates and screen.interactive:
        screen.note("/choose K continues from another one")


NORMAL_ENDS = (FinishReason.EOS, FinishReason.STOP_SEQUENCE, FinishReason.STOP_TOKEN)


class Dialogue:
    """A session, the sampling options of its turns, and the line that is not answered yet."""

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
        self._unsent_folder = unsent
        self.schema = ""
        """JSON schema of the answers to come; "": any text."""
        self.is_warm = False
        """A turn has just ended, so the session's KV is on the device."""

    @property
    def _options(self) -> dict[str, Any]:
        """Options of the next turn."""
        return {**self.sampling, **({"schema": self.schema} if self.schema else {})}

    @property
    def unsent(self) -> Unsent | None:
        """The line typed in this session that is not answered yet."""
        return self._unsent_folder.get(self.session.id)

    def move_to(self, session: Session) -> None:
        """Continue in a new session. A line not answered in the old one moves along."""
        kept = self.unsent
        self.drop_unsent()
        self.session = session
        self.is_warm = False
        if kept is not None:
            self._save_unsent(kept.text, {})

    def drop_unsent(self) -> None:
        self._unsent_folder.drop(self.session.id)

    def ask(self, text: str, **options: Any) -> None:
        """Run one turn. An unsent line is sent as before, under its own request id. Raises the server's errors."""
        kept = self.unsent
        if kept is None or kept.text != text or options:
            before = kept
            if before is not None and "replace_after_item" in before.options:
                # Still the same edit.
                options.setdefault("replace_after_item", before.options["replace_after_item"])
            kept = self._save_unsent(text, options)
            if before is not None and not self._may_replace(before):
                return  # the new line is offered again, below the earlier line's answer
        stream = self.session.stream(text, request_id=kept.request_id, **kept.options)
        if self._follow_turn(stream, kept.options.get("candidates", 1) > 1):
            self._unsent_folder.drop(self.session.id)

    def regenerate(self) -> None:
        last = self.screen.call_with_status(self.session.last_user_item)
        stream = self.session.stream(replace_after_item=last, **self._options)
        self._follow_turn(stream, self.sampling.get("candidates", 1) > 1)

    def resume_unsent(self) -> None:
        """Resume the line that an earlier chat left in this session: show its answer, or offer the line again."""
        kept = self.unsent
        if kept is None:
            return
        state = self._turn_state(kept)
        if state is TurnState.RUNNING:
            self.screen.note(f"still being answered: {first_words(kept.text)}")
            if self._follow_turn(self.session.attach(kept.request_id), False):
                self._unsent_folder.drop(self.session.id)
        elif state is TurnState.COMMITTED:
            self._unsent_folder.drop(self.session.id)
        if self.unsent is not None:
            self.screen.note("this line was not answered last time; Enter sends it, an empty line drops it")

    def _save_unsent(self, text: str, options: dict[str, Any]) -> Unsent:
        kept = Unsent(text, str(uuid.uuid4()), {**self._options, **options})
        self._unsent_folder.put(self.session.id, kept)
        return kept

    def _turn_state(self, kept: Unsent) -> TurnState:
        try:
            return self.screen.call_with_status(lambda: self.session.get_turn(kept.request_id)).state
        except NotFound:
            return TurnState.DISCARDED

    def _may_replace(self, kept: Unsent) -> bool:
        """Whether the unsent line can be replaced by another. Shows its answer if it turns out to have one."""
        state = self._turn_state(kept)
        if state is TurnState.COMMITTED:
            turn = self.screen.call_with_status(lambda: self.session.get_turn(kept.request_id))
            self.screen.note("the previous message had arrived; its answer:")
            self.screen.write_line(turn.text)
            return False
        if state is TurnState.RUNNING:
            self.screen.call_with_status(lambda: self.session.cancel(kept.request_id, keep="nothing"))
        return True

    def _follow_turn(self, stream: TurnStream, several: bool) -> bool:
        """Show a turn to its end. Return whether it is in history."""
        screen = self.screen
        display = TurnDisplay(stream, screen, show=not several)
        display.run()
        if not stream.done or stream.turn.state is TurnState.DISCARDED:
            screen.note("(stopped; the turn was discarded)")
            return False
        turn = stream.turn
        self.is_warm = True
        if several or turn.candidates:
            show_candidates(turn, screen)
        elif not screen.interactive:
            display.finish_piped(turn.text)
        if screen.interactive:
            if turn.finish_reason not in NORMAL_ENDS:
                screen.note(f"({reason(turn)})")
            screen.note(summary(turn))
        return True


def warm(session: Session) -> str:
    """Ask for the session's KV on the device, and return the outcome as text."""
    try:
        return f"warmed: {session.warm()}"
    except PensieveError as error:
        return f"not warmed: {error}"


def reason(turn: Turn) -> str:
    known = isinstance(turn.finish_reason, FinishReason)
    return turn.finish_reason.name.lower() if known else f"reason {turn.finish_reason}"  # type: ignore[union-attr]


def summary(turn: Turn) -> str:
    """Describe in one line where the context came from."""
    usage = turn.usage
    return (
        f"{usage.context_tokens} tokens of context = {usage.gpu_cached_tokens} on the device + "
        f"{usage.swapped_in_tokens} swapped in + {usage.recomputed_tokens} recomputed + {usage.new_tokens} new"
    )


def first_words(text: str) -> str:
    """Return the text on one line, cut to 48 characters."""
    words = " ".join(text.split())
    return words if len(words) <= 48 else f"{words[:47]}…"
