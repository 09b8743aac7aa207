"""Several client processes: they play what one would, end together, and leave nothing behind."""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import signal
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from pensieve.replay.command import replay
from pensieve.replay.load.schedule import Arrivals, Due, Script, scripts
from pensieve.replay.load.workload import Conversation, Dataset, Shaping, TurnLengths
from pensieve.replay.play import player_pool
from pensieve.replay.play import player_process as wire
from pensieve.replay.play.player_pool import ClientFailed, deal
from pensieve.replay.records import Outcome, RunOptions, TurnRecord
from pensieve.replay.session import ReplayPlan, run
from pensieve.replay.targets.base import Address, RemoteTarget, TargetInfo, TurnFailed
from pensieve.replay.targets.options import parse_target
from support.service.paced_server import PacedConversations, in_thread

INFO = TargetInfo(vocab_size=50, context_limit=512)
TALKS = tuple(
    Conversation(str(number), (TurnLengths(3 + number, 2 + number),) * (1 + number % 4))
    for number in range(7)
)
TURNS = sum(len(talk.turns) for talk in TALKS)


@pytest.fixture
def service() -> PacedConversations:
    return PacedConversations()


@pytest.fixture
def address(service: PacedConversations) -> Iterator[Address]:
    with in_thread(service) as host:
        yield Address(f"pensieve://{host}", None)


@dataclass(frozen=True)
class At:
    """A target of which only its address counts."""

    where: Address
    name: str = "it"

    def address(self) -> Address:
        return self.where


async def play(address: Address, processes: int = 2, **more: Any) -> Outcome:
    options = RunOptions(seed=3, processes=processes)
    return await player_pool.replay(At(address), INFO, scripts(TALKS, Arrivals()), options, **more)


def client_processes() -> set[int]:
    """Children of this process that are clients."""
    found = set()
    for task in Path("/proc/self/task").iterdir():
        for child in contents(task / "children").split():
            command = contents(Path(f"/proc/{int(child)}/cmdline")).split(b"\0")
            found |= {int(child)} if wire.__name__.encode() in command else set()
    return found


def contents(file: Path) -> bytes:
    """Empty for a thread or a process that has ended meanwhile."""
    try:
        return file.read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


@given(st.integers(0, 40), st.integers(1, 6), st.none() | st.integers(6, 20))
def test_every_conversation_is_dealt_once_and_evenly(count: int, processes: int, limit: int | None) -> None:
    every = [Script(number, TALKS[0], ()) for number in range(count)]
    hands = deal(every, RunOptions(processes=processes, concurrency=limit))
    assert len(hands) == processes
    assert sorted(script.number for share, _ in hands for script in share) == list(range(count))
    for share, _ in hands:
        numbers = [script.number for script in share]
        assert numbers == sorted(numbers), "in order of their starts"
    sizes = [len(share) for share, _ in hands]
    if limit is None:
        assert max(sizes) - min(sizes) <= 1
        assert {options.concurrency for _, options in hands} == {None}
        return
    limits = [options.concurrency or 0 for _, options in hands]
    assert sum(limits) == limit and max(limits) - min(limits) <= 1
    for size, part in zip(sizes, limits, strict=True):
        assert abs(size - count * part / limit) <= part, "as many conversations as it has clients for"


def deterministic(report: dict[str, Any]) -> dict[str, Any]:
    """What of a report does not depend on time."""
    (summary,) = report["targets"]
    kept = {key: summary[key] for key in ("turns", "tokens", "receipts", "errors", "vocab_size", "leftover")}
    by_turn = [(row["turn"], row["turns"], row["tokens"]) for row in summary["by_turn"]]
    counts = {key: summary[key]["count"] for key in ("inter_token_s", "latency_s", "client_lag_s")}
    return kept | counts | {"by_turn": by_turn, "workload": report["workload"], "valid": report["valid"]}


