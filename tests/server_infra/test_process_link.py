"""The link to an engine process: deals events, survives every way an engine can die, leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import pytest

from pensieve.core import FinishReason, Sampling, SessionKey
from pensieve.debug import child_environment
from pensieve.engine.messages import Finished, Output, RequestProgress, Started
from pensieve.errors import (
    ContextLimitExceeded,
    Internal,
    InvalidArgument,
    PensieveError,
    ResourceExhausted,
    Unavailable,
)
from pensieve.server.child import ChildProcess, RestartBackoff, SilenceTimer
from pensieve.server.links.engine_link import LinkState
from pensieve.server.links.process_link import EngineProcess, HostCommand, ProcessLink
from support.engine.fake_engine import BUILDER, Script, options
from support.service.listener import Listened, Listener, submission

SESSION = SessionKey("default/abc")
LONG = Sampling(max_output_tokens=100_000)


@asynccontextmanager
async def running(script: Script, *, stall_limit_s: float = 30.0) -> AsyncIterator[ProcessLink]:
    link = ProcessLink(options(script), builder=BUILDER, stall_limit_s=stall_limit_s)
    await link.start()
    try:
        yield link
    finally:
        await link.stop()


def submit(link: ProcessLink, sampling: Sampling | None = None, length: int = 8) -> Listened:
    return Listened(link, SESSION, np.arange(length, dtype=np.int32), sampling or Sampling())


async def until(condition: object, *, seconds: float = 20.0) -> None:
    assert callable(condition)
    async with asyncio.timeout(seconds):
        while not condition():
            await asyncio.sleep(0.01)


def alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_generation_comes_in_order_and_ends() -> None:
    async with running(Script()) as link:
        assert link.info.context_limit == 4096
        events = [event async for event in submit(link)]
        kinds = [type(event) for event in events]
        assert kinds[0] is Started and kinds[-1] is Finished and RequestProgress in kinds
        tokens = [token for event in events if isinstance(event, Output) for token in event.token_ids]
        assert tokens == [0, 1, 2, 3]
        finished = events[-1]
        assert isinstance(finished, Finished) and finished.reason is FinishReason.LENGTH
        assert finished.usage.reconciles
        assert link.stats.output_total == 4


async def test_many_generations_run_at_once_and_do_not_mix() -> None:
    async with running(Script()) as link:
        sizes = range(1, 40)

        async def count(size: int) -> int:
            generation = submit(link, Sampling(max_output_tokens=size))
            return sum([len(event.token_ids) async for event in generation if isinstance(event, Output)])

        assert await asyncio.gather(*map(count, sizes)) == list(sizes)


async def test_calls_are_answered() -> None:
    async with running(Script()) as link:
        assert await link.evict() == 77
        assert await link.evict(SESSION) == len(SESSION)
        assert (await link.residency(SESSION)).host_tokens == 2
        warmed = await link.warm(SESSION, np.arange(5, dtype=np.int32), scope="tenants/t")
        assert (warmed.refused, warmed.device_tokens, warmed.host_tokens) == ("tenants/t", 5, len(SESSION))


async def test_cancel_ends_the_events_and_frees_the_engine() -> None:
    async with running(Script()) as link:
        generation = submit(link, LONG)
        await generation.first_output()
        generation.cancel()
        heard = len(generation.events)
        generation.cancel()
        await until(lambda: link.stats.running == 0)
        assert len(generation.events) == heard and generation.ends == 0


async def test_cancel_never_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when so much waits to be read by the engine that it cannot be told: nothing more is heard of it here."""

    def full(command: object) -> None:
        raise ResourceExhausted("too much waits")

    async with running(Script()) as link:
        generation = submit(link, LONG)
        await generation.first_output()
        with monkeypatch.context() as patch:
            assert link._process is not None
            patch.setattr(link._process, "send", full)
            generation.cancel()
        heard = len(generation.events)
        assert [event async for event in submit(link)]
        assert len(generation.events) == heard and generation.ends == 0


async def test_cancel_before_the_first_event() -> None:
    async with running(Script()) as link:
        generation = submit(link, LONG)
        generation.cancel()
        assert [event async for event in submit(link)]
        await until(lambda: link.stats.running == 0)
        assert generation.events == [] and generation.ends == 0


