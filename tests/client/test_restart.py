"""A server that is killed and comes back much later, under real clients: everything goes on by itself, exactly once."""

from __future__ import annotations

import asyncio
import threading
import time
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pensieve.client import AsyncClient, Client, Item, Turn
from support.faults.fault_server import fault_server
from support.lengths import at_length
from support.store.redis_server import free_port

OUTAGE_S = at_length(7, 20)
"""From the kill to the next start, which takes some seconds more."""
TOKENS = 40


class Watched:
    """What somebody who reads a stream has on the screen, and whether it has begun."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.text = ""

    def see(self, piece: Any) -> None:
        self.text = piece.text if piece.restarted else self.text + piece.text
        if self.text:
            self.begun.set()


def stream(stream: Any, screen: Watched) -> Turn:
    with stream:
        for piece in stream:
            screen.see(piece)
    turn: Turn = stream.turn
    return turn


async def stream_async(target: str, session: str, screen: Watched) -> Turn:
    async with AsyncClient(target) as client:
        stream = client.session(session).stream("three", max_output_tokens=TOKENS, ignore_eos=True)
        async for piece in stream:
            screen.see(piece)
        return stream.turn


@pytest.mark.fault(15, 25)
@pytest.mark.timeout(150)
def test_a_long_outage_is_ridden_out(tmp_path: Path) -> None:
    address = f"127.0.0.1:{free_port()}"
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    options: dict[str, Any] = {"max_output_tokens": TOKENS, "ignore_eos": True}
    # A lease that a loaded machine renews in time, and that is over when the server is there again.
    lasting: dict[str, Any] = {"listen": address, "lease_s": 6.0}
    with (
        fault_server(tmp_path / "server", store, pace_s=0.5, **lasting) as server,
        Client(address) as client,
        Client(address) as other,
        ThreadPoolExecutor(8) as pool,
    ):
        server.start()
        chats = [client.create_session() for _ in range(4)]
        shown, followed, awaited = Watched(), Watched(), Watched()
        streaming = chats[0].stream("one", **options)
        jobs: dict[str, Future[Any]] = {
            "stream": pool.submit(stream, streaming, shown),
            "send": pool.submit(chats[1].send, "two", **options),
            "async": pool.submit(asyncio.run, stream_async(address, chats[2].name, awaited)),
        }
        assert shown.begun.wait(30) and awaited.begun.wait(30)
        onlooker = other.session(chats[0].name).attach(streaming.request_id)
        jobs["attach"] = pool.submit(stream, onlooker, followed)
        assert followed.begun.wait(30)
        server.kill()  # long before the turns would have ended: a step takes half a second
        (server.model / "pace").write_text("0")
        jobs["late send"] = pool.submit(chats[3].send, "four", **options)
        jobs["items"] = pool.submit(chats[3].items, after_item=100)
        time.sleep(OUTAGE_S)
        assert not any(job.done() for job in jobs.values()), "given up, or the server was not away"
        server.start()
        turns = {name: job.result(60) for name, job in jobs.items()}

        assert turns.pop("items") == []
        assert streaming.resumes > 0 and onlooker.resumes > 0
        assert shown.text == followed.text == turns["stream"].text == turns["attach"].text
        assert awaited.text == turns["async"].text
        said = zip(chats, ("stream", "send", "async", "late send"), strict=True)
        for number, (chat, name) in enumerate(said):
            items: list[Item] = chat.items()
            assert [one.text for one in items] == [("one", "two", "three", "four")[number], turns[name].text]
            assert turns[name].usage.output_tokens == TOKENS and turns[name].revision == 2


@pytest.mark.fault(15)
@pytest.mark.timeout(150)
def test_a_kill_right_after_the_call_is_ridden_out(tmp_path: Path) -> None:
    """The server dies between taking the connection's bytes and its first word about the turn."""
    address = f"127.0.0.1:{free_port()}"
    store = f"sqlite:///{tmp_path / 'history.sqlite3'}"
    with (
        fault_server(tmp_path / "server", store, listen=address) as server,
        Client(address) as client,
        ThreadPoolExecutor(1) as pool,
    ):
        server.start()
        for delay_s in (0.001, 0.0, 0.003):
            chat = client.create_session()
            job = pool.submit(chat.send, "one", max_output_tokens=TOKENS, ignore_eos=True)
            time.sleep(delay_s)
            server.kill()
            server.start()
            assert job.result(45).usage.output_tokens == TOKENS
            assert [one.text for one in chat.items()].count("one") == 1


def test_the_end_of_patience_says_what_was_tried() -> None:
    """Nobody is there, and ``retry_for`` is over: the error says how often, how long, and what was the last cause."""
    with Client(f"127.0.0.1:{free_port()}", retry_for=1.0) as client:
        for call in (lambda: client.sessions(), lambda: client.session("s-1").send("hi")):
            with pytest.raises(
                Exception, match=r"given up after \d+ tries in [\d.]+ s.*UNAVAILABLE"
            ) as caught:
                call()
            assert int(caught.value.metadata["tries"]) > 1  # type: ignore[attr-defined]
