"""Asks the service whether it serves, by the health protocol of gRPC, which takes no credential."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final

import grpc
from grpc import aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pensieve.http.common.settings import DoorSettings

_TIMEOUT_S: Final = 2.0
"""Of a service that is well the answer takes a millisecond; a prober waits for seconds at most."""


class Readiness:
    """One connection of its own, made by the first question. One event loop."""

    def __init__(self, settings: DoorSettings) -> None:
        self._settings = settings
        self._channel: aio.Channel | None = None
        self._serving = False
        """What it has said last."""

    async def problem(self) -> str:
        """Why calls are not served; "" when they are."""
        if problem := await self.unreachable():
            return problem
        return "" if self._serving else "the service is not serving"

    async def unreachable(self) -> str:
        """Why the service cannot be asked; "" when it can, also where it says that it does not serve."""
        socket = self._settings.target.removeprefix("unix:")
        if socket != self._settings.target and not Path(socket).is_socket():
            return "the service's socket is gone"  # a connection that is there would not tell
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
            # A prober that comes every few seconds must not be kept from a service that is back.
            options = [("grpc.initial_reconnect_backoff_ms", 200), ("grpc.max_reconnect_backoff_ms", 1_000)]
            target = self._settings.target
            self._channel = (
                aio.secure_channel(target, grpc.ssl_channel_credentials(), options)
                if self._settings.tls
                else aio.insecure_channel(target, options)
            )
        return self._channel