@pytest.mark.parametrize("load", [(), ("--rate", "200"), ("--clients", "3")])
def test_one_process_and_two_agree(service: PacedConversations, address: Address, load: tuple[str, ...],
                                   tmp_path: Path) -> None:  # fmt: skip
    trace = tmp_path / "trace.jsonl"
    rows = [
        {"session_id": talk.key, "turn": turn, "input_tokens": one.input_tokens, "output_tokens": one.output_tokens}
        for talk in TALKS
        for turn, one in enumerate(talk.turns)
    ]  # fmt: skip
    trace.write_text("".join(json.dumps(row) + "\n" for row in rows))
    reports, prompts = [], []
    for processes in ("1", "2"):
        out = tmp_path / f"{processes}.json"
        arguments = [str(trace), "--target", address.url, "--max-lag", "60", "--processes", processes, *load]
        result = CliRunner().invoke(replay, [*arguments, "--json", str(out)])
        assert result.exit_code == 0, result.output
        reports.append(json.loads(out.read_text()))
        prompts.append(Counter(service.prompts))
        service.prompts.clear()
    assert deterministic(reports[0]) == deterministic(reports[1])
    assert prompts[0] == prompts[1] and prompts[0].total() == TURNS
    assert [len(report["targets"][0]["client"]["loop_lag_p99_s"]) for report in reports] == [1, 2]
    assert [report["options"]["run"]["processes"] for report in reports] == [1, 2]


async def test_records_are_in_order_of_completion_from_one_start(address: Address) -> None:
    sends, seen = itertools.count(), list[TurnRecord]()
    outcome = await play(address, on_send=lambda: next(sends), on_turn=seen.append)
    assert next(sends) == len(seen) == TURNS, "a watcher hears of every turn, as from one process"
    times = [record.done_s for record in outcome.records]
    assert len(times) == TURNS and times == sorted(times)
    assert all(0 <= record.due_s <= record.sent_s <= record.done_s for record in outcome.records)
    assert outcome.duration_s >= times[-1]
    assert not client_processes()


def begun(number: int) -> Script:
    """A conversation with a history of 20 tokens."""
    talk = Conversation(str(number), (TurnLengths(19, 1), TurnLengths(4, 2)))
    return Script(number, talk, (Due(-1.0, 0.0), Due(0.0, 0.0)), has_history=True)


async def test_all_histories_are_played_before_the_common_start(
    service: PacedConversations, address: Address
) -> None:
    """One process has nothing to play beforehand, and waits for the other one."""
    service.token_s = 0.2
    fresh = Script(1, Conversation("1", (TurnLengths(5, 1),)), (Due(0.0, 0.0),))
    outcome = await player_pool.replay(At(address), INFO, [begun(0), fresh], RunOptions(processes=2))
    assert len(service.prompts[0]) == 19
    history, *others = [(r.conversation, r.turn, r.done_s > 0) for r in outcome.records]
    assert history == (0, 0, False) and sorted(others) == [(0, 1, True), (1, 0, True)]
    first = service.log.index(("done", "sessions/0"))
    assert first == 1, "nothing was sent before the history was there"


async def test_no_session_goes_before_all_have_ended(service: PacedConversations, address: Address) -> None:
    """A conversation of one process ends long before the other's."""
    service.token_s = 0.01
    talks = (Conversation("short", (TurnLengths(2, 1),)), Conversation("long", (TurnLengths(2, 30),)))
    await player_pool.replay(At(address), INFO, scripts(talks, Arrivals()), RunOptions(processes=2))
    kinds = [kind for kind, _ in service.log]
    assert kinds[-2:] == ["deleted", "deleted"] and kinds.count("done") == 2


async def test_a_process_that_dies_is_an_error(service: PacedConversations, address: Address) -> None:
    killed = set[int]()

    def kill() -> None:
        if not killed:
            killed.add(max(client_processes()))
            os.kill(max(killed), signal.SIGKILL)

    service.token_s = 60.0
    with pytest.raises(ClientFailed, match=r"client process \d ended with status -9"):
        await play(address, on_send=kill)
    assert not client_processes()


