"""Anthropic's Messages through Anthropic's own client, every answer checked against its types."""

from __future__ import annotations

import itertools
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import anthropic
import httpx2 as httpx
import pytest
from anthropic import AsyncAnthropic

from pensieve.v1 import pensieve_pb2 as pb
from support.http.http_rig import HttpRig, door
from support.http.tool_rig import OSLO, ROME, context_of, tool_door
from support.service.service_rig import ANSWER, says
from support.tool_templates import WEATHER

TOOL: Any = {
    "name": "weather",
    "description": WEATHER["function"]["description"],
    "input_schema": WEATHER["function"]["parameters"],
}
HI: Any = [{"role": "user", "content": "hi"}]


def client_of(rig: HttpRig, **options: Any) -> AsyncAnthropic:
    options = {"api_key": "acme", "max_retries": 0, **options}
    return AsyncAnthropic(base_url=rig.url, _strict_response_validation=True, **options)


async def say(rig: HttpRig, messages: Any, **options: Any) -> Any:
    options = {"model": "tiny", "max_tokens": 100, **options}
    async with client_of(rig) as client:
        return await client.messages.create(messages=messages, **options)


async def test_a_message_and_a_resent_history() -> None:
    async with door() as rig:
        first = await say(rig, HI, system="Be brief.")
        assert (first.type, first.role, first.model) == ("message", "assistant", "tiny")
        assert [(one.type, one.text) for one in first.content] == [("text", ANSWER)]
        assert (first.stop_reason, first.stop_sequence) == ("end_turn", None)
        assert first._request_id
        history = [*HI, {"role": "assistant", "content": first.content}, {"role": "user", "content": "again"}]
        await say(rig, history, system=[{"type": "text", "text": "Be brief."}])
        assert len({turn.session for turn in rig.service.link.generations}) == 1
