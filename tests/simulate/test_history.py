"""The gap on a server's own history: its store says what was served, and the gap is what the real cache would find."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from pensieve.client import AsyncClient
from pensieve.config import CacheConfig
from pensieve.core import FinishReason, Role, Usage, pack_tokens
from pensieve.engine.cost import CostModel
from pensieve.replay.load.workload import Conversation, TurnLengths, load
from pensieve.server.operations.recording import TraceHeader, open_recorder
from pensieve.simulate import history
from pensieve.simulate.command import simulate
from pensieve.simulate.run import Simulation
from pensieve.simulate.scenario.load import Load
from pensieve.simulate.scenario.machine import Machine
from pensieve.simulate.scenario.settings import Settings
from pensieve.store import Key
from pensieve.store.records import Erasure, Item, Record, RecordKind, TurnResult
from pensieve.store.sqlite_store import SqliteStore
from support.cache.hindsight import HindsightOrder, PastTurn, look_back, returns
from support.page.page_rig import page_rig

INSTANT = Machine(
    weights_s=0.0, token_s=1e-12, kv_s=0.0, pair_s=0.0, row_s=0.0, fixed_s=0.0, swap_bytes_per_s=1e18
)
"""Turns take no time, as in the oracle where they end when they are admitted."""
COST = CostModel(((0, 0.0), (1024, 1.0)), 0.2, 8)


def turn(revision: int, context: int, new: int, output: int, at_ms: int = 0, **usage: float) -> Record:
    """A committed turn: one item of input, a prompt of 2 tokens before the answer."""
    items = (
        Item(2 * revision, Role.USER, "", pack_tokens([1] * (new - 2))),
        Item(2 * revision + 1, Role.ASSISTANT, "", pack_tokens([1] * (2 + output)), prefix_tokens=2),
    )
    receipt = Usage(context_tokens=context, new_tokens=new, output_tokens=output, **usage)  # type: ignore[arg-type]
    result = TurnResult(revision - 1, FinishReason.EOS, usage=receipt, input_items=1)
    return Record(revision, RecordKind.TURN, at_ms, f"r{revision}", items=items, turn=result)


def test_a_turn_that_does_not_go_on_begins_a_new_session() -> None:
    rewound = turn(5, 40, 10, 5, 9_000)
    erased = Record(6, RecordKind.TURN, 9_500, turn=rewound.turn, erased=Erasure("", ""))
    log = [
        Record(1, RecordKind.CREATE, 0),
        turn(2, 20, 20, 10, 4_000, queue_s=0.5, restore_s=0.25, prefill_s=0.75, decode_s=1.0),
        turn(3, 45, 15, 5, 6_000, gpu_cached_tokens=20, swapped_in_tokens=8, recomputed_tokens=2),
        Record(4, RecordKind.REWIND, 7_000, keep_items=5),
        rewound,
        erased,
    ]
    rows = list(history.trace_rows(Key("t", "s"), log))
    told = [
        tuple(row[name] for name in ("session_id", "turn", "input_tokens", "output_tokens")) for row in rows
    ]
    assert told == [("t/s#1", 0, 20, 10), ("t/s#1", 1, 15, 5), ("t/s#2", 0, 40, 5)]
    assert [row["timestamp_s"] for row in rows] == [1.5, 6.0, 9.0]
    assert [rows[1][f"{name}_tokens"] for name in ("gpu_cached", "swapped_in", "recomputed")] == [20, 8, 2]


async def converse(address: str) -> None:
    """Six sessions, some of which are rewound, forked or answered anew."""
    wishes, words = random.Random(3), ["some", "words", "that", "take", "a", "few", "chunks", "of", "room"]
    async with AsyncClient(address) as client:
        chats = [await client.create_session() for _ in range(6)]
        for number in range(6):
            for chat in chats:
                text = " ".join(words[: wishes.randint(3, len(words))])
                await chat.send(text, max_output_tokens=wishes.randint(2, 6))
                await asyncio.sleep(0.02)
            if number == 3:
                branch = await chats[0].fork()
                await branch.send("and now another way", max_output_tokens=3)
                await chats[1].regenerate(max_output_tokens=3)


async def test_the_store_says_what_a_recording_says(tmp_path: Path) -> None:
    """Lengths, order and receipts are equal. Arrivals are later by waits that no receipt has, as of a busy machine."""
    store, trace = SqliteStore(tmp_path / "history.db"), tmp_path / "trace.jsonl"
    recorder = open_recorder(trace)
    recorder.start(TraceHeader("1", {}))
    async with page_rig(tmp_path, store=store, on_turn_ended=recorder.turn_ended) as rig:
        await converse(rig.address)
        totals = rig.engine.stats()
        # Beside a server at work.
        stored = await asyncio.to_thread(history.from_store, f"sqlite:///{tmp_path}/history.db")
    await recorder.close()
    recorded = load(trace).conversations

    def told(talks: tuple[Conversation, ...]) -> list[list[tuple[object, ...]]]:
        ordered = sorted(talks, key=lambda talk: talk.turns[0].timestamp_s or 0.0)
        return [
            [(one.input_tokens, one.output_tokens, one.receipt) for one in talk.turns] for talk in ordered
        ]

    assert told(stored.conversations) == told(recorded) and len(recorded) == 8
    times = [
        sorted(one.timestamp_s or 0.0 for talk in talks for one in talk.turns)
        for talks in (stored.conversations, recorded)
    ]
    for ours, theirs in zip(*times, strict=True):
        assert ours - times[0][0] == pytest.approx(theirs - times[1][0], abs=5)
    out = tmp_path / "out.json"
    options = [
        "--device-cache",
        "512tokens",
        "--host-cache",
        "256tokens",
        "--chunk-tokens",
        "8",
        "--no-sharing",
    ]
    policies = ["--policy", "lru", "--policy", "clairvoyant", "--swap-watermark", "0", "--jobs", "1"]
    url = f"sqlite:///{tmp_path}/history.db"
    arguments = ["--store", url, *options, *policies, "--json", str(out)]
    ran = await asyncio.to_thread(CliRunner().invoke, simulate, arguments)
    assert ran.exit_code == 0, ran.output
    report = json.loads(out.read_text())
    gap, lru = report["gap"], report["targets"][0]["tokens"]
    assert totals.recomputed_total > 0, "nothing was lost: the test shows little"
    assert gap["recomputed_in_vain"] == pytest.approx(
        gap["measured"]["recomputed"] - gap["clairvoyant"]["recomputed"]
    )
    assert gap["clairvoyant"]["recomputed"] < gap["measured"]["recomputed"]
    # One turn after the other, and no sharing: simulated it is what it was.
    came = lru["gpu_cached"] + lru["swapped_in"] + lru["recomputed"]
    assert gap["history_tokens"] == came
    for name, simulated in (("device", "gpu_cached"), ("host", "swapped_in"), ("recomputed", "recomputed")):
        assert lru[simulated] / came == pytest.approx(gap["measured"][name], abs=0.05), report["gap"]
    assert "the gap is" in ran.output


def past(seed: int, sessions: int, turns: int) -> list[PastTurn]:
    """Turns at random times, one after the other, with receipts made up."""
    wishes = random.Random(seed)
    lengths: dict[int, int] = {}
    found = []
    for number in range(turns):
        session = wishes.randrange(sessions)
        before, new, output = lengths.get(session, 0), wishes.randint(3, 40), wishes.randint(1, 20)
        lost = before // 3
        receipt = (before - lost, 0, lost)
        at = float(number) + wishes.random() / 2
        found.append(PastTurn(str(session), at, at, before + new, before, output, receipt, True))
        lengths[session] = before + new + output
    return found


def simulated(turns: list[PastTurn], device: int, host: int, policy: str) -> dict[str, object]:
    by_session: dict[str, list[TurnLengths]] = {}
    for one in turns:
        lengths = TurnLengths(one.context - one.history, one.output, one.admitted, one.receipt)
        by_session.setdefault(one.session, []).append(lengths)
    talks = tuple(Conversation(key, tuple(some)) for key, some in by_session.items())
    cache = CacheConfig(device, host, 8, swap_watermark=0.0, decode_reserve=0.0, prefix_sharing=False)
    settings = Settings(INSTANT, cache, COST, context_limit=8 * device)
    targets = [Simulation(settings, Load(talks), "turns", name).run() for name in (policy, "clairvoyant")]
    found = history.gap(talks, None, targets)
    assert found is not None
    replayed = history.gap(talks, None, [{"target": "clairvoyant", "tokens": targets[0]["tokens"]}])
    assert replayed is not None
    return {**found, "replayed": replayed["clairvoyant"]}


@pytest.mark.parametrize(("device", "host"), [(60, 0), (60, 30), (400, 0)])
@pytest.mark.parametrize("policy", ["lru", "retention"])
def test_the_gap_is_that_of_the_cache_itself(device: int, host: int, policy: str) -> None:
    for seed in range(3):
        turns = past(seed, 12, 90)
        order = HindsightOrder(
            device,
            host,
            8,
            policy,
            0.0,
            COST.attention,
            COST.other,
            tuple(turns),  # type: ignore[arg-type]
        )
        truth, ours = look_back(order), simulated(turns, device, host, policy)
        for name in ("turns", "history_tokens"):
            assert ours[name] == truth[name]
        for name in ("measured", "replayed", "clairvoyant"):
            assert ours[name] == pytest.approx(truth[name]), (seed, name)


def test_the_oracle_knows_when_sessions_come_back() -> None:
    turns = [PastTurn(f"s{n % 3}", n, n + 0.5, 40, 0, 0, (0, 0, 0), True) for n in range(6)]
    assert returns(turns)[:3] == [3.0, 4.0, 5.0] and min(returns(turns)[3:]) > 1e6


def test_without_receipts_no_gap_is_told() -> None:
    talk = Conversation("a", (TurnLengths(5, 4, 0.0), TurnLengths(5, 4, 1.0)))
    assert history.gap([talk], None, []) is None
    receipts = Conversation("a", (TurnLengths(5, 4, 0.0), TurnLengths(5, 4, 1.0, (9, 0, 0))))
    assert history.gap([talk, receipts], None, []) is None, "one of the two turns has none"
    found = history.gap([receipts], None, [])
    assert found is not None and found["clairvoyant"] is None and found["measured"]["device"] == 1.0
    assert history.gap([receipts], (0.0, 0.5), []) is None, "no turn came back in this window"


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        ([], "give TRACE or --store"),
        (["sharegpt", "--store", "sqlite:///x.db"], "give TRACE or --store"),
        (["--store", "memory:"], "not a store on a disk or in Redis"),
        (["--store", "sqlite:///nowhere/at/all.db"], "nowhere/at/all.db"),
    ],
)
def test_bad_stores_are_refused(arguments: list[str], told: str) -> None:
    result = CliRunner().invoke(simulate, arguments)
    assert result.exit_code in (1, 2) and told in result.output, result.output
