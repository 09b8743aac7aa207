"""The chat's commands: lines that begin with ``/``."""

from __future__ import annotations

import difflib
import glob
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import click

from pensieve.cli.chat import sessions
from pensieve.cli.chat.dialogue import Dialogue, choose_candidate, reason, set_candidates, set_schema
from pensieve.cli.chat.prompt import Prompt
from pensieve.cli.chat.screen import can_edit
from pensieve.client import Item, Role, SamplingOptions
from pensieve.core import SAMPLING
from pensieve.machine import user_path

SETTABLE: Final[dict[str, type[int] | type[float]]] = {
    name: row.kind
    for name, row in SAMPLING.items()
    if row.kind in (int, float) and name not in ("candidates", "beam_width", "length_penalty")
}
"""Options that ``/set`` accepts."""
COMMAND: Final = re.compile(r"/[A-Za-z]+( .*)?")
"""Not a path, a comment in source code, or a message of several lines."""
LEAVE_COMMANDS: Final = ("/quit", "/bye", "/exit")


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """``usage`` shows the arguments; ``complete`` lists the possible first arguments."""

    run: Callable[[str], None]
    usage: str
    text: str
    complete: Callable[[str], list[str]] = lambda _: []


class Commands:
    """All commands of a chat. ``run`` raises the server's errors."""

    def __init__(self, dialogue: Dialogue, prompt: Prompt) -> None:
        self._dialogue = dialogue
        self._screen = dialogue.screen
        self._prompt = prompt
        self._listed: list[str] = []
        """Session ids in the order in which they were last listed."""
        self.leaving = False
        self.table: dict[str, ChatCommand] = {
            "/help": ChatCommand(self._help, "", "list the commands"),
            "/new": ChatCommand(self._new, "[SYSTEM PROMPT]", "start another conversation"),
            "/sessions": ChatCommand(self._sessions, "", "list recent conversations"),
            "/switch": ChatCommand(self._switch, "N|ID", "continue one of them", self._complete_ids),
            "/history": ChatCommand(self._history, "", "show the conversation so far"),
            "/edit": ChatCommand(
                self._edit, "[N]", "change your last message, or the N-th, and continue from there"
            ),
            "/regenerate": ChatCommand(
                lambda _: dialogue.regenerate(), "", "generate another answer to the last question"
            ),
            "/candidates": ChatCommand(
                lambda n: set_candidates(n, dialogue.sampling, dialogue.screen),
                "[N]",
                "generate N answers to each question from now on",
            ),
            "/choose": ChatCommand(
                lambda k: choose_candidate(k, dialogue.session, dialogue.screen),
                "K",
                "continue from answer K of the last turn",
            ),
            "/rewind": ChatCommand(self._rewind, "[N]", "drop the last N turns (1)"),
            "/fork": ChatCommand(self._fork, "", "continue in a copy; the original is unchanged"),
            "/compact": ChatCommand(self._compact, "[N]", "summarise all but the last N turns (2)"),
            "/system": ChatCommand(self._system, "[TEXT]", "show the system prompt, or change it"),
            "/set": ChatCommand(
                self._set, "[NAME VALUE]", "temperature 0.7, seed 1, …; `default` resets it", _complete_names
            ),
            "/schema": ChatCommand(
                lambda name: set_schema(name, dialogue),
                "[FILE|off]",
                "answers follow the JSON schema of this file from now on",
                _complete_files,
            ),
            "/stats": ChatCommand(
                self._stats, "", "show where the last turn's context came from, and its times"
            ),
            "/save": ChatCommand(
                self._save, "FILE", "write the conversation as text, or as JSON (.json)", _complete_files
            ),
            "/quit": ChatCommand(self._leave, "", "leave; also /bye, /exit, Ctrl-D"),
        }
        self._aliases = {name: self.table["/quit"] for name in LEAVE_COMMANDS} | {
            "/receipt": self.table["/stats"]
        }

    def run(self, line: str) -> None:
        name, _, argument = line.partition(" ")
        command = self.table.get(name) or self._aliases.get(name)
        if command is not None:
            command.run(argument.strip())
            return
        near = difflib.get_close_matches(name, [*self.table, *self._aliases], n=1, cutoff=0.5)
        self._screen.note(
            f"no command {name}; " + (f"did you mean {near[0]}?" if near else "/help lists the commands")
        )

    def complete(self, typed: str) -> list[str]:
        name, space, argument = typed.partition(" ")
        if not typed.startswith("/"):
            return []
        if not space:
            return [
                f"{command} " for command in sorted({*self.table, *self._aliases}) if command.startswith(name)
            ]
        command = self.table.get(name)
        return [f"{name} {value}" for value in command.complete(argument)] if command is not None else []

    # -- sessions

    def _new(self, system: str) -> None:
        dialogue = self._dialogue
        dialogue.move_to(
            self._screen.call_with_status(
                lambda: dialogue.client.create_session(system_prompt=system or None)
            )
        )
        self._screen.note(f"now in {dialogue.session.name}; /switch goes back")

    def _sessions(self, _: str) -> None:
        found = self._screen.call_with_status(lambda: sessions.recent(self._dialogue.client))
        self._listed = [session.info.id for session in found]
        sessions.show_recent(found, self._screen, self._dialogue.session.name)
        self._screen.note("/switch N continues one" if found else "no conversation with a message yet")

    def _switch(self, wanted: str) -> None:
        if not wanted:
            self._screen.note("/switch takes a number from /sessions, or an id")
            return
        if wanted.isdecimal() and 0 < int(wanted) <= len(self._listed):
            wanted = self._listed[int(wanted) - 1]
        try:
            found = self._screen.call_with_status(
                lambda: sessions.find_session(self._dialogue.client, wanted)
            )
        except sessions.NoSuchSession as error:
            self._screen.note(str(error).partition("; with --new")[0])
            return
        self._dialogue.session = found
        self._dialogue.is_warm = False
        self._screen.note(f"now in {found.name}")
        if self._screen.interactive:
            sessions.show_tail(found, self._screen)
            self._dialogue.resume_unsent()

    def _complete_ids(self, typed: str) -> list[str]:
        return [session_id for session_id in self._listed if session_id.startswith(typed)]

    def _fork(self, _: str) -> None:
        origin = self._dialogue.session
        self._dialogue.session = self._screen.call_with_status(origin.fork)
        self._screen.note(f"now in {self._dialogue.session.name}, a copy of {origin.name}")

    def _compact(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            self._screen.note("/compact takes the number of turns to keep as they are")
            return
        session = self._dialogue.session
        done = self._screen.call_with_status(lambda: session.compact(keep_turns=int(argument or 2)))
        self._screen.write_line(done.summary)
        self._screen.note(
            f"{done.session.context_tokens} tokens of context now; the whole conversation is {done.branch}"
        )

    def _system(self, text: str) -> None:
        session = self._dialogue.session
        if text:
            self._screen.call_with_status(lambda: session.update(system_prompt=text))
            self._screen.note("changed; the next turn recomputes its whole context")
            return
        info = self._screen.call_with_status(session.refresh)
        self._screen.write_line(info.system_prompt or "(none)")

    # -- history

    def _items(self) -> list[Item]:
        return self._screen.call_with_status(self._dialogue.session.items)

    def _history(self, _: str) -> None:
        for item in self._items():
            self._screen.write_line(f"{item.item} {_role_name(item)}: {item.text}")

    def _edit(self, argument: str) -> None:
        asked = [item for item in self._items() if item.role == Role.USER]
        if not self._screen.interactive:
            self._screen.note("/edit needs a terminal")
            return
        if (argument and not argument.isdecimal()) or not 0 < int(argument or 1) <= len(asked):
            self._screen.note(
                f"/edit takes the number of one of your {len(asked)} messages" if asked else "nothing to edit"
            )
            return
        number = int(argument or len(asked))
        old = asked[number - 1]
        later = len(asked) - number
        dropped = (
            "its answer"
            if not later
            else f"its answer and the {later} turn{'s' if later > 1 else ''} after it"
        )
        self._screen.note(f"message {number} of {len(asked)}: {dropped} will be dropped when you send it")
        text = self._edit_text(old.text)
        if not text or text == old.text:
            self._screen.note("not changed")
            return
        self._dialogue.ask(text, replace_after_item=old.item - 1)

    def _edit_text(self, text: str) -> str:
        """Let the user edit the text in place, or in $EDITOR if the terminal has no line editor."""
        if can_edit():
            return self._prompt.edit(text)
        try:
            return (click.edit(text) or "").strip()
        except click.ClickException as error:
            self._screen.error(error.format_message())
            return ""

    def _rewind(self, argument: str) -> None:
        if argument and not argument.isdecimal():
            self._screen.note("/rewind takes the number of turns to drop")
            return
        items = self._items()
        starts = [item.item for item in items if item.role == Role.USER]
        count = min(int(argument or 1), len(starts))
        if count == 0:
            self._screen.note("nothing to drop")
            return
        keep = max((item.item for item in items if item.item < starts[-count]), default=0)
        self._screen.call_with_status(lambda: self._dialogue.session.rewind(to_item=keep))
        self._screen.note(f"dropped {count} of {len(starts)} turns")

    def _save(self, name: str) -> None:
        if not name:
            self._screen.note("/save takes a file name")
            return
        path = user_path(name)
        items = self._items()
        if path.suffix == ".json":
            messages = [{"role": _role_name(item), "content": item.text} for item in items]
            text = json.dumps(messages, ensure_ascii=False, indent=2)
        else:
            text = "\n\n".join(f"## {_role_name(item)}\n\n{item.text}" for item in items)
        try:
            with path.open("x", encoding="utf-8") as file:
                file.write(f"{text}\n")
        except OSError as error:
            self._screen.error(f"not saved: {error}")
            return
        self._screen.note(f"saved {len(items)} messages to {path}")

    # -- the rest

    def _set(self, argument: str) -> None:
        sampling: SamplingOptions = self._dialogue.sampling
        name, _, value = argument.partition(" ")
        if not name:
            shown = ", ".join(f"{key} {value}" for key, value in sampling.items())
            self._screen.note(shown or "nothing set; the defaults of the session and the server apply")
        elif name not in SETTABLE:
            near = difflib.get_close_matches(name, SETTABLE, n=1)
            self._screen.note(
                f"/set has no {name}; " + (f"did you mean {near[0]}?" if near else ", ".join(SETTABLE))
            )
        elif value.strip() == "default":
            sampling.pop(name, None)  # type: ignore[misc]
            self._screen.note(f"{name} has the default of the session or server again")
        else:
            try:
                sampling.update(_parse_number(name, value))
            except ValueError:
                self._screen.note(f"{name} takes a {'whole ' if SETTABLE[name] is int else ''}number")
                return
            self._screen.note(f"{name} {value.strip()} from the next turn on")

    def _stats(self, _: str) -> None:
        turn = self._dialogue.session.last_turn
        if turn is None:
            self._screen.note("no turn yet")
            return
        usage = turn.usage
        rows = (
            ("context", f"{usage.context_tokens} tokens, from"),
            ("  the device", f"{usage.gpu_cached_tokens}, found where they were computed"),
            ("  host memory", f"{usage.swapped_in_tokens}, copied back"),
            (
                "  history",
                f"{usage.recomputed_tokens}, recomputed because their cached state had been dropped",
            ),
            ("  you", f"{usage.new_tokens}, new with this turn"),
            ("answer", f"{usage.output_tokens} tokens, {reason(turn)}"),
            ("queue", f"{usage.queue_s * 1e3:.1f} ms"),
            ("restore", f"{usage.restore_s * 1e3:.1f} ms"),
            ("prefill", f"{usage.prefill_s * 1e3:.1f} ms"),
            ("decode", f"{usage.decode_s * 1e3:.1f} ms"),
            ("seed", f"{turn.seed}"),
            ("revision", f"{turn.revision}"),
        )
        for label, value in rows:
            self._screen.write_line(f"{label:14} {value}")

    def _help(self, _: str) -> None:
        for name, command in self.table.items():
            self._screen.note(f"{f'{name} {command.usage}':22} {command.text}")
        self._screen.note('""" starts and ends a message of several lines; Ctrl-C stops an answer')

    def _leave(self, _: str) -> None:
        self.leaving = True


def _role_name(item: Item) -> str:
    return item.role.name.lower() if isinstance(item.role, Role) else f"role {item.role}"


def _complete_names(typed: str) -> list[str]:
    return [f"{name} " for name in SETTABLE if name.startswith(typed)]


def _complete_files(typed: str) -> list[str]:
    return sorted(glob.glob(f"{glob.escape(typed)}*"))


def _parse_number(name: str, value: str) -> Any:
    return {name: SETTABLE[name](value)}
