"""A compaction that is cut off at any step leaves the old context or the new one, and its repetition ends it once."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import uuid
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import httpx2 as httpx
import pytest
from grpc import aio

from pensieve.http.responses.ids import ResponseId
from pensieve.server.sessions.compaction import HEADING
from pensieve.v1 import pensieve_pb2 as pb
from support.engine.hash_engine import expected_output
from support.faults.fault_client import (
    PATIENCE_S,
    SERVING,
    Caller,
    Refused,
    Talk,
    calling,
    check_idle,
    get_turn,
    may_try_again,
    uid,
)
from support.faults.fault_server import FaultServer, fault_server
from support.lengths import at_length

TURNS, OUTPUTS, SUMMARY = 3, 12, 12
"""Turns before the compaction, and tokens of an answer and of the summary."""
POINTS = (
    "before_compaction_fork@1",
    f"before_begin@{TURNS + 1}",
    f"after_begin@{TURNS + 1}",
    f"mid_decode@{TURNS * OUTPUTS + 5}",
    f"before_commit@{TURNS + 1}",
    f"after_commit_before_ack@{TURNS + 1}",
    "before_compaction_commit@1",
    "changing",
    "after_compaction_commit@1",
    "warming",
)
"""Steps of a compaction: fork, the turn that makes the summary, the change of the session, the new context's KV.
``changing`` is a random moment around the change."""
ARMED = {"changing": "before_compaction_commit@1", "warming": "after_compaction_commit@1"}
CHANGING_S = 0.03
DONE = POINTS[-2:]
"""Steps at which the context is the new one."""
VICTIMS = (
    ("server", False),
    ("engine", False),
    ("server", True),
    ("engine", True),
    ("door", True),
    ("", True),
)
"""The process that is killed, and whether a client's turn arrives first."""
KILLED_SERVER, KILLED_ENGINE, KILLED_DOOR = VICTIMS[0], VICTIMS[3], VICTIMS[4]
SHORT = (
    ("sqlite", POINTS[6], (KILLED_SERVER,)),
    ("sqlite", POINTS[3], (KILLED_ENGINE,)),
    ("redis", DONE[0], (KILLED_DOOR,)),
)
LONG = [("sqlite", point, VICTIMS) for point in POINTS]
LONG += [("redis", point, (KILLED_SERVER, VICTIMS[2])) for point in POINTS]
CASES = at_length(SHORT, LONG)
THROUGH_DOOR = at_length(
    [(POINTS[6], "door")], [(point, victim) for point in POINTS[:-1] for victim in ("door", "server")]
)
"""The door asks for the compaction, and ``warming`` is no step of its own: the door waits for it."""
APART = at_length([POINTS[6]], [POINTS[0], POINTS[3], POINTS[6], DONE[0]])
moments = Random(20261126)
CONFLICTS = ("REVISION_MISMATCH", "TURN_IN_PROGRESS")


@dataclass
class Compacted:
    """One session before and after its compaction, as its client knows it."""

    talk: Talk
    old: list[pb.Item] = field(default_factory=list)
    request: pb.CompactSessionRequest = field(default_factory=pb.CompactSessionRequest)

    @property
    def conversation(self) -> str:
        """Its id at the HTTP door."""
        return self.talk.name.removeprefix("sessions/").replace("conv-", "conv_")


async def _talked(caller: Caller) -> Compacted:
    config = pb.SessionConfig(
        system_prompt="be brief", default_sampling=pb.SamplingParams(temperature=0, ignore_eos=True)
    )
    name = f"conv-{uuid.UUID(uid()).hex}"
    await caller.data.CreateSession(pb.CreateSessionRequest(session_id=name, config=config))
    one = Compacted(Talk(f"sessions/{name}"))
    for number in range(TURNS):
        await caller.say(one.talk, f"question {number}", OUTPUTS)
    one.old, _ = await caller.items(one.talk)
    one.request = pb.CompactSessionRequest(
        name=one.talk.name, request_id=uid(), keep_turns=1, max_summary_tokens=SUMMARY
    )
    return one


async def _compact(caller: Caller, request: pb.CompactSessionRequest) -> pb.CompactSessionResponse:
    """One try. Raises Refused."""
    try:
        answer: pb.CompactSessionResponse = await caller.data.CompactSession(request, timeout=PATIENCE_S)
    except aio.AioRpcError as error:
        raise Refused.of(error) from error
    return answer


async def _until_compacted(caller: Caller, request: pb.CompactSessionRequest) -> pb.CompactSessionResponse:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            try:
                return await _compact(caller, request)
            except Refused as refused:
                assert may_try_again(refused.error), refused.error
                await asyncio.sleep(min(refused.error.retry_after_s or 0.02, 0.02))