async def test_a_bug_in_a_sink_costs_its_own_generation_only() -> None:
    class Broken(Listener):
        def tokens(self, event: Output) -> None:
            raise KeyError("a bug")

    async with running(Script()) as link:
        pid, broken, others = link.pid, Broken(), [submit(link) for _ in range(3)]
        link.submit(submission(SESSION, np.arange(8, dtype=np.int32), LONG), broken)
        others += [submit(link) for _ in range(3)]
        with pytest.raises(KeyError, match="a bug"):
            async for _ in broken:
                pass
        for generation in others:
            assert [event async for event in generation][-1] == generation.events[-1]
            assert generation.token_ids == [0, 1, 2, 3]
        await until(lambda: link.stats.running == 0)
        assert link.pid == pid and link.restarts_total == 0 and broken.ends == 1


async def test_a_context_that_can_never_fit_is_the_callers_error() -> None:
    async with running(Script()) as link:
        with pytest.raises(ContextLimitExceeded):
            await submit(link, length=5000).first_output()
        with pytest.raises(ContextLimitExceeded):
            submit(link, length=17 * 1024 * 1024)  # over MAX_FRAME: never leaves the front end
        assert [event async for event in submit(link)]


@pytest.mark.fault(27)
async def test_kill_9_ends_running_generations_and_a_new_engine_serves() -> None:
    async with running(Script()) as link:
        generation, call = submit(link, LONG), asyncio.ensure_future(link.residency(SESSION))
        await generation.first_output()
        await call
        first_pid = link.pid
        assert first_pid is not None
        os.kill(first_pid, signal.SIGKILL)
        with pytest.raises(Unavailable) as caught:
            async for _ in generation:
                pass
        assert caught.value.reason == "ENGINE_RESTARTING"
        assert caught.value.retry_after_s is not None
        assert link.state is LinkState.RESTARTING
        with pytest.raises(Unavailable, match="restarting"):
            submit(link)
        await until(lambda: link.state is LinkState.SERVING)
        assert link.pid != first_pid
        assert link.restarts_total == 1
        assert [event async for event in submit(link)]


