"""The probation gate: suspects go in one at a time, whatever becomes of those that wait."""

from __future__ import annotations

import pytest

from pensieve.core import RequestKey, Sampling, SessionKey
from pensieve.engine.messages import Finished, FinishReason, Output, Submit, Usage
from pensieve.errors import Internal, PensieveError, ResourceExhausted
from pensieve.server.links.generations import Generations, OpenGeneration
from pensieve.server.links.quarantine import ProbationGate
from support.service.listener import Listener


class Gate:
    """A probation gate with an engine that takes what it is sent, and the listeners of its generations."""

    def __init__(self) -> None:
        self.sent: list[int] = []
        self.refuse: PensieveError | None = None
        self.generations = Generations(lambda request, candidate: None)
        self.probation = ProbationGate(self._take, self.generations.fail)
        self.generations.on_closed = lambda one, finished: self.probation.on_closed(one, finished=finished)

    def _take(self, command: Submit) -> None:
        if self.refuse is not None:
            raise self.refuse
        self.sent.append(command.request)

    def enter(self, origin: str) -> OpenGeneration:
        generation = self.generations.open(Listener())
        command = Submit(generation.request, "s", b"", 0, Sampling(), origin=origin)
        self.probation.check(command)
        self.probation.enter(generation, command)
        return generation

    def say(self, generation: OpenGeneration, tokens: int) -> None:
        self.generations.dispatch([Output(generation.request, tuple(range(tokens)))])
        self.probation.on_tokens()

    def finish(self, generation: OpenGeneration) -> None:
        self.generations.dispatch([Finished(generation.request, FinishReason.EOS, Usage())])

    def die(self, *batch: OpenGeneration) -> None:
        self.probation.on_step_begin(one.request for one in batch)
        guilty = self.probation.on_engine_lost(killed_externally=False)
        if guilty is not None:
            self.generations.fail(guilty, Internal("guilty"))
        self.generations.fail_all(lambda: Internal("restarting"))
        self.sent.clear()


def suspects(gate: Gate, *names: str) -> list[OpenGeneration]:
    """All of them were in a batch that died, and try again."""
    gate.die(*[gate.enter(name) for name in names])
    return [gate.enter(name) for name in names]


async def test_one_after_another() -> None:
    gate = Gate()
    a, b, c = suspects(gate, "a", "b", "c")
    assert gate.sent == [a.request]
    other = gate.enter("new")
    assert gate.sent == [a.request, other.request], "everybody else goes on"
    gate.say(a, 1)
    assert gate.sent[2:] == [b.request], "it got further than it was: the next"
    gate.finish(b)
    assert gate.sent[3:] == [c.request]


async def test_who_leaves_makes_room() -> None:
    gate = Gate()
    a, b, c = suspects(gate, "a", "b", "c")
    b.cancel()
    a.cancel()
    assert gate.sent == [a.request, c.request], "the one that left the queue is never sent"


async def test_one_that_the_engine_does_not_take_is_told_and_the_next_goes_in() -> None:
    gate = Gate()
    a, b, c = suspects(gate, "a", "b", "c")
    gate.refuse = ResourceExhausted("full")
    gate.finish(a)
    listeners = [one.sink for one in (b, c)]
    assert [one.error for one in listeners if isinstance(one, Listener)] == [gate.refuse] * 2


async def test_who_left_while_the_engine_was_at_work_on_it_is_still_a_suspect() -> None:
    """Clients give up on a request that hangs; the engine dies of it a little later."""
    gate = Gate()
    for _ in range(2):
        bad = gate.enter("bad")
        gate.probation.on_step_begin([bad.request])
        bad.cancel()
        assert gate.probation.on_engine_lost(killed_externally=False) is (bad if _ else None)
    with pytest.raises(Internal, match="REQUEST_QUARANTINED"):
        gate.enter("bad")


async def test_who_was_not_in_the_step_is_no_suspect() -> None:
    gate = Gate()
    waiting, running = gate.enter("waiting"), gate.enter("running")
    gate.die(running)
    assert not waiting.num_output_tokens
    one, two = gate.enter("waiting"), gate.enter("running")
    assert gate.sent == [one.request, two.request]


async def test_a_session_whose_warming_an_engine_may_have_died_of_is_not_warmed_again() -> None:
    now = 0.0
    gate = ProbationGate(lambda command: None, lambda generation, error: None, lambda: now)
    long_ago, just_now = SessionKey("t/long ago"), SessionKey("t/just now")
    assert gate.may_warm(long_ago)
    now = 100.0
    assert gate.may_warm(just_now)
    gate.on_engine_lost(killed_externally=True)
    assert gate.may_warm(just_now), "killed from outside"
    gate.on_engine_lost(killed_externally=False)
    assert gate.may_warm(long_ago) and not gate.may_warm(just_now)
    now += 700.0
    assert gate.may_warm(just_now)


async def test_all_of_a_condemned_session_is_refused_and_what_has_no_name_is_never_a_suspect() -> None:
    """A name tells the tries of one turn apart; without one a generation is of its session all the same."""
    gate = Gate()
    for _ in range(3):
        gate.die(gate.enter(""))
    assert [one.request for one in (gate.enter(""), gate.enter(""))] == gate.sent
    assert not gate.probation.blocklist.add("s", "t", b"1")
    on_probation = [gate.enter(""), gate.enter("")]
    assert gate.sent[2:] == [one.request for one in on_probation]
    assert gate.probation.blocklist.add("s", "t", b"2")
    for name in ("", "new"):
        with pytest.raises(Internal, match="SESSION_QUARANTINED"):
            gate.enter(name)


async def test_nothing_is_kept_of_what_is_over() -> None:
    gate = Gate()
    for number in range(5):
        one = gate.enter(f"x{number}")
        gate.probation.on_step_begin([one.request])
        gate.finish(one)
    gate.probation.on_step_begin([RequestKey(99)])
    assert not gate.probation._admitted
