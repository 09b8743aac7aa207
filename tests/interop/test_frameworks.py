"""LangChain, Pydantic AI, LiteLLM, the Agents SDK and agentic-api against the HTTP door, unchanged, each in a program.

Each is in a Python environment of its own. ``make frameworks``, a part of ``make test``, tries LangChain, LiteLLM and
the Agents SDK; ``make test-clients`` tries all.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import subprocess
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from openai import AsyncOpenAI

from pensieve.http.responses.ids import ResponseId
from support.http.http_rig import HttpRig, door
from support.http.tool_rig import ROME, context_of, tool_door
from support.service.service_rig import ANSWER
from support.tool_templates import WEATHER

ENVIRONMENTS = Path(os.environ.get("PENSIEVE_TEST_CLIENTS", "/nowhere"))
"""Folder of the environments, by the names of their files of packages."""
FOLDER = Path(__file__).parent / "python"
EXAMPLE = FOLDER.parents[2] / "examples" / "langchain_chat.py"

pytestmark = pytest.mark.timeout(400)


def needs(client: str) -> pytest.MarkDecorator:
    missing = not python_of(client).exists()
    return pytest.mark.skipif(missing, reason=f"PENSIEVE_TEST_CLIENTS has no environment of {client}")


def python_of(client: str) -> Path:
    return ENVIRONMENTS / client / "bin" / "python"


async def seen_by(client: str, rig: HttpRig, model: str = "tiny") -> dict[str, Any]:
    """What a client's program saw of the door."""
    program = FOLDER / f"{client}_client.py"
    seen: dict[str, Any] = json.loads(await said_by(client, program, rig, rig.url, "acme", model))
    return seen


async def said_by(client: str, program: Path, rig: HttpRig, *arguments: str) -> str:
    settings = {"OPENAI_BASE_URL": f"{rig.url}/v1", "OPENAI_API_KEY": "acme", "MODEL": "tiny"}
    environment = {**os.environ, "no_proxy": "127.0.0.1", "PYTHONPATH": "", **settings}
    environment["LITELLM_LOCAL_MODEL_COST_MAP"] = "True"  # otherwise LiteLLM fetches its list of prices
    done = await asyncio.to_thread(
        subprocess.run,
        [python_of(client), program, *arguments],
        capture_output=True,
        text=True,
        timeout=300,
        env=environment,
    )
    assert done.returncode == 0, done.stderr
    text: str = done.stdout
    return text


def session_of(response: str) -> str:
    found = ResponseId.parse(response)
    assert found is not None
    return found.session_id


async def said_in(rig: HttpRig, session: str) -> list[str]:
    return [item.text for item in await rig.service.items(f"sessions/{session}")]


@needs("langchain")
async def test_langchain() -> None:
    async with door() as rig:
        seen = await seen_by("langchain", rig)
        chat, chain = seen["chat"], seen["responses"]
        assert [chat["first"], chat["second"], chat["streamed"], *chat["batch"]] == [ANSWER] * 6
        assert chat["reason"] == "stop" and chat["tokens"][1] > chat["tokens"][0]
        assert chat["streamed_tokens"] > 0
        assert [*chain["answers"], chain["streamed"], *chain["batch"], *seen["async"]] == [ANSWER] * 9
        assert (
            chain["tokens"] == sorted(set(chain["tokens"])) and chain["streamed_tokens"] > chain["tokens"][-1]
        )
        # One session, to which each call has brought its own turn and nothing else.
        sessions = {session_of(one) for one in (*chain["ids"], chain["streamed_id"])}
        assert len(sessions) == 1
        turns = [text for said in ("hi", "again", "more", "streamed") for text in (said, ANSWER)]
        assert await said_in(rig, sessions.pop()) == turns


@needs("pydantic_ai")
async def test_pydantic_ai() -> None:
    async with door() as rig:
        seen = await seen_by("pydantic_ai", rig)
        for kind in ("chat", "responses"):
            assert [*seen[kind]["answers"], seen[kind]["streamed"]] == [ANSWER] * 3
            assert seen[kind]["tokens"][1] > seen[kind]["tokens"][0] > 0
        sessions = {session_of(one) for one in seen["responses"]["ids"]}
        assert len(sessions) == 1
        turns = [text for said in ("hi", "again", "more") for text in (said, ANSWER)]
        assert await said_in(rig, sessions.pop()) == turns