@pytest.mark.fault(29, 30)
async def test_an_exception_in_a_step_ends_the_engine_it_never_carries_on(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    script = Script(raise_at_step=3, only_in_life=str(tmp_path / "life"))
    async with running(script) as link:
        first_pid = link.pid
        with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
            async for _ in submit(link, LONG):
                pass
        await until(lambda: link.state is LinkState.SERVING)
        assert link.pid != first_pid
        assert [event async for event in submit(link)]
    errors = capfd.readouterr().err
    assert "Traceback" in errors and "device-side assert triggered" in errors


@pytest.mark.fault(28)
async def test_a_stalled_engine_is_killed_and_replaced(tmp_path: Path) -> None:
    script = Script(hang_at_step=3, only_in_life=str(tmp_path / "life"))
    async with running(script, stall_limit_s=0.4) as link:
        with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
            async for _ in submit(link, LONG):
                pass
        await until(lambda: link.state is LinkState.SERVING)
        assert link.restarts_total == 1
        assert [event async for event in submit(link)]


async def test_heartbeats_without_steps_are_a_stall_when_work_waits() -> None:
    async with running(Script(never_steps=True), stall_limit_s=2.0) as link:
        first_pid = link.pid
        generation = submit(link)
        with pytest.raises(Unavailable, match="ENGINE_RESTARTING"):
            await generation.first_output()
        await until(lambda: link.pid not in (None, first_pid))


async def test_idling_is_no_stall() -> None:
    async with running(Script(), stall_limit_s=1.0) as link:
        pid = link.pid
        for _ in range(1000):
            link._watchdog.tick(1.0, work_waits=False)
            link._watchdog.on_report(link.stats)
        assert not link.stalled
        assert link.pid == pid and link.restarts_total == 0


@pytest.mark.parametrize(
    ("script", "kind", "words"),
    [
        (Script(fail_to_start="no such folder: /models/x"), InvalidArgument, "no such folder: /models/x"),
        (Script(raise_to_start="pool too large"), Internal, "RuntimeError: pool too large"),
        (Script(exit_to_start=True, chatter="x\nout of memory\n"), Internal, "status 5 after: out of memory"),
    ],
)
async def test_a_failed_start_says_why_in_the_engines_own_words(
    script: Script, kind: type[PensieveError], words: str
) -> None:
    link = ProcessLink(options(script), builder=BUILDER)
    with pytest.raises(kind) as caught:
        await link.start()
    assert words in caught.value.message
    assert link.pid is None
    await link.stop()


async def test_a_process_that_does_not_end_in_time_is_killed() -> None:
    process = await ChildProcess.launch(lambda _: ["sleep", "600"], os.environ)
    async with asyncio.timeout(20):
        assert await process.wait(0.05) == -signal.SIGKILL
    assert process.describe_exit(-signal.SIGKILL) == "ended with signal 9 from here"


async def test_failed_restarts_are_tried_again() -> None:
    async with running(Script()) as link:
        good, bad = link._command, options(Script(fail_to_start="gone"))
        link._command = type(good)(options=bad, builder=good.builder)
        assert link.pid is not None
        os.kill(link.pid, signal.SIGKILL)
        await until(lambda: link.state is LinkState.RESTARTING)
        link._command = good
        await until(lambda: link.state is LinkState.SERVING)


async def test_stop_ends_generations_and_the_process() -> None:
    async with running(Script()) as link:
        pid = link.pid
        assert pid is not None
        generation = submit(link, LONG)
        await generation.first_output()
    with pytest.raises(Unavailable) as caught:
        async for _ in generation:
            pass
    assert caught.value.reason == "DRAINING"
    assert not alive(pid)
    with pytest.raises(Unavailable, match="DRAINING"):
        submit(link)


async def test_stop_while_restarting_leaves_no_process() -> None:
    link = ProcessLink(options(Script()), builder=BUILDER)
    await link.start()
    assert link.pid is not None
    os.kill(link.pid, signal.SIGKILL)
    await until(lambda: link.state is LinkState.RESTARTING)
    await link.stop()
    assert link.pid is None


async def test_sigterm_and_sigint_to_the_whole_group_do_not_end_the_engine() -> None:
    async with running(Script()) as link:
        assert link.pid is not None
        for number in (signal.SIGTERM, signal.SIGINT):
            os.kill(link.pid, number)
        assert [event async for event in submit(link)]
        assert link.restarts_total == 0


def test_the_engine_dies_with_the_front_end_even_when_stuck() -> None:
    program = """
        import asyncio, os
        import numpy as np
        from support.engine.fake_engine import BUILDER, Script, options
        from pensieve.core import Sampling, SessionKey
        from pensieve.server.links.process_link import ProcessLink
        from support.service.listener import Listener, submission

        async def main():
            link = ProcessLink(options(Script(hang_at_step=1)), builder=BUILDER)
            await link.start()
            link.submit(submission(SessionKey("t/s"), np.arange(3, dtype=np.int32), Sampling()), Listener())
            await asyncio.sleep(0.2)
            print(link.pid, flush=True)
            os._exit(137)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(program)],
        env=child_environment(),
        stdout=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    assert done.returncode == 137
    pid = int(done.stdout)
    for _ in range(500):
        if not alive(pid) or "Z" in Path(f"/proc/{pid}/stat").read_text().split()[2]:
            return
        time.sleep(0.02)
    os.kill(pid, signal.SIGKILL)
    pytest.fail("the engine outlived its front end")


async def test_a_cancelled_wait_closes_what_it_would_have_closed() -> None:
    """A link that is stopped while it waits for a dying engine: nobody comes back to that engine's socket."""
    command = HostCommand(options=options(Script()), builder=BUILDER)
    process = await EngineProcess.spawn(command, failpoints=False)
    waiting = asyncio.create_task(process.wait(60.0))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    with pytest.raises(ConnectionError):
        await process._writer.drain()
    process.kill()
    assert await process.wait(10.0) < 0


def test_pauses_between_starts_double_and_begin_anew_after_a_steady_life() -> None:
    pauses = RestartBackoff(0.2, 30.0, 60.0)
    assert [pauses.next_pause_s() for _ in range(9)] == [0.2, 0.4, 0.8, 1.6, 3.2, 6.4, 12.8, 25.6, 30.0]
    pauses.record_lifetime(60.0)
    assert pauses.next_pause_s() == 30.0
    pauses.record_lifetime(61.0)
    assert [pauses.next_pause_s(), pauses.next_pause_s()] == [0.2, 0.4]


def test_a_server_that_was_stopped_for_minutes_blames_no_child() -> None:
    silence = SilenceTimer(tick_s=0.25)
    silence.advance(0.25)
    assert silence.advance(600.0) == 0.5
    assert silence.seconds == 0.75
    silence.reset()
    assert silence.seconds == 0.0
