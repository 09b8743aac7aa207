"""What a server refuses, and that none answers, as one line for whoever has typed a command."""

from __future__ import annotations

import re
from typing import Final

import click

from pensieve.cli.output import clean
from pensieve.errors import InvalidArgument, PensieveError

_OPTIONS: Final = {"target": "--target", "api_key": "--api-key"}
"""Arguments of a client, which looks at them before it calls anybody."""
_CAUSES: Final = (
    r"failed to connect to all addresses; last error: \w+: (?:\S+: )?(?:Failed to connect to remote host: )?(.+)",
    r"errors resolving .*\[field:hostname lookup error:address lookup failed for \S+: (.+?)\](.*)",
)
"""What the gRPC library says around the cause."""
_ELSEWHERE: Final = "a server's ready line names its address: grpc=…"
_ADVICE: Final = {
    "Socket closed": "a server with TLS wants --tls",
    "WRONG_VERSION_NUMBER": "it speaks no TLS: leave out --tls",
    "CERTIFICATE_VERIFY_FAILED": "GRPC_DEFAULT_SSL_ROOTS_FILE_PATH names root certificates in place of the system's",
}
"""What to do about causes that have these words in them."""


class BadModel(click.ClickException):
    """The model cannot be served: bad input, as a bad option is."""

    exit_code = 2


def describe_error(error: PensieveError, target: str) -> str:
    """It names the option where a key is wanted, tells a wrong port, and has nothing that a terminal would obey."""
    if error.reason == "CREDENTIAL_MISSING":
        return f"{target} wants --api-key, or PENSIEVE_API_KEY ({error.reason})"
    if error.reason == "TRANSPORT" and error.code in ("UNKNOWN", "UNIMPLEMENTED"):  # such as the admin port
        return f"what answers at {target} is no gRPC port of pensieve; a server's ready line names its own: grpc=…"
    if error.reason == "TRANSPORT" and error.code == "UNAVAILABLE":
        return describe_unreachable(error, target)
    return clean(str(error), lines=False)


def describe_unreachable(error: PensieveError, target: str) -> str:
    """That nobody is there, why, and what to do about it."""
    cause = error.message
    for pattern in _CAUSES:
        if found := re.fullmatch(pattern, cause, re.DOTALL):
            cause = "".join(found.groups())
    cause = clean(cause, lines=False)
    advice = next((what for words, what in _ADVICE.items() if words in cause), _ELSEWHERE)
    return f"no server answers at {target}: {cause}; {advice}"


def usage_error(error: PensieveError) -> click.UsageError | None:
    """The error if it is one of an option of the command: nobody was called then."""
    if isinstance(error, InvalidArgument):
        for field, problem in error.violations:
            if field in _OPTIONS:
                return click.UsageError(f"{_OPTIONS[field]}: {clean(problem, lines=False)}")
    return None
