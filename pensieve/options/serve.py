"""Options of ``pensieve serve``: flags, the keys of a TOML file and ``--print-config``, all from one table.

Precedence: flag, environment, file, default. Names are the same everywhere (``device-cache``,
``PENSIEVE_SERVE_DEVICE_CACHE``). An unknown key is an error that suggests the nearest known one.
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal, TypeVar

import click
import msgspec

from pensieve.config import (
    DISCONNECT_GRACE_S,
    HEARTBEAT_S,
    LEASE_S,
    MAX_QUEUED_TOKENS,
    MAX_WAIT_S,
    EngineOptions,
    EngineTuning,
    device_range,
    parse_cache_size,
)
from pensieve.machine import user_directory, user_path
from pensieve.options.commands import Completer, complete_words, models
from pensieve.options.table import HIDDEN_OPTIONS, OFF_SWITCHES, OPTIONS, Option
from pensieve.options.values import OneOf, is_loopback, without_secrets

Source = Literal["flag", "environment", "file", "default"]
Command = Callable[..., Any]
T = TypeVar("T")
NO_VARIABLES: Final[Mapping[str, str]] = {}


def state_directory() -> Path:
    """Return the default folder of a user's history: ``$XDG_STATE_HOME/pensieve`` or ``~/.local/state/pensieve``."""
    return user_directory("XDG_STATE_HOME", ".local/state")


def default_store() -> str:
    return f"sqlite:///{state_directory() / 'pensieve.sqlite3'}"


class ServeOptions(EngineTuning, frozen=True, kw_only=True):
    """All options of the server, typed and checked. Durations are in seconds; sizes are still as written."""

    model: str = "demo"
    served_model_name: str | None = None
    listen: str = "127.0.0.1:50051"
    admin: str = "127.0.0.1:25051"
    http: str | None = None
    http_max_body: int = 4
    http_patience_s: float = 20.0
    http_cors_origin: str | None = None
    http_host: str | None = None
    http_trusted_proxy: str | None = None
    store: str = msgspec.field(default_factory=default_store)
    threads: int = 0
    chat_template: Path | None = None
    allow_rewriting_template: bool = False
    api_keys: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    insecure_i_know: bool = False
    max_wait_s: float = MAX_WAIT_S
    max_queued_tokens: int = MAX_QUEUED_TOKENS
    max_connections: int = 0
    tenant_metrics: bool = False
    page_text: bool = False
    disconnect_grace_s: float = DISCONNECT_GRACE_S
    drain_grace_s: float = 30.0
    heartbeat_s: float = HEARTBEAT_S
    lease_s: float = LEASE_S
    stall_limit_s: float = 60.0
    record: Path | None = None
    traces: str | None = None
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    log_json: bool = False

    def engine_options(
        self, model_path: Path | str, *, eos_token_ids: tuple[int, ...] | None = None
    ) -> EngineOptions:
        """Return the engine's options.

        ``model_path``: the local folder that ``model`` was resolved to. ``eos_token_ids``: as in
        ``EngineOptions``.
        """
        return EngineOptions(
            model=str(model_path),
            eos_token_ids=eos_token_ids,
            torch_threads=self.threads,
            **{name: getattr(self, name) for name in EngineTuning.__struct_fields__},
        )


@dataclass(frozen=True, slots=True)
class Resolved:
    """The options and the origin of each. ``config``: the file that was read, if any."""

    options: ServeOptions
    sources: Mapping[str, Source]
    config: Path | None
    variables: Mapping[str, str]
    """Option name → the variable that set it."""

    def render(self) -> str:
        """Return TOML that ``--config`` accepts, with each value's origin and reason as a comment.

        A password in the store's URL is masked.
        """
        lines = ["# Configuration of `pensieve serve`. Precedence: flag, environment, file, default."]
        for option in OPTIONS:
            value = getattr(self.options, option.field)
            source = self.sources[option.name]
            origin = {
                "flag": f"flag --{option.name}",
                "environment": f"environment {self.variables.get(option.name)}",
                "file": f"file {self.config}",
                "default": f"default: {option.why}",
            }[source]
            if value is None:
                lines.append(f"# {option.name} is unset  # {origin}")
            else:
                shown = without_secrets(value) if isinstance(value, str) else value
                written = f"{value:g}{option.unit}" if option.unit else shown
                lines.append(f"{option.name} = {_toml(written)}  # {origin}")
        return "\n".join(lines)


