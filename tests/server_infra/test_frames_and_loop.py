"""Framing limits, strict decoding, and the engine loop."""

from __future__ import annotations

import gc
import pickle
import socket
import struct
import threading

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pensieve import frames
from pensieve.core import Sampling
from pensieve.engine.messages import (
    Cancel,
    Command,
    EngineReady,
    Event,
    Evict,
    Evicted,
    Failed,
    Finished,
    Output,
    Report,
    Stats,
    Stepping,
    Stop,
    Submit,
)
from pensieve.engine.process.host import settle_collector
from pensieve.engine.process.loop import run_engine
from pensieve.frames import (
    MAX_FRAME,
    FrameError,
    FrameSocket,
    PeerClosed,
    decoder_for,
    encode_frame,
    frame_length,
)
from support.engine.fake_engine import FakeEngine, Script

COMMANDS = decoder_for(Command)


def pair() -> tuple[FrameSocket, socket.socket]:
    ours, theirs = socket.socketpair()
    return FrameSocket(ours), theirs


def submit(request: int, tokens: int = 8) -> Submit:
    return Submit(request=request, session="t/s", tokens=bytes(4 * tokens), num_new=1, sampling=Sampling())


@given(st.lists(st.integers(0, 2**40), min_size=1, max_size=20), st.integers(1, 7))
def test_frames_survive_any_cut(numbers: list[int], piece: int) -> None:
    receiver, sender = pair()
    with sender:
        data = b"".join(encode_frame(Cancel(number)) for number in numbers)
        got: list[Cancel] = []
        for start in range(0, len(data), piece):
            sender.sendall(data[start : start + piece])
            got += receiver.receive(COMMANDS, 0)
        assert got == [Cancel(number) for number in numbers]
        receiver.close()


def test_a_frame_over_the_limit_is_refused_before_it_is_read() -> None:
    receiver, sender = pair()
    sender.sendall(struct.pack("<I", MAX_FRAME + 1))
    with pytest.raises(FrameError, match="over the limit"):
        receiver.receive(COMMANDS, 1)
    with pytest.raises(FrameError):
        frame_length(struct.pack("<I", MAX_FRAME + 1))
    assert frame_length(struct.pack("<I", MAX_FRAME)) == MAX_FRAME
    receiver.close()
    sender.close()


def test_a_message_over_the_limit_is_not_sent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "MAX_FRAME", 200)
    encode_frame(submit(1, tokens=1))
    with pytest.raises(FrameError, match="over the limit of 200"):
        encode_frame(submit(1, tokens=100))


@pytest.mark.parametrize(
    "payload",
    [
        pickle.dumps(Stop()),
        b"",
        b"\xc1",
        msgspec.msgpack.encode({"type": "submit"}),
        msgspec.msgpack.encode({"type": "cancel", "request": "1"}),
        msgspec.msgpack.encode({"type": "no such command"}),
        msgspec.msgpack.encode([1, 2, 3]),
        msgspec.msgpack.encode({"type": "cancel", "request": 1}) + b"\x00",
    ],
)
def test_anything_but_a_command_is_refused(payload: bytes) -> None:
    receiver, sender = pair()
    sender.sendall(struct.pack("<I", len(payload)) + payload)
    with pytest.raises(FrameError, match="undecodable"):
        receiver.receive(COMMANDS, 1)
    receiver.close()
    sender.close()


def test_the_end_of_the_stream_is_seen_on_both_ways() -> None:
    receiver, sender = pair()
    sender.close()
    with pytest.raises(PeerClosed):
        receiver.receive(COMMANDS, 1)
    with pytest.raises(PeerClosed):
        receiver.send(Stop())
    receiver.close()


class ScriptedChannel:
    """Gives one list of commands per iteration, then Stop; keeps what was reported."""

    def __init__(self, *batches: list[Command]) -> None:
        self.batches = list(batches)
        self.reports: list[Report] = []
        self.timeouts: list[float] = []
        self.announced: list[Stepping] = []

    def receive(self, timeout: float) -> list[Command]:
        self.timeouts.append(timeout)
        return self.batches.pop(0) if self.batches else [Stop()]

    def send(self, report: Report) -> None:
        steps = [event for event in report.events if isinstance(event, Stepping)]
        if not steps:
            self.reports.append(report)
        self.announced += steps


def engine() -> FakeEngine:
    return FakeEngine(Script(step_s=0))


