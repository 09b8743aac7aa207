"""What an engine says before its steps: the requests that clients know, and how many tokens."""

from __future__ import annotations

import pytest

from pensieve.config import EngineOptions
from pensieve.core import Sampling, pack_tokens
from pensieve.engine.engine import Engine
from pensieve.engine.messages import Finished, Stepping, Submit
from support.engine import hash_engine

OPTIONS = EngineOptions(model="", device_cache="512tokens", host_cache="256tokens", chunk_tokens=8)


def submit(request: int, length: int, **sampling: int) -> Submit:
    tokens = pack_tokens(range(request, request + length))
    return Submit(
        request,
        f"t/s{request}",
        tokens,
        length,
        Sampling(max_output_tokens=4, **sampling),  # type: ignore[arg-type]
    )


def finished(engine: Engine, requests: int) -> None:
    over = 0
    for _ in range(200):
        over += sum(isinstance(event, Finished) for event in engine.step())
        if over == requests:
            return
    raise AssertionError("it never ends")


@pytest.mark.parametrize("overlapped", [False, True])
def test_batches_by_the_names_that_clients_know(overlapped: bool) -> None:
    engine = hash_engine.build(OPTIONS)
    engine._overlapped = overlapped
    said: list[Stepping] = []
    engine.announcer.send = said.append
    engine.handle(submit(1, 100))
    engine.handle(submit(2, 9, candidates=3))
    finished(engine, 2)
    assert {number for one in said for number in one.requests} == {1, 2}, "candidates go by their request"
    assert {1, 2} in [set(one.requests) for one in said]
    assert max(one.tokens for one in said) >= 100
    assert len(said) < 12, "steps like the one before are not told"


def test_a_plan_that_fails_names_everybody(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = hash_engine.build(OPTIONS)
    said: list[Stepping] = []
    engine.announcer.send = said.append
    engine.handle(submit(1, 10))
    engine.handle(submit(2, 10))

    def broken(now: float) -> None:
        raise AssertionError("the books do not balance")

    monkeypatch.setattr(engine._scheduler, "plan", broken)
    with pytest.raises(AssertionError, match="the books"):
        engine.step()
    assert [(one.tokens, set(one.requests)) for one in said] == [(0, {1, 2})]
