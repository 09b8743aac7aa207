"""OpenAI's client for Node against the HTTP door."""

from __future__ import annotations

import asyncio

import pytest

from support.http.http_rig import door
from support.service.node_client import (
    install_node_client,
    missing_programs,
    run_openai_client,
    run_openai_example,
)
from support.service.service_rig import ANSWER


@pytest.mark.skipif(bool(missing_programs()), reason="needs node and npm")
@pytest.mark.timeout(400)
async def test_openais_client_for_node() -> None:
    await asyncio.to_thread(install_node_client)
    async with door() as rig:
        seen = await asyncio.to_thread(run_openai_client, rig.url, "acme")
        assert await asyncio.to_thread(run_openai_example, rig.url, "acme") == f"{ANSWER}\n"
    assert seen["first"] == seen["second"] == seen["text"] == ANSWER
    assert [number for number, _ in seen["events"]] == list(range(len(seen["events"])))
    assert seen["events"][0][1] == "response.created" and seen["events"][-1][1] == "response.completed"
    assert seen["items"] == ["assistant", "user"]
    assert seen["refused"] == [404, "NotFoundError"]
