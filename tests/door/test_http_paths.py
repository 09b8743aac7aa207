"""Paths with a slash at the end: nobody is sent elsewhere, least of all to where the caller's ``Host`` says."""

from __future__ import annotations

import json
from typing import Any

import httpx2 as httpx
import pytest

from support.http.http_rig import door

HOSTS = ("evil.example", "evil.example:444", "[", "a@evil.example", "evil.example/x?y#")
CHAT = {"messages": [{"role": "user", "content": "hi"}]}
POSTED: tuple[tuple[str, dict[str, Any]], ...] = (
    ("/v1/chat/completions", CHAT),
    ("/v1/completions", {"prompt": "hi"}),
    ("/v1/responses", {"input": "hi"}),
    ("/v1/conversations", {}),
)


@pytest.mark.parametrize("host", HOSTS)
async def test_a_slash_at_the_end_changes_nothing_whatever_the_host(host: str) -> None:
    async with (
        door() as rig,
        httpx.AsyncClient(base_url=rig.url, headers={"host": host}, timeout=60) as http,
    ):
        for path, body in POSTED:
            plain = await http.post(path, json=body)
            for end in ("/", "//", "/?a=b"):
                answer = await http.post(path + end, json=body)
                assert (plain.status_code, answer.status_code) == (200, 200), (path, end, answer.headers)
                assert answer.json().keys() == plain.json().keys()
        made = (await http.post("/v1/responses", json={"input": "hi"})).json()
        assert (await http.get(f"/v1/responses/{made['id']}/")).json() == made
        listing = (await http.get("/v1/models/")).json()
        assert listing["object"] == "list"
        assert (await http.get(f"/v1/models/{listing['data'][0]['id']}/")).json() == listing["data"][0]
        # Counted as what they are.
        assert 'route="/v1/chat/completions",status="200"} 4.0' in (await http.get("/metrics/")).text


async def test_no_path_and_no_method_leads_elsewhere() -> None:
    async with (
        door() as rig,
        httpx.AsyncClient(base_url=rig.url, headers={"host": "evil.example"}, timeout=60) as http,
    ):
        for method, path, status in (
            ("GET", "/", 404),
            ("GET", "//evil.example/", 404),
            ("POST", "/v1/", 404),
            ("POST", "/v1/embeddings/", 404),
            ("GET", "/v1/chat/completions/", 405),
            ("DELETE", "/v1/responses/", 405),
            ("DELETE", "/v1/conversations/", 405),
        ):
            answer = await http.request(method, path)
            assert answer.status_code == status and "location" not in answer.headers, (method, path)
            assert "evil" not in json.dumps(answer.json()).replace("//evil.example", "")
            assert answer.json()["error"]["code"] == "unknown_route"
