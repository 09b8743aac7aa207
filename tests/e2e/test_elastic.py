"""A server whose device tier goes from full to its floor and back while turns run: its resident memory follows, no
session is lost, nothing is computed again while the host has room, and answers are those of a stateless server."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pensieve import Client
from pensieve.client.admin import device_memory
from pensieve.spawn import ServerProcess
from support.lengths import at_length
from support.processes import children

pytestmark = pytest.mark.timeout(300)
SESSIONS, OUTPUT = 6, 24
TEXT = "We spoke of ships, of the sea and of what the weather does to both, for a long time. " * 20
FLOOR, CEILING = "2048tokens", "6144tokens"


def resident(server: ServerProcess) -> int:
    """Bytes of the device tier that lie in memory, as the kernel counts them."""
    total = 0
    for pid in children(server.pid):
        for part in Path(f"/proc/{pid}/smaps").read_text().split("\n\n"):
            for mapping in re.split(r"\n(?=[0-9a-f]+-[0-9a-f]+ )", part):
                if "pensieve-device-tier" in mapping.partition("\n")[0]:
                    found = re.search(r"^Rss:\s+(\d+) kB", mapping, re.MULTILINE)
                    assert found is not None
                    total += int(found[1]) << 10
    return total


def until(condition: Callable[[], bool], what: str) -> None:
    limit = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < limit, what
        time.sleep(0.05)


def question(number: int, turn: int) -> str:
    return f"Number {number}, turn {turn}. {TEXT if turn == 0 else 'And then?'}"


def test_memory_follows_while_turns_run() -> None:
    options = ("--model", "demo", "--store", "memory:", "--threads", "1")
    tiers = ("--device-cache", f"{FLOOR}..{CEILING}", "--host-cache", "16384tokens")
    stop, turns = threading.Event(), [0] * SESSIONS
    answers: list[list[str]] = [[] for _ in range(SESSIONS)]
    lost: list[str] = []

    with ServerProcess(*options, *tiers) as server, Client(server.target) as client:

        def memory(size: str | None = None) -> dict[str, int]:
            return device_memory(server.admin, size, api_key="", timeout_s=30)

        def follow(name: str) -> None:
            wanted = memory()[name]
            memory(f"{wanted}B")
            until(lambda: memory()["held"] == wanted, f"the tier does not hold its {name}: {memory()}")

        def talk() -> None:
            while not stop.is_set():
                for number, session in enumerate(sessions):
                    answer = session.send(
                        question(number, turns[number]), max_output_tokens=OUTPUT, temperature=0
                    )
                    answers[number].append(answer.text)
                    turns[number] += 1
                    if not answer.usage.reconciles or answer.usage.recomputed_tokens:
                        lost.append(f"session {number}: {answer.usage}")

        def shrink_and_grow() -> None:
            full = resident(server)
            follow("floor")
            small, floor = resident(server), memory()["floor"]
            assert small <= floor < full
            seen = min(turns)
            until(lambda: min(turns) > seen, "turns stand still at the floor")
            follow("ceiling")
            until(lambda: resident(server) > floor, "no chunk lies above the floor again")

        sessions = [client.create_session() for _ in range(SESSIONS)]
        talking = threading.Thread(target=talk)
        talking.start()
        try:
            until(lambda: min(turns) >= 1, "no first turns")
            follow("ceiling")
            for _ in range(at_length(1, 3)):
                shrink_and_grow()
        finally:
            stop.set()
            talking.join()
        assert server.stop() == 0
    assert not lost
    with ServerProcess(*options, "--stateless") as server, Client(server.target) as client:
        for number, said in list(enumerate(answers))[: at_length(2, SESSIONS)]:
            session = client.create_session()
            for turn, text in enumerate(said):
                again = session.send(question(number, turn), max_output_tokens=OUTPUT, temperature=0)
                assert again.text == text
