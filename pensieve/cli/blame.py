"""Which command an error is about: the innermost one that it came out of."""

from __future__ import annotations

from types import TracebackType

import click


class Blame:
    """``main`` hands it to all contexts as their ``obj``; those that an error leaves write in it."""

    def __init__(self) -> None:
        self._error: BaseException | None = None
        self._command = ""

    def take(self, error: BaseException, command: str) -> None:
        """``error`` leaves ``command``: remembered unless it has left another one before."""
        if error is not self._error:
            self._error, self._command = error, command

    def command(self, error: BaseException) -> str:
        """The command as it was typed, without its arguments; ``pensieve`` if the error came out of none."""
        context = getattr(error, "ctx", None)  # click knows it of mistakes in how a command is called
        if isinstance(context, click.Context):
            return context.command_path
        return self._command if error is self._error else "pensieve"


class BlamedContext(click.Context):
    """A context that tells its ``Blame`` of errors. Click itself names no command in errors of run time."""

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool | None:
        if error is not None and isinstance(self.obj, Blame):
            self.obj.take(error, self.command_path)
        return super().__exit__(kind, error, trace)


def blamed(command: click.Command) -> None:
    """Have a command, and those below it, run in contexts that tell."""
    command.context_class = BlamedContext
    for inner in getattr(command, "commands", {}).values():
        blamed(inner)
