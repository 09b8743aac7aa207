"""The outermost layer of the gRPC servers: authentication, limits, decoding and errors.

A call passes in this order: credential, number of calls, the caller's byte rate, number of bodies being read, body
size, decoding, handler, errors. The two numbers are divided among callers: tenants, or addresses without credentials.
Handlers are registered for raw bytes and decode here, because a failure inside grpc.aio's own decoding reaches the
client as UNKNOWN. Every exception leaves as a ``google.rpc.Status``: a ``PensieveError`` as itself, anything else as
INTERNAL/BUG with only an error id. grpc.aio would send the exception's text.

Health checks bypass the limits: they must work under load.

``AccessControl`` has one key file for all ports of a server process, reloaded while it runs.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable
from pathlib import Path
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from pensieve import rpc_status
from pensieve.errors import InvalidArgument, PensieveError, Unauthenticated
from pensieve.logs import bind
from pensieve.server.failures import report_bug
from pensieve.server.keys import TenantTable, quota_exceeded
from pensieve.server.operations.metrics import CallMetrics, Metrics
from pensieve.server.rpc.auth import (
    ANONYMOUS,
    RELOAD_S,
    Authenticator,
    Identity,
    LoginThrottle,
    Peer,
    forwarded_caller,
)
from pensieve.server.rpc.calls import (
    BURST,
    RATE,
    BodyGate,
    BodyRateLimiter,
    Handler,
    RunningCall,
    RunningCalls,
    count_calls,
)
from pensieve.server.rpc.grpc_server import make_server
from pensieve.tracing import incoming_traceparent, trace_id, traceparent_in

log = logging.getLogger(__name__)

_identity: contextvars.ContextVar[Identity] = contextvars.ContextVar("pensieve_identity")
DEFAULT_IN_FLIGHT: Final = 1024
ADDRESS_RATE_FACTOR: Final = 4
"""Without credentials, an address's connections together may send this many times one connection's rate."""
_HEALTH: Final = "/grpc.health."
Decoded = TypeVar("Decoded")

MAX_FIELDS: Final = 16_384
"""Fields of one large request, nested ones included. An import at all limits has half of this."""
LARGE_BYTES: Final = 64 * 1024
"""Requests up to this size are decoded without counting fields: they can take only little memory."""
_DEEPEST: Final = 100


def current_caller() -> Identity:
    """Return the caller of the current call. Raises LookupError outside a call that passed the interceptor."""
    return _identity.get()


class Interceptor(aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """Guards all calls of one server; the module docstring has the order."""

    def __init__(
        self,
        authorizer: Authenticator,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        bodies: BodyGate | None = None,
        tenants: TenantTable | None = None,
        logins: LoginThrottle | None = None,
        metrics: CallMetrics | None = None,
    ) -> None:
        self._trusts_door = False
        self._authorizer = authorizer
        self._calls = RunningCalls(max_in_flight)
        self._bodies = bodies or BodyGate()
        self._pace = BodyRateLimiter()
        self._address_pace = BodyRateLimiter(ADDRESS_RATE_FACTOR * RATE, ADDRESS_RATE_FACTOR * BURST)
        self._tenants = tenants or TenantTable()
        self._logins = logins or LoginThrottle()
        self._metrics = metrics

    def for_http_door(self) -> Interceptor:
        """Return an interceptor for the HTTP door's server. It shares all limits and trusts the caller that the door
        reports."""
        twin = copy.copy(self)
        twin._trusts_door = True
        return twin

    def end_revoked(self, revocation_error: Callable[[Identity], PensieveError | None]) -> int:
        """End the calls whose credential is no longer valid. Return how many. Call on the server's event loop."""
        return self._calls.end_revoked(revocation_error)

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = _text(handler_call_details.method)
        metadata = handler_call_details.invocation_metadata or ()
        handler = await continuation(handler_call_details)
        if handler is None or method.startswith(_HEALTH):
            return handler

        def guarded(inner: Handler) -> Handler:
            guard = self._guard(method, metadata, inner, handler)
            return guard if self._metrics is None else count_calls(guard, method, self._metrics)

        return _wrap_handler(handler, guarded)

    def _guard(
        self,
        method: str,
        metadata: Iterable[tuple[str, str | bytes]],
        inner: Handler,
        handler: grpc.RpcMethodHandler,
    ) -> Handler:
        async def guarded(requests: Any, context: Any) -> Any:
            held_back = 0.0
            try:
                peer = Peer(context, forwarded_caller(metadata) if self._trusts_door else None)
                identity = self._authorizer.check(method, metadata, peer)
                if handler.stream_stream is not None:  # reflection
                    return await _relay(inner, requests, context)
                # Callers without a credential are told apart by their address.
                name = f"@{peer.address}" if identity is ANONYMOUS else identity.tenant
                call = RunningCall(identity, name, peer.connection)
                # Each call has its own context, so neither is ever reset.
                incoming_traceparent.set(traceparent := traceparent_in(metadata))
                bind(tenant=identity.tenant, trace_id=trace_id(traceparent))
                with self._calls.admit(call), call.interruptible():
                    return await self._answer(call, inner, handler, context)
            except Unauthenticated as error:
                refusal: PensieveError = error
                held_back = self._logins.record_failure(peer.address)
            except PensieveError as error:
                refusal = error
            except aio.AbortError:
                raise  # the status was already sent
            except aio.InternalError:
                # Writing to a client that has gone raises grpc's ExecuteBatchError, not CancelledError.
                raise asyncio.CancelledError from None
            except Exception as error:
                refusal = report_bug(error, method)
            # The traceback refers to frames that hold the request, this one included. Without breaking that
            # cycle, a refused request stays in memory until the next full collection.
            refusal.with_traceback(None).__cause__ = refusal.__context__ = None
            if held_back:
                await self._logins.hold_back(held_back)
            # Outside the ``except``: otherwise the caught exception becomes the context of the AbortError,
            # which grpc logs with its text.
            return await context.abort_with_status(rpc_status.to_grpc(refusal))

        return guarded

    async def _answer(
        self, call: RunningCall, inner: Handler, handler: grpc.RpcMethodHandler, context: Any
    ) -> Any:
        token = _identity.set(call.identity)
        try:
            if handler.request_streaming:
                return await inner(self._messages(call, handler, context), context)
            request = await self._receive(call, handler, context)
            if request is None:
                # The call ended before a message came: it was cancelled, or gRPC refused its size.
                raise InvalidArgument("the call ended without a request", reason="REQUEST_MALFORMED")
            answer = inner(request, context)
            del request  # may be large, and the call may be long
            return await answer
        finally:
            _identity.reset(token)

    async def _messages(
        self, call: RunningCall, handler: grpc.RpcMethodHandler, context: Any
    ) -> AsyncIterator[Any]:
        while (message := await self._receive(call, handler, context)) is not None:
            yield message

    async def _receive(self, call: RunningCall, handler: grpc.RpcMethodHandler, context: Any) -> Any:
        """Read and decode the next message; None at the end of the stream."""
        size, waited = 0, list[tuple[BodyRateLimiter, str, int]]()
        try:
            for pace, name in self._paces(call):
                waited.append((pace, name, await pace.reserve(name)))
            async with self._bodies.admit(call):
                data = await context.read()
            size = len(data) if isinstance(data, bytes) else 0
        finally:
            for pace, name, expected in waited:
                pace.settle(name, size, expected)
        if not isinstance(data, bytes):
            return None
        self._check_size(call.identity.tenant, size)
        return decode(handler.request_deserializer, data)

    def _paces(self, call: RunningCall) -> list[tuple[BodyRateLimiter, str]]:
        """Rate limits for the call's body, each with the name it counts under. A tenant has one limit. Callers
        without a credential may share an address: each connection has its own limit, and the address a higher one."""
        if call.identity is ANONYMOUS and call.connection:
            return [(self._pace, call.connection), (self._address_pace, call.caller)]
        return [(self._pace, call.caller)]

    def _check_size(self, tenant: str, size: int) -> None:
        limit = self._tenants.limits(tenant).max_request_bytes
        if limit is not None and size > limit:
            raise quota_exceeded(tenant, "max_request_bytes", f"{limit} bytes a request")


