"""The shipped model folder: size, what transformers makes of it, and that it remembers."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pensieve.demo import MODEL_DIR
from pensieve.demo.talk import attributes, smalltalk
from pensieve.demo.talk.values import Values
from pensieve.demo.training.evaluate import TransformersChat
from pensieve.demo.training.forced import score
from pensieve.demo.training.tokenizer import CHAT_TEMPLATE


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL_DIR)


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(MODEL_DIR, dtype=torch.float32)


def test_the_folder_is_small() -> None:
    assert sum(path.stat().st_size for path in Path(MODEL_DIR).rglob("*")) <= 8 * 2**20


def test_it_is_a_plain_llama_with_room_for_a_long_conversation(model: Any, tokenizer: Any) -> None:
    assert type(model) is LlamaForCausalLM
    assert model.config.max_position_embeddings >= 4096
    assert model.config.vocab_size == len(tokenizer)
    assert model.generation_config.do_sample is False
    assert model.generation_config.eos_token_id == tokenizer.eos_token_id
    assert tokenizer.chat_template == CHAT_TEMPLATE


def test_the_template_only_appends(tokenizer: Any) -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "My name is Zo\u00eb \U0001f600."},
        {"role": "assistant", "content": "Got it, your name is Zo\u00eb \U0001f600."},
        {"role": "user", "content": "  what's my name?\n"},
    ]

    def ids(count: int) -> list[int]:
        rendered: list[int] = tokenizer.apply_chat_template(messages[:count], return_dict=False)
        return rendered

    whole = ids(4)
    for count in range(1, 4):
        assert whole[: len(ids(count))] == ids(count)
    assert tokenizer.decode(whole).count(tokenizer.eos_token) == 4
    assert messages[3]["content"] in tokenizer.decode(whole)


@pytest.mark.parametrize(
    "text",
    ["My name is Ada.", "  two  spaces ", "Zo\u00eb \U0001f600 \u4f60\u597d", "a\tb\n\nc", "4821 K7Q2"],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text


@pytest.mark.parametrize(("rows", "length"), [(8, 512), (2, 4096)])
def test_held_out_values_are_recalled_in_whole_dialogues(model: Any, rows: int, length: int) -> None:
    @torch.no_grad()
    def best(ids: torch.Tensor) -> torch.Tensor:
        likely: torch.Tensor = model(ids).logits.argmax(-1)
        return likely

    report = score(best, MODEL_DIR / "tokenizer.json", rows=rows, length=length, seed=f"test {length}")
    assert report.questions >= 20
    assert report.recall >= 0.97, report.line()  # few questions: one or two wrong ones must not decide


@pytest.mark.parametrize("distance", [0, 1000, 3800])
def test_a_name_is_recalled_from_far_away(model: Any, tokenizer: Any, distance: int) -> None:
    rng = random.Random(distance)
    name = Values(rng, held_out=True, plain=True).draw("name")
    chat = TransformersChat(model, tokenizer)
    assert name in chat.send(f"My name is {name}.")
    noise: list[int] = []
    while len(noise) < distance:  # written, not generated: it is only there to push the name away
        sentences, _, reply = smalltalk.exchange(rng, held_out=True)
        messages = [
            {"role": "user", "content": ". ".join(sentences)},
            {"role": "assistant", "content": reply},
        ]
        noise += tokenizer.apply_chat_template(messages, return_dict=False)
    chat.read(noise)
    assert name in chat.send("what's my name?")
    assert len(chat.tokens) <= 4096


def test_what_a_newcomer_types_works(model: Any, tokenizer: Any) -> None:
    chat = TransformersChat(model, tokenizer)
    chat.send("Hello!")
    chat.send("My name is Ada.")
    chat.send("i live in paris")
    chat.send("I have a dog called Bruno")
    chat.send("My favorite color is teal.")
    assert "Ada" in chat.send("what's my name?")
    assert "paris" in chat.send("Where do I live?")
    assert "Bruno" in chat.send("What is my dog's name?")
    assert "teal" in chat.send("what is my favourite colour")
    assert "don't know" in chat.send("What is my cat's name?")
    chat.send("Actually, my name is Grace.")
    assert "Grace" in chat.send("Who am I?")


def test_facts_about_others_are_kept_apart(model: Any, tokenizer: Any) -> None:
    chat = TransformersChat(model, tokenizer)
    chat.send("Tom lives in Oslo.")
    chat.send("My sister lives in Lima.")
    chat.send("I live in Quito.")
    for question, city in (
        ("Where does Tom live?", "Oslo"),
        ("Where does my sister live?", "Lima"),
        ("Where do I live?", "Quito"),
    ):
        assert city in chat.send(question)


def test_every_attribute_has_a_canonical_clause_with_its_value() -> None:
    for attribute in attributes.PERSONAL + attributes.WORLD_FACTS:
        assert "{v}" in attribute.clause
        assert all("{v}" in statement for statement in attribute.statements)
        assert not any("{v}" in question for question in attribute.questions)
