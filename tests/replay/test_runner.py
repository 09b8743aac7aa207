"""The runner and the report against a target made of Python."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from collections import defaultdict

import pytest

from pensieve.core import Usage
from pensieve.replay.load.schedule import Arrivals, Due, Script, scripts
from pensieve.replay.load.workload import Conversation, Dataset, Shaping, TurnLengths
from pensieve.replay.measure import (
    Window,
    client_lag,
    cut_to_window,
    is_clean,
    receipt_violations,
    statistics,
    summarise,
)
from pensieve.replay.play.runner import ReplayWatcher, RunWatcher, replay
from pensieve.replay.records import Outcome, PlayResult, RunOptions, TurnRecord, merge_results
from pensieve.replay.session import ReplayPlan, run
from pensieve.replay.targets.base import OnTokens, TargetInfo, TurnFailed, TurnRequest

INFO = TargetInfo(vocab_size=50, context_limit=1000)
TALKS = (
    Conversation("a", (TurnLengths(4, 3), TurnLengths(2, 5), TurnLengths(1, 1))),
    Conversation("b", (TurnLengths(6, 2), TurnLengths(3, 4))),
)


class FakeTarget:
    """Keeps histories as lengths; half of each history is "cached". Fails and lies when told to."""

    name = "fake"

    def __init__(self, *, fail_at: int | None = None, lie: bool = False, short: bool = False) -> None:
        self.fail_at, self.lie, self.short = fail_at, lie, short
        self.contexts: dict[str, int] = {}
        self.running: dict[str, int] = defaultdict(int)
        self.most_running = self.calls = 0
        self.ids: list[list[int]] = []
        self.ended: list[str] = []
        self.closed = False

    async def open(self) -> TargetInfo:
        return INFO

    async def start_session(self) -> str:
        name = f"s{len(self.contexts)}"
        self.contexts[name] = 0
        return name

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        assert not self.running[session], "a turn came before the answer to the one before"
        self.running[session] = 1
        self.most_running = max(self.most_running, sum(self.running.values()))
        self.calls += 1
        self.ids.append(spec.input_ids.tolist())
        if self.calls == self.fail_at:
            raise TurnFailed("UNAVAILABLE", "down")
        for _ in range(spec.output_tokens - self.short):
            await asyncio.sleep(0)
            on_tokens(1, time.perf_counter())
        history, new = self.contexts[session], len(spec.input_ids)
        self.contexts[session] = history + new + spec.output_tokens
        self.running[session] = 0
        cached = history // 2
        return Usage(
            context_tokens=history + new + (self.lie and history > 0),
            new_tokens=new,
            gpu_cached_tokens=cached,
            recomputed_tokens=history - cached,
            output_tokens=spec.output_tokens,
        )

    async def end_session(self, session: str) -> None:
        self.ended.append(session)

    async def close(self) -> None:
        self.closed = True


class Watching(ReplayWatcher, RunWatcher):
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.runs: list[tuple[str, int]] = []
        self.records: list[TurnRecord] = []
        self.sends = 0

    def run(self, target: str, turns: int) -> RunWatcher:
        self.runs.append((target, turns))
        return self

    def on_send(self) -> None:
        self.sends += 1

    def on_turn_end(self, record: TurnRecord) -> None:
        self.records.append(record)


def plan(**run_options: object) -> ReplayPlan:
    return ReplayPlan(
        Dataset("d", TALKS, "0"), Shaping(), Arrivals(seed=3), RunOptions(seed=3, **run_options)  # type: ignore[arg-type]
    )  # fmt: skip


async def play(target: FakeTarget, **options: object) -> Outcome:
    return await replay(target, INFO, scripts(TALKS, Arrivals()), RunOptions(**options))  # type: ignore[arg-type]


async def test_every_turn_once_and_in_order() -> None:
    target = FakeTarget()
    outcome = await play(target)
    assert {(r.conversation, r.turn) for r in outcome.records} == {(0, 0), (0, 1), (0, 2), (1, 0), (1, 1)}
    assert sorted(map(len, target.ids)) == [1, 2, 3, 4, 6]
    assert target.most_running == 2
    for record in outcome.records:
        assert record.due_s <= record.sent_s <= record.arrivals[0][1] <= record.done_s
    assert sorted(target.ended) == ["s0", "s1"], "sessions go after the measurement"


async def test_concurrency_bounds_open_conversations() -> None:
    target = FakeTarget()
    await play(target, concurrency=1)
    assert target.most_running == 1


async def test_a_stall_of_the_client_is_noted_for_its_whole_length() -> None:
    class Stalling(FakeTarget):
        async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
            time.sleep(0.1)
            return await super().turn(session, spec, on_tokens)

    outcome = await play(Stalling(), concurrency=1)
    (lags,) = outcome.loop_lag_s
    assert max(lags) > 0.05
    assert len([lag for lag in lags if lag > 0.01]) > 10, "five stalls, each a few timers long"
    assert not client_lag(outcome, 0.01)["valid"]


async def test_failure_ends_its_conversation_only() -> None:
    target = FakeTarget(fail_at=1)
    outcome = await play(target, concurrency=1)
    summary = summarise(outcome)
    assert summary["turns"] == {"completed": 2, "failed": 1, "skipped": 2}
    assert summary["errors"] == {"UNAVAILABLE": 1}
    assert not is_clean(summary)


async def test_a_session_that_cannot_be_ended_costs_no_result() -> None:
    class Sticky(FakeTarget):
        async def end_session(self, session: str) -> None:
            raise TurnFailed("UNAVAILABLE", "gone")

    outcome = await play(Sticky())
    assert len(outcome.records) == 5 and "gone" in outcome.leftover


def test_what_several_players_did_is_one_outcome() -> None:
    late, early, short = (TurnRecord(n, 0, 1, 0.0, done_s=at) for n, at in enumerate((2.0, 1.0, 3.0)))
    parts = [PlayResult(3.0, 1, (), (0.1,)), PlayResult(3.5, 2, (short,), (0.2, 0.3))]
    whole = merge_results("it", INFO, [late, early], parts, "stuck")
    assert whole.records == (early, late) and whole.cut_short == (short,)
    assert (whole.duration_s, whole.skipped_turns, whole.leftover) == (3.5, 3, "stuck")
    assert whole.loop_lag_s == ((0.1,), (0.2, 0.3))


async def test_forced_lengths_are_checked() -> None:
    assert summarise(await play(FakeTarget(short=True)))["errors"] == {"WRONG_LENGTH": 2}
    outcome = await play(FakeTarget(short=True), force_lengths=False)
    assert not summarise(outcome)["errors"]


async def test_pauses_follow_the_answer() -> None:
    script = scripts(TALKS, Arrivals(think_time_s=0.01, seed=5))
    outcome = await replay(FakeTarget(), INFO, script, RunOptions())
    records = {(r.conversation, r.turn): r for r in outcome.records}
    for (talk, turn), record in records.items():
        if turn:
            pause = script[talk].due[turn].after_answer_s
            assert record.due_s == pytest.approx(records[talk, turn - 1].done_s + pause)
            assert record.sent_s >= record.due_s


def begun(number: int, due_s: float, history: int, *turns: TurnLengths) -> Script:
    """A conversation in progress, whose next turn is its third."""
    talk = Conversation(str(number), (TurnLengths(history - 1, 1), *turns))
    dues = (Due(-due_s, 0.0), *(Due(due_s, 0.0) for _ in turns))
    return Script(number, talk, dues, first_turn=1, has_history=True)


async def test_histories_are_played_before_time_0_in_order_of_age() -> None:
    begun_talks = [
        begun(3, 0.02, 30, TurnLengths(4, 2)),
        begun(1, 0.05, 10, TurnLengths(5, 3), TurnLengths(6, 1)),
    ]
    fresh = Script(9, Conversation("9", (TurnLengths(7, 2),)), (Due(0.03, 0.0),))
    target = FakeTarget()
    found = await replay(target, INFO, [begun_talks[0], fresh, begun_talks[1]], RunOptions())
    assert list(target.contexts.values()) == [10 + 8 + 7, 30 + 6, 9], (
        "the session that was idle longest is the first"
    )
    assert [(r.conversation, r.turn) for r in found.records] == [
        (1, 1),
        (3, 1),
        (3, 2),
        (9, 0),
        (1, 2),
        (1, 3),
    ]
    for record in found.records:
        if record.turn == 1:
            assert record.sent_s == record.due_s < record.done_s == 0.0 >= record.arrivals[0][1]
        else:
            assert 0 < record.due_s <= record.sent_s < record.done_s <= found.duration_s
    assert not receipt_violations(found.records), "receipts go on from the history"
    assert client_lag(found, 10.0)["send_lag_s"]["max"] < 1.0


async def test_what_was_played_beforehand_is_not_measured() -> None:
    found = await replay(FakeTarget(), INFO, [begun(0, 0.01, 20, TurnLengths(4, 2))], RunOptions())
    for window in (Window(), Window(0.0, 10.0)):
        measured, told = cut_to_window(found, window)
        assert [record.turn for record in measured.records] == [2] and told["turns_outside"] == 1


async def test_a_history_that_fails_ends_its_conversation() -> None:
    talks = [begun(1, 0.05, 10, TurnLengths(5, 3), TurnLengths(6, 1)), begun(3, 0.02, 30, TurnLengths(4, 2))]
    found = await replay(FakeTarget(fail_at=1), INFO, talks, RunOptions())
    assert [(r.conversation, r.turn, r.error) for r in found.records] == [
        (1, 1, "UNAVAILABLE"), (3, 1, ""), (3, 2, ""),
    ]  # fmt: skip
    assert found.skipped_turns == 2


async def test_of_a_conversation_that_is_over_only_the_history_is_played() -> None:
    target = FakeTarget()
    talks = [begun(3, 0.02, 30), begun(1, 0.05, 10, TurnLengths(4, 2))]
    found = await replay(target, INFO, talks, RunOptions(concurrency=1))
    assert [(r.conversation, r.turn, r.done_s > 0) for r in found.records] == [
        (1, 1, False), (3, 1, False), (1, 2, True),
    ]  # fmt: skip
    assert not found.cut_short and not found.skipped_turns and sorted(target.ended) == ["s0", "s1"]


async def test_a_load_that_is_over_is_refused() -> None:
    over = dataclasses.replace(plan(), arrivals=Arrivals(rate=100.0, run_in_s=0.2))
    with pytest.raises(ValueError, match="ask for more conversations"):
        await run(over, [FakeTarget()])


async def test_few_histories_at_a_time() -> None:
    """They come in the order of their age only if most have to wait."""
    target = FakeTarget()
    talks = [begun(number, 60.0, 20 + number, TurnLengths(1, 1)) for number in range(200)]
    found = await replay(target, INFO, talks, RunOptions(stop_s=0.01))
    assert target.calls == len(found.records) == 200 and 1 < target.most_running <= 16
    assert list(target.contexts.values()) == [20 + number for number in range(200)]


async def test_report_adds_up() -> None:
    target = FakeTarget()
    seen = Watching()
    report = await run(plan(), [target], seen)
    assert target.closed and seen.runs == [("fake", 5)] and len(seen.records) == 5 == seen.sends
    (summary,) = report["targets"]
    assert is_clean(summary)
    assert report["workload"]["turns"] == summary["turns"]["completed"] == 5
    tokens = summary["tokens"]
    assert tokens["new"] == report["workload"]["input_tokens"] == 16
    assert tokens["output"] == report["workload"]["output_tokens"] == 15
    assert tokens["context"] == 4 + 9 + 15 + 6 + 11
    assert tokens["context"] == sum(tokens[k] for k in ("gpu_cached", "swapped_in", "recomputed", "new"))
    assert [row["turns"] for row in summary["by_turn"]] == [2, 2, 1]
    for key in tokens:
        assert tokens[key] == sum(row["tokens"][key] for row in summary["by_turn"])
    assert summary["ttft_s"]["cold"]["count"] == 2 and summary["ttft_s"]["warm"]["count"] == 3
    assert summary["inter_token_s"]["count"] == 15 - 5
    assert summary["client_lag_s"]["count"] == 5


async def test_all_targets_get_the_same_tokens() -> None:
    one, two = FakeTarget(), FakeTarget()
    await run(plan(concurrency=1), [one, two])
    assert one.ids == two.ids


async def test_false_receipts_are_found() -> None:
    summary = summarise(await play(FakeTarget(lie=True)))
    assert summary["receipts"]["checked"] == 5
    assert summary["receipts"]["violations"] == 3, "each of the three later turns alone"
    assert not is_clean(summary)


def record(turn: int, usage: Usage) -> TurnRecord:
    return TurnRecord(0, turn, usage.new_tokens, 0.0, arrivals=[(2, 1.0)], usage=usage)


def test_each_receipt_rule() -> None:
    first = record(0, Usage(context_tokens=5, new_tokens=5, output_tokens=2))
    second = record(1, Usage(context_tokens=8, new_tokens=1, gpu_cached_tokens=7, output_tokens=2))
    assert receipt_violations([second, first]) == []
    found = record(1, Usage(context_tokens=9, new_tokens=1, gpu_cached_tokens=8, output_tokens=2))
    assert receipt_violations([found, first]) == [], "a part of the input may be in the cache already"
    assert second.usage is not None and first.usage is not None

    def broken(**changes: int) -> str:
        values = {f: getattr(second.usage, f) for f in second.usage.__struct_fields__}
        (problem,) = receipt_violations([first, record(1, Usage(**(values | changes)))])
        return problem

    assert "is not gpu" in broken(gpu_cached_tokens=6)
    assert "turn before" in broken(context_tokens=7, gpu_cached_tokens=6)
    assert "are recomputed" in broken(context_tokens=10, gpu_cached_tokens=1, recomputed_tokens=8)
    assert "tokens arrived" in broken(output_tokens=3)
    (problem,) = receipt_violations(
        [record(0, Usage(context_tokens=5, new_tokens=3, recomputed_tokens=2, output_tokens=2))]
    )
    assert "first turn" in problem
    shared = record(0, Usage(context_tokens=5, new_tokens=2, gpu_cached_tokens=3, output_tokens=2))
    assert not receipt_violations([shared, second]), "a first turn may find what another has computed"


def test_gap_of_a_merged_piece_is_shared_by_its_tokens() -> None:
    merged = TurnRecord(0, 0, 1, 0.0, arrivals=[(1, 1.0), (3, 1.6)], done_s=2.0)
    summary = summarise(Outcome("x", INFO, (merged,), 0, 2.0))
    assert summary["inter_token_s"]["count"] == 3
    assert summary["inter_token_s"]["max"] == pytest.approx(0.2)
    assert summary["normalised_latency_s"]["mean"] == pytest.approx(0.5)
    assert summary["output_tokens_per_s"] == 2.0


def test_statistics_of_nothing() -> None:
    assert statistics([])["mean"] is None
    assert statistics([1.0, 3.0])["p50"] == 2.0


async def test_nothing_fits() -> None:
    small = dataclasses.replace(plan(), context_limit=5)
    with pytest.raises(ValueError, match="scale-lengths"):
        await run(small, [FakeTarget()])
