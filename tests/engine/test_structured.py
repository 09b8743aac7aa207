"""Answers under grammars: as a stateless run gives them, whatever else the engine does meanwhile."""

from __future__ import annotations

import json
import os
import random
import re
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import Any

import jsonschema
import pytest
from llguidance import LLTokenizer

from pensieve.config import CacheConfig, SchedulerConfig
from pensieve.core import FinishReason, Grammar, Sampling
from pensieve.engine import grammar as structured
from pensieve.engine.grammar import NICENESS, SLOWEST_MASKS, Prototypes, Structured
from pensieve.engine.messages import Cancel
from support.engine.choosing import (
    EOS,
    PIECES,
    STOP,
    VOCAB,
    ChoosingWorker,
    expected,
    grammar,
    make_tokenizer,
    text_of,
)
from support.engine.engine_driver import Clock, make_engine
from support.engine.structured_rig import Answers, LateMatchers, make_structured
from support.lengths import at_length

TOKENIZER = make_tokenizer()
LIMIT = 200
SCHEMA = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 9},
        "old": {"type": "boolean"},
        "age": {"type": "integer"},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}
JSON = grammar("start: %json " + json.dumps(SCHEMA | {"x-guidance": {"whitespace_flexible": False}}))
WORDS = grammar("start: /[a-f]{3,12}/")
CHOICE = grammar('start: "yes" | "no" | "maybe"')


