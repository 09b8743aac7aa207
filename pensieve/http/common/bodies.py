"""Reads a request's body: bounded, then decoded into a checked struct."""

from __future__ import annotations

import asyncio
import re
from typing import Final, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from pensieve.http.common.failures import HttpFailure

T = TypeVar("T", bound=msgspec.Struct)

BODY_S: Final = 30.0
"""How long a body may take."""
_PATH: Final = re.compile(r" - at `\$\.?(.*)`$")
"""Where msgspec says that a value is wrong."""
_MISSING: Final = re.compile(r"Object missing required field `(.*?)`")


async def read_json(request: Request, kind: type[T], max_bytes: int) -> T:
    """The body as ``kind``. Raises HttpFailure: 413 before more than ``max_bytes`` are read, 415 for a compressed
    one, 400 for what is wrong."""
    try:
        return msgspec.json.decode(await _read(request, max_bytes), type=kind)
    except msgspec.ValidationError as error:
        raise _wrong(str(error)) from error
    except RecursionError as error:
        raise HttpFailure(400, "the body is nested too deep", code="invalid_json") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise HttpFailure(400, f"the body is not valid JSON: {error}", code="invalid_json") from error


def _wrong(message: str) -> HttpFailure:
    found, missing = _PATH.search(message), _MISSING.match(message)
    # A key of an object is not told: the object is.
    param = found.group(1).replace("[...]", "") if found is not None else ""
    if missing is None:
        return HttpFailure(400, message, param=param or None, code="invalid_type")
    param = f"{param}.{missing.group(1)}" if param else missing.group(1)
    return HttpFailure(400, f"{param}: is missing", param=param, code="missing_required_parameter")


async def _read(request: Request, max_bytes: int) -> bytes:
    too_large = HttpFailure(413, f"the body is larger than {max_bytes} bytes", code="request_too_large")
    coding = request.headers.get("content-encoding", "identity")
    if coding.lower() != "identity":
        raise HttpFailure(
            415, f"a body with content-encoding {coding!r} is not read", code="unsupported_media_type"
        )
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > max_bytes:
        raise too_large
    parts: list[bytes] = []
    size = 0
    try:
        async with asyncio.timeout(BODY_S):
            async for part in request.stream():
                size += len(part)
                if size > max_bytes:
                    raise too_large
                parts.append(part)
    except ClientDisconnect:
        raise HttpFailure(
            400, "the caller left before the body was whole", code="client_disconnected"
        ) from None
    except TimeoutError:
        raise HttpFailure(408, f"the body did not come within {BODY_S:g} s", code="request_timeout") from None
    return b"".join(parts)