async def _respond(server: FaultServer, one: Compacted, text: str) -> None:
    """A turn through the HTTP door. Raises httpx.TransportError when the door dies meanwhile."""
    body = {"model": "model", "conversation": one.conversation, "input": text, "max_output_tokens": OUTPUTS}
    async with (
        httpx.AsyncClient(base_url=f"http://{server.http}/v1", timeout=PATIENCE_S) as http,
        http.stream("POST", "/responses", json=body | {"stream": True}) as answer,
    ):
        assert answer.status_code in (200, 409), await answer.aread()
        async for _ in answer.aiter_bytes():
            pass


async def _reached(server: FaultServer, point: str) -> None:
    """Returns when the server stands at the armed point."""
    name, _, _ = point.partition("@")
    async with asyncio.timeout(PATIENCE_S):
        while f"failpoint {name}: stall" not in server.log:
            await asyncio.sleep(0.005)


async def _kill(server: FaultServer, victim: str) -> None:
    if victim == "server":
        await asyncio.to_thread(server.kill)
    elif victim:
        pid = server.engine_pid if victim == "engine" else server.door_pid
        assert pid is not None
        os.kill(pid, signal.SIGKILL)


async def _check(caller: Caller, one: Compacted, extra: int) -> bool:
    """Whether the context is the new one. It is the old or the new one, with at most ``extra`` turns that were not
    acknowledged, and no acknowledged turn is lost."""
    items, revision = await caller.items(one.talk)
    session = await caller.session(one.talk)
    assert session.revision == revision and session.item_count == len(items)
    summary = session.config.summary
    whole = items
    if summary:
        assert items[0].text == f"be brief\n\n{summary}" and items[0].role == pb.ROLE_SYSTEM
        branch, words = await _branch(caller, one, summary)
        assert summary == HEADING + words
        kept = items[1:]
        count = 2 * one.request.keep_turns
        moved = zip(branch[len(branch) - count :], kept, strict=False)
        # Tokens between the first of them and what was before it are rendered anew.
        assert all(
            (old.role, old.text, old.request_id) == (new.role, new.text, new.request_id)
            and (old.tokens == new.tokens or new is kept[0])
            for old, new in moved
        ), "the kept turns are not the old ones"
        whole = branch + kept[count:]
    assert whole[: len(one.old)] == one.old, "the old context is no longer there"
    answers = [item.request_id for item in whole if item.role == pb.ROLE_ASSISTANT]
    assert len(set(answers)) == len(answers), "a turn is there twice"
    assert set(one.talk.acked) <= set(answers), "a confirmed turn is lost"
    assert len(answers) <= len(one.talk.acked) + extra
    assert revision == 1 + len(answers) + bool(summary), "not one compaction"
    for request_id in one.talk.acked:
        assert (await get_turn(caller, one.talk, request_id)).state == pb.Turn.STATE_COMMITTED
    return bool(summary)


async def _branch(caller: Caller, one: Compacted, summary: str) -> tuple[list[pb.Item], str]:
    """The branch with the old context, without the turn that made the summary; and the summary, which is exact."""
    listed = await caller.data.ListSessions(pb.ListSessionsRequest(page_size=100))
    for session in listed.sessions:
        branch = Talk(session.name)
        items, _ = await caller.items(branch)
        if session.forked_from == one.talk.name and summary == HEADING + items[-1].text.strip():
            turn = await get_turn(caller, branch, items[-1].request_id)
            _check_exact(items, turn.usage.output_tokens)
            return items[:-2], items[-1].text.strip()
    raise AssertionError("no branch has the old context and this summary")


def _check_exact(items: list[pb.Item], count: int) -> None:
    """The last answer is that of a stateless run over the items before it."""
    tokens = [token for item in items for token in item.tokens.ids]
    assert tokens[-count:] == expected_output(tokens[:-count], count), "not the exact answer"


async def _say_exactly(caller: Caller, one: Compacted) -> None:
    turn = await caller.say(one.talk, "and then?", OUTPUTS)
    items, _ = await caller.items(one.talk)
    _check_exact(items, OUTPUTS)
    assert turn.usage.context_tokens == sum(len(item.tokens.ids) for item in items) - OUTPUTS