async def _relay(inner: Callable[[Any, Any], Any], requests: Any, context: Any) -> None:
    async for answer in inner(requests, context):
        await context.write(answer)


def _wrap_handler(handler: Any, wrap: Callable[[Handler], Handler]) -> grpc.RpcMethodHandler:
    """Return a handler around the wrapped function, which is called when the headers have arrived.

    On the wire one message is a stream of one. Registered as a stream, the request is read when the handler asks for
    it: after authentication, and as bytes.
    """
    serializer = handler.response_serializer
    if handler.stream_stream is not None:
        parse = handler.request_deserializer
        return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), parse, serializer)
    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler(wrap(handler.unary_unary), None, serializer)
    if handler.unary_stream is not None:
        return grpc.stream_stream_rpc_method_handler(wrap(handler.unary_stream), None, serializer)
    return grpc.stream_unary_rpc_method_handler(wrap(handler.stream_unary), None, serializer)


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def decode(parse: Callable[[bytes], Decoded], data: bytes) -> Decoded:
    """Return ``parse(data)``. Raises InvalidArgument (REQUEST_MALFORMED), whose message never quotes the input.

    ``parse`` is ``FromString`` of a message class. Unknown fields are accepted; invalid UTF-8 in a string field and
    nesting beyond the parser's limit are not. A large message with very many fields is refused before decoding: an
    element of two bytes on the wire takes thirty times as much in memory.
    """
    if len(data) > LARGE_BYTES:
        kind: Any = getattr(parse, "__self__", None)
        if count_fields(data, None if kind is None else kind.DESCRIPTOR) > MAX_FIELDS:
            raise InvalidArgument(
                f"the request has more than {MAX_FIELDS} fields, nested ones included",
                reason="REQUEST_MALFORMED",
            )
    try:
        return parse(data)
    except (DecodeError, RecursionError, ValueError) as error:
        raise InvalidArgument(
            "the request does not decode as the message that this method takes", reason="REQUEST_MALFORMED"
        ) from error