def resolve(
    flags: Mapping[str, object], config: Path | None = None, variables: Mapping[str, str] = NO_VARIABLES
) -> Resolved:
    """Check and merge all values. ``flags``: option name → value as given, or None; ``off`` has names.

    ``variables``: option name → variable, for those values in ``flags`` that come from the environment.

    Raises click.UsageError with one line that names the option, the value and what is accepted.
    """
    from_file = _read_file(config) if config is not None else {}
    flags, variables = _expand_off(flags, variables)
    if unknown := set(flags) - {option.name for option in OPTIONS}:
        raise KeyError(f"no such option: {', '.join(sorted(unknown))}")
    values: dict[str, Any] = {}
    sources: dict[str, Source] = {}
    for option in OPTIONS:
        given = flags.get(option.name)
        if given is not None:
            variable = variables.get(option.name)
            values[option.field] = _parse(option, given, variable or f"--{option.name}")
            sources[option.name] = "environment" if variable else "flag"
        elif option.name in from_file:
            values[option.field] = _parse(option, from_file[option.name], f"{config}: {option.name}")
            sources[option.name] = "file"
        else:
            sources[option.name] = "default"
    options = ServeOptions(**values)
    _check_combinations(options)
    return Resolved(options, sources, config, variables)


def by_name(parameters: Mapping[str, T]) -> dict[str, T]:
    """Map the parameters of a click command with ``serve_flags`` to option names, as ``resolve`` takes them."""
    fields = {option.name: option.field for option in OPTIONS} | {"off": "off"}
    return {name: parameters[field] for name, field in fields.items() if field in parameters}


def serve_flags(command: Command) -> Command:
    """Decorator: add one flag per option to a click command. A parameter has the name of the option's field."""
    defaults = ServeOptions()
    for option in reversed(OPTIONS):
        default = getattr(defaults, option.field)
        if option.is_switch:
            on_off = f"--{option.name}/--no-{option.name}" if option.can_negate else f"--{option.name}"
            shown = f"  [default: {'on' if default else 'off'}]"
            command = click.option(
                on_off,
                option.field,
                is_flag=True,
                default=None,
                help=option.help + shown,
                hidden=option.name in HIDDEN_OPTIONS,
            )(command)
        else:
            written = option.default_text or (f"{default:g}{option.unit}" if option.unit else default)
            shown = f"  [default: {written}]" if default is not None else ""
            command = click.option(
                f"--{option.name}",
                option.field,
                type=str,
                metavar=option.metavar,
                help=option.help + shown,
                shell_complete=_completer(option),
            )(command)
    return click.option(
        "--off",
        multiple=True,
        type=click.Choice(list(OFF_SWITCHES)),
        metavar="NAME",
        help=f"Disable a feature, to measure its effect: {', '.join(OFF_SWITCHES)}; repeatable.",
    )(command)


def _completer(option: Option) -> Completer:
    if option.name == "model":
        return models
    if isinstance(option.parse, OneOf):
        return complete_words(*option.parse.words)
    return complete_words(*option.keywords, paths="file" if option.is_file else "")


