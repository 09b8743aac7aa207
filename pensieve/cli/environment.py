"""Options from the environment: ``--max-running`` of ``pensieve serve`` is ``PENSIEVE_SERVE_MAX_RUNNING``.

The rule for every command: PENSIEVE, the command, the subcommand if any, the option; in capitals, joined by
underscores. An empty variable counts as unset. A switch takes true or false. Several values are separated by
spaces.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator

import click
from click.core import ParameterSource

PREFIX = "PENSIEVE"
NO_OPTIONS = frozenset({"PENSIEVE_API_KEY", "PENSIEVE_DEBUG", "PENSIEVE_FAILPOINTS"})
"""Variables that belong to several commands, and switches for developers."""


def silence_grpc() -> None:
    """Keep gRPC from writing to stderr, except for errors. Else any stranger adds a line to a server's log with each
    failed TLS handshake."""
    os.environ.setdefault("GRPC_VERBOSITY", "ERROR")


def ignore_forks() -> None:
    """Keep gRPC from handling forks, before it is imported. Commands fork only to start programs, and gRPC would log
    a line for each."""
    os.environ.setdefault("GRPC_ENABLE_FORK_SUPPORT", "0")


def assign_variables(command: click.Command, path: str) -> None:
    """Assign an environment variable to each option of a command and of its subcommands.

    ``path``: the command's name as typed, ``serve`` or ``store check``.
    """
    for param in command.params:
        if isinstance(param, click.Option) and param.allow_from_autoenv:
            wanted = _variable(path, param)
            present = _variables(param)
            if wanted not in present:
                param.envvar = [wanted, *present]
    for name, inner in _subcommands(command):
        assign_variables(inner, f"{path} {name}")


def variables_in_use(ctx: click.Context) -> dict[str, str]:
    """Return parameter → variable, for each parameter that the environment has set."""
    return {
        param.name: _set_variable(param)
        for param in ctx.command.params
        if param.name and ctx.get_parameter_source(param.name) is ParameterSource.ENVIRONMENT
    }


def variable_of_error(error: click.ClickException) -> str | None:
    """Return the variable whose value ``error`` is about, or None."""
    if not isinstance(error, click.BadParameter) or error.ctx is None or error.param is None:
        return None
    name = error.param.name
    if name is None or error.ctx.get_parameter_source(name) is not ParameterSource.ENVIRONMENT:
        return None
    return _set_variable(error.param)


def misspelt_variables(command: click.Command, path: str) -> Iterator[str]:
    """Yield a line for each variable that looks like an option of this command but sets none."""
    known = set(_all_variables(command))
    prefix = f"{PREFIX}_{_upper_snake(path)}_"
    for name in sorted(os.environ):
        if name in known or name in NO_OPTIONS or not name.startswith(f"{PREFIX}_"):
            continue
        full_name = prefix + name.removeprefix(f"{PREFIX}_")  # if the command's name was left out
        if name.startswith(prefix):
            nearest = difflib.get_close_matches(name, known, n=1, cutoff=0.8)
            yield f"ignoring {name}: no such option" + (f"; did you mean {nearest[0]}?" if nearest else "")
        elif full_name in known:
            yield f"ignoring {name}: no such option; did you mean {full_name}?"


def _all_variables(command: click.Command) -> Iterator[str]:
    for param in command.params:
        yield from _variables(param)
    for _, inner in _subcommands(command):
        yield from _all_variables(inner)


def _subcommands(command: click.Command) -> Iterator[tuple[str, click.Command]]:
    """Yield the subcommands of a group. ``replay`` is not a group but has one."""
    yield from getattr(command, "commands", {}).items()


def _variable(path: str, param: click.Option) -> str:
    flag = max(param.opts, key=len).lstrip("-")
    return f"{PREFIX}_{_upper_snake(path)}_{_upper_snake(flag)}"


def _upper_snake(text: str) -> str:
    return text.replace("-", "_").replace(" ", "_").upper()


def _variables(param: click.Parameter) -> list[str]:
    """Return the parameter's variables; the first one that is set wins."""
    if param.envvar is None:
        return []
    return [param.envvar] if isinstance(param.envvar, str) else list(param.envvar)


def _set_variable(param: click.Parameter) -> str:
    return next(name for name in _variables(param) if os.environ.get(name))