def count_fields(data: bytes, descriptor: Any) -> int:
    """Count the fields of a message on the wire, nested ones included. Stops at a number above ``MAX_FIELDS``.
    ``descriptor`` (None: unknown) tells which fields are messages."""
    return _Counter(data).count(0, len(data), descriptor, 0)


class _Counter:
    """Counts the fields of a message in wire format. Malformed input is left to the parser."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._fields = 0

    def count(self, at: int, end: int, descriptor: Any, depth: int) -> int:
        """Count the fields of ``data[at:end]`` into the total and return it; stops soon after ``MAX_FIELDS``."""
        fields = {} if descriptor is None else descriptor.fields_by_number
        while at < end and self._fields <= MAX_FIELDS:
            self._fields += 1
            key, at = self._varint(at, end)
            wire = key & 7
            if wire == 0:
                _, at = self._varint(at, end)
            elif wire == 1:
                at += 8
            elif wire == 5:
                at += 4
            elif wire == 2:
                length, at = self._varint(at, end)
                inside = min(at + length, end)
                field = fields.get(key >> 3)
                if field is not None and field.message_type is not None and depth < _DEEPEST:
                    self.count(at, inside, field.message_type, depth + 1)
                at += length
            # The remaining wire types are group markers, which this API does not use: one field each.
        return self._fields

    def _varint(self, at: int, end: int) -> tuple[int, int]:
        value = shift = 0
        while at < end:
            byte = self._data[at]
            at += 1
            value |= (byte & 0x7F) << shift
            if byte < 0x80 or shift > 63:
                break
            shift += 7
        return value, at


HTTP_DOOR_STREAMS: Final = 8192
_OPERATOR_METHOD: Final = "/pensieve.v1.AdminService/GetStats"


class AccessControl:
    """Authentication and limits for all gRPC servers of a process. Used on one event loop."""

    def __init__(self, key_file: Path | None, metrics: Metrics) -> None:
        """Read the key file. Raises ValueError or OSError when it cannot be used."""
        self._authenticator = Authenticator(key_file, on_failure=metrics.auth_failure)
        self._metrics = metrics
        self._logins = LoginThrottle(metrics.auth_held_back)
        self._interceptors: list[Interceptor] = []

    @property
    def tenants(self) -> TenantTable:
        return self._authenticator.tenants

    def make_server(self, max_in_flight: int = DEFAULT_IN_FLIGHT, connections: int = 0) -> aio.Server:
        """Return an unbound gRPC server behind an interceptor. ``connections``: see ``make_server``."""
        interceptor = Interceptor(
            self._authenticator,
            max_in_flight=max_in_flight,
            tenants=self.tenants,
            logins=LoginThrottle(self._metrics.auth_held_back),
            metrics=self._metrics.calls,
        )
        self._interceptors.append(interceptor)
        return make_server([interceptor], connections=connections)

    def make_private_server(self) -> aio.Server:
        """Return an unbound server for the HTTP door's private socket. It shares the limits of the first server. Each
        connection of the door carries many callers, with or without keys."""
        interceptor = self._interceptors[0].for_http_door()
        self._interceptors.append(interceptor)
        return make_server([interceptor], max_streams=HTTP_DOOR_STREAMS)

    async def admit_operator(self, authorization: str, address: str) -> None:
        """Check that the caller may use the admin service. Raises PermissionDenied or, delayed after repeated
        failures, Unauthenticated."""
        try:
            self._authenticator.check(
                _OPERATOR_METHOD, [("authorization", authorization)] if authorization else []
            )
        except Unauthenticated:
            held_back = self._logins.record_failure(address)
            if held_back:
                await self._logins.hold_back(held_back)
            raise

    def reload_keys(self, *, always: bool = False) -> None:
        """Reload the key file if it changed (or ``always``). End the calls whose credential it no longer accepts."""
        self._authenticator.reload(always=always)
        ended = sum(
            interceptor.end_revoked(self._authenticator.revocation_error)
            for interceptor in self._interceptors
        )
        if ended:
            log.warning("calls ended because their credential is no longer valid: %d", ended)

    async def watch(self, interval_s: float = RELOAD_S) -> None:
        while True:
            await asyncio.sleep(interval_s)
            self.reload_keys()
