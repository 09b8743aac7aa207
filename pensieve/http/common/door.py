"""The state that all requests share, common parts of answers, and the service's readiness."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any, Final

import grpc
import msgspec
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import ServerInfo
from pensieve.client.identity import identity_credentials
from pensieve.config import DoorSettings
from pensieve.errors import PensieveError
from pensieve.http.common.admission import Admission
from pensieve.http.common.bodies import BodyReader
from pensieve.http.common.callers import Caller, Callers
from pensieve.http.common.failures import HttpFailure
from pensieve.http.common.heads import HeadCache

_TIMEOUT_S: Final = 2.0
"""A healthy service answers in a millisecond; a prober waits for seconds at most."""


class Readiness:
    """Asks the service whether it is serving, by gRPC's health protocol, which takes no credential. Runs on one
    event loop. It uses a connection of its own, opened by the first check."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._channel: aio.Channel | None = None
        self._serving = False

    async def problem(self) -> str:
        """Return why calls are not served; "" when they are."""
        if problem := await self.unreachable():
            return problem
        return "" if self._serving else "the service is not serving"

    async def unreachable(self) -> str:
        """Return why the service does not respond; "" when it responds, even if it is not serving."""
        socket = self._settings.target.removeprefix("unix:")
        if socket != self._settings.target and not Path(socket).is_socket():
            return "the service's socket is gone"  # an open connection would not notice
        stub: Any = health_pb2_grpc.HealthStub(self._connection())
        try:
            answer = await stub.Check(health_pb2.HealthCheckRequest(), timeout=_TIMEOUT_S)
        except grpc.RpcError as error:
            return f"the service does not answer ({error.code().name})"
        self._serving = answer.status == health_pb2.HealthCheckResponse.SERVING
        return ""

    async def close(self) -> None:
        if self._channel is not None:
            await self._channel.close()

    def _connection(self) -> aio.Channel:
        if self._channel is None:
            # With gRPC's own backoff a prober would not see for minutes that the service is back.
            options = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1_000)]
            target = self._settings.target
            identity = self._settings.identity
            if identity is not None:
                self._channel = aio.secure_channel(target, identity_credentials(identity), options)
            elif self._settings.tls:
                self._channel = aio.secure_channel(target, grpc.ssl_channel_credentials(), options)
            else:
                self._channel = aio.insecure_channel(target, options)
        return self._channel


_INFO_S: Final = 30.0
"""Time for which the service's information is cached. It says nothing about the caller's credential."""


class HttpDoor:
    """The state of one application. Runs on one event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self.settings = settings
        self.bodies = BodyReader(settings.max_body_bytes)
        self.admission = Admission(settings)
        self.callers = Callers(settings)
        self.heads = HeadCache(settings.max_heads)
        self.readiness = Readiness(settings)
        self._following: dict[asyncio.Task[None], str] = {}
        self._infos: dict[bytes, tuple[float, ServerInfo]] = {}

    def follow(self, turn_id: str, work: Coroutine[Any, Any, object], held: AsyncExitStack) -> None:
        """Run a turn's ``work`` to its end after the request was answered, then close ``held``."""

        async def following() -> None:
            async with held:
                with contextlib.suppress(PensieveError):  # GetTurn reports the outcome.
                    await work

        task = asyncio.create_task(following())
        self._following[task] = turn_id
        task.add_done_callback(self._following.pop)

    def follows(self, turn_id: str) -> bool:
        """Whether this door follows the turn: if its engine dies, the turn is begun again."""
        return turn_id in self._following.values()

    async def close(self) -> None:
        """Close all connections: streams end with an error event, calls with 503."""
        self.admission.close()
        await self.callers.close()
        await self.readiness.close()

    @staticmethod
    def from_request(request: Request) -> HttpDoor:
        found = request.app.state.door
        assert isinstance(found, HttpDoor)
        return found

    async def server_info(self, caller: Caller, *, fresh: bool = False) -> ServerInfo:
        """Return the service's information for this caller, cached for a while unless ``fresh``."""
        known = self._infos.get(caller.scope)
        if fresh or known is None or time.monotonic() - known[0] > _INFO_S:
            if len(self._infos) > self.settings.max_callers:
                self._infos.clear()
            known = self._infos[caller.scope] = time.monotonic(), await caller.client.server_info()
        return known[1]

    async def require_model(self, caller: Caller, name: str | None) -> str:
        """Return the served model's name. Raises HttpFailure (404) when the request names another."""
        served = (await self.server_info(caller)).model
        if name and name != served:
            raise HttpFailure(
                404,
                f"the model {name!r} is not served here; {served!r} is",
                param="model",
                code="model_not_found",
            )
        return served

    def headers(self, request: Request) -> dict[str, str]:
        """Headers of every answer: the request's id, which is the caller's ``x-request-id`` if it sent a valid
        one."""
        given = request.headers.get("x-request-id", "")
        sound = given.isascii() and given.isprintable() and 0 < len(given) <= 128
        name = given if sound else f"req_{uuid.uuid4().hex}"
        return {"x-request-id": name, **({"request-id": name} if speaks_messages(request) else {})}

    def answer(self, document: dict[str, Any], request: Request, status: int = 200) -> Response:
        return Response(
            msgspec.json.encode(document), status, self.headers(request), media_type="application/json"
        )

    def refusal(self, failure: HttpFailure, request: Request) -> Response:
        headers = {**self.headers(request), **failure.headers}
        status, body = failure.status, failure.body
        if speaks_messages(request):
            status, body = failure.messages_status, failure.messages_body(headers["request-id"])
        return Response(msgspec.json.encode(body), status, headers, media_type="application/json")


def speaks_messages(request: Request) -> bool:
    """Whether the client speaks Anthropic's protocol: its path says so, or a header that its SDKs send."""
    return request.scope["path"].startswith("/v1/messages") or "anthropic-version" in request.headers
