"""Terminal output: the width of stdout, numbers and times, text of others made safe to print, and one-line messages
for refused calls and unreachable servers."""

from __future__ import annotations

import re
import shutil
from collections.abc import Mapping
from typing import Final

import click
from rich.console import Console

from pensieve.errors import InvalidArgument, PensieveError

UNBOUNDED_WIDTH: Final = 10_000
"""Columns of an output without a width of its own, such as a pipe: wide enough that nothing is cut."""


def stdout() -> Console:
    """Return a console on stdout. In a pipe or file each row is one line, unless COLUMNS is set.

    Rich would assume 80 columns there, or those of a terminal on stdin.
    """
    console = Console(highlight=False)
    if console.file.isatty():  # not ``is_terminal``, which FORCE_COLOR makes true for a pipe
        return console
    return Console(highlight=False, width=shutil.get_terminal_size((UNBOUNDED_WIDTH, 24)).columns)


_CONTROL: Final = "\x00-\x08\x0b-\x1f\x7f-\x9f\u200e\u200f\u2028\u2029\u202a-\u202e\u2066-\u2069\ud800-\udfff"
_IN_LINES: Final = re.compile(f"[{_CONTROL}]")
_IN_A_CELL: Final = re.compile(f"[\t\n{_CONTROL}]")


def clean(text: str, *, lines: bool = True) -> str:
    """Replace control characters by visible ones, so that none reaches a terminal.

    Text from a model, a server or its callers could otherwise move the cursor, set the title, write to the
    clipboard, or hide its content with bidirectional marks. Joiners of letters and emoji, and spaces of any
    width, stay. ``lines``: line ends and tabs stay too.
    """
    return (_IN_LINES if lines else _IN_A_CELL).sub(_visible, text.replace("\r\n", "\n"))


def _visible(match: re.Match[str]) -> str:
    code = ord(match[0])
    if code < 0x20:
        return chr(0x2400 + code)
    return "\u2421" if code == 0x7F else f"<U+{code:04X}>"


_DAY_S = 86_400.0


def count(number: float) -> str:
    """Format a number in at most seven characters: ``999``, ``12,345``, ``1.2M``."""
    if number >= 1e9:
        return f"{number / 1e9:.1f}G"
    if number >= 1e6:
        return f"{number / 1e6:.1f}M"
    if number >= 100 or number == int(number):
        return f"{number:,.0f}"
    return f"{number:.1f}"


def seconds(duration_s: float) -> str:
    """Format a latency: ``8.4 ms``, ``120 ms``, ``2.4 s``."""
    if duration_s < 1.0:
        milliseconds = duration_s * 1e3
        return f"{milliseconds:.1f} ms" if milliseconds < 10 else f"{milliseconds:.0f} ms"
    return f"{duration_s:.1f} s" if duration_s < 100 else f"{duration_s:.0f} s"


def age(duration_s: float) -> str:
    """Format a long time in its largest unit: ``12s``, ``5m``, ``3h``, ``9d``."""
    for length, unit in ((_DAY_S, "d"), (3600.0, "h"), (60.0, "m")):
        if duration_s >= length:
            return f"{duration_s / length:.0f}{unit}"
    return f"{max(duration_s, 0.0):.0f}s"


def share(part: float, whole: float) -> str:
    """Format a share: ``62 %``; less than half a percent is ``<1 %``."""
    if whole <= 0:
        return "–"
    percent = 100 * part / whole
    return "<1 %" if 0 < percent < 0.5 else f"{percent:.0f} %"


def byte_size(number: float) -> str:
    """Format a size: ``1.5 MB``."""
    for length, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        if number >= length:
            return f"{number / length:.1f} {unit}"
    return f"{number:.0f} B"


def binary_size(num_bytes: int) -> str:
    """Format memory: ``42.00 GiB``; less than one in MiB."""
    if num_bytes < 1 << 30:
        return f"{num_bytes / (1 << 20):.2f} MiB"
    return f"{num_bytes / (1 << 30):.2f} GiB"


def labels(values: Mapping[str, str]) -> str:
    """Format labels: ``k=v k2=v2``."""
    return clean(" ".join(f"{key}={value}" for key, value in sorted(values.items())), lines=False)


_OPTIONS: Final = {"target": "--target", "api_key": "--api-key"}
"""Client argument → option. The client checks these before it makes a call."""
_CAUSES: Final = (
    r"failed to connect to all addresses; last error: \w+: (?:\S+: )?(?:Failed to connect to remote host: )?(.+)",
    r"errors resolving .*\[field:hostname lookup error:address lookup failed for \S+: (.+?)\](.*)",
)
"""Patterns of gRPC messages, to extract the cause."""
_DEFAULT_ADVICE: Final = "the address is in the server's ready line, printed when it has started: grpc=…"
_ADVICE: Final = {
    "Socket closed": "if the server uses TLS, add --tls, or --tls-identity if it has --tls-client-ca",
    "WRONG_VERSION_NUMBER": "the server does not use TLS: remove --tls",
    "CERTIFICATE_VERIFY_FAILED": "set GRPC_DEFAULT_SSL_ROOTS_FILE_PATH to use other root certificates",
}


class BadModel(click.ClickException):
    """The model cannot be served. Exit code 2, as for a bad option."""

    exit_code = 2


def describe_error(error: PensieveError, target: str) -> str:
    """Describe an error in one line that is safe to print."""
    if error.reason == "CREDENTIAL_MISSING":
        return f"{target} requires an API key: pass --api-key, or set PENSIEVE_API_KEY ({error.reason})"
    if error.reason == "TRANSPORT" and error.code in ("UNKNOWN", "UNIMPLEMENTED"):  # such as the admin port
        return f"{target} is not a gRPC port of pensieve; the address is in the server's ready line: grpc=…"
    if error.reason == "TRANSPORT" and error.code == "UNAVAILABLE":
        return describe_unreachable(error, target)
    return clean(str(error), lines=False)


def describe_unreachable(error: PensieveError, target: str) -> str:
    """Describe that no server answers, why, and what to do."""
    cause = error.message
    for pattern in _CAUSES:
        if found := re.fullmatch(pattern, cause, re.DOTALL):
            cause = "".join(found.groups())
    cause = clean(cause, lines=False)
    advice = next((what for words, what in _ADVICE.items() if words in cause), _DEFAULT_ADVICE)
    return f"no server answers at {target}: {cause}; {advice}"


def usage_error(error: PensieveError) -> click.UsageError | None:
    """Return a usage error if ``error`` is about an option of the command; then no server was called."""
    if isinstance(error, InvalidArgument):
        for field, problem in error.violations:
            if field in _OPTIONS:
                return click.UsageError(f"{_OPTIONS[field]}: {clean(problem, lines=False)}")
    return None
