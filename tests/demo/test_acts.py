"""The logic of ``pensieve demo``: bars, the closing number, and everything that it has to notice."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

from pensieve.client import Piece, Turn
from pensieve.demo import crowd, killed, long_talk
from pensieve.demo import run as command
from pensieve.demo.conversations import Utterance, long_conversation
from pensieve.demo.exchange import SOURCES, Exchange, wrong_answers, wrong_receipts
from pensieve.demo.long_talk import bar, bars, fitting_width
from support.demo.runs import receipt, spoil, survived, turn, well, with_usage

# -- bars


def test_a_bar_is_as_high_as_its_value() -> None:
    assert bar(1.0, 1.0, 2) == "██"
    assert bar(0.75, 1.0, 2) == "█▄"
    assert bar(0.25, 1.0, 2) == "▄ "
    assert bar(0.0, 1.0, 2) == "  "
    assert bar(1e-6, 1.0, 2) == "▁ ", "what took time shows"
    assert bar(3.0, 1.0, 2) == "██"
    assert bar(0.0, 0.0, 2) == "  "


def test_bars_stand_side_by_side() -> None:
    assert bars([0.5, 1.0], 1.0, 2, 3) == ["   ██", "██ ██"]
    assert bars([0.5, 1.0], 1.0, 2, 2) == ["  █", "█ █"]
    assert bars([0.5, 1.0], 1.0, 2, 1) == [" █", "██"]
    assert [fitting_width(22, columns) for columns in (68, 50, 20)] == [3, 2, 1]


def test_rows_share_one_scale_and_a_running_turn_grows() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    now = [10.0]
    stage = long_talk.Stage(22, console, lambda: now[0])
    exchange = well("x", "device", 0.5).exchanges[-1]
    stage.on_asked(long_talk.STATEFUL)
    stage.on_answered(long_talk.STATEFUL, exchange)
    stage.on_asked(long_talk.STATELESS)
    now[0] = 12.0
    with console.capture() as capture:
        console.print(stage.picture())
    lines = capture.get().splitlines()
    assert all(len(line) <= 80 for line in lines)
    assert "full height 2.00 s" in lines[0] and lines[0].endswith("turn 1/22: stateless")
    kept, forgot = lines[1:5], lines[5:9]
    assert [line[11:] for line in kept] == ["", "", "", "██"], "a quarter of the highest"
    assert [line[11:] for line in forgot] == ["██"] * 4


def test_without_a_terminal_each_turn_is_a_plain_line() -> None:
    console = Console(file=io.StringIO(), width=80)
    with long_talk.Stage(2, console) as stage:
        for name, seconds in ((long_talk.STATEFUL, 0.5), (long_talk.STATELESS, 2.0)):
            stage.on_asked(name)
            stage.on_answered(name, well(name, "device", seconds).exchanges[0])
    assert isinstance(console.file, io.StringIO)
    assert console.file.getvalue() == "turn  1     10 tokens   Pensieve  0.500 s   stateless  2.000 s\n"


# -- the first act


class FakeSession:
    """Answers everything alike; a clock of its own moves on with each token."""

    def __init__(self, now: list[float], first_token_s: float, order: list[str], name: str) -> None:
        self._now, self._first_token_s, self._order, self._name = now, first_token_s, order, name
        self._turns = 0

    def stream(self, text: str, **_: Any) -> FakeSession:
        self._order.append(self._name)
        return self

    def __enter__(self) -> FakeSession:
        return self

    def __exit__(self, *_: object) -> None:
        self._turns += 1

    def __iter__(self) -> Iterator[Piece]:
        yield Piece()  # the turn has begun: no token yet
        self._now[0] += self._first_token_s
        yield Piece(text="Your name", token_count=2)
        self._now[0] += 100.0
        yield Piece(text=" is Vio.", token_count=2)

    @property
    def turn(self) -> Turn:
        return turn("Your name is Vio.", receipt(self._turns, "device"))


class Silent:
    def on_asked(self, name: str) -> None: ...
    def on_answered(self, name: str, exchange: Exchange) -> None: ...


def test_both_servers_get_every_turn_and_go_first_in_turns() -> None:
    now, order = [0.0], list[str]()
    sessions: Any = [(name, FakeSession(now, wait, order, name)) for name, wait in (("a", 0.25), ("b", 2.0))]
    script = [Utterance("My name is Vio."), Utterance("Who am I?", "Vio"), Utterance("Who am I?", "Vio")]
    runs = long_talk.hold(script, sessions, Silent(), lambda: now[0])
    assert order == ["a", "b", "b", "a", "a", "b"]
    assert [[one.first_token_s for one in run.exchanges] for run in runs] == [[0.25] * 3, [2.0] * 3]
    assert [run.name for run in runs] == ["a", "b"]
    assert all(one.is_right for run in runs for one in run.exchanges)


def test_the_closing_number_is_the_quotient_of_two_medians_of_the_last_turns() -> None:
    keeps, forgets = well("Pensieve", "device", 0.02, turns=9), well("stateless", "recomputed", 2.0, turns=9)
    for run, early in ((keeps, 50.0), (forgets, 0.001)):  # what was before the last five does not count …
        talk = run.conversations[0]
        talk[:4] = [replace(one, first_token_s=early) for one in talk[:4]]
    keeps.conversations[0][-1] = replace(
        keeps.exchanges[-1], first_token_s=9.0
    )  # … and one hiccup does not either
    assert long_talk.medians(keeps, forgets) == (0.02, 2.0)
    text = long_talk.result(keeps, forgets)
    assert "comes 100 times sooner" in text and "20 ms against 2,000 ms" in text
    assert "3.3 times" in long_talk.result(well("a", "device", 0.6), well("b", "recomputed", 2.0))
    assert "no sooner" in long_talk.result(well("a", "device", 2.0), well("b", "recomputed", 2.0))


def test_a_long_conversation_tells_early_and_asks_late() -> None:
    script = long_conversation(10, 48, seed=1)
    assert script == long_conversation(10, 48, seed=1) != long_conversation(10, 48, seed=2)
    asked = [index for index, one in enumerate(script) if one.expected is not None]
    assert asked == list(range(5, 22)) and len(script) == 22
    facts = [one.text for one in script[:5]]
    for place, question in enumerate(script[-5:]):
        assert question.expected is not None and question.expected in facts[-1 - place]
    stories = [index for index, one in enumerate(script) if one.text.count(".") >= 48]
    assert stories == [5, 6, 7, 8, 10, 11, 12, 13, 15, 16]
    for one in script[5:]:
        assert one.expected is not None and any(one.expected in fact for fact in facts)


def test_a_first_act_without_fault_has_no_problems() -> None:
    assert long_talk.problems(well("Pensieve", "device", 1), well("stateless", "recomputed", 1)) == []


@pytest.mark.parametrize(
    ("source", "change", "said"),
    [
        ("device", lambda one: replace(one, text="I don't know your name yet."), "wanted 'Vio'"),
        ("device", lambda one: replace(one, text="Vio it is."), "turn 6: Pensieve said 'Vio it is.'"),
        ("device", with_usage(gpu_cached_tokens=0), "the receipt does not add up"),
        ("device", with_usage(gpu_cached_tokens=10, context_tokens=20), "but the turn before ended with 75"),
        (
            "device",
            with_usage(gpu_cached_tokens=0, new_tokens=9, recomputed_tokens=76),
            "ended with 75 and 9",
        ),
        ("device", with_usage(gpu_cached_tokens=50, swapped_in_tokens=25), "the server counted"),
        ("recomputed", lambda one: one, "recomputed 225 tokens that it had room to keep"),
    ],
)
def test_the_first_act_notices(source: str, change: Callable[[Turn], Turn], said: str) -> None:
    keeps = spoil(well("Pensieve", source, 1), change)
    found = long_talk.problems(keeps, well("stateless", "recomputed", 1))
    assert any(said in line for line in found), found


def test_the_first_act_notices_a_stateless_server_that_remembers() -> None:
    found = long_talk.problems(well("Pensieve", "device", 1), well("stateless", "host", 1))
    assert found == ["stateless found 225 tokens that it should have forgotten"]


# -- the second act and the command


def crowded() -> crowd.CrowdRun:
    """A run that took every path."""
    run = well("Pensieve", "device", 1)
    run.conversations += (
        well("Pensieve", "host", 1).conversations + well("Pensieve", "recomputed", 1).conversations
    )
    run.counted = {key: run.tokens(key) for key in SOURCES}
    return crowd.CrowdRun(run, seconds=1.0, suspensions=3, dropped_tokens=225)


def test_a_second_act_that_took_every_path_has_no_problems() -> None:
    assert crowd.problems(crowded()) == []


@pytest.mark.parametrize("source", ["device", "host", "recomputed"])
def test_the_second_act_notices_a_path_not_taken(source: str) -> None:
    act = crowded()
    place = ["device", "host", "recomputed"].index(source)
    del act.run.conversations[place]
    act.run.counted = {key: act.run.tokens(key) for key in SOURCES}
    (problem,) = crowd.problems(act)
    assert problem.startswith("no token was ")


def demo(monkeypatch: pytest.MonkeyPatch, act: crowd.CrowdRun, *arguments: str) -> Result:
    """The command with all acts already held."""
    first = well("Pensieve", "device", 0.1), well("stateless", "recomputed", 2.0)
    monkeypatch.setattr(long_talk, "serve_and_hold", lambda *_: first)
    monkeypatch.setattr(crowd, "serve_and_hold", lambda *_: act)
    monkeypatch.setattr(killed, "serve_and_hold", lambda *_: survived())
    return CliRunner().invoke(command.demo, arguments)


def test_the_command_ends_well(monkeypatch: pytest.MonkeyPatch) -> None:
    result = demo(monkeypatch, crowded())
    assert result.exit_code == 0, result.output
    assert "comes 20 times sooner" in result.output and "4.2 s after the kill" in result.output
    assert "Every answer is right and every receipt adds up." in result.output
    assert "Now try:" in result.output and "What is my name?" not in result.output
    assert "\x1b" not in result.output


def test_the_transcript_is_for_those_who_ask_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    output = demo(monkeypatch, crowded(), "--verbose").output
    assert output.count("you    What is my name?") == 4 * 5
    assert "85 context = 75 device + 0 host + 0 recomputed + 10 new → 5 output" in output


def test_quiet_leaves_the_ends_of_the_acts(monkeypatch: pytest.MonkeyPatch) -> None:
    output = demo(monkeypatch, crowded(), "--quiet").output
    assert "20 times sooner" in output and "18 of 18" in output and "Now try" not in output
    assert demo(monkeypatch, crowded(), "--quiet", "--verbose").exit_code == 2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda one: replace(one, text="I don't know."), "wanted 'Vio', got \"I don't know.\""),
        (with_usage(recomputed_tokens=1), "the receipt does not add up"),
    ],
)
def test_the_command_fails_clearly(
    monkeypatch: pytest.MonkeyPatch, change: Callable[[Turn], Turn], said: str
) -> None:
    act = crowded()
    act.run.conversations[-1][-1] = replace(
        act.run.conversations[-1][-1], turn=change(act.run.conversations[-1][-1].turn)
    )
    result = demo(monkeypatch, act)
    assert result.exit_code == 1
    assert said in " ".join(result.output.split()) and "FAILED" in result.output
    assert "Every answer is right" not in result.output


def test_all_faults_of_a_run_are_told_by_name() -> None:
    run = spoil(well("Pensieve", "device", 1), lambda one: replace(one, text="Hm."))
    assert wrong_answers(run) == ["Pensieve: asked 'What is my name?', wanted 'Vio', got 'Hm.'"]
    run.counted["new"] += 1
    assert wrong_receipts(run) == ["Pensieve: receipts say 60 new tokens, the server counted 61"]


def test_what_to_try_next_names_a_command_that_works(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    script = tmp_path / "a folder" / "bin" / "pensieve"
    script.parent.mkdir(parents=True)
    script.write_text("#!/bin/sh\n")
    script.chmod(0o755)
    monkeypatch.chdir(tmp_path / "a folder")
    monkeypatch.setenv("PATH", "/nowhere")
    assert command.program_name("bin/pensieve") == "bin/pensieve"
    monkeypatch.chdir(script.parent)
    assert command.program_name("./pensieve") == "./pensieve"
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    assert command.program_name(str(script)) == f"'{script}'", "a shell must take it as one word"
    monkeypatch.setenv("PATH", str(script.parent))
    assert command.program_name(str(script)) == "pensieve"
    assert command.program_name("/x/pensieve/__main__.py").endswith("-m pensieve")
