"""The shipped model folder: size, what transformers makes of it, and that it remembers."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

from pensieve.demo import MODEL_DIR
from pensieve.demo.conversations import material

DIALOGUES = json.loads(Path(__file__).with_name("dialogues.json").read_text(encoding="utf-8"))
"""Dialogues that training never saw, as the code that trained the model wrote them: 8 of 512 tokens, 2 of 4,096. A turn
has the user's words, the reply, and where it asks for something, whether that was told before."""
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
CHATTER = ("I only know what you tell me.", "I understand.", "Thanks for telling me.")
"""Replies to turns without facts."""


class TransformersChat:
    """One conversation with a model of transformers, its cache kept between turns."""

    def __init__(self, model: Any, tokenizer: Any) -> None:
        self._model = model
        self._tokenizer = tokenizer
        self._cache: Any = None
        self.tokens: list[int] = []
        """The whole context so far."""

    @torch.no_grad()
    def read(self, tokens: list[int]) -> Any:
        """Append tokens to the context; the logits behind the last of them."""
        out = self._model(torch.tensor([tokens]), past_key_values=self._cache, use_cache=True)
        self._cache = out.past_key_values
        self.tokens += tokens
        return out.logits[0, -1]

    def send(self, text: str) -> str:
        """The greedy answer to one more turn of the user."""
        message = [{"role": "user", "content": text}]
        pending = self._tokenizer.apply_chat_template(message, add_generation_prompt=True, return_dict=False)
        answer: list[int] = []
        while len(answer) < 64 and self._tokenizer.eos_token_id not in answer:
            answer.append(int(self.read(pending).argmax()))
            pending = answer[-1:]
        self.read(pending)  # the last token is not in the cache yet
        return str(self._tokenizer.decode(answer, skip_special_tokens=True))


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


@pytest.mark.parametrize("dialogues", [DIALOGUES[:8], DIALOGUES[8:]], ids=["short", "long"])
def test_held_out_values_are_recalled_in_whole_dialogues(
    model: Any, tokenizer: Any, dialogues: list[Any]
) -> None:
    """Right is an answer all of whose tokens are the most likely ones: greedy decoding would have written it."""
    right = asked = 0
    for dialogue in dialogues:
        messages = [("system", dialogue["system"])] if dialogue["system"] else []
        ids = [token for role, text in messages for token in encoded(tokenizer, role, text)]
        answers = []
        for user, reply, *told in dialogue["turns"]:
            ids += encoded(tokenizer, "user", user)
            start = len(ids) + 1  # behind the role
            ids += encoded(tokenizer, "assistant", reply)
            if told == [True]:
                answers.append(range(start, len(ids)))
        with torch.no_grad():
            likely = model(torch.tensor([ids])).logits[0].argmax(-1).tolist()
        asked += len(answers)
        right += sum(all(likely[at - 1] == ids[at] for at in answer) for answer in answers)
    assert asked >= 20
    assert right / asked >= 0.97, (
        f"{right} of {asked}"
    )  # few questions: one or two wrong ones must not decide


def encoded(tokenizer: Any, role: str, text: str) -> list[int]:
    message = [{"role": role, "content": text}]
    ids: list[int] = tokenizer.apply_chat_template(message, return_dict=False)
    return ids


@pytest.mark.parametrize("distance", [0, 1000, 3800])
def test_a_name_is_recalled_from_far_away(model: Any, tokenizer: Any, distance: int) -> None:
    name = material().lives[distance % 7][0].value
    chat = TransformersChat(model, tokenizer)
    assert name in chat.send(f"My name is {name}.")
    chatter = [turn for one in DIALOGUES for turn in one["turns"] if turn[1] in CHATTER]
    noise: list[int] = []
    for user, reply in itertools.cycle(chatter):
        if len(noise) >= distance:  # written, not generated: it is only there to push the name away
            break
        noise += encoded(tokenizer, "user", user) + encoded(tokenizer, "assistant", reply)
    if noise:
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
