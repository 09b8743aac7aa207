"""The outermost layer of both gRPC servers: who may come in, how many, and what an error looks like from outside.

In the order of a call: credential, number of calls in flight, the caller's pace, number of bodies being read, the
body's size, decoding, handler, errors. Both numbers are divided among the callers: tenants, or addresses where there
are no credentials. Handlers are registered for raw bytes and decoded here: what fails inside grpc.aio's own decoding
is UNKNOWN to the client. Whatever is raised leaves as a ``google.rpc.Status``: a ``PensieveError`` as itself, anything
else as INTERNAL/BUG with an error id and nothing more; grpc.aio would send the exception's text.

Health checks take no place among the calls in flight: they must work under load.
"""

from __future__ import annotations

import asyncio
import contextvars
import copy
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, TypeVar

import grpc
from google.protobuf.message import DecodeError
from grpc import aio

from pensieve import rpc_status
from pensieve.errors import InvalidArgument, PensieveError, Unauthenticated
from pensieve.logs import bind
from pensieve.server.bugs import report_bug
from pensieve.server.rpc.auth import ANONYMOUS, Authenticator, Identity, LoginThrottle, Peer, forwarded_caller
from pensieve.server.rpc.calls import (
    BURST,
    RATE,
    BodyGate,
    BodyRateLimiter,
    CallObserver,
    Handler,
    RunningCall,
    RunningCalls,
    observe_calls,
)
from pensieve.server.tenants import TenantTable, quota_exceeded
from pensieve.tracing import incoming_traceparent, trace_id, traceparent_in

_identity: contextvars.ContextVar[Identity] = contextvars.ContextVar("pensieve_identity")
DEFAULT_IN_FLIGHT: Final = 1024
CROWD: Final = 4
"""Without credentials, all connections of an address together may send this many times as fast as one connection."""
_HEALTH: Final = "/grpc.health."
Decoded = TypeVar("Decoded")

MAX_FIELDS: Final = 16_384
"""Fields of one large request, nested ones included. An import with all that the limits allow has half of it."""
LARGE_BYTES: Final = 64 * 1024
"""Requests up to this size are decoded uncounted: whatever they hold, it takes little memory."""
_DEEPEST: Final = 100
"""The parser's own limit on nesting."""


def current_caller() -> Identity:
    """The caller of the current call. Raises LookupError outside of a call that passed the interceptor."""
    return _identity.get()


