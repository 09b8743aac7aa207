"""Open WebUI's requests, as its router for OpenAI's protocol sends them: it is no SDK, and resends what it shows."""

from __future__ import annotations

import json
from collections import Counter
from typing import Any

import httpx2 as httpx

from support.http.http_rig import HttpRig, door
from support.service.service_rig import ANSWER

HEADERS = {
    "Authorization": "Bearer acme",
    "X-OpenWebUI-User-Id": "7",
    "X-OpenWebUI-User-Email": "ada@example.org",
    "X-OpenWebUI-Chat-Id": "c1",
}


async def chat(rig: HttpRig, messages: list[Any], **more: Any) -> dict[str, Any]:
    """A streamed turn of a chat; return its usage."""
    body = {
        "stream": True,
        "model": "tiny",
        "messages": messages,
        "stream_options": {"include_usage": True},
        **more,
    }
    async with httpx.AsyncClient(base_url=f"{rig.url}/v1", headers=HEADERS, timeout=60) as http:
        answer = await http.post("/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    assert answer.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in answer.text.splitlines() if line.startswith("data: ")]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    said = "".join(one["delta"].get("content") or "" for chunk in chunks for one in chunk["choices"])
    assert said == ANSWER
    usage: dict[str, Any] = chunks[-1]["usage"]
    return usage


def marked(text: str) -> list[dict[str, Any]]:
    """The content of the last message where the model is set to be cached."""
    return [{"type": "text", "text": text, "cache_control": {"type": "ephemeral"}}]


async def test_a_chat_with_its_background_tasks() -> None:
    async with door(service_options={"context_limit": 1000}) as rig:
        async with httpx.AsyncClient(base_url=f"{rig.url}/v1", headers=HEADERS) as http:
            assert (await http.get("/models")).json()["data"][0]["id"] == "tiny", "the check of a connection"
        system = {"role": "system", "content": "Be brief."}
        first = [system, {"role": "user", "content": marked("hi")}]
        parameters = {"temperature": 0.5, "top_p": 0.9, "max_tokens": 50, "stop": ["###"], "seed": 3}
        await chat(rig, first, **parameters, user={"name": "Ada", "id": "7", "role": "user"})
        talk = [system, {"role": "user", "content": "hi"}, {"role": "assistant", "content": ANSWER}]
        usage = await chat(rig, [*talk, {"role": "user", "content": marked("again")}], **parameters)
        assert usage["prompt_tokens_details"]["cached_tokens"] > 0
        for task in ("title", "tags"):
            body: dict[str, Any] = {
                "model": "tiny",
                "messages": [{"role": "user", "content": f"Make a {task} of: {talk}"}],
                "stream": False,
                "max_completion_tokens": 1000 if task == "tags" else 50,
            }
            async with httpx.AsyncClient(base_url=f"{rig.url}/v1", headers=HEADERS, timeout=60) as http:
                answer = (await http.post("/chat/completions", json=body)).json()
            assert answer["choices"][0]["message"]["content"] == ANSWER
        turns = Counter(turn.session for turn in rig.service.link.generations)
        assert list(turns.values()) == [2, 1, 1], "the chat is one session"
