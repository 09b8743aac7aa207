"""A client in another process, forked off as web servers do it for their workers, and in another event loop."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys

import pytest

from pensieve.client import AsyncClient
from support.faults.fake_faults import answer_to
from support.service.fake_server import FakeServerThread

PROGRAM = """
import os, signal, sys
from pensieve import Cancelled, Client

client = Client(sys.argv[1])
chat = client.create_session()
chat.send("a")
stream = chat.stream("b")
next(stream)
if not (child := os.fork()):
    signal.alarm(20)  # a child that hangs ends
    try:
        next(stream)
    except Cancelled as error:
        print(error)
    stream.close()
    print(client.create_session().send("c").text, flush=True)
    for name in sys.argv[2:]:
        globals().pop(name)
    sys.exit(3)
print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), stream.finish().text, len(chat.items()), flush=True)
"""


def forked(*dropped: str) -> list[str]:
    """The lines of the program, whose child lets go of the globals ``dropped`` before it ends."""
    with FakeServerThread() as server:
        command = [sys.executable, "-P", "-c", PROGRAM, server.target, *dropped]
        # Commands that an earlier test called in this process have switched gRPC's handling of forks off.
        env = {name: value for name, value in os.environ.items() if name != "GRPC_ENABLE_FORK_SUPPORT"}
        # The limit is for a child that hangs, which is what this is about.
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False, env=env)
    assert done.returncode == 0, done.stderr
    assert "Traceback" not in done.stderr
    return done.stdout.splitlines()


def test_a_client_goes_on_in_a_forked_process_which_ends() -> None:
    of_parent, of_child, outcome = forked()
    assert of_parent.startswith("this stream belongs to the parent process")
    assert of_child == answer_to("c")
    assert outcome == f"3 {answer_to('b')} 4", "the stream of the parent went on, and was complete"


def test_what_a_forked_process_lets_go_of_stays_open_in_its_parent() -> None:
    assert forked("stream", "chat", "client")[-1] == f"3 {answer_to('b')} 4"


def test_a_client_of_another_loop_says_so() -> None:
    with FakeServerThread() as server:
        client = AsyncClient(server.target)

        async def one_turn() -> str:
            return (await (await client.create_session()).send("x")).text

        async def whole() -> None:
            assert await one_turn() == answer_to("x")
            with pytest.raises(RuntimeError, match="belongs to another event loop"):
                await asyncio.to_thread(asyncio.run, one_turn())
            await client.close()

        asyncio.run(whole())
