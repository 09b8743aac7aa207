"""Errors survive the wire, and the trailer for the gRPC library allows a replay only where it helps."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from google.rpc import error_details_pb2, status_pb2

from pensieve import errors
from pensieve.errors import (
    InvalidArgument,
    NotFound,
    PensieveError,
    ResourceExhausted,
    RevisionMismatch,
    TurnInProgress,
    Unavailable,
)
from pensieve.rpc_status import (
    DETAILS_KEY,
    MESSAGE_TOO_LARGE,
    PUSHBACK_KEY,
    TRANSPORT,
    TRANSPORT_FINAL,
    from_proto,
    from_rpc_error,
    pushback_ms,
    to_grpc,
    to_proto,
)


class Failed:
    """A failed call, as both libraries show it."""

    def __init__(
        self, code: grpc.StatusCode, details: str, trailers: tuple[tuple[str, Any], ...] | None
    ) -> None:
        self.code, self.details, self.trailing_metadata = lambda: code, lambda: details, lambda: trailers


CLASSES = sorted(
    {*errors.BY_CODE.values(), *errors.BY_REASON.values(), PensieveError}, key=lambda one: one.__name__
)


@pytest.mark.parametrize("kind", CLASSES)
def test_round_trip(kind: type[PensieveError]) -> None:
    error = kind("what happened", metadata={"k": "v"}, retry_after_s=1.25)
    status = to_grpc(error)
    assert status.code.name == kind.code
    back = from_rpc_error(Failed(status.code, status.details, status.trailing_metadata))
    assert type(back) is kind
    assert (back.message, back.reason) == ("what happened", kind.default_reason)
    assert (back.metadata, back.retry_after_s) == ({"k": "v"}, 1.25)


def test_violations() -> None:
    error = InvalidArgument("two fields", violations=[("a.b", "too long"), ("c", "negative")])
    back = from_proto(to_proto(error))
    assert isinstance(back, InvalidArgument)
    assert back.violations == (("a.b", "too long"), ("c", "negative"))


def test_quota_failure() -> None:
    error = ResourceExhausted("100 turns a minute", reason="QUOTA_EXCEEDED", metadata={"subject": "t1"})
    quota = error_details_pb2.QuotaFailure()
    assert any(detail.Unpack(quota) for detail in to_proto(error).details)
    assert [(one.subject, one.description) for one in quota.violations] == [("t1", "100 turns a minute")]


def test_a_reason_of_a_newer_server_falls_back_to_the_code() -> None:
    back = from_proto(to_proto(NotFound("x", reason="SESSION_ON_THE_MOON")))
    assert type(back) is NotFound
    assert back.reason == "SESSION_ON_THE_MOON"


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (TurnInProgress("x", retry_after_s=3.0), -1),
        (RevisionMismatch("x"), -1),
        (ResourceExhausted("x", retry_after_s=1.0), -1),
        (Unavailable("x", reason="TURN_RUNNING_ELSEWHERE"), 1000),
        (Unavailable("x", reason="DRAINING"), None),
        (Unavailable("x", reason="STORE_UNAVAILABLE", retry_after_s=0.5), 500),
        (Unavailable("x", reason="STORE_FULL", retry_after_s=0.5), 2000),
        (Unavailable("x", reason="SOMETHING_NEW"), -1),
    ],
    ids=lambda value: getattr(value, "reason", str(value)),
)
def test_pushback(error: PensieveError, expected: int | None) -> None:
    assert pushback_ms(error) == expected
    trailers = dict(to_grpc(error).trailing_metadata)
    assert trailers.get(PUSHBACK_KEY) == (None if expected is None else str(expected))


@pytest.mark.parametrize(
    ("trailers", "reason", "wait"),
    [
        (None, TRANSPORT, None),
        (((PUSHBACK_KEY, "250"),), TRANSPORT, 0.25),
        (((PUSHBACK_KEY, "-1"),), TRANSPORT, None),
        (((PUSHBACK_KEY, "soon"),), TRANSPORT, None),
        (((DETAILS_KEY, b"\xff\xff"),), TRANSPORT, None),
        (((DETAILS_KEY, status_pb2.Status(code=14).SerializeToString()),), TRANSPORT, None),
    ],
)
def test_errors_that_are_not_ours(trailers: Any, reason: str, wait: float | None) -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.UNAVAILABLE, "socket closed", trailers))
    assert type(error) is Unavailable
    assert (error.reason, error.retry_after_s) == (reason, wait)
    assert error.metadata == {"grpc_code": "UNAVAILABLE"}


def test_a_refusal_without_details_that_forbids_to_try_again() -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", ((PUSHBACK_KEY, "-1"),)))
    assert error.reason == TRANSPORT_FINAL


def test_a_foreign_domain_is_not_ours() -> None:
    status = to_proto(Unavailable("x", reason="DRAINING"))
    info = error_details_pb2.ErrorInfo(reason="DRAINING", domain="elsewhere")
    status.details[0].Pack(info)
    assert from_proto(status) is None


def test_codes_without_a_class() -> None:
    error = from_rpc_error(Failed(grpc.StatusCode.UNIMPLEMENTED, "no such method", ()))
    assert type(error) is PensieveError
    assert error.metadata == {"grpc_code": "UNIMPLEMENTED"}


def test_a_request_that_grpc_finds_too_large_is_told_with_both_sizes() -> None:
    told = "SERVER: Received message larger than max (41000102 vs. 4194304)"
    error = from_rpc_error(Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, told, None))
    assert isinstance(error, ResourceExhausted) and error.reason == MESSAGE_TOO_LARGE
    assert "41,000,102 bytes" in error.message and "4,194,304" in error.message
    assert (error.metadata["bytes"], error.metadata["limit"]) == ("41000102", "4194304")
    answer = from_rpc_error(
        Failed(grpc.StatusCode.RESOURCE_EXHAUSTED, told.replace("SERVER", "CLIENT"), None)
    )
    assert answer.reason == TRANSPORT, "this side took no more"
