"""The documents behind the page: what they say is what the cache and the store have, and only who may reads them."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import AsyncClient
from pensieve.engine.cache.chunk import Place
from pensieve.server.page import state as page_state
from pensieve.server.page.state import StripPoller
from support.page.page_rig import PageRig, page_rig

LETTERS = {Place.DEVICE: "d", Place.BOTH: "b", Place.HOST: "h", Place.DROPPED: "x"}
CANARY = "zanzibar"


async def talk(rig: PageRig, sessions: int, turns: int = 1, text: str = "one two three") -> list[str]:
    """Turns one after the other; the ids of the sessions."""
    async with AsyncClient(rig.address) as client:
        chats = [await client.create_session(labels={"title": f"talk {n}"}) for n in range(sessions)]
        for _ in range(turns):
            for chat in chats:
                await chat.send(text, max_output_tokens=5)
        return [chat.id for chat in chats]


def letters(strip: str) -> str:
    return "".join(letter * int(count) for letter, count in re.findall(r"([a-zA-Z])(\d+)", strip))


async def state(rig: PageRig, query: str = "") -> dict[str, Any]:
    status, found = await rig.get(f"state.json{query}")
    assert status == 200, found
    return found


async def test_strips_and_totals_are_those_of_the_cache(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig:
        await talk(
            rig, 12, 2, text="a rather long input that takes some chunks of the cache, and some more of them"
        )
        while rig.engine.has_work:
            await asyncio.sleep(0.01)
        found = await state(rig)
        cache = rig.engine._cache
        recount = {
            str(session.key): "".join(LETTERS[chunk.place] for chunk in session.chunks)
            for session in cache.sessions.values()
        }
        rows = found["sessions"]["rows"]
        assert {row["session"]: letters(row["strip"]) for row in rows} == recount
        assert {"d", "h"} <= set("".join(recount.values())), "nothing has moved: the test shows little"
        assert [row["tokens"] for row in rows] == [len(cache.sessions[r["session"]].tokens) for r in rows]
        occupancy = cache.occupancy()
        assert found["device"] == {
            "capacity": 512,
            "used": occupancy.device_used,
            "free": occupancy.device_free,
            "reclaimable": occupancy.device_reclaimable,
        }
        assert found["host"]["used"] == occupancy.host_used
        rig.link.memory_sizes = (3, 2, 1, 4)
        sizes = {"held": 3, "wanted": 2, "floor": 1, "ceiling": 4}
        assert (await state(rig))["device_memory"] == sizes
        assert found["lately"]["turns"] == 24 and found["lately"]["failed"] == 0
        context, totals = found["lately"]["context"], found["totals"]
        assert [context[one] for one in ("device", "host", "recomputed", "new")] == [
            totals[f"{one}_total"] for one in ("gpu_cached", "swapped_in", "recomputed", "new")
        ]
        assert found["schema"] == "pensieve.state/1" and found["server"]["chunk_tokens"] == 8


async def test_sessions_come_by_activity_and_in_pages(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig:
        ids = await talk(rig, 5)
        assert [row["id"] for row in (await state(rig))["sessions"]["rows"]] == ids[::-1]
        first = (await state(rig, "?limit=2"))["sessions"]
        second = (await state(rig, f"?limit=3&after={first['next']}"))["sessions"]
        assert [row["id"] for row in first["rows"] + second["rows"]] == ids[::-1]
        assert (first["total"], first["next"], second["next"]) == (5, 2, None)
        row = first["rows"][0]
        assert row["labels"] == {"title": "talk 4"} and row["items"] == 2 and row["state"] == "idle"
        for query in ("?limit=-1", "?limit=x", "?after=1e3", "?limit=99999999999"):
            status, problem = await rig.get(f"state.json{query}")
            assert status == 400 and problem["reason"] == "FIELD_INVALID", query


async def test_one_look_serves_all_who_ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_state, "FRESH_S", 600.0)
    async with page_rig(tmp_path) as rig:
        await talk(rig, 3)
        looks = 0
        look = rig.link.read_strips

        async def counted() -> Sequence[Any]:
            nonlocal looks
            looks += 1
            return await look()

        rig.link.read_strips = counted  # type: ignore[method-assign,assignment]
        await asyncio.gather(*(state(rig) for _ in range(10)))
        assert looks == 1
        rig.link.read_strips = look  # type: ignore[method-assign]
        strips = StripPoller(rig.link, clock=lambda: now)
        now = 0.0
        assert (await strips.strips()) is (await strips.strips())
        first, now = await strips.strips(), 600.0
        assert (await strips.strips()) is not first


async def test_what_was_said_is_shown_to_nobody_unasked(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    for text in (False, True):
        async with page_rig(tmp_path / ("b" if text else "a"), text=text) as rig:
            (name,) = await talk(rig, 1, 2, text=f"the word is {CANARY}")
            (row,) = (await state(rig))["sessions"]["rows"]
            assert (await rig.get(f"sessions/{name}.json?tenant=another"))[0] == 404
            status, found = await rig.get(f"sessions/{name}.json?tenant={row['tenant']}")
            assert status == 200 and found["cached"]["id"] == name
            create, first, second = found["turns"]
            assert (create["kind"], first["kind"], second["kind"]) == ("create", "turn", "turn")
            assert second["device"] + second["new"] == second["context_tokens"] > first["context_tokens"]
            everything = [str((await rig.get(path))[1]) for path in ("state.json", "series.json")]
            assert CANARY not in "".join(everything)
            assert (CANARY in str(found)) == text
            if text:
                assert second["said"][0] == {"role": "user", "text": f"the word is {CANARY}"}


async def test_who_may_not_is_told_so(tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        "".join(
            f'[[key]]\nid = "{name}"\ntenant = "{name}"\nsha256 = "{hashlib.sha256(b"s3cret").hexdigest()}"\n'
            f'scopes = ["{scope}"]\n'
            for name, scope in (("ops", "admin"), ("user", "sessions.read"))
        )
    )
    keys.chmod(0o600)
    async with page_rig(tmp_path, keys=keys) as rig:
        for path in ("state.json", "series.json", "sessions/abc.json"):
            status, problem = await rig.get(path)
            assert (status, problem["reason"]) == (401, "CREDENTIAL_MISSING"), path
            status, problem = await rig.get(path, Authorization="Bearer ck_ops_wrong")
            assert (status, problem["reason"]) == (401, "CREDENTIAL_INVALID"), path
            status, problem = await rig.get(path, Authorization="Bearer ck_user_s3cret")
            assert (status, problem["reason"]) == (403, "SCOPE_MISSING"), path
        assert (await rig.get("state.json", Authorization="Bearer ck_ops_s3cret"))[0] == 200
        async with rig.http.get(rig.url) as page:
            assert page.status == 200, "the page itself holds nothing"


async def test_a_name_that_leads_here_reads_nothing(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig:
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            for path in ("", "state.json"):
                status, problem = await rig.get(path, Host=host)
                assert (status, problem["reason"]) == (403, "HOST_REFUSED"), host
        for host in ("127.0.0.1:9090", "localhost:9090", "[::1]:9090", "10.1.2.3", "pensieve.localhost"):
            assert (await rig.get("state.json", Host=host))[0] == 200, host
        for path in (
            "sessions/nobody.json",
            "sessions/..json",
            "sessions/a/b.json",
            "sessions/%2e%2e%2fx.json",
        ):
            status, problem = await rig.get(path)
            assert status == 404 and problem["reason"] == "SESSION_NOT_FOUND", path


async def test_the_policy_lets_only_the_page_itself_run(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig, rig.http.get(rig.url) as page:
        html, policy = await page.text(), page.headers["Content-Security-Policy"]
        assert page.headers["Content-Type"] == "text/html; charset=utf-8"
        script = html.split("<script>")[1].split("</script>")[0]
        digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
        assert f"script-src 'sha256-{digest}';" in policy
        assert "default-src 'none'" in policy and "unsafe" not in policy and "http" not in policy
        assert not re.search(r'(?:src|href)="(?!data:)', html), "the page takes nothing from elsewhere"
        assert "innerHTML" not in script and "eval(" not in script


async def test_without_an_engine_the_state_is_told_all_the_same(tmp_path: Path) -> None:
    async with page_rig(tmp_path) as rig:
        await talk(rig, 2)
        await rig.link.stop()
        found = await state(rig)
        assert found["sessions"] == {
            "total": 0, "running": 0, "age_s": None, "first": 0, "next": None, "rows": [],
        }  # fmt: skip
