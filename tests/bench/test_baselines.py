"""The programs of bench/ that compare: transformers as a target, ratios, the page."""

from __future__ import annotations

import inspect
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from pensieve.replay.command import make_plan
from pensieve.replay.report import is_clean
from pensieve.replay.runner import RunOptions
from pensieve.replay.schedule import Arrivals
from pensieve.replay.session import Plan, run
from pensieve.replay.shaping import Shape
from pensieve.replay.targets import TurnSpec
from pensieve.replay.workload import Conversation, Dataset, Turn
from support.benches import load_bench

PLAN = Plan(
    Dataset("d", (Conversation("a", (Turn(4, 3), Turn(2, 5))), Conversation("b", (Turn(6, 2),))), "0"),
    Shape(),
    Arrivals(),
    RunOptions(),
)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, max_position_embeddings=128, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


async def test_transformers_as_a_target(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_bench("hf_baseline", monkeypatch).HuggingFaceTarget(model, threads=1)
    report = await run(PLAN, [target])
    (summary,) = report["targets"]
    assert is_clean(summary), summary
    assert summary["turns"]["completed"] == 3
    assert summary["receipts"]["checked"] == 3
    assert summary["tokens"]["recomputed"] == 7
    assert (summary["vocab_size"], summary["context_limit"]) == (64, 128)


async def test_transformers_continues_the_history(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = load_bench("hf_baseline", monkeypatch).HuggingFaceTarget(model, threads=1)
    await target.open()
    session = await target.start_session()
    for ids in ([5, 6, 7], [8, 9]):
        await target.turn(session, TurnSpec(np.array(ids, np.int32), 4, True), lambda count, at: None)
    history = target._histories[session].tolist()
    oracle = LlamaForCausalLM.from_pretrained(model).eval()
    context = torch.tensor([[*history[:7], 8, 9]])
    with torch.inference_mode():
        for _ in range(4):
            logits = oracle(context).logits[0, -1]
            logits[2] = -torch.inf  # end of sequence is banned before the forced length
            context = torch.cat([context, logits.argmax().view(1, 1)], dim=1)
    assert history == context[0].tolist()


@pytest.mark.parametrize("program", ["hf_baseline", "replay_compare"])
def test_every_parameter_has_an_option(program: str, monkeypatch: pytest.MonkeyPatch) -> None:
    main = load_bench(program, monkeypatch).main
    wanted = {name for name in inspect.signature(main.callback).parameters if name != "workload"}
    wanted |= {name for name in inspect.signature(make_plan).parameters}
    assert wanted == {parameter.name for parameter in main.params}


async def test_ratios_and_page(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compare = load_bench("replay_compare", monkeypatch)
    report = await run(PLAN, [compare.HuggingFaceTarget(model, threads=1)])
    (slow,) = report["targets"]
    fast = slow | {
        "target": "fast",
        "turns_per_s": slow["turns_per_s"] * 2,
        "latency_s": slow["latency_s"],
        "normalised_latency_s": {k: v / 4 for k, v in slow["normalised_latency_s"].items()},
    }
    found = compare.ratios(fast, slow)
    assert found["turns/s"] == pytest.approx(2)
    assert found["mean normalised latency"] == pytest.approx(4)
    assert found["output tokens/s"] == pytest.approx(1)
    empty = slow | {"turns_per_s": None}
    assert compare.ratios(empty, slow)["turns/s"] is None
    page = compare.markdown(
        report | {"targets": [fast, slow], "ratios": {"slow": found}, "command_line": "python x"}
    )
    assert "| turns/s | 2.00 |" in page
    assert compare.portable(["python", "/some/where/x.jsonl", "--rate", "2"]) == "python x.jsonl --rate 2"
    assert "`python x`" in page and report["versions"]["torch"] in page