def test_the_first_report_is_ready_and_each_iteration_sends_one() -> None:
    channel = ScriptedChannel([submit(1), submit(2), Evict(call=7)], [], [], [])
    run_engine(engine(), channel)
    assert isinstance(channel.reports[0].events[0], EngineReady)
    assert len(channel.reports) == 1 + 4
    first_step = channel.reports[1].events
    assert Evicted(call=7, tokens=77) in first_step
    assert {event.request for event in first_step if isinstance(event, Output)} == {1, 2}
    assert [report.stats.steps_total for report in channel.reports] == [0, 1, 2, 3, 4]
    assert sum(isinstance(event, Finished) for event in channel.reports[-1].events) == 2


def test_with_work_nothing_is_waited_for_and_idle_it_beats() -> None:
    channel = ScriptedChannel([], [submit(1)], [], [], [], [])
    run_engine(engine(), channel)
    assert [timeout > 0 for timeout in channel.timeouts] == [True, True, False, False, False, True, True]
    assert max(channel.timeouts) <= 1.0
    heartbeat, size = channel.reports[1], 4 << 20
    stats = Stats(device_held=size, device_wanted=size, device_floor=size, device_ceiling=size)
    assert heartbeat == Report(events=(), stats=stats)


def test_waiting_work_that_cannot_step_does_not_spin() -> None:
    channel = ScriptedChannel([submit(1)], [], [])
    run_engine(FakeEngine(Script(never_steps=True)), channel)
    assert channel.timeouts[2] > 0 and channel.timeouts[3] > 0


def test_a_refusal_is_reported_even_when_there_is_nothing_to_step() -> None:
    channel = ScriptedChannel([submit(1, tokens=5000)])
    run_engine(engine(), channel)
    assert isinstance(channel.reports[1].events[0], Failed)


def test_steps_are_announced_when_they_are_unlike_the_one_before() -> None:
    channel = ScriptedChannel([submit(1, tokens=100)], [], [], [submit(2, tokens=5)], [], [], [], [])
    run_engine(engine(), channel)
    said = [(one.tokens, set(one.requests)) for one in channel.announced]
    assert said == [(101, {1}), (1, {1}), (7, {1, 2}), (1, {2})]


def test_what_cannot_even_be_taken_in_is_named() -> None:
    class Fragile(FakeEngine):
        def handle(self, command: Command) -> list[Event]:
            if isinstance(command, Submit) and command.request == 2:
                raise ValueError("what is this")
            return super().handle(command)

    channel = ScriptedChannel([submit(1)], [submit(2)])
    with pytest.raises(ValueError, match="what is this"):
        run_engine(Fragile(Script(step_s=0)), channel)
    assert channel.announced[-1] == Stepping(0, (2,))


@pytest.mark.fault(29)
def test_an_exception_leaves_the_loop() -> None:
    channel = ScriptedChannel([submit(1)], [], [])
    with pytest.raises(RuntimeError, match="device-side assert"):
        run_engine(FakeEngine(Script(step_s=0, raise_at_step=2)), channel)
    assert len(channel.reports) == 2


def test_the_loop_over_a_real_socket_serves_while_commands_keep_coming() -> None:
    from pensieve.engine.process.host import SocketChannel

    ours, theirs = socket.socketpair()
    frames_out, frames_in = FrameSocket(ours), FrameSocket(theirs)
    thread = threading.Thread(target=run_engine, args=(engine(), SocketChannel(frames_in)))
    thread.start()
    for number in range(1, 101):
        frames_out.send(submit(number))
    finished = 0
    while finished < 100:
        for report in frames_out.receive(decoder_for(Report), 5):
            finished += sum(isinstance(event, Finished) for event in report.events)
    frames_out.send(Stop())
    thread.join(10)
    assert not thread.is_alive()
    frames_out.close()
    frames_in.close()


def test_the_objects_of_a_step_start_no_search_for_garbage() -> None:
    searches: list[str] = []

    def note(phase: str, _: object) -> None:
        searches.append(phase)

    before = gc.get_threshold()
    gc.set_threshold(700, 10, 10)  # Python's own
    settle_collector()
    gc.callbacks.append(note)
    try:
        step = [submit(number) for number in range(2000)]
        assert not searches and gc.get_freeze_count() > 10_000
        kept = [[number] for number in range(25_000)]
        assert searches, "garbage is looked for now and then"
    finally:
        gc.callbacks.remove(note)
        gc.unfreeze()
        gc.set_threshold(*before)
    assert len(step) + len(kept) == 27_000
