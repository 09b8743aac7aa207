"""``pensieve demo --model smollm2``: which model is fetched, what is held, what is refused. No real model."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import pytest
from click.testing import CliRunner
from rich.console import Console

from pensieve.cli import main as cli
from pensieve.demo import crowd, killed, long_talk
from pensieve.demo import run as command
from pensieve.demo.conversations import Conversation
from pensieve.model.arch import ModelError
from support.demo.runs import spoil, well, with_usage
from support.lengths import LONG


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    """Exit code, stdout and stderr of ``pensieve demo``."""
    with pytest.raises(SystemExit) as ended:
        cli.main(["demo", *arguments])
    assert isinstance(ended.value.code, int)
    return ended.value.code, *capsys.readouterr()


@pytest.mark.parametrize("model", ["", "gpt2", "./folder", "Demo"])
def test_other_models_are_refused(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, err = said(capsys, "--model", model)
    assert (code, out, err.count("\n")) == (2, "", 1)
    assert "--model" in err and "'demo', 'smollm2'" in err


@pytest.mark.parametrize("option", ["--sessions=3", "--turns=3", "--device-cache=1GiB", "--chunk-tokens=8"])
def test_options_without_effect_are_refused(option: str, capsys: pytest.CaptureFixture[str]) -> None:
    name = option.partition("=")[0]
    line = f"pensieve demo: {name} is for the demo model; it does not go with --model smollm2\n"
    assert said(capsys, "--model", "smollm2", option) == (2, "", line)


def test_a_model_that_cannot_be_fetched_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail() -> None:
        raise ModelError("smollm2: cannot be fetched: no network")

    monkeypatch.setattr(command, "smollm2", fail)
    line = "pensieve demo: smollm2: cannot be fetched: no network\n"
    assert said(capsys, "--model", "smollm2") == (2, "", line)


def demo(
    monkeypatch: pytest.MonkeyPatch, keeps: long_talk.ServerRun, *arguments: str
) -> tuple[Any, list[str]]:
    """The command with its act already held, and what it did in which order."""
    did: list[str] = []

    def hold(conversation: Conversation, _: Console, servers: dict[str, Sequence[str]]) -> Any:
        did.append(f"held {len(conversation)} turns")
        assert servers["Pensieve"][:2] == ["--model", "smollm2"]
        assert servers["stateless"] == [*servers["Pensieve"], "--stateless"]
        return keeps, well("stateless", "recomputed", 4.0, turns=5)

    def other(*_: object) -> None:
        raise AssertionError("an act that needs the demo model")

    monkeypatch.setattr(command, "smollm2", lambda: did.append("fetched"))
    monkeypatch.setattr(long_talk, "serve_and_hold", hold)
    monkeypatch.setattr(crowd, "serve_and_hold", other)
    monkeypatch.setattr(killed, "serve_and_hold", other)
    return CliRunner().invoke(command.demo, ["--model", "smollm2", *arguments]), did


def test_one_act_with_the_fetched_model(monkeypatch: pytest.MonkeyPatch) -> None:
    result, did = demo(monkeypatch, well("Pensieve", "device", 0.1, turns=5))
    assert result.exit_code == 0, result.output
    assert did == ["fetched", "held 5 turns"]
    assert "comes 40 times sooner" in result.output
    assert "Medians of the last 4 turns, at 70 tokens: 100 ms against 4,000 ms." in result.output
    assert "Both servers give the same answers and every receipt adds up." in result.output
    assert "chat --model smollm2" in result.output and "Every answer is right" not in result.output


def test_a_wrong_receipt_fails_it(monkeypatch: pytest.MonkeyPatch) -> None:
    keeps = spoil(well("Pensieve", "device", 0.1, turns=5), with_usage(recomputed_tokens=1))
    result, _ = demo(monkeypatch, keeps)
    assert result.exit_code == 1 and "FAILED" in result.output and "same answers" not in result.output


def test_the_conversation_grows_with_the_option() -> None:
    short, long = (long_talk.real_script(tokens, 1) for tokens in (1000, 4000))
    assert len(short) == len(long) == 1 + long_talk.REAL_LAST_TURNS
    assert all(one.expected is None for one in long) and short[1:] == long[1:]
    assert 3.9 < long[0].text.count(". ") / short[0].text.count(". ") < 5.2
    assert long_talk.real_script(4000, 1) == long != long_talk.real_script(4000, 2)


@pytest.mark.parametrize("options", long_talk.real_servers("demo").values(), ids=long_talk.SERVERS)
def test_its_servers_take_their_options(options: list[str]) -> None:
    told = CliRunner().invoke(cli.cli, ["serve", *options, "--print-config"])
    assert told.exit_code == 0, told.output


@pytest.mark.timeout(120)
@pytest.mark.skipif(not LONG, reason="two more servers, as those of `pensieve demo`: PENSIEVE_LONG_TESTS=1")
def test_the_act_with_a_small_model() -> None:
    console = Console(file=io.StringIO(), width=80)
    keeps, forgets = long_talk.serve_and_hold(
        long_talk.real_script(400, 1), console, long_talk.real_servers("demo")
    )
    assert long_talk.problems(keeps, forgets) == []
    assert keeps.tokens("recomputed") == 0 < keeps.tokens("device")
    assert forgets.tokens("device") == 0 < forgets.tokens("recomputed")