async def _cut_off(
    server: FaultServer, caller: Caller, one: Compacted, point: str, victim: str, turn: bool
) -> pb.CompactSessionResponse | None:
    """Kill ``victim`` when the compaction stands at ``point``; return its answer, None if it failed as it may."""
    compaction = asyncio.create_task(_compact(caller, one.request))
    await _reached(server, ARMED.get(point, point))
    started = asyncio.Event()
    between: asyncio.Task[object] | None = None
    if turn and victim == "door":
        between = asyncio.create_task(_respond(server, one, "in between"))
        await asyncio.sleep(0.1)
    elif turn:
        spec = one.talk.spec("in between", OUTPUTS)
        between = asyncio.create_task(caller.turn(one.talk, spec, started))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(started.wait(), 0.3)
    if point == "warming" and not turn:
        server.hold()
        await asyncio.wait((compaction,), timeout=1)
    if point == "changing":
        await asyncio.sleep(moments.uniform(0, 2 * CHANGING_S))
    await _kill(server, victim)
    server.release()
    if between is not None:
        try:
            await between
        except Refused as refused:
            assert may_try_again(refused.error), refused.error
        except httpx.TransportError:
            assert victim == "door"
    try:
        return await compaction
    except Refused as refused:
        assert may_try_again(refused.error) or (turn and refused.error.reason in CONFLICTS), refused.error
        return None


async def _check_case(server: FaultServer, point: str, victim: str, turn: bool) -> None:
    # The others go on afterwards; the server must not go on before it is killed.
    pause = CHANGING_S if point == "changing" else 30 if victim == "server" else 0.7
    await asyncio.to_thread(server.start, f"{ARMED.get(point, point)}=stall({pause})")
    async with calling(server.grpc, server.admin) as caller:
        one = await _talked(caller)
        answer = await _cut_off(server, caller, one, point, victim, turn)
        if victim != "server":
            await _check_afterwards(server, caller, one, answer, None)
    if victim == "server":
        await asyncio.to_thread(server.start)
        async with calling(server.grpc, server.admin) as caller:
            known = not turn and point != "changing"
            await _check_afterwards(server, caller, one, answer, point in DONE if known else None)


async def _check_afterwards(
    server: FaultServer,
    caller: Caller,
    one: Compacted,
    answer: pb.CompactSessionResponse | None,
    is_new: bool | None,
) -> None:
    await caller.becomes(SERVING)
    await caller.free(one.talk)
    found = await _check(caller, one, extra=1)
    assert is_new in (None, found)
    assert found or answer is None, "answered and not there"
    if len(one.talk.open):
        await _say_exactly(caller, one)
    tries = (_until_compacted(caller, one.request) for _ in range(2))
    done, again = await asyncio.gather(*tries)
    for other in filter(None, (answer, again)):
        assert (other.branch, other.summary) == (done.branch, done.summary)
    assert await _check(caller, one, extra=1)
    await _say_exactly(caller, one)
    if server.http:
        async with asyncio.timeout(PATIENCE_S):
            while not server.door_pid:
                await asyncio.sleep(0.05)
        await _respond(server, one, "through the door")
        items, _ = await caller.items(one.talk)
        assert items[-2].text == "through the door"
        _check_exact(items, OUTPUTS)
    await check_idle(caller)


@pytest.mark.fault(66)
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("store", "point", "victims"),
    [pytest.param(*case, marks=[pytest.mark.redis] * (case[0] == "redis")) for case in CASES],
    indirect=["store"],
)
async def test_at_each_step(
    store: str, point: str, victims: tuple[tuple[str, bool], ...], tmp_path: Path
) -> None:
    for number, (victim, turn) in enumerate(victims):
        http = {"http": "127.0.0.1:0"} if victim == "door" else {}
        folder = tmp_path / f"server-{number}"
        with fault_server(folder, store, pace_s=0.003, device_cache="1024tokens", **http) as server:
            try:
                await _check_case(server, point, victim, turn)
            except BaseException as error:
                error.add_note(f"killed: {victim or 'none'}, turn: {turn}\n{server.log[-2000:]}")
                raise


async def _post(server: FaultServer, path: str, key: str = "", **body: object) -> httpx.Response | None:
    """None when the door or the server dies meanwhile."""
    headers = {"Idempotency-Key": key} if key else {}
    try:
        async with httpx.AsyncClient(base_url=f"http://{server.http}/v1", timeout=PATIENCE_S) as http:
            return await http.post(path, json={"model": "model", **body}, headers=headers)
    except httpx.TransportError:
        return None


async def _until_told(server: FaultServer, path: str, key: str = "", **body: object) -> dict[str, Any]:
    async with asyncio.timeout(PATIENCE_S):
        while True:
            answer = await _post(server, path, key, **body)
            if answer is not None and answer.status_code == 200:
                told: dict[str, Any] = answer.json()
                return told
            assert answer is None or answer.status_code in (409, 429, 503), answer.text
            await asyncio.sleep(0.05)