@dataclass
class Rig:
    """An engine around a ``ChoosingWorker``."""

    overlapped: bool = False
    late: random.Random | None = None
    device: int = 400
    host: int = 100
    max_running: int = 16
    unified: bool = True
    stateless: bool = False
    answers: Answers = field(init=False)
    structured: Structured = field(init=False)

    def __post_init__(self) -> None:
        size = 8
        cache = CacheConfig(self.device // size, self.host // size, size)
        scheduler = SchedulerConfig(
            context_limit=LIMIT,
            eos_token_ids=(EOS,),
            max_batch_tokens=64,
            max_running=self.max_running,
            unified_batch=self.unified,
            stateless=self.stateless,
        )
        self.structured = make_structured(TOKENIZER, VOCAB, self.late)
        worker = ChoosingWorker(cache.device_chunks, cache.host_chunks, size)
        self.answers = Answers(
            make_engine(
                cache,
                scheduler,
                worker,
                Clock(),
                VOCAB,
                overlapped=self.overlapped,
                structured=self.structured,
            )
        )

    def check(self, request: int, context: list[int], sampling: Sampling) -> None:
        """The answer is that of a stateless run."""
        for candidate in range(sampling.candidates):
            tokens, reason = expected(TOKENIZER, context, sampling, LIMIT, candidate)
            assert self.answers.outputs[request, candidate] == tokens
            if candidate == 0:
                assert self.answers.ended[request] is reason


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.answers.engine.close()


def prompt(text: str) -> list[int]:
    return [PIECES.index(char.encode()) for char in text]


def random_sampling(rng: random.Random) -> Sampling:
    values: dict[str, Any] = {"max_output_tokens": rng.choice((3, 25, 60)), "seed": rng.randrange(1 << 64)}
    values["grammar"] = rng.choice((None, JSON, JSON, WORDS, CHOICE))
    if rng.random() < 0.6:
        values |= {
            "temperature": rng.choice((0.5, 1.0, 2.0)),
            "top_k": rng.choice((0, 5)),
            "top_p": rng.choice((1.0, 0.7)),
        }
    if rng.random() < 0.4:
        values |= {
            "repetition_penalty": 1.3,
            "frequency_penalty": rng.choice((0.0, 0.4)),
            "presence_penalty": 0.2,
        }
    if rng.random() < 0.2:
        values |= {"min_output_tokens": rng.choice((2, 30)), "logit_bias": {EOS: 2.0, STOP: 3.0, 40: -1e9}}
    if rng.random() < 0.2:
        values |= {"stop_token_ids": (PIECES.index(b"d"),), "ignore_eos": values["grammar"] is not None}
    if rng.random() < 0.2:
        values |= {"candidates": 3, "temperature": 1.0}
    return Sampling(**values)


@pytest.mark.parametrize("seed", range(at_length(4, 200)))
def test_answers_are_those_of_a_stateless_run(seed: int) -> None:
    """Batched, overlapped, suspended, with late masks, cancelled neighbours and several turns of a session."""
    rng = random.Random(seed)
    made = Rig(
        overlapped=seed % 2 == 1,
        late=rng if seed % 4 > 1 else None,
        device=rng.choice((256, 400)),
        host=rng.choice((0, 200)),
        max_running=rng.choice((3, 16)),
        unified=rng.random() < 0.8,
        stateless=rng.random() < 0.1,
    )
    asked: dict[int, tuple[str, list[int], Sampling]] = {}
    histories: dict[str, list[int]] = {}
    cancelled = set()
    for request in range(1, 16):
        session = f"s{rng.randrange(6)}"
        if any(name == session and key not in made.answers.ended for key, (name, _, _) in asked.items()):
            continue
        known = histories.get(session, [])
        context = [*known, *(rng.randrange(2, 97) for _ in range(rng.randrange(1, 30)))]
        if len(context) > LIMIT - 70:
            continue
        sampling = random_sampling(rng)
        asked[request] = session, context, sampling
        made.answers.submit(request, context, sampling, session)
        for _ in range(rng.choice((0, 1, 5, 40))):
            made.answers.step()
        if rng.random() < 0.1 and request not in made.answers.ended:
            made.answers.take(made.answers.engine.handle(Cancel(request)))
            cancelled.add(request)
            made.answers.ended[request] = "cancelled"
        for key, (name, before, _) in asked.items():
            if key in made.answers.ended and (key, 0) in made.answers.outputs:
                histories[name] = max(
                    histories.get(name, []), [*before, *made.answers.outputs[key, 0]], key=len
                )
    made.answers.run()
    for request, (_, context, sampling) in asked.items():
        if request not in cancelled:
            made.check(request, context, sampling)
    if isinstance(made.structured.matchers, LateMatchers):
        assert made.structured.matchers.lates, "no mask was late"
    made.answers.engine.close()


def test_answers_match_and_end(rig: Rig) -> None:
    values = {"temperature": 1.0, "max_output_tokens": 120}
    for request in range(1, 10):
        rig.answers.submit(request, prompt(f"tell {request}"), Sampling(grammar=JSON, seed=request, **values))
    rig.answers.submit(20, prompt("pick"), Sampling(grammar=CHOICE, seed=1, ignore_eos=True, **values))
    rig.answers.submit(21, prompt("say"), Sampling(grammar=WORDS, min_output_tokens=100, seed=1, **values))
    rig.answers.run()
    ended = 0
    for request in range(1, 10):
        if rig.answers.ended[request] is FinishReason.EOS:
            ended += 1
            jsonschema.validate(json.loads(text_of(rig.answers.outputs[request, 0])), SCHEMA)
    assert ended
    # Neither may go on past the end of its grammar.
    assert rig.answers.ended[20] is FinishReason.EOS and text_of(rig.answers.outputs[20, 0]) in (
        "yes",
        "no",
        "maybe",
    )
    assert rig.answers.ended[21] is FinishReason.EOS
    assert re.fullmatch("[a-f]{12}", text_of(rig.answers.outputs[21, 0]))


def test_a_plain_answer_is_the_same_beside_structured_ones(rig: Rig) -> None:
    plain = Sampling(temperature=1.0, seed=5, max_output_tokens=40)
    rig.answers.submit(1, prompt("hello"), plain)
    for request in range(2, 6):
        rig.answers.submit(request, prompt("hello"), Sampling(grammar=JSON, max_output_tokens=60))
    rig.answers.run()
    rig.check(1, prompt("hello"), plain)


def test_a_request_waits_for_its_grammar_and_can_be_cancelled(rig: Rig) -> None:
    rig.answers.submit(1, prompt("one"), Sampling(grammar=JSON, max_output_tokens=5))
    assert rig.answers.engine.has_work
    rig.answers.take(rig.answers.engine.handle(Cancel(1)))
    assert not rig.answers.engine.has_work
    rig.answers.run()
    assert not rig.answers.outputs


@pytest.mark.fault(65)
@pytest.mark.parametrize("overlapped", [False, True])
def test_a_grammar_over_the_limits_ends_its_own_turn_only(overlapped: bool) -> None:
    made = Rig(overlapped=overlapped)
    costly = grammar('start: a\na: "x" a "y" | a a | "x" | ""', step_items=20)
    fine = Sampling(grammar=WORDS, max_output_tokens=20)
    made.answers.submit(
        1,
        prompt("costly"),
        Sampling(
            grammar=costly,
            max_output_tokens=60,
            candidates=2,
            temperature=1.0,
            logit_bias={PIECES.index(b"x"): 50.0},
        ),
    )
    made.answers.submit(2, prompt("fine"), fine)
    made.answers.run()
    assert made.answers.ended[1] == "GRAMMAR_TOO_COSTLY"
    made.check(2, prompt("fine"), fine)
    assert made.answers.engine.stats().running == 0
    made.answers.engine.close()


def test_the_vocabulary_is_prepared_before_the_first_grammar() -> None:
    prepared = threading.Event()

    def prepare() -> LLTokenizer:
        prepared.set()
        return TOKENIZER

    prototypes = Prototypes(prepare, VOCAB)
    assert prepared.wait(10)
    prototypes.close()


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere threads have no priority of their own")
def test_compiling_yields_to_steps() -> None:
    def priorities() -> dict[str, int]:
        ours = [thread for thread in threading.enumerate() if thread not in before]
        return {thread.name: os.getpriority(os.PRIO_PROCESS, thread.native_id or 0) for thread in ours}

    before, own = threading.enumerate(), os.getpriority(os.PRIO_PROCESS, 0)
    prototypes = Prototypes(lambda: TOKENIZER, VOCAB)
    prototypes.prepare(WORDS).result(10)
    assert priorities()["grammars_0"] == min(own + NICENESS, 19)
    assert os.getpriority(os.PRIO_PROCESS, threading.get_native_id()) == own
    prototypes.close()


def test_the_end_does_not_wait_for_the_vocabulary() -> None:
    go_on = threading.Event()

    def prepare() -> LLTokenizer:
        go_on.wait(60)
        return TOKENIZER

    prototypes = Prototypes(prepare, VOCAB)
    waiting = prototypes.prepare(WORDS)
    prototypes.close()
    with pytest.raises(CancelledError):
        waiting.result(10)
    go_on.set()


def test_an_invalid_grammar_is_refused_alone(rig: Rig) -> None:
    rig.answers.submit(1, prompt("bad"), Sampling(grammar=Grammar("start: nothing")))
    rig.answers.submit(2, prompt("fine"), Sampling(max_output_tokens=3))
    rig.answers.run()
    assert rig.answers.ended == {1: "GRAMMAR_TOO_COSTLY", 2: FinishReason.LENGTH}


def test_beams_are_refused(rig: Rig) -> None:
    rig.answers.submit(1, prompt("x"), Sampling(grammar=JSON, beam_width=2, max_output_tokens=4))
    assert rig.answers.ended == {1: "ENGINE_FAILED"}


@pytest.mark.fault(65)
def test_long_masks_end_the_turn(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    monkeypatch.setattr("pensieve.engine.grammar.LONGEST_MASK_S", -1.0)  # every mask takes longer
    rig.answers.submit(1, prompt("x"), Sampling(grammar=WORDS, max_output_tokens=50))
    rig.answers.run()
    assert rig.answers.ended[1] == "GRAMMAR_TOO_COSTLY"
    assert len(rig.answers.outputs[1, 0]) == SLOWEST_MASKS


@pytest.mark.fault(65)
def test_a_panic_of_the_library_ends_the_turn_only(monkeypatch: pytest.MonkeyPatch, rig: Rig) -> None:
    class Panic(BaseException):
        """As the library raises: no Exception."""

    original = structured._Row._advance

    def advance(row: Any) -> str:
        if row.output_tokens == 3:
            raise Panic
        return original(row)

    monkeypatch.setattr(structured._Row, "_advance", advance)
    rig.answers.submit(1, prompt("x"), Sampling(grammar=WORDS, max_output_tokens=50))
    rig.answers.submit(2, prompt("x"), Sampling(grammar=WORDS, max_output_tokens=3))
    rig.answers.run()
    assert rig.answers.ended == {1: "GRAMMAR_TOO_COSTLY", 2: FinishReason.LENGTH}


def test_a_stopped_candidate_leaves_the_others_alone(rig: Rig) -> None:
    sampling = Sampling(grammar=JSON, candidates=3, temperature=1.0, seed=3, max_output_tokens=30)
    rig.answers.submit(1, prompt("hello"), sampling)
    while (1, 1) not in rig.answers.outputs:
        rig.answers.step()
    rig.answers.take(rig.answers.engine.handle(Cancel(1, 1)))
    rig.answers.run()
    for candidate in (0, 2):
        tokens, _ = expected(TOKENIZER, prompt("hello"), sampling, LIMIT, candidate)
        assert rig.answers.outputs[1, candidate] == tokens


@pytest.mark.fault(65)
def test_a_slow_grammar_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    """While a mask does not come, the others get their tokens, one in each step."""
    made, go_on = Rig(overlapped=True), []
    plain = Sampling(max_output_tokens=30)
    held = Sampling(grammar=WORDS, max_output_tokens=8)

    def waiting(row: Any) -> None:
        while not go_on:
            time.sleep(0.001)
        original(row)

    original = structured._Row.advance
    monkeypatch.setattr(structured._Row, "advance", waiting)
    made.answers.submit(1, prompt("held"), held)
    while (1, 0) not in made.answers.outputs:
        made.answers.step()
    made.answers.submit(2, prompt("plain"), plain)
    until = made.answers.engine.stats().steps_total + 40
    while 2 not in made.answers.ended:
        made.answers.step()
        assert made.answers.engine.stats().steps_total < until
    assert len(made.answers.outputs[1, 0]) == 1
    assert made.answers.engine.stats().late_masks_total == 1, "counted once, not by step"
    go_on.append(True)
    made.answers.run()
    made.check(1, prompt("held"), held)
    made.check(2, prompt("plain"), plain)
    made.answers.engine.close()


def test_requests_with_penalties_sit_out_no_step() -> None:
    steps = {}
    for overlapped in (False, True):
        made = Rig(overlapped=overlapped)
        sampling = Sampling(repetition_penalty=1.5, max_output_tokens=30, ignore_eos=True)
        made.answers.submit(1, prompt("again and again"), sampling)
        made.answers.run()
        made.check(
            1,
            prompt("again and again"),
            Sampling(repetition_penalty=1.5, max_output_tokens=30, min_output_tokens=30),
        )
        steps[overlapped] = made.answers.engine.stats().steps_total
    assert steps[True] <= steps[False] + 1