def _expand_off(
    flags: Mapping[str, object], variables: Mapping[str, str]
) -> tuple[dict[str, object], dict[str, str]]:
    """Return ``flags`` and ``variables`` with ``--off`` replaced by the options that it sets."""
    flags, variables = dict(flags), dict(variables)
    names, variable = flags.pop("off", None) or (), variables.pop("off", None)
    assert isinstance(names, tuple | list)
    for name in names:
        option, value = OFF_SWITCHES[str(name)]
        given, by_variable = flags.get(option), option in variables
        if given is not None and given is not value and (variable is None) is not by_variable:
            switch = option if given else f"no-{option}"
            raise click.UsageError(f"{variable or '--off'}: {name} contradicts --{switch}")
        if given is None or (by_variable and variable is None):
            flags[option] = value
            variables.pop(option, None)
            if variable is not None:
                variables[option] = variable
    return flags, variables


def _read_file(path: Path) -> dict[str, object]:
    """Return the keys and values of a TOML file. Relative paths are resolved against the file's folder."""
    try:
        data = tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise click.UsageError(f"--config: cannot read {path}: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise click.UsageError(f"--config: {path} is not TOML: {error}") from None
    known = {option.name: option for option in OPTIONS}
    for name in _off_in_file(path, data.pop("off", [])):
        option, value = OFF_SWITCHES[name]
        if data.setdefault(option, value) is not value:
            raise click.UsageError(f"{path}: off: {name} contradicts {option}")
    for key, value in data.items():
        if key not in known:
            raise click.UsageError(f"{path}: unknown key {key!r}{_nearest(key, known)}")
        if known[key].is_file and isinstance(value, str) and value and value not in known[key].keywords:
            data[key] = str(path.parent / user_path(value))
    return data


def _off_in_file(path: Path, names: object) -> list[str]:
    names = [names] if isinstance(names, str) else names
    if not isinstance(names, list) or not all(name in OFF_SWITCHES for name in names):
        raise click.UsageError(f"{path}: off: expected names of {', '.join(OFF_SWITCHES)}, got {names!r}")
    return names


def _nearest(key: str, known: Mapping[str, object]) -> str:
    close = difflib.get_close_matches(key.replace("_", "-").lower(), known, n=1, cutoff=0.5)
    return f"; did you mean {close[0]!r}?" if close else f"; known keys: {', '.join(sorted(known))}"


def _parse(option: Option, value: object, where: str) -> object:
    try:
        return option.parse(value)
    except ValueError as error:
        raise click.UsageError(f"{where}: {error}") from None


def _check_combinations(options: ServeOptions) -> None:
    """Raise click.UsageError for values that are wrong only in combination."""
    if (options.tls_cert is None) != (options.tls_key is None):
        given, missing = ("cert", "key") if options.tls_cert else ("key", "cert")
        raise click.UsageError(f"--tls-{missing}: required with --tls-{given}")
    if device_range(options.device_cache) is None:
        for name, is_set in (
            ("device-slack", parse_cache_size(options.device_slack, 1) > 0),
            ("idle-release", options.idle_release_s > 0),
        ):
            if is_set:
                raise click.UsageError(f"--{name}: requires a range, such as --device-cache 8GiB..60GiB")
    if options.tls_client_ca is not None and options.tls_cert is None:
        raise click.UsageError("--tls-client-ca: requires --tls-cert and --tls-key")
    if options.insecure_i_know:
        return
    if not is_loopback(options.admin):
        raise click.UsageError(
            f"--admin: {options.admin} is not loopback and the admin port has no TLS; "
            "use 127.0.0.1, or pass --insecure-i-know behind your own protection"
        )
    for name, address in (("listen", options.listen), ("http", options.http)):
        if address is not None and not is_loopback(address):
            missing_flag = "--tls-cert and --tls-key" if options.tls_cert is None else "--api-keys"
            if options.tls_cert is None or options.api_keys is None:
                raise click.UsageError(
                    f"--{name}: {address} is not loopback; pass {missing_flag}, "
                    "or --insecure-i-know behind your own protection"
                )


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    return json.dumps(str(value), ensure_ascii=False)
