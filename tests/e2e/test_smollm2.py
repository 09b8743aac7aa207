"""A real chat model end to end: the answers of servers on little memory, against transformers; tensors and tokens."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import gguf
import pytest
import torch

from pensieve.client import Client
from pensieve.model.folder import load_arch
from pensieve.model.smollm2 import smollm2
from pensieve.model.weights import load_weights
from pensieve.spawn import ServerProcess
from pensieve.tokenizer.folder import read_folder
from support.lengths import at_length, some
from support.smollm2 import SMOLLM2_FILE

pytestmark = [pytest.mark.smollm2, pytest.mark.timeout(600)]

TALKS = (
    ("What is the capital of France? One word.", "And of Italy?", "Which of the two has more people?"),
    ("Name three colours.", "Which of them is the sky's?", "Why?"),
    ("What is 12 plus 30?", "And 5 more?", "Say it in words."),
)
OUTPUT = at_length(4, 48)
TURNS = at_length(2, 3)
DEVICE, HOST = f"{at_length(96, 256)}tokens", f"{at_length(32, 256)}tokens"
TIERS = {
    "two tiers": ["--device-cache", DEVICE, "--host-cache", HOST, "--chunk-tokens", "8"],
    "one tier": ["--device-cache", "256tokens", "--host-cache", "0", "--chunk-tokens", "8"],
    "stateless": ["--stateless"],
}


@functools.cache
def oracle() -> Any:
    """The model as transformers reads the same file, float32."""
    with parsed_once():
        return _oracle()


@contextlib.contextmanager
def parsed_once() -> Iterator[None]:
    """Let transformers parse the file and find the names of its tensors once, not in each of its steps."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf, "GGUFReader", READER)
        patch.setattr(gguf, "get_tensor_name_map", NAMES)
        yield


READER, NAMES = functools.cache(gguf.GGUFReader), functools.cache(gguf.get_tensor_name_map)


def _oracle() -> Any:
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.for_model(**load_gguf_checkpoint(str(SMOLLM2_FILE))["config"])
    with torch.device("meta"):
        empty = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(str(SMOLLM2_FILE), return_tensors=True, model_to_load=empty)["tensors"]
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(tensors, strict=False)
    model.tie_weights()
    return model.eval()


@functools.cache
def answers() -> list[list[str]]:
    """What transformers says in each talk, greedily, over the whole history each time."""
    from transformers.tokenization_utils_tokenizers import PreTrainedTokenizerFast

    with parsed_once():
        tokenizer = PreTrainedTokenizerFast.from_pretrained(
            str(SMOLLM2_FILE.parent), gguf_file=SMOLLM2_FILE.name
        )
    # transformers does not know this file's pre-tokenizer by name.
    tokenizer.backend_tokenizer.pre_tokenizer = read_folder(SMOLLM2_FILE).backend.pre_tokenizer
    return [_talk(tokenizer, talk[:TURNS]) for talk in TALKS]


def _talk(tokenizer: Any, questions: Sequence[str]) -> list[str]:
    context, said = "", []
    for number, question in enumerate(questions):
        system = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        context += system if number == 0 else ""
        context += f"<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
        ids = tokenizer(context, return_tensors="pt", add_special_tokens=False).input_ids
        with torch.no_grad():
            out = oracle().generate(ids, max_new_tokens=OUTPUT, do_sample=False, pad_token_id=2)[
                0, ids.shape[1] :
            ]
        context += tokenizer.decode(out)
        if out[-1] != 2:
            context += "<|im_end|>"
        context += "\n"
        said.append(tokenizer.decode(out, skip_special_tokens=True))
    return said


@pytest.mark.parametrize("tiers", some(tuple(TIERS), 1))
def test_answers_are_those_of_transformers(tiers: str, tmp_path: Path) -> None:
    assert smollm2(folder=SMOLLM2_FILE.parent) == SMOLLM2_FILE
    options = ["--device", "cpu", "--store", "memory:", "--max-wait", "0", *TIERS[tiers]]
    said: list[list[str]] = [[] for _ in TALKS]
    with ServerProcess("--model", str(SMOLLM2_FILE), *options) as server, Client(server.target) as client:
        sessions = [client.create_session() for _ in TALKS]
        for turn in range(TURNS):
            for number, session in enumerate(sessions):
                answer = session.send(TALKS[number][turn], max_output_tokens=OUTPUT, temperature=0.0)
                assert answer.usage.reconciles
                said[number].append(answer.text)
        if tiers == "two tiers":
            for source in ("host", "recomputed")[: at_length(2, 1)]:
                assert server.metric("pensieve_context_tokens_total", source=source) > 0, (
                    "the tiers were too large"
                )
    assert said == answers()


def test_tensors_are_those_of_transformers() -> None:
    wanted = oracle().state_dict()
    weights = load_weights(SMOLLM2_FILE, load_arch(SMOLLM2_FILE), dtype=torch.float32)
    assert torch.equal(weights.embedding, wanted["model.embed_tokens.weight"])
    for number, layer in enumerate(weights.layers):
        at = f"model.layers.{number}."
        parts = [wanted[f"{at}self_attn.{name}_proj.weight"] for name in "qkv"]
        assert torch.equal(layer.attention.qkv.weight, torch.cat(parts))
        assert torch.equal(layer.mlp.down.weight, wanted[f"{at}mlp.down_proj.weight"])


def test_digits_are_words_of_their_own() -> None:
    backend = read_folder(SMOLLM2_FILE).backend
    assert backend.encode("in 1999\n\n7").tokens == ["in", "Ġ", "1", "9", "9", "9", "ĊĊ", "7"]
