"""One-line messages for refused calls and unreachable servers, for the user of a command."""

from __future__ import annotations

import re
from typing import Final

import click

from pensieve.cli.output import clean
from pensieve.errors import InvalidArgument, PensieveError

_OPTIONS: Final = {"target": "--target", "api_key": "--api-key"}
"""Client argument → option. The client checks these before it makes a call."""
_CAUSES: Final = (
    r"failed to connect to all addresses; last error: \w+: (?:\S+: )?(?:Failed to connect to remote host: )?(.+)",
    r"errors resolving .*\[field:hostname lookup error:address lookup failed for \S+: (.+?)\](.*)",
)
"""Patterns of gRPC messages, to extract the cause."""
_DEFAULT_ADVICE: Final = "the address is in the server's ready line, printed when it has started: grpc=…"
_ADVICE: Final = {
    "Socket closed": "if the server uses TLS, add --tls",
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