class Interceptor(aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """See the module docstring. One per server."""

    def __init__(
        self,
        authorizer: Authenticator,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        bodies: BodyGate | None = None,
        tenants: TenantTable | None = None,
        logins: LoginThrottle | None = None,
        observer: CallObserver | None = None,
    ) -> None:
        self._believes = False
        self._authorizer = authorizer
        self._calls = RunningCalls(max_in_flight)
        self._bodies = bodies or BodyGate()
        self._pace = BodyRateLimiter()
        self._crowds = BodyRateLimiter(CROWD * RATE, CROWD * BURST)
        self._tenants = tenants or TenantTable()
        self._logins = logins or LoginThrottle()
        self._observer = observer

    def for_http_door(self) -> Interceptor:
        """One for another server: it shares all limits, and believes its caller, the HTTP door."""
        other = copy.copy(self)
        other._believes = True
        return other

    def recheck(self, problem: Callable[[Identity], PensieveError | None]) -> int:
        """End the calls whose credential has become a problem; returns how many. On the server's event loop."""
        return self._calls.recheck(problem)

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
            return guard if self._observer is None else observe_calls(guard, method, self._observer)

        return _wrapped(handler, guarded)

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
                peer = Peer(context, forwarded_caller(metadata) if self._believes else None)
                identity = self._authorizer.check(method, metadata, peer)
                if handler.request_streaming:  # reflection
                    return await _relayed(inner, requests, context)
                # Callers without a credential are told apart by where they call from.
                name = f"@{peer.address}" if identity is ANONYMOUS else identity.tenant
                call = RunningCall(identity, name, peer.connection)
                # A call has a context of its own, which is why neither is ever taken back.
                incoming_traceparent.set(found := traceparent_in(metadata))
                bind(tenant=identity.tenant, trace_id=trace_id(found))
                with self._calls.admit(call), call.interruptible():
                    return await self._answer(call, inner, handler.request_deserializer, context)
            except Unauthenticated as error:
                refusal: PensieveError = error
                held_back = self._logins.record_failure(peer.address)
            except PensieveError as error:
                refusal = error
            except aio.AbortError:
                raise  # the status is already on its way
            except aio.InternalError:
                # A write to a client that is gone ends in grpc's ExecuteBatchError, not in CancelledError.
                raise asyncio.CancelledError from None
            except Exception as error:
                refusal = report_bug(error, method)
            # Its traceback holds the frames that hold the request; and this frame, which holds it: with that ring a
            # refused request would stay in memory until the next full collection.
            refusal.with_traceback(None).__cause__ = refusal.__context__ = None
            if held_back:
                await self._logins.hold_back(held_back)
            # Outside of the ``except``: else what was caught would be the context of the AbortError, which grpc logs
            # with its text.
            return await context.abort_with_status(rpc_status.to_grpc(refusal))

        return guarded

    async def _answer(
        self, call: RunningCall, inner: Handler, parse: Callable[[bytes], Any], context: Any
    ) -> Any:
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
            # No message came before the end of the call: it was cancelled, or gRPC has refused it for its size.
            raise InvalidArgument("the call ended without a request", reason="REQUEST_MALFORMED")
        token = _identity.set(call.identity)
        try:
            self._check_size(call.identity.tenant, len(data))
            request = decode(parse, data)
            del data  # may be large, and the call may be long
            answer = inner(request, context)
            del request
            return await answer
        finally:
            _identity.reset(token)

    def _paces(self, call: RunningCall) -> list[tuple[BodyRateLimiter, str]]:
        """The paces that the call's body keeps, each by a name.

        A tenant has one. Many callers without a credential may share an address: each connection has a pace of its own
        there, and the address a faster one.
        """
        if call.identity is ANONYMOUS and call.connection:
            return [(self._pace, call.connection), (self._crowds, call.caller)]
        return [(self._pace, call.caller)]

    def _check_size(self, tenant: str, size: int) -> None:
        most = self._tenants.limits(tenant).max_request_bytes
        if most is not None and size > most:
            raise quota_exceeded(tenant, "max_request_bytes", f"{most} bytes a request")


async def _relayed(inner: Callable[[Any, Any], Any], requests: Any, context: Any) -> None:
    """A handler of streams, whose answers come from a generator."""
    async for answer in inner(requests, context):
        await context.write(answer)


def _wrapped(handler: Any, wrap: Callable[[Handler], Handler]) -> grpc.RpcMethodHandler:
    """The handler around the wrapped function, which is called when the headers have come.

    On the wire one message is a stream of one. Taken as a stream, the request is read when the handler asks for it:
    after the credential was checked, and as bytes.
    """
    serializer = handler.response_serializer
    if handler.stream_stream is not None:
        parse = handler.request_deserializer
        return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), parse, serializer)
    if handler.unary_unary is not None:
        return grpc.stream_unary_rpc_method_handler(wrap(handler.unary_unary), None, serializer)
    if handler.unary_stream is not None:
        return grpc.stream_stream_rpc_method_handler(wrap(handler.unary_stream), None, serializer)
    raise TypeError("methods that take a stream and give one answer are not served")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")


def decode(parse: Callable[[bytes], Decoded], data: bytes) -> Decoded:
    """``parse(data)``. Raises InvalidArgument (REQUEST_MALFORMED), whose text never quotes the input.

    ``parse`` is ``FromString`` of a message class. Unknown fields are accepted; invalid UTF-8 in a string field and
    nesting beyond the parser's limit are not. A large message of very many fields is refused before it is decoded: an
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
    """Fields of a message on the wire, nested ones included; of very many, a number above ``MAX_FIELDS``.

    ``descriptor`` (of the message; None: unknown) says which fields are messages themselves.
    """
    return _Counter(data).count(0, len(data), descriptor, 0)


class _Counter:
    """Counts the fields of a message by walking over the wire format. What is malformed is left to the parser."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._found = 0

    def count(self, at: int, end: int, descriptor: Any, depth: int) -> int:
        """Fields of ``data[at:end]`` and before; it stops soon after ``MAX_FIELDS``."""
        fields = {} if descriptor is None else descriptor.fields_by_number
        while at < end and self._found <= MAX_FIELDS:
            self._found += 1
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
            # The rest are the ends of groups, which nothing here has: one field each.
        return self._found

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
