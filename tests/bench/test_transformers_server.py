"""The baseline on transformers: its answers are those of ``generate``, over the protocol too."""

from __future__ import annotations

import json
import shlex
import socket
import sys
import threading
from pathlib import Path

import aiohttp
import numpy as np
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM

from pensieve.demo import MODEL_DIR
from pensieve.replay.command import replay
from pensieve.replay.targets.base import TurnRequest
from pensieve.replay.targets.openai_target import OpenAITarget
from support.engine.checkpoints import FAMILIES, Family, tiny_checkpoint
from support.engine.hf_oracle import HfOracle
from support.replay.benches import BENCH
from support.replay.openai_stub import Model, Server

PROMPT, LIMIT = list(range(5, 25)), 12


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose own greedy answer to the prompt has its end of sequence in the middle."""
    path = tiny_checkpoint("llama", tmp_path_factory.mktemp("model"))
    answer = list(Model(path).answer(PROMPT, LIMIT))
    model = AutoModelForCausalLM.from_pretrained(path)
    model.generation_config.eos_token_id = next(t for t in answer[3:] if t not in answer[:3])
    model.save_pretrained(path.parent / "ending")
    return path.parent / "ending"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_answers_as_generate_does(family: Family, tmp_path: Path) -> None:
    path = tiny_checkpoint(family, tmp_path)
    assert list(Model(path).answer(PROMPT, LIMIT)) == HfOracle(path).generate(PROMPT, LIMIT)


@pytest.mark.parametrize("least", [0, 4, LIMIT])
def test_min_tokens_and_the_end_of_sequence(folder: Path, least: int) -> None:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    ids = torch.tensor([PROMPT])
    expected = model.generate(
        ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=LIMIT, min_new_tokens=least,
        pad_token_id=0,
    )[0, len(PROMPT) :].tolist()  # fmt: skip
    assert list(Model(folder).answer(PROMPT, LIMIT, least=least, ignore_eos=False)) == expected
    assert least or len(expected) < LIMIT, "the answer ends by itself"


def test_ignore_eos(folder: Path) -> None:
    model = Model(folder)
    assert len(list(model.answer(PROMPT, LIMIT, ignore_eos=False))) < LIMIT
    assert len(list(model.answer(PROMPT, LIMIT, ignore_eos=True))) == LIMIT


async def test_over_the_protocol(folder: Path) -> None:
    model = Model(folder)
    server = Server(model)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    base = f"http://127.0.0.1:{server.server_port}"
    target = OpenAITarget(base)
    try:
        info = await target.open()
        assert (info.vocab_size, info.context_limit, info.forces_lengths) == (160, 512, True)
        assert info.details["prompt"] == info.details["answers"] == "token ids"
        session = await target.start_session()
        history: list[int] = []
        came: list[int] = []
        for ids in (PROMPT, [7, 8, 9]):
            spec = TurnRequest(np.array(ids, np.int32), LIMIT, True)
            usage = await target.turn(session, spec, lambda count, at: came.append(count))
            assert usage is not None and usage.reconciles
            assert (usage.new_tokens, usage.recomputed_tokens) == (len(ids), len(history)), "nothing is kept"
            history += ids + list(model.answer(history + ids, LIMIT, least=LIMIT))
        assert sum(came) == 2 * LIMIT
        assert target._sessions[session].ids == history, "the next turn sends what the model has answered"
        async with aiohttp.ClientSession(base) as http:
            for path, status in (("/v1/completions", 400), ("/v1/chat/completions", 404)):
                async with http.post(path, json={"prompt": "text", "max_tokens": 1}) as response:
                    assert response.status == status
    finally:
        await target.close()
        server.shutdown()
        server.server_close()


def test_a_replay_starts_it_and_asks_it_for_its_sizes(tmp_path: Path) -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [sys.executable, str(BENCH / "transformers_server.py"), str(MODEL_DIR), "--port", str(port)]
    out = tmp_path / "r.json"
    load = [
        "sharegpt",
        "--conversations",
        "2",
        "--max-turns",
        "2",
        "--max-output-tokens",
        "4",
        "--max-lag",
        "60",
    ]
    start = f"http://127.0.0.1:{port} {shlex.join(command)}"
    done = CliRunner().invoke(replay, [*load, "--start", start, "--json", str(out)])
    assert done.exit_code == 0, done.output
    report = json.loads(out.read_text())
    (summary,) = report["targets"]
    config = json.loads((MODEL_DIR / "config.json").read_text())
    assert summary["vocab_size"] == config["vocab_size"]
    assert summary["turns"]["completed"] == report["workload"]["turns"] > 2