LOOP = (ROME, "Blue.", "Bye.")
"""A call, the answer to its result, and the answer to one more question."""


@needs("litellm")
async def test_litellm() -> None:
    """As a provider of OpenAI's kind and of Anthropic's: each talk stays in one session."""
    async with tool_door(*LOOP * 4) as rig:
        seen = await seen_by("litellm", rig)
        assert set(seen) == {
            f"{kind} {streamed}" for kind in ("openai", "anthropic") for streamed in (False, True)
        }
        for talk in seen.values():
            assert [one or "" for one in talk["answers"]] == ["", "Blue.", "Bye."]
            assert talk["cached"][1] > 0 and talk["cached"][2] > 0
        sessions = Counter(turn.session for turn in rig.service.link.generations)
        assert list(sessions.values()) == [3, 3, 3, 3]


@needs("agents")
async def test_the_agents_sdk() -> None:
    """With its history at the client, in a conversation, at the end of a chain, and compacted. The SDK compacts only
    for models with a name of OpenAI's kind."""
    compacted = (ROME, "Blue.", "They talked.", "Bye.", "They parted.")
    async with tool_door(*LOOP * 4, *LOOP[:2], *compacted, model="gpt-tiny") as rig:
        seen = await seen_by("agents", rig, model="gpt-tiny")
        assert seen.pop("streamed") == ["Blue.", "True"]
        assert (seen.pop("compacted"), seen.pop("items")) == (["Blue.", "Bye."], ["compaction"])
        assert set(seen) == {"chat", "responses", "conversation", "chained"}
        assert list(seen.values()) == [["Blue.", "Bye."]] * 4
        # Each talk is one session, wherever its history is.
        sessions = Counter(turn.session for turn in rig.service.link.generations)
        assert list(sessions.values()) == [3, 3, 3, 3, 2, 2, 1, 1, 1]
        assert "They talked." in context_of(rig, -2) and "Rome" not in context_of(rig, -2)


@needs("langchain")
async def test_the_example_for_langchain() -> None:
    async with door() as rig:
        assert await said_by("langchain", EXAMPLE, rig) == f"{ANSWER}\n"


@needs("agentic_api")
async def test_under_agentic_api(tmp_path: Path) -> None:
    """Its Responses, with state and conversations of its own, on this server as the engine: a chain is one session."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    program = python_of("agentic_api").with_name("agentic-server")
    options = {"--gateway-host": "127.0.0.1", "--gateway-port": str(port), "--openai-api-key": "acme"}
    options |= {"--db-url": f"sqlite://{tmp_path}/responses.db?mode=rwc"}
    tool: Any = {"type": "function", "name": "weather", "parameters": WEATHER["function"]["parameters"]}
    async with tool_door(*LOOP) as rig:
        options["--llm-api-base"] = rig.url
        gateway = await asyncio.create_subprocess_exec(
            program, *itertools.chain(*options.items()), env={**os.environ, "HOME": str(tmp_path)}
        )
        try:
            async with AsyncOpenAI(
                base_url=f"http://127.0.0.1:{port}/v1", api_key="acme", max_retries=20
            ) as client:

                def ask(given: Any, previous: str | None) -> Any:
                    return client.responses.create(
                        model="tiny", input=[given], previous_response_id=previous, tools=[tool]
                    )

                called = await ask({"role": "user", "content": "How is it in Rome?"}, None)
                (call,) = (one for one in called.output if one.type == "function_call")
                result = {"type": "function_call_output", "call_id": call.call_id, "output": "blue skies"}
                answer = await ask(result, called.id)
                last = await ask({"role": "user", "content": "Thanks."}, answer.id)
                assert [answer.output_text, last.output_text] == ["Blue.", "Bye."]
                assert last.usage.input_tokens_details.cached_tokens > 0
        finally:
            gateway.terminate()
            await gateway.wait()
        assert len({turn.session for turn in rig.service.link.generations}) == 1
