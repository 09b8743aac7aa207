"""The outermost layer of both gRPC servers: who may come in, how many, and what an error looks like from outside.

In the order of a call: credential (before the body is read), number of calls in flight, number of bodies being read,
decoding, handler, errors. Handlers are registered for raw bytes and decoded here: what fails inside grpc.aio's own
decoding is UNKNOWN to the client. Whatever is raised leaves as a ``google.rpc.Status``: a ``PensieveError`` as
itself, anything else as INTERNAL/BUG with an error id and nothing more; grpc.aio would send the exception's text.

Health checks and reflection take no place among the calls in flight: they must work under load.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, Iterable
from typing import Any, Final, Protocol

import grpc
from grpc import aio

from pensieve import rpc_status
from pensieve.errors import PensieveError, ResourceExhausted
from pensieve.server.bugs import bug
from pensieve.server.rpc.auth import Identity
from pensieve.server.rpc.decode import decode

_identity: contextvars.ContextVar[Identity] = contextvars.ContextVar("pensieve_identity")
DEFAULT_IN_FLIGHT: Final = 1024
_UNLIMITED = ("/grpc.health.", "/grpc.reflection.", "/grpc.channelz.")

Handler = Callable[[Any, Any], Awaitable[Any]]


class Authorizer(Protocol):
    """Checks the credential of a call. ``pensieve.server.rpc.auth.Authenticator`` is one."""

    def check(self, method: str, metadata: Iterable[tuple[str, str | bytes]]) -> Identity: ...


def caller() -> Identity:
    """Who makes the current call. Raises LookupError outside of a call that passed the interceptor."""
    return _identity.get()


class BodyGate:
    """Bounds how many request bodies are being received at once; a sender may hold a place for ``patience_s``.

    Beyond it requests are decoded, validated and converted without yielding to the event loop, so that at most one
    decoded message exists at any time.
    """

    def __init__(self, places: int, patience_s: float) -> None:
        self._places = asyncio.Semaphore(places)
        self._patience_s = patience_s

    async def enter(self) -> Callable[[], None]:
        """Wait for a place. Returns the function that leaves it, which may be called again without harm."""
        await self._places.acquire()
        held = True

        def leave() -> None:
            nonlocal held
            if held:
                held = False
                timer.cancel()
                self._places.release()

        timer = asyncio.get_running_loop().call_later(self._patience_s, leave)
        return leave


class Interceptor(aio.ServerInterceptor):  # type: ignore[misc]  # grpc has no types
    """See the module docstring. One per server."""

    def __init__(
        self,
        authorizer: Authorizer,
        *,
        max_in_flight: int = DEFAULT_IN_FLIGHT,
        max_undecoded: int = 16,
        body_patience_s: float = 2.0,
    ) -> None:
        self._authorizer = authorizer
        self._max_in_flight = max_in_flight
        self._gate = BodyGate(max_undecoded, body_patience_s)
        self.in_flight = 0
        """Calls being handled, health checks and reflection aside."""

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        method = _text(handler_call_details.method)
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        try:
            identity = self._authorizer.check(method, handler_call_details.invocation_metadata or ())
            if method.startswith(_UNLIMITED):
                return handler
            if self.in_flight >= self._max_in_flight:
                raise ResourceExhausted("too many calls at once", retry_after_s=1.0)
        except PensieveError as error:
            return _wrapped(handler, _refusal(error))
        leave = await self._gate.enter()
        parse = handler.request_deserializer
        return _wrapped(handler, lambda inner: self._guard(method, inner, parse, identity, leave))

    def _guard(
        self,
        method: str,
        inner: Handler,
        parse: Callable[[bytes], Any],
        identity: Identity,
        leave: Callable[[], None],
    ) -> Handler:
        async def guarded(data: bytes, context: Any) -> Any:
            leave()
            token = _identity.set(identity)
            self.in_flight += 1
            try:
                return await inner(decode(parse, data), context)
            except PensieveError as error:
                refusal = error
            except aio.AbortError:
                raise  # the status is already on its way
            except aio.InternalError:
                # A write to a client that is gone ends in grpc's ExecuteBatchError, not in CancelledError.
                raise asyncio.CancelledError from None
            except Exception as error:
                refusal = bug(error, method)
            finally:
                self.in_flight -= 1
                _identity.reset(token)
            # Outside of the ``except``: else what was caught would be the context of the AbortError, which grpc logs
            # with its text.
            return await context.abort_with_status(rpc_status.to_grpc(refusal))

        return guarded


def _refusal(error: PensieveError) -> Callable[[Handler], Handler]:
    async def refuse(_request: Any, context: Any) -> None:
        await context.abort_with_status(rpc_status.to_grpc(error))

    return lambda _inner: refuse


def _wrapped(handler: Any, wrap: Callable[[Handler], Handler]) -> grpc.RpcMethodHandler:
    """The same kind of handler around the wrapped function, which gets the request as bytes."""
    serializer = handler.response_serializer
    if handler.unary_unary is not None:
        return grpc.unary_unary_rpc_method_handler(wrap(handler.unary_unary), None, serializer)
    if handler.unary_stream is not None:
        return grpc.unary_stream_rpc_method_handler(wrap(handler.unary_stream), None, serializer)
    if handler.stream_stream is not None:  # reflection, when it is refused
        return grpc.stream_stream_rpc_method_handler(wrap(handler.stream_stream), None, serializer)
    raise TypeError("methods that take a stream and give one answer are not served")


def _text(value: str | bytes) -> str:
    return value if isinstance(value, str) else value.decode("ascii", "replace")
