"""One request id, many calls: at once, late, and after a broken stream. One turn, one text."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from pensieve import AsyncClient
from pensieve.v1 import pensieve_pb2 as pb
from support.faults.fault_client import Caller, Talk, audit, calling, check_history
from support.faults.fault_server import fault_server
from support.faults.proxies import CuttingProxy, running

OUTPUTS = 48


@pytest.fixture
async def served(tmp_path: Path) -> AsyncIterator[tuple[Caller, CuttingProxy]]:
    """A server, and a proxy before it."""
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with fault_server(tmp_path / "server", store, pace_s=0.002, device_cache="1024tokens") as server:
        await asyncio.to_thread(server.start)
        async with (
            calling(server.grpc, server.admin) as caller,
            running(CuttingProxy(int(server.grpc.rpartition(":")[2]))) as proxy,
        ):
            yield caller, proxy


@pytest.mark.fault(2, 8, 9)
async def test_one_turn_whatever_is_sent_again(served: tuple[Caller, CuttingProxy]) -> None:
    caller, proxy = served
    talks = [await _fifty_at_once(caller), await _late(caller)]
    await _resumed_at_every_offset(caller, talks[0])
    talks.append(await _cut_everywhere(caller, proxy))
    await audit(caller, talks)


async def _fifty_at_once(caller: Caller) -> Talk:
    talk = await caller.talk()
    spec = talk.spec("one of many")
    turns = await asyncio.gather(*(caller.turn(talk, spec) for _ in range(50)))
    assert all(turn == turns[0] for turn in turns) and turns[0].revision == 2
    await check_history(caller, talk)
    return talk


async def _late(caller: Caller) -> Talk:
    talk = await caller.talk()
    specs = [talk.spec(f"turn {number}", 6) for number in range(1, 10)]
    turns = [await caller.turn(talk, spec) for spec in specs]
    again = await caller.turn(talk, specs[2])
    assert again == turns[2] and again.revision == 4
    assert (await caller.session(talk)).revision == 10, "a late retry appended something"
    await check_history(caller, talk)
    return talk


async def _resumed_at_every_offset(caller: Caller, talk: Talk) -> None:
    """While the turn runs, and again after it was committed."""
    spec = talk.spec("with holes", OUTPUTS)
    whole: list[int] = []
    texts: list[str] = [""]
    attempt = ""
    resumed: list[asyncio.Task[tuple[list[int], str]]] = []
    async for event in caller.call(talk, spec):
        if event.HasField("accepted"):
            attempt = event.accepted.attempt
        elif event.HasField("delta"):
            whole += event.delta.tokens.ids
            texts += [""] * event.delta.token_count
            texts[len(whole)] = texts[len(whole) - event.delta.token_count] + event.delta.text
            resumed.append(asyncio.create_task(_resume(caller, talk, spec, attempt, len(whole))))
        elif event.HasField("completed"):
            caller._ack(talk, spec, event.completed, whole)
    full = texts[len(whole)]
    offsets = [offset for offset in range(1, OUTPUTS + 1) if texts[offset] or offset == OUTPUTS]
    for task in resumed:
        tokens, text = await task
        offset = OUTPUTS - len(tokens)
        assert tokens == whole[offset:] and texts[offset] + text == full
    for offset in range(OUTPUTS + 1):
        tokens, text = await _resume(caller, talk, spec, attempt, offset)
        assert tokens == whole[offset:] and full.endswith(text)
        assert offset not in offsets or texts[offset] + text == full


async def _resume(
    caller: Caller, talk: Talk, spec: pb.TurnSpec, attempt: str, offset: int
) -> tuple[list[int], str]:
    tokens: list[int] = []
    text = ""
    async for event in caller.call(talk, spec, resume_attempt=attempt, resume_token_offset=offset):
        if event.HasField("delta"):
            assert event.delta.token_offset == offset + len(tokens)
            tokens += event.delta.tokens.ids
            text += event.delta.text
    return tokens, text


async def _cut_everywhere(caller: Caller, proxy: CuttingProxy) -> Talk:
    """The SDK behind a proxy that cuts each turn's connection once, at another byte each time."""
    talk = await caller.talk()
    cuts = 0
    for limit in range(60, 1260, 75):
        async with AsyncClient(f"127.0.0.1:{proxy.port}") as client:
            session = client.session(talk.name)
            spec = talk.spec(f"cut {limit}", 16)
            proxy.cut_next_after(limit)
            stream = session.stream(
                spec.input[0].text, request_id=spec.request_id, max_output_tokens=16, ignore_eos=True,
                temperature=0.0,
            )  # fmt: skip
            text, tokens = "", 0
            async for piece in stream:
                if piece.restarted:
                    text, tokens = "", 0
                assert piece.token_offset == tokens
                text, tokens = text + piece.text, tokens + piece.token_count
            turn = await stream.finish()
            assert text == turn.text and tokens == turn.usage.output_tokens == 16
            committed = await caller.data.GetTurn(
                pb.GetTurnRequest(session=talk.name, request_id=spec.request_id)
            )
            talk.acked[spec.request_id] = committed.turn
            assert committed.turn.output.text == text
        cuts += proxy.cut
    assert cuts >= 5, "the proxy cut hardly anything"
    await check_history(caller, talk)
    return talk
