"""``serve --invariant``: an answer whose engine is killed goes on with the same tokens, drawn without a seed or not."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from contextlib import nullcontext
from dataclasses import dataclass

import httpx2 as httpx
import msgspec
import pytest
from starlette.requests import Request

from pensieve import AsyncClient
from pensieve.client import AsyncSession
from pensieve.http.common.requests import request_id_for, seed_for
from pensieve.spawn import ServerProcess
from support.lengths import LONG, at_length

pytestmark = pytest.mark.timeout(900)
ANSWERS = at_length(6, 200)
TOKENS = 96
SHOWN = 24
"""Characters of the first answer when the engine is killed. By then the answers differ. On a busy machine others may
lag far behind it, and this process behind all of them."""
OPTIONS = (
    "--model", "demo", "--store", "memory:", "--threads", "1", "--http", "127.0.0.1:0", "--dtype", "bfloat16",
    "--device-cache", "16384tokens", "--chunk-tokens", "16", "--max-wait", "600",
    "--http-patience", "300", "--max-running", "256", "--invariant",
)  # fmt: skip
DRAWN = {"temperature": 1.5, "ignore_eos": True}


@dataclass
class Answer:
    """One stream: the text its client has, and what makes another server give the same answer."""

    question: str
    text: str = ""
    seed: int | None = None
    cut: int | None = None
    """Length of the text when the engine was killed. None for an answer that had ended."""
    ended: bool = False


def question(number: int) -> str:
    return f"My name is Ada, aged {number}. What's my name?"


async def say(session: AsyncSession, answer: Answer) -> None:
    """Stream an answer over gRPC. A restarted attempt must repeat what was shown, and then go on."""
    stream = session.stream(answer.question, max_output_tokens=TOKENS, seed=answer.seed, **DRAWN)
    shown = ""
    async for piece in stream:
        assert answer.seed in (None, stream.seed), "another attempt has another seed"
        answer.seed = stream.seed
        shown = "" if piece.restarted else shown + piece.text
        assert shown.startswith(answer.text) or answer.text.startswith(shown), "a shown text was taken back"
        answer.text = max(shown, answer.text, key=len)
    turn = await stream.finish()
    assert turn.text == answer.text and turn.numerics == "invariant bfloat16 cpu"
    assert turn.seed == answer.seed
    answer.ended = True


async def complete(http: httpx.AsyncClient, answer: Answer, key: str) -> None:
    """Stream a chat completion. Without a seed of its own, its seed follows from ``key``."""
    body = {"model": "demo", "messages": [{"role": "user", "content": answer.question}], "stream": True}
    body |= {"max_tokens": TOKENS, **DRAWN} | ({} if answer.seed is None else {"seed": answer.seed})
    headers = {"Idempotency-Key": key}
    async with http.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
        assert response.status_code == 200, await response.aread()
        async for line in response.aiter_lines():
            if line.startswith("data: {"):
                event = msgspec.json.decode(line.removeprefix("data: "))
                assert "error" not in event, event
                for choice in event["choices"]:
                    answer.text += choice["delta"].get("content") or ""
                    answer.ended |= choice["finish_reason"] == "length"
    assert answer.ended
    answer.seed = seed_for(
        request_id_for(Request({"type": "http", "headers": [(b"idempotency-key", key.encode())]}))
    )


async def ask_all(
    server: ServerProcess,
    name: str,
    answers: list[Answer],
    *,
    at_once: int,
    disturb: Callable[[], Awaitable[None]],
) -> None:
    """Get all answers, the even ones over gRPC and the odd ones over HTTP. ``name`` differs between calls."""
    places = asyncio.Semaphore(at_once)
    no_limit = httpx.Limits(max_connections=None)
    http = httpx.AsyncClient(base_url=f"http://{server.http}", timeout=600, limits=no_limit)

    async def ask(number: int, answer: Answer) -> None:
        async with places:
            if number % 2:
                await complete(http, answer, f"{name} {number}")
            else:
                await say(await client.create_session(), answer)

    async with AsyncClient(server.target, retry_for=300) as client, http, asyncio.TaskGroup() as streams:
        for number, answer in enumerate(answers):
            streams.create_task(ask(number, answer))
        await disturb()


async def nothing() -> None: ...


@pytest.mark.fault(27)
def test_all_answers_go_on_when_their_engine_is_killed() -> None:
    answers = [Answer(question(number)) for number in range(ANSWERS)]
    with ServerProcess(*OPTIONS) as server:

        async def kill() -> None:
            while all(len(answer.text) < SHOWN for answer in answers):
                await asyncio.sleep(0.01)
            engine = server.engine_pid
            assert engine is not None
            os.kill(engine, signal.SIGKILL)
            for answer in answers:
                answer.cut = None if answer.ended else len(answer.text)

        asyncio.run(ask_all(server, "killed", answers, at_once=ANSWERS, disturb=kill))
        assert server.metric("pensieve_engine_restarts_total") == 1
        again = [Answer(answer.question, seed=answer.seed) for answer in answers]
        # Other batches, and in the long run nothing cached: the bits are the same.
        undisturbed = ServerProcess(*OPTIONS, "--stateless") if LONG else nullcontext(server)
        with undisturbed as other_server:
            asyncio.run(
                ask_all(other_server, "undisturbed", again, at_once=at_length(4, 16), disturb=nothing)
            )
        assert server.metric("pensieve_engine_restarts_total") == 1
    # A short answer may have shown all of its text when the engine died, and lack its end only.
    assert any(answer.cut is not None and answer.cut < len(answer.text) for answer in answers)
    for answer, other in zip(answers, again, strict=True):
        assert answer.text == other.text, answer.question
    assert len({answer.text for answer in answers}) > len(answers) // 2, "the answers are drawn"
