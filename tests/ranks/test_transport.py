"""What travels between ranks: plans as bytes, and the ring that carries them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading

import msgspec
import numpy as np
import pytest

from pensieve.core import RequestKey, Sampling
from pensieve.engine.plan import NO_PAGE, PENDING, Chain, Copy, PageCheck, Plan, SampleSpec, Span
from pensieve.engine.ranks import ring as rings
from pensieve.engine.ranks.codec import SAMPLED_LATE, SAMPLED_ON_RANK_0, decode, encode
from pensieve.engine.ranks.ring import SLOT_BYTES, SLOTS, RingReader, RingWriter, SharedRing

SPEC = SampleSpec(Sampling(temperature=1.0, seed=3), 5, prompt=np.arange(4, dtype=np.int32))
PLANS = {
    "nothing to compute": Plan(3, swap_out=(Copy(1, 2), Copy(70000, 0)), swap_in=(Copy(5, 6),)),
    "one token": Plan(
        1, (Span(RequestKey(1), 7, np.array([PENDING], np.int32), 0, SPEC),), (np.array([4], np.int32),)
    ),
    "several spans of one request": Plan(
        2,
        (
            Span(RequestKey(9), 0, np.arange(3, dtype=np.int32), 1),
            Span(RequestKey(9), 8, np.arange(5, dtype=np.int32), 1, SPEC),
            Span(RequestKey(2**40), 30, np.array([1], np.int32), 0, msgspec.structs.replace(SPEC, late=True)),
        ),
        (np.array([9, 8], np.int32), np.array([0, 3, 1], np.int32)),
        copies=(Copy(3, 4),),
    ),
    "undecided drafts": Plan(
        3,
        (
            Span(
                RequestKey(9),
                3,
                np.array([-1, 7, 8], np.int32),
                0,
                SPEC,
                drafts=2,
                undecided=np.array([5], np.int32),
            ),
            Span(RequestKey(2), 30, np.array([1], np.int32), 1, SPEC),
            Span(
                RequestKey(3), 6, np.array([-1], np.int32), 0, SPEC, undecided=np.array([4, 2, 1], np.int32)
            ),
        ),
        (np.array([9, 8], np.int32), np.array([0, 3, 1], np.int32)),
    ),
    "windows": Plan(
        4,
        (
            Span(RequestKey(9), 0, np.arange(3, dtype=np.int32), 1, None, 2),
            Span(RequestKey(2), 30, np.array([1], np.int32), 0, SPEC),
        ),
        (np.array([9, 8], np.int32), np.array([0, 3, 1], np.int32)),
        swap_out=(Copy(1, 2, 1), Copy(3, 0)),
        swap_in=(Copy(70000, 6), Copy(5, 6, 1)),
        window_tables=(np.array([-1, 8], np.int32), np.array([7, 7, 1], np.int32)),
    ),
    "states": Plan(
        5,
        (
            Span(RequestKey(9), 0, np.arange(3, dtype=np.int32), 0),
            Span(RequestKey(9), 3, np.arange(5, dtype=np.int32), 0, SPEC),
            Span(RequestKey(2), 30, np.array([1], np.int32), 1, SPEC),
        ),
        (np.array([9, 8], np.int32), np.array([0, 3, 1], np.int32)),
        chains=(Chain(0, 1, NO_PAGE, 7, 4, 2**30), Chain(2, 2, 3, NO_PAGE, 0, 3)),
    ),
    "memory": Plan(6, memory=(0, 2**40)),
    "checks": Plan(7, checks=(PageCheck(-(2**63), 3), PageCheck(2**63 - 1, 70000))),
}


@pytest.mark.parametrize("name", PLANS)
def test_a_plan_arrives_as_it_was_but_for_how_tokens_are_chosen(name: str) -> None:
    plan = PLANS[name]
    found = decode(encode(plan))
    assert found is not None
    assert (found.step, found.swap_out, found.copies, found.swap_in) == (
        plan.step,
        plan.swap_out,
        plan.copies,
        plan.swap_in,
    )
    assert [table.tolist() for table in found.page_tables] == [table.tolist() for table in plan.page_tables]
    assert [table.tolist() for table in found.window_tables] == [
        table.tolist() for table in plan.window_tables
    ]
    assert found.chains == plan.chains and found.memory == plan.memory
    for span, was in zip(found.spans, plan.spans, strict=True):
        assert (span.request, span.start, span.page_table, span.stores) == (
            was.request,
            was.start,
            was.page_table,
            was.stores,
        )
        assert span.tokens.tolist() == was.tokens.tolist() and span.tokens.dtype == np.int32
        assert span.drafts == was.drafts and (span.undecided is None) == (was.undecided is None)
        if span.undecided is not None and was.undecided is not None:
            assert span.undecided.tolist() == was.undecided.tolist() and span.undecided.dtype == np.int32
        if was.sample is None:
            assert span.sample is None
        else:
            assert span.sample == (SAMPLED_LATE if was.sample.late else SAMPLED_ON_RANK_0)


def test_leaving_is_a_message_and_anything_else_is_refused() -> None:
    assert decode(encode(None)) is None
    with pytest.raises(msgspec.DecodeError):
        decode(b"\x91\xa4plan")


def messages() -> list[bytes]:
    """Of all lengths: of no byte, of a slot, of more than the ring holds; and many."""
    random = np.random.default_rng(5)
    lengths = [0, 1, SLOT_BYTES - 1, SLOT_BYTES, SLOT_BYTES + 1, (SLOTS + 3) * SLOT_BYTES + 17]
    lengths += random.integers(0, 3000, 200).tolist()
    return [random.bytes(length) for length in lengths]


def test_every_reader_gets_every_message_in_order() -> None:
    ring, sent = SharedRing.create(3), messages()
    heard: list[list[bytes | None]] = [[], [], []]

    def read(number: int) -> None:
        reader = RingReader(ring, number, spin_s=0.0)
        heard[number] = [reader.receive(30.0) for _ in sent]
        reader.report_backlog(10 * number)

    threads = [threading.Thread(target=read, args=(number,)) for number in range(3)]
    for thread in threads:
        thread.start()
    writer = RingWriter(ring, spin_s=0.0)
    for message in sent:
        writer.send(message)
    for thread in threads:
        thread.join(30)
    assert heard == [sent, sent, sent]
    assert writer.max_backlog() == 20
    ring.close()


def test_answers_about_memory_are_told_apart() -> None:
    """The least of all readers, plan by plan; a reader may be ahead of the writer."""
    ring = SharedRing.create(2)
    writer, (one, two) = RingWriter(ring, spin_s=0.0), [RingReader(ring, at, spin_s=0.0) for at in (0, 1)]
    one.report_memory((5, 2**47))
    one.report_memory((6, 1))
    assert ring.memory(1, 1) is None
    two.report_memory((7, 3))
    assert writer.least_memory() == (5, 3)
    two.report_memory((0, 4))
    assert writer.least_memory() == (0, 1)
    for number in range(3 * rings.ANSWERS):
        one.report_memory((number, number))
        two.report_memory((9, 9))
        assert writer.least_memory() == (min(number, 9), min(number, 9))
    assert one._answered == two._answered == writer._asked and ring.backlog(0) == ring.taken(1) == 0
    ring.close()


def test_a_process_that_inherits_the_ring_reads_it() -> None:
    ring = SharedRing.create(1)
    code = (
        "import sys; from pensieve.engine.ranks.ring import RingReader, SharedRing\n"
        f"reader = RingReader(SharedRing({ring.fd}, 1), 0, spin_s=0.0)\n"
        "sys.stdout.buffer.write(reader.receive(30.0))"
    )
    command = [sys.executable, "-P", "-c", code]
    with subprocess.Popen(command, stdout=subprocess.PIPE, pass_fds=(ring.fd,)) as process:
        RingWriter(ring, spin_s=0.0).send(b"from another process")
        assert process.communicate(timeout=60)[0] == b"from another process"
    with pytest.raises(OSError, match="Bad file"):
        ring.close()
        os.fstat(ring.fd)


def test_a_piece_is_taken_only_when_all_of_it_is_there() -> None:
    """On some processors the number may be seen before the bytes: here it is written before them."""
    ring = SharedRing.create(1)
    writer, reader = RingWriter(ring, spin_s=0.0), RingReader(ring, 0, spin_s=0.0)
    for _ in range(SLOTS):
        writer.send(b"an old message")
        assert reader.receive(1.0) == b"an old message"
    ring._words[ring._slot(SLOTS + 1)] = (
        SLOTS + 1
    )  # the slot of the first message, whose bytes are still there
    assert reader.receive(0.01) is None
    writer.send(b"a new message")
    assert reader.receive(1.0) == b"a new message"
    ring.close()


def test_a_full_ring_waits_for_the_slowest_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    ring = SharedRing.create(2)
    writer, quick = RingWriter(ring, spin_s=0.0), RingReader(ring, 0, spin_s=0.0)
    for number in range(SLOTS):
        writer.send(bytes([number]))
        assert quick.receive(1.0) == bytes([number])

    class Full(Exception):
        pass

    def give_up(_: float) -> None:
        raise Full

    monkeypatch.setattr(rings.time, "sleep", give_up)
    with pytest.raises(Full):
        writer.send(b"one more")
    slow = RingReader(ring, 1, spin_s=0.0)
    assert slow.receive(1.0) == bytes([0])
    writer.send(b"one more")
    assert [slow.receive(1.0) for _ in range(SLOTS)][-1] == b"one more"
    ring.close()
