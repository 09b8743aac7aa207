"""Errors in OpenAI's form and in Anthropic's, with their HTTP status."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, Final

from pensieve.core import SAMPLING
from pensieve.errors import InvalidArgument, PensieveError
from pensieve.rpc_status import BROKEN, TRANSPORT, TRANSPORT_FINAL

_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    409: "conflict_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "server_error",
    504: "server_error",
}
"""HTTP status → error type; ``invalid_request_error`` for any other."""
_MESSAGES_KINDS: Final = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    413: "request_too_large",
    429: "rate_limit_error",
    500: "api_error",
    504: "timeout_error",
    529: "overloaded_error",
}
"""The same for Anthropic's protocol."""


class HttpFailure(Exception):
    """An error response. ``param``: the request's field that is wrong. ``kind``: its type, by default the status's."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str | None = None,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind or _KINDS.get(status, "invalid_request_error")
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s
        self.closes_connection = False
        self.details: dict[str, Any] = {}
        """Fields for programs, in Anthropic's protocol."""

    @property
    def body(self) -> dict[str, Any]:
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    @property
    def messages_status(self) -> int:
        """The status in Anthropic's protocol, which has 529 for a server that cannot take the call now."""
        return 529 if self.status == 503 else self.status

    def messages_body(self, request_id: str) -> dict[str, Any]:
        """Return the body in Anthropic's form. ``param`` and ``code`` are not Anthropic's."""
        kind = _MESSAGES_KINDS.get(self.messages_status, "invalid_request_error")
        error = {"type": kind, "message": self.message, "param": self.param, "code": self.code}
        details = {"details": self.details} if self.details else {}
        return {"type": "error", "error": {**error, **details}, "request_id": request_id}

    @property
    def headers(self) -> dict[str, str]:
        found = {"connection": "close"} if self.closes_connection else {}
        if self.status == 401:
            found["www-authenticate"] = "Bearer"
        if self.retry_after_s is not None:
            found["retry-after"] = str(max(1, math.ceil(self.retry_after_s)))
        return found


_STATUS: Final = {
    "INVALID_ARGUMENT": 400,
    "UNAUTHENTICATED": 401,
    "PERMISSION_DENIED": 403,
    "NOT_FOUND": 404,
    "ALREADY_EXISTS": 409,
    "FAILED_PRECONDITION": 409,
    "OUT_OF_RANGE": 400,
    "ABORTED": 409,
    "RESOURCE_EXHAUSTED": 429,
    "UNAVAILABLE": 503,
    "DEADLINE_EXCEEDED": 504,
    "CANCELLED": 409,
}
"""The service's status code → HTTP status; 500 for any other."""
_CODES: Final = {"CONTEXT_LIMIT_EXCEEDED": "context_length_exceeded", "CREDENTIAL_INVALID": "invalid_api_key"}
"""The service's reasons that have an OpenAI name; the others are sent in lower case."""
_PARAMS: Final = {
    "candidates": "n",
    **{name: row.http for name, row in SAMPLING.items() if row.http},
    "request_id": "Idempotency-Key",
    "text": "input",
    "tools_json": "tools",
    "overflow_policy": "truncation",
    "begin_with": "tool_choice",
    "allowed": "tool_choice",
    "calls": "tools",
    "strict": "tools",
    "turn_tools": "tools",
    "turn_system_prompt": "instructions",
    "system_prompt": "instructions",
}
"""The service's fields that have another name at the door."""


_NAMES_BY_PATH: Final[Mapping[str, Mapping[str, str]]] = {
    "/v1/chat/completions": {
        **dict.fromkeys(("input", "items", "initial_items", "instructions"), "messages"),
        "max_output_tokens": "max_tokens",
    },
    "/v1/completions": {
        **dict.fromkeys(("input", "items", "initial_items", "tokens"), "prompt"),
        "max_output_tokens": "max_tokens",
    },
    "/v1/messages": {
        **dict.fromkeys(("input", "items", "initial_items"), "messages"),
        "instructions": "system",
        "max_output_tokens": "max_tokens",
        "stop": "stop_sequences",
    },
    "/v1/responses": {"items": "input", "initial_items": "input"},
    "/v1/conversations": dict.fromkeys(("input", "initial_items", "instructions"), "items"),
}
"""Path prefix → fields of the door that these endpoints call by another name."""


def failure_from_error(error: HttpFailure | PensieveError, path: str = "") -> HttpFailure:
    """Convert an error of the service into the response for a request of this path."""
    if isinstance(error, HttpFailure):
        return error
    if error.reason == "CLIENT_CLOSED":  # the door closed it while shutting down
        return HttpFailure(503, "the server is shutting down", code="draining", retry_after_s=1.0)
    if error.reason in (TRANSPORT, TRANSPORT_FINAL):
        return _unreachable(error)
    status = _STATUS.get(error.code, 500)
    message, param = error.message, "Idempotency-Key" if error.reason == "REQUEST_ID_REUSED" else None
    if isinstance(error, InvalidArgument) and error.violations:
        named = [(_field(where, path), problem) for where, problem in error.violations]
        message, param = "; ".join(f"{name}: {problem}" for name, problem in named), named[0][0]
    return HttpFailure(
        status,
        message,
        param=param,
        code=_CODES.get(error.reason, error.reason.lower()),
        retry_after_s=error.retry_after_s if status in (429, 503) else None,
    )


def _unreachable(error: PensieveError) -> HttpFailure:
    """Our server did not answer. gRPC's own text names files and addresses, so no caller gets it."""
    code = error.metadata.get("grpc_code", error.code)
    if code in BROKEN:
        return HttpFailure(
            503,
            "the service cannot be reached: try again",
            code="service_unreachable",
            retry_after_s=error.retry_after_s if error.retry_after_s is not None else 1.0,
        )
    status = _STATUS.get(error.code, 500)
    return HttpFailure(status, f"the call of the service failed ({code})", code=code.lower())


def _field(where: str, path: str) -> str:
    """Return the request's field that became ``where`` in the service's request."""
    name = re.sub(r"\[\d+\]", "", where.rpartition(".")[2])
    name = _PARAMS.get(name, name)
    for beginning, names in _NAMES_BY_PATH.items():
        if path.startswith(beginning):
            return names.get(name, name)
    return name


def invalid_field(param: str, problem: str, code: str | None = None) -> HttpFailure:
    return HttpFailure(400, f"{param}: {problem}", param=param, code=code)


def unsupported_field(param: str, problem: str) -> HttpFailure:
    """Return an error (400): a field asks for something that the door does not do."""
    return invalid_field(param, problem, "unsupported_parameter")
