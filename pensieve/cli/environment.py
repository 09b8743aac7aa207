"""Options from the environment: ``--max-running`` of ``pensieve serve`` is ``PENSIEVE_SERVE_MAX_RUNNING``.

The rule is the same for every command: PENSIEVE, the command, below it the subcommand, the option; in capitals, with
underscores. What is empty counts as not set, a switch takes true or false, several values stand apart by spaces.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator

import click
from click.core import ParameterSource

PREFIX = "PENSIEVE"
NO_OPTIONS = frozenset({"PENSIEVE_API_KEY", "PENSIEVE_DEBUG", "PENSIEVE_FAILPOINTS"})
"""Variables of other kinds: of several commands, and switches for developers."""


def silence_grpc() -> None:
    """Keep the gRPC library from writing lines of its own to stderr, such as one for each TLS handshake that fails."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def assign_variables(command: click.Command, path: str) -> None:
    """Give each option of a command, and of the commands below it, its variable.

    ``path``: the command's name as typed, ``serve`` or ``store check``.
    """
    for param in command.params:
        if isinstance(param, click.Option) and param.allow_from_autoenv:
            wanted = _variable(path, param)
            present = _variables(param)
            if wanted not in present:
                param.envvar = [wanted, *present]
    for name, inner in _below(command):
        assign_variables(inner, f"{path} {name}")


def variables_in_use(ctx: click.Context) -> dict[str, str]:
    """Parameter → variable, of those that the environment has set."""
    return {
        param.name: _used(param)
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
    }


def variable_of_error(error: click.ClickException) -> str | None:
    """The variable whose value ``error`` is about; None when it is about something else."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return None
    name = error.param.name
    if name is None or error.ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
        return None
    return _used(error.param)


def misspelt_variables(command: click.Command, path: str) -> Iterator[str]:
    """A line for each variable that looks as if it should set an option of this command, and sets none."""
    known = set(_all_variables(command))
    own = f"{PREFIX}_{_capitals(path)}_"
    for name in sorted(os.environ):
        if name in known or name in NO_OPTIONS or not name.startswith(f"{PREFIX}_"):
            continue
        whole = own + name.removeprefix(f"{PREFIX}_")  # the command's name was left out
        if name.startswith(own):
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            yield f"{name} sets no option" + (f"; did you mean {nearest[0]}?" if nearest else "")
        elif whole in known:
            yield f"{name} sets no option; did you mean {whole}?"


def _all_variables(command: click.Command) -> Iterator[str]:
    for param in command.params:
        yield from _variables(param)
    for _, inner in _below(command):
        yield from _all_variables(inner)


def _below(command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """The subcommands of a group; ``replay`` is none, and has one as well."""
    yield from getattr(command, "commands", {}).items()


def _variable(path: str, param: click.Option) -> str:
    flag = max(param.opts, key=len).lstrip("-")
    return f"{PREFIX}_{_capitals(path)}_{_capitals(flag)}"


def _capitals(text: str) -> str:
    return text.replace("-", "_").replace(" ", "_").upper()


def _variables(param: click.Parameter) -> list[str]:
    """Its variables, the first one winning."""
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)


def _used(param: click.Parameter) -> str:
    return next(name for name in _variables(param) if os.environ.get(name))