async def test_a_process_that_fails_says_why() -> None:
    with pytest.raises(ClientFailed, match=r"(?s)status 1.*nowhere://x.*is not pensieve://HOST:PORT"):
        await play(Address("nowhere://x", None))


async def test_a_server_that_is_gone_is_the_targets_failure() -> None:
    with pytest.raises(TurnFailed, match="UNAVAILABLE"):
        await play(Address("http://127.0.0.1:1", None))
    assert not client_processes()


async def test_cancelling_ends_the_processes(service: PacedConversations, address: Address) -> None:
    service.token_s = 60.0
    playing = asyncio.create_task(play(address))
    assert await asyncio.to_thread(service.on_turn.wait, 30)
    assert len(client_processes()) == 2
    playing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await playing
    assert not client_processes()


async def hired_process(
    address: Address, work: list[Script]
) -> tuple[asyncio.subprocess.Process, wire.PoolChannel]:
    """A process that is told what to do by hand."""
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", "-m", wire.__name__, str(theirs.fileno())), pass_fds=(theirs.fileno(),)
        )
    channel = await wire.PoolChannel.from_socket(ours, wire.PlayerMessage)
    channel.send(wire.Job(address, INFO, tuple(work), RunOptions()))
    return process, channel


async def ready_process(address: Address) -> tuple[asyncio.subprocess.Process, wire.PoolChannel]:
    process, channel = await hired_process(address, scripts(TALKS, Arrivals()))
    await channel.receive(wire.PlayerReady)
    return process, channel


async def test_a_process_without_its_crew_ends_before_its_work_has_begun(
    service: PacedConversations, address: Address
) -> None:
    service.token_s = 600.0
    process, channel = await hired_process(address, [begun(0)])
    assert await asyncio.to_thread(service.on_turn.wait, 30)
    await channel.close()
    assert await process.wait() == 0


async def test_a_process_without_its_crew_ends(service: PacedConversations, address: Address) -> None:
    """What happens when the crew is killed in the middle of a run."""
    service.token_s = 60.0
    process, channel = await ready_process(address)
    channel.send(wire.Go(time.perf_counter()))
    assert await asyncio.to_thread(service.on_turn.wait, 30)
    await channel.close()
    assert await process.wait() == 0


async def test_times_count_from_the_instant_that_the_crew_names(address: Address) -> None:
    process, channel = await ready_process(address)
    channel.send(wire.Go(time.perf_counter() - 1000.0))
    await channel.receive(wire.TurnSent)
    while isinstance(message := await channel.receive(wire.TurnSent | wire.TurnEnded), wire.TurnSent):
        pass
    record = message.record
    assert record.due_s >= 1000 and record.sent_s >= 1000 and record.arrivals[0][1] >= 1000
    await channel.close()
    await process.wait()


async def test_the_key_goes_with_the_address(service: PacedConversations, address: Address) -> None:
    await play(Address(address.url, "secret"))
    assert service.bearers == {"Bearer secret"}


@pytest.mark.parametrize("url", ["pensieve://127.0.0.1:1", "http://127.0.0.1:1"])
def test_targets_say_where_they_are(url: str) -> None:
    target = parse_target(url, "secret")
    assert isinstance(target, RemoteTarget) and target.address() == Address(url, "secret")


async def test_a_target_inside_this_process_is_refused() -> None:
    class Inside:
        name = "inside"

        async def open(self) -> TargetInfo:
            return INFO

        async def close(self) -> None: ...

    plan = ReplayPlan(Dataset("d", TALKS, "0"), Shaping(), Arrivals(), RunOptions(processes=2))
    with pytest.raises(ValueError, match="inside runs in this process"):
        await run(plan, [Inside()])  # type: ignore[list-item]
