"""What a server refuses, as one line for whoever has typed a command."""

from __future__ import annotations

from pensieve.cli.untrusted import clean
from pensieve.errors import PensieveError


def refusal(error: PensieveError, target: str) -> str:
    """It names the option where a key is wanted, tells a wrong port, and has nothing that a terminal would obey."""
    if error.reason == "CREDENTIAL_MISSING":
        return f"{target} wants --api-key, or PENSIEVE_API_KEY ({error.reason})"
    if error.reason == "TRANSPORT" and error.code in ("UNKNOWN", "UNIMPLEMENTED"):  # such as the admin port
        return f"what answers at {target} is no gRPC port of pensieve; a server's ready line names its own: grpc=…"
    return clean(str(error), lines=False)
