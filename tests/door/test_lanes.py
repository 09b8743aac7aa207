"""Long texts of one tenant do not make another wait: row 19 of the fault matrix."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from pensieve.core import Role, pack_tokens
from pensieve.errors import ResourceExhausted
from pensieve.server.history.lanes import MAX_SHORT_CHARS, MAX_WAITING_CHARS, CallerLeft, Check, TextLanes
from pensieve.server.history.rendering import ContextRoom, ItemStamp, Renderer
from pensieve.server.values import InputEntry, ToolEntry
from pensieve.speech import FunctionCall
from pensieve.store.records import History, Overflow, SessionConfig
from pensieve.v1 import pensieve_pb2 as pb
from support.http.tool_rig import speaker
from support.service.service_rig import refusal, serving, spec, tokenizer, user
from support.tool_templates import WEATHER

LONG = 10 * MAX_SHORT_CHARS


class Bench:
    """Work whose order is written down, and which waits until it is let go."""

    def __init__(self) -> None:
        self.lanes = TextLanes()
        self.order: list[str] = []
        self.go = threading.Event()
        self.tasks: list[asyncio.Task[None]] = []

    def ask(self, tenant: str, chars: int = LONG, name: str = "") -> asyncio.Task[None]:
        def work(_check: Check) -> None:
            self.order.append(name or tenant)
            assert self.go.wait(30)

        task = asyncio.create_task(self.lanes.run(tenant, chars, work))
        self.tasks.append(task)
        return task

    async def begun(self, count: int) -> None:
        async with asyncio.timeout(30):
            while len(self.order) < count:
                await asyncio.sleep(0.005)

    async def all_done(self) -> None:
        self.go.set()
        await asyncio.wait_for(asyncio.gather(*self.tasks, return_exceptions=True), 30)


@pytest.fixture
async def bench() -> Any:
    made = Bench()
    yield made
    made.go.set()
    made.lanes.close()


async def test_tenants_take_turns(bench: Bench) -> None:
    for _ in range(20):
        bench.ask("flood")
    await bench.begun(1)
    for _ in range(3):
        bench.ask("other")
    await bench.all_done()
    assert len(bench.order) == 23
    places = [place for place, name in enumerate(bench.order) if name == "other"]
    assert places[0] <= 2 and places[2] <= 6, bench.order


async def test_turns_are_taken_by_characters(bench: Bench) -> None:
    for _ in range(10):
        bench.ask("long", 4 * LONG)
    await bench.begun(1)
    for _ in range(12):
        bench.ask("shorter", LONG)
    await bench.all_done()
    before_third = bench.order[: [i for i, name in enumerate(bench.order) if name == "long"][3]]
    assert before_third.count("shorter") >= 8, bench.order


async def test_short_texts_wait_for_no_long_one(bench: Bench) -> None:
    for _ in range(5):
        bench.ask("flood")
    await bench.begun(1)
    bench.ask("flood", 100, "short")
    bench.ask("other", 100, "short")
    await bench.begun(3)
    assert bench.order == ["flood", "short", "short"]


async def test_who_leaves_is_skipped_and_takes_no_thread_along(bench: Bench) -> None:
    tasks = [bench.ask("a", name=str(number)) for number in range(6)]
    await bench.begun(1)
    for task in tasks[:4]:  # the first is at work already
        task.cancel()
    await bench.all_done()
    assert bench.order == ["0", "4", "5"]
    await asyncio.wait_for(bench.lanes.run("a", LONG, lambda _: None), 30)


async def test_work_of_a_caller_that_has_left_ends_at_its_next_check(bench: Bench) -> None:
    began, ended, checks = threading.Event(), threading.Event(), 0

    def work(check: Check) -> None:
        nonlocal checks
        began.set()
        try:
            while True:
                check()
                checks += 1
                assert checks < 100_000_000, "goes on for nobody"
        except CallerLeft:
            ended.set()
            raise

    task = asyncio.create_task(bench.lanes.run("a", LONG, work))
    assert await asyncio.to_thread(began.wait, 30)
    task.cancel()
    assert await asyncio.to_thread(ended.wait, 30)
    # Its thread is free for others.
    await asyncio.wait_for(bench.lanes.run("b", LONG, lambda _: None), 30)


async def test_work_that_fails_tells_its_caller_and_frees_its_thread(bench: Bench) -> None:
    def fails(_check: Check) -> None:
        raise ValueError("no")

    for _ in range(5):
        with pytest.raises(ValueError, match="no"):
            await asyncio.wait_for(bench.lanes.run("a", LONG, fails), 30)


async def test_texts_are_processed_again_when_threads_can_be_started(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", none_left)
        for _ in range(5):
            with pytest.raises(ResourceExhausted, match="can't start new thread") as refused:
                await asyncio.wait_for(bench.lanes.run("a", 1, lambda _: None), 30)
            assert refused.value.retry_after_s is not None
    assert await asyncio.wait_for(bench.lanes.run("a", 1, lambda _: 7), 30) == 7


async def test_what_waits_is_bounded_per_tenant(bench: Bench) -> None:
    for _ in range(MAX_WAITING_CHARS // 1_000_000 + 1):
        bench.ask("flood", 1_000_000)
    await bench.begun(1)
    with pytest.raises(ResourceExhausted):
        await bench.lanes.run("flood", 1_000_000, lambda _: None)
    assert not bench.ask("other", 1_000_000).done()
    await bench.all_done()


@pytest.mark.fault(19, 36)
async def test_counting_a_flood_of_long_texts_leaves_others_their_turns() -> None:
    """The real tokenizer; how long it takes for the flood does not matter, only that another tenant is served first."""
    async with serving(context_limit=1 << 20) as rig:
        name = await rig.create()
        text = "the quick brown fox " * 2_000
        request = pb.CountTokensRequest(input=[user(text)])
        flood = [rig.api.CountTokens(request, metadata=(("tenant", "flood"),)) for _ in range(15)]
        done = asyncio.gather(*flood)
        await asyncio.wait([asyncio.ensure_future(flood[0])])
        for _ in range(3):
            assert (await rig.run(name, spec("hi"))).output.text
        assert not done.done(), "the flood was over before the turns were"
        assert {answer.input_tokens for answer in await done} == {(await flood[0]).input_tokens}


async def test_each_text_waits_in_its_tenants_name(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    plain = TextLanes.run

    async def run(self: TextLanes, tenant: str, chars: int, work: Any) -> Any:
        seen.append(tenant)
        return await plain(self, tenant, chars, work)

    monkeypatch.setattr(TextLanes, "run", run)
    async with serving() as rig:
        name = await rig.create("Be brief.")
        await rig.run(name, "hi")
        await rig.api.CountTokens(pb.CountTokensRequest(input=[user("hi")]), metadata=(("tenant", "other"),))
        changed = pb.Session(config=pb.SessionConfig(system_prompt="Be long."))
        await rig.api.UpdateSession(pb.UpdateSessionRequest(name=name, session=changed))
    assert seen[:3] == ["acme", "acme", "other"] and set(seen[3:]) == {"acme"}


@pytest.mark.fault(36)
async def test_many_short_messages_are_as_much_work_as_a_long_one(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    plain = TextLanes.run

    async def run(self: TextLanes, tenant: str, chars: int, work: Any) -> Any:
        seen.append(chars)
        return await plain(self, tenant, chars, work)

    monkeypatch.setattr(TextLanes, "run", run)
    async with serving(context_limit=1 << 16) as rig:
        await rig.create(initial_items=[user("a")] * 1000)
        assert seen.pop() > MAX_SHORT_CHARS, "it would stand in the way of short ones"
        await rig.run(await rig.create(), "hi")
        assert seen.pop() <= MAX_SHORT_CHARS


FIRST = ItemStamp(1, "", 0)


@pytest.mark.fault(36)
async def test_tools_calls_and_tokens_are_work_as_text_is() -> None:
    sizes: list[int] = []

    class Noting(TextLanes):
        async def run(self, tenant: str, chars: int, work: Any) -> Any:
            sizes.append(chars)
            return await super().run(tenant, chars, work)

    renderer = Renderer(speaker("qwen"), Noting())
    filling = "x" * MAX_SHORT_CHARS
    shown = History(config=SessionConfig(tools=json.dumps([WEATHER | {"description": filling}])))
    asked = InputEntry(Role.USER, "hi")
    calls = (FunctionCall("weather", json.dumps({"town": filling}), "c1"),)
    large = [
        (shown, asked),
        (History(), ToolEntry(Role.ASSISTANT, "", calls=calls)),
        (History(), InputEntry(Role.USER, tokens=pack_tokens([20] * (MAX_SHORT_CHARS + 1)))),
    ]
    for history, entry in large:
        items, _ = await renderer.items(history, [asked, entry], FIRST)
        assert sizes.pop() > MAX_SHORT_CHARS, entry
    behind = replace(shown, items=items[:1], head_item=1)
    await renderer.items(behind, [asked], FIRST)
    assert sizes.pop() <= MAX_SHORT_CHARS, "tools stand before the first user's words alone"
    renderer.close()


@pytest.mark.fault(36)
async def test_rendering_looks_whether_its_caller_is_there() -> None:
    class Counting(TextLanes):
        left = False
        checks = 0

        async def run(self, _tenant: str, _chars: int, work: Any) -> Any:
            def check() -> None:
                self.checks += 1
                if self.left:
                    raise CallerLeft

            return work(check)

    lanes = Counting()
    renderer = Renderer(tokenizer(), lanes)

    async def checks(count: int, chars: int) -> int:
        before = lanes.checks
        await renderer.items(History(), [InputEntry(Role.USER, "x" * chars)] * count, FIRST)
        return lanes.checks - before

    few = await checks(8, 1)
    assert await checks(500, 1) > few, "while the template writes"
    assert await checks(8, 10_000) > few, "while the text becomes tokens"
    lanes.left = True
    entries, room = [InputEntry(Role.USER, "hi")], ContextRoom(1 << 20, Overflow.REJECT, None)
    with pytest.raises(CallerLeft):
        await renderer.items(History(), entries, FIRST)
    with pytest.raises(CallerLeft):
        await renderer.prepare(History(), entries, FIRST, room)
    renderer.close()


TOO_LONG = ("OUT_OF_RANGE", "CONTEXT_LIMIT_EXCEEDED")


@pytest.mark.fault(19)
async def test_what_can_never_fit_is_not_tokenised(monkeypatch: pytest.MonkeyPatch) -> None:
    async with serving() as rig:

        async def never(*_: Any) -> Any:
            pytest.fail("tokenised")

        name = await rig.create()
        monkeypatch.setattr(TextLanes, "run", never)
        huge = [user("x" * 900_000)]
        many = [user("x")] * 300  # each has a control token of its own
        dropping = pb.SessionConfig(overflow_policy=pb.OVERFLOW_POLICY_DROP_OLDEST_TURNS)
        for call in (
            rig.api.CountTokens(pb.CountTokensRequest(input=huge)),
            rig.api.CountTokens(pb.CountTokensRequest(session=name, input=huge)),
            rig.create(initial_items=huge),
            rig.create(initial_items=huge, config=dropping),
            rig.create(initial_items=many),
            rig.api.AppendItems(pb.AppendItemsRequest(name=name, items=many)),
        ):
            error = await refusal(call)
            assert (error.code, error.reason) == TOO_LONG


def words() -> Iterator[str]:
    yield "x" * 200_000
    yield " " * 200_000
    yield "a\u0301" * 100_000
    yield "🦊" * 50_000


@pytest.mark.fault(19)
async def test_strange_texts_stop_nobody() -> None:
    """One long word, nothing but spaces, combining marks: the loop goes on answering meanwhile."""
    async with serving(context_limit=1 << 20) as rig:
        for text in words():
            count = asyncio.ensure_future(rig.api.CountTokens(pb.CountTokensRequest(input=[user(text)])))
            answered = 0
            while not count.done():
                await rig.api.GetServerInfo(pb.GetServerInfoRequest(), timeout=20)
                answered += 1
            assert (await count).input_tokens > 0 and answered > 0
