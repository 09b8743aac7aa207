"""Errors on the wire: ``PensieveError`` to ``google.rpc.Status`` and back, for both ends.

Every error carries ``ErrorInfo{reason, domain, metadata}``, with ``BadRequest`` for wrong fields, ``RetryInfo`` where
waiting helps, and ``QuotaFailure`` for quotas. The trailer ``grpc-retry-pushback-ms`` is for the gRPC *library* only:
-1 forbids its built-in retry, a delay allows it after that time, no trailer leaves it to the library's own backoff.
The SDK decides by the reason, and by the trailer only if there is no reason.
"""

from __future__ import annotations

import re
from typing import Any, Final

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from pensieve.errors import (
    BY_CODE,
    BY_REASON,
    ERROR_DOMAIN,
    InvalidArgument,
    PensieveError,
    ResourceExhausted,
)

PUSHBACK_KEY = "grpc-retry-pushback-ms"
DETAILS_KEY = "grpc-status-details-bin"

TRANSPORT = "TRANSPORT"
"""Reason of an error that no Pensieve server raised, but the connection, a proxy or the gRPC library."""
TRANSPORT_FINAL = "TRANSPORT_FINAL"
"""The same, with a pushback that forbids a retry."""
MESSAGE_TOO_LARGE = "MESSAGE_TOO_LARGE"
"""Reason of a request that the server's gRPC library refuses as too large, before our code sees it."""
BROKEN: Final = ("UNAVAILABLE", "INTERNAL", "UNKNOWN", "CANCELLED")
"""Status codes of a connection that died during a call, directly or behind various proxies."""

LIBRARY_MAY_RETRY: dict[str, int | None] = {
    "TURN_RUNNING_ELSEWHERE": 1000,
    "DRAINING": None,
    "STARTING": None,
    "ENGINE_RESTARTING": None,
    "STORE_UNAVAILABLE": None,
    "STORE_REPLACED": None,
    "STORE_FULL": 2000,
}
"""Reasons that the gRPC library may retry by itself → smallest delay in ms; None: its own backoff."""

_TOO_LARGE = re.compile(r"(?:SERVER: )?Received message larger than max \((\d+) vs\. (\d+)\)")
"""The message for answers that are too large for this side's library begins with CLIENT."""
_CODE_BY_NAME = {code.name: code for code in grpc.StatusCode}


def pushback_ms(error: PensieveError) -> int | None:
    """Return the pushback trailer's value for this error; None: send no trailer."""
    if error.reason not in LIBRARY_MAY_RETRY:
        return -1
    smallest = LIBRARY_MAY_RETRY[error.reason]
    if error.retry_after_s is None:
        return smallest
    return max(smallest or 0, round(error.retry_after_s * 1000))


def to_proto(error: PensieveError) -> status_pb2.Status:
    code = _CODE_BY_NAME[error.code]
    status = status_pb2.Status(code=code.value[0], message=error.message)
    status.details.add().Pack(
        error_details_pb2.ErrorInfo(reason=error.reason, domain=ERROR_DOMAIN, metadata=error.metadata)
    )
    if isinstance(error, InvalidArgument) and error.violations:
        bad = error_details_pb2.BadRequest()
        for field, description in error.violations:
            bad.field_violations.add(field=field, description=description)
        status.details.add().Pack(bad)
    if error.retry_after_s is not None:
        retry = error_details_pb2.RetryInfo()
        retry.retry_delay.FromNanoseconds(round(error.retry_after_s * 1e9))
        status.details.add().Pack(retry)
    if error.reason == "QUOTA_EXCEEDED":
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.metadata.get("subject", ""), description=error.message)
        status.details.add().Pack(quota)
    return status


def to_grpc(error: PensieveError) -> Any:
    """Return the error as a ``grpc.Status`` for ``context.abort_with_status``, trailing metadata included."""
    status = rpc_status.to_status(to_proto(error))
    pushback = pushback_ms(error)
    if pushback is None:
        return status
    return status._replace(trailing_metadata=(*status.trailing_metadata, (PUSHBACK_KEY, str(pushback))))


def from_proto(status: status_pb2.Status) -> PensieveError | None:
    """Return the error in a ``google.rpc.Status``, or None if it carries no ErrorInfo of ours."""
    info, retry, bad = (
        error_details_pb2.ErrorInfo(),
        error_details_pb2.RetryInfo(),
        error_details_pb2.BadRequest(),
    )
    for detail in status.details:
        for message in (info, retry, bad):
            detail.Unpack(message)
    if info.domain != ERROR_DOMAIN:
        return None
    code = next((code.name for code in grpc.StatusCode if code.value[0] == status.code), "UNKNOWN")
    kind = BY_REASON.get(info.reason) or BY_CODE.get(code, PensieveError)
    wait = retry.retry_delay.ToNanoseconds() / 1e9 if retry.HasField("retry_delay") else None
    details: dict[str, Any] = {"reason": info.reason, "metadata": info.metadata, "retry_after_s": wait}
    if issubclass(kind, InvalidArgument):
        details["violations"] = [(one.field, one.description) for one in bad.field_violations]
    return kind(status.message, **details)


def from_rpc_error(error: Any) -> PensieveError:
    """Return the error of a failed call (``grpc.RpcError``, sync or aio).

    Without our details the class follows the status code, the reason is ``TRANSPORT``, ``TRANSPORT_FINAL`` or
    ``MESSAGE_TOO_LARGE``, and metadata ``grpc_code`` keeps the code (some codes have no class of their own).
    """
    trailers = {key: value for key, value in error.trailing_metadata() or ()}
    pushback = _pushback(trailers.get(PUSHBACK_KEY))
    ours = _details(trailers.get(DETAILS_KEY))
    if ours is not None:
        if ours.retry_after_s is None and pushback is not None and pushback >= 0:
            ours.retry_after_s = pushback / 1000
        return ours
    code = error.code().name
    if code == "RESOURCE_EXHAUSTED" and (sizes := _TOO_LARGE.match(error.details() or "")):
        size, limit = sizes.groups()
        return ResourceExhausted(
            f"the request has {int(size):,} bytes, more than the server's limit of {int(limit):,}: send less at once",
            reason=MESSAGE_TOO_LARGE,
            metadata={"grpc_code": code, "bytes": size, "limit": limit},
        )
    # Our refusals carry details. The trailer without them means that a dying connection truncated the
    # refusal: the call's outcome is unknown, and a retry is safe with a request id.
    final = pushback is not None and pushback < 0 and code not in BROKEN
    return BY_CODE.get(code, PensieveError)(
        error.details() or code,
        reason=TRANSPORT_FINAL if final else TRANSPORT,
        metadata={"grpc_code": code},
        retry_after_s=pushback / 1000 if pushback is not None and pushback >= 0 else None,
    )


def _pushback(value: str | bytes | None) -> int | None:
    """Parse the trailer. Anything but a number means "do not retry", as in the gRPC library."""
    if value is None:
        return None
    try:
        return int(value)
    except ValueError:
        return -1


def _details(value: str | bytes | None) -> PensieveError | None:
    """Parse the details; None if a proxy truncated them."""
    if not isinstance(value, bytes):
        return None
    try:
        return from_proto(status_pb2.Status.FromString(value))
    except DecodeError:
        return None