async def _killed(
    server: FaultServer, point: str, victim: str, call: asyncio.Task[httpx.Response | None]
) -> None:
    """Kill ``victim`` when the compaction that ``call`` began stands at ``point``."""
    await _reached(server, ARMED.get(point, point))
    if point == "changing":
        await asyncio.sleep(moments.uniform(0, 2 * CHANGING_S))
    await _kill(server, victim)
    assert await call is None or point == "changing"
    if victim == "server":
        await asyncio.to_thread(server.start)


async def _lasting(caller: Caller) -> int:
    """The number of sessions that never expire."""
    listed = await caller.data.ListSessions(pb.ListSessionsRequest(page_size=100))
    return sum(not session.HasField("expire_time") for session in listed.sessions)


@pytest.mark.fault(66)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize(("point", "victim"), THROUGH_DOOR)
async def test_within_a_response(store: str, point: str, victim: str, tmp_path: Path) -> None:
    """``context_management`` compacts a conversation before its response. The repeated call gives both, once."""
    asked: dict[str, Any] = {"input": "in between", "max_output_tokens": OUTPUTS}
    asked["context_management"] = [{"type": "compaction", "compact_threshold": 1}]
    key = uid()
    with fault_server(tmp_path, store, pace_s=0.003, device_cache="1024tokens", http="127.0.0.1:0") as server:
        pause = CHANGING_S if point == "changing" else 30 if victim == "server" else 0.7
        await asyncio.to_thread(server.start, f"{ARMED.get(point, point)}=stall({pause})")
        async with calling(server.grpc, server.admin) as caller:
            one = await _talked(caller)
            one.request.keep_turns = 0
            asked["conversation"] = one.conversation
            first = asyncio.create_task(_post(server, "/responses", key, **asked))
            await _killed(server, point, victim, first)
        async with calling(server.grpc, server.admin) as caller:
            await caller.becomes(SERVING)
            await caller.free(one.talk)
            is_new = await _check(caller, one, extra=1 if point == "changing" else 0)
            assert point == "changing" or is_new is (point in DONE)
            told = await _until_told(server, "/responses", key, **asked)
            again = await _until_told(server, "/responses", key, **asked)
            assert (again["id"], again["output"]) == (told["id"], told["output"])
            assert [item["type"] for item in told["output"]] == ["compaction", "message"]
            assert await _check(caller, one, extra=1)
            items, revision = await caller.items(one.talk)
            assert [item.text for item in items[1:-1]] == ["in between"] and revision == 1 + TURNS + 2
            _check_exact(items, OUTPUTS)
            assert await _lasting(caller) == 2, "the conversation, and the fork with its old context"
            await check_idle(caller)


@pytest.mark.fault(66)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("store", ["sqlite"], indirect=True)
@pytest.mark.parametrize("point", APART)
async def test_apart_from_the_conversation(store: str, point: str, tmp_path: Path) -> None:
    """``/responses/compact`` leaves the conversation as it is, and nothing that stays for ever."""
    with fault_server(tmp_path, store, pace_s=0.003, device_cache="1024tokens", http="127.0.0.1:0") as server:
        point = point.replace(f"@{TURNS * OUTPUTS + 5}", f"@{(TURNS + 1) * OUTPUTS + 5}")
        await asyncio.to_thread(server.start, f"{point}=stall(0.7)")
        async with calling(server.grpc, server.admin) as caller:
            one = await _talked(caller)
            asked: dict[str, Any] = {"input": "and then?", "max_output_tokens": OUTPUTS}
            last = await _until_told(server, "/responses", **asked, conversation=one.conversation)
            before = await caller.items(one.talk)
            call = asyncio.create_task(_post(server, "/responses/compact", previous_response_id=last["id"]))
            await _killed(server, point, "door", call)
            assert await caller.items(one.talk) == before
            assert await _lasting(caller) == 1, "the conversation"
            short = await _until_told(server, "/responses/compact", previous_response_id=last["id"])
            asked["input"] = [*short["output"], {"role": "user", "content": "Go on."}]
            response = await _until_told(server, "/responses", **asked)
            found = ResponseId.parse(response["id"])
            assert found is not None
            items, _ = await caller.items(Talk(f"sessions/{found.session_id}"))
            assert HEADING in items[0].text and items[-2].text == "Go on."
            _check_exact(items, OUTPUTS)
            assert await caller.items(one.talk) == before
            await check_idle(caller)
