"""The HTTP door on a real port, in front of the conversation service with a scripted engine."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from openai import AsyncOpenAI

from pensieve.config import DoorSettings
from pensieve.http.app import make_app
from pensieve.http.run import running
from pensieve.server.rpc.auth import ALL_SCOPES, Identity
from support.service.service_rig import ANSWER, Rig, serving


class BearerTenant:
    """Takes the tenant from the bearer token: a stand-in for credentials."""

    def check(self, method: str, metadata: Any, peer: str = "") -> Identity:
        token = str(dict(metadata or ()).get("authorization", "Bearer acme")).removeprefix("Bearer ")
        return Identity(tenant=token, key_id="", scopes=ALL_SCOPES)


@dataclass
class HttpRig:
    """A door, what is behind it, and OpenAI's own client with every answer checked against its types."""

    service: Rig
    client: AsyncOpenAI
    url: str


@asynccontextmanager
async def door(
    answer: str | None = ANSWER, *, service_options: dict[str, Any] | None = None, **settings: Any
) -> AsyncIterator[HttpRig]:
    """``answer``: what the engine says to everything; None: the test plays the engine. ``settings``: of the door."""
    async with (
        serving(answer=answer, authorizer=BearerTenant(), **(service_options or {})) as service,
        opened(service.target, **settings) as (url, client),
    ):
        yield HttpRig(service, client, url)


@asynccontextmanager
async def opened(target: str, **settings: Any) -> AsyncIterator[tuple[str, AsyncOpenAI]]:
    """A door to a server, and a client of it."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        async with running(make_app(DoorSettings(target, **settings)), listener, None) as server:
            url = f"http://127.0.0.1:{listener.getsockname()[1]}"
            client = AsyncOpenAI(
                base_url=f"{url}/v1", api_key="acme", max_retries=0, _strict_response_validation=True
            )
            try:
                async with client:
                    yield url, client
            finally:
                server.should_exit = server.force_exit = True
