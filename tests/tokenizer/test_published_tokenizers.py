"""Tokenizer files as people publish them: read as transformers reads them, or refused in one line."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from tokenizers import AddedToken, Tokenizer
from transformers import AutoTokenizer

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.model.families import READERS
from pensieve.tokenizer import PLAIN_TEMPLATE, ChatTokenizer, RawMessage, TextMessage
from pensieve.tokenizer.folder import read_folder
from support import tokenizers_ as tiny

NAMED = tiny.CHATML.replace("<|im_end|>", "</s>")
OTHER = tiny.CHATML.replace("<|im_start|>", "<|eot_id|>")
TEXTS = ("hello  world 1234", " it's THE don't fox", "na\u00efve e\u0301\n\n x", "my name</s> is <think>")


def settings(folder: Path, **values: Any) -> None:
    """Change tokenizer_config.json; None takes a value away."""
    path = folder / "tokenizer_config.json"
    found = json.loads(path.read_text()) | values
    path.write_text(json.dumps({name: value for name, value in found.items() if value is not None}))


@pytest.mark.parametrize("family", [None, *READERS])
@pytest.mark.parametrize("kind", ["bytes", "metaspace"])
def test_the_class_of_a_tokenizer_is_that_of_transformers(
    family: str | None, kind: str, tmp_path: Path
) -> None:
    tokenizer = tiny.byte_level() if kind == "bytes" else tiny.metaspace(False)
    names = (None, "PreTrainedTokenizerFast", "LlamaTokenizer", "LlamaTokenizerFast", "Qwen2Tokenizer", "GPT2Tokenizer",
             "NoSuchTokenizer")  # fmt: skip
    for number, name in enumerate(names):
        config = {"model_type": family} if family else {}
        folder = tiny.write_folder(tmp_path / str(number), tokenizer, **config)
        settings(folder, tokenizer_class=name, legacy=True)
        oracle, found = AutoTokenizer.from_pretrained(str(folder)), read_folder(folder)
        for text in TEXTS:
            ids = found.backend.encode(text, add_special_tokens=True).ids
            assert ids == oracle(text)["input_ids"], f"{name} for {text!r}"
        assert (found.bos_token_id, found.bos_token) == (oracle.bos_token_id, oracle.bos_token)


def test_add_bos_token_counts_as_transformers_counts_it(tmp_path: Path) -> None:
    for number, (named, with_post_processor) in enumerate(
        itertools.product((None, True, False), (False, True))
    ):
        tokenizer = tiny.with_bos(tiny.byte_level()) if with_post_processor else tiny.byte_level()
        folder = tiny.write_folder(tmp_path / str(number), tokenizer, model_type="llama")
        settings(folder, add_bos_token=named)
        oracle, chat = AutoTokenizer.from_pretrained(str(folder)), ChatTokenizer.from_folder(folder)
        raw = chat.render([], [RawMessage(Role.USER, "hello")], generation_prompt=True)
        assert raw.item_tokens[0].tolist() == oracle("hello")["input_ids"]


# ---- special tokens in several files

SPECIAL_FILES: tuple[dict[str, dict[str, Any]], ...] = (
    {"tokenizer_config.json": {"eos_token": "<|im_end|>", "bos_token": None}},
    {"special_tokens_map.json": {"eos_token": "<|eot_id|>", "bos_token": "<|begin_of_text|>"}},
    {"special_tokens_map.json": {"eos_token": {"content": "<|eot_id|>", "lstrip": True}}},
    {
        "special_tokens_map.json": {"eos_token": "<|eot_id|>"},
        "tokenizer_config.json": {
            "added_tokens_decoder": {
                "2": {"content": "</s>", "special": True},
                "4": {"content": "<|im_end|>"},
            }
        },
    },
    {"added_tokens.json": {"<|im_end|>": 4, "<new>": 9000}},
    {"added_tokens.json": {"<|im_end|>": 7}},
)


@pytest.mark.parametrize("files", SPECIAL_FILES, ids=str)
def test_special_tokens_of_several_files(files: dict[str, dict[str, Any]], tmp_path: Path) -> None:
    folder = tiny.write_folder(
        tmp_path, tiny.byte_level(), model_type="llama", vocab_size=512, eos_token_id=None
    )
    for name, values in files.items():
        path = folder / name
        before = json.loads(path.read_text()) if path.is_file() else {}
        path.write_text(json.dumps(before | values))
    oracle, found = AutoTokenizer.from_pretrained(str(folder)), read_folder(folder)
    assert found.bos_token_id == oracle.bos_token_id
    assert found.eos_token_ids == (oracle.eos_token_id,)
    for text in TEXTS:
        assert found.backend.encode(text).ids == oracle(text)["input_ids"]


# ---- ends of turns


@pytest.mark.parametrize(
    ("config", "generation", "ends"),
    [
        ({"eos_token_id": [1, 4]}, {"eos_token_id": 8}, (8, 1, 4, 2)),
        ({"eos_token_id": None}, {}, (2,)),
        ({"eos_token_id": []}, {"eos_token_id": None}, (2,)),
        ({"model_type": "llama"}, {"eos_token_id": 8}, (8, 2)),
        ({"eos_token_id": 9_000}, {"eos_token_id": [2**40, 4]}, (4, 2)),
    ],
)
def test_ends_of_turns(
    config: dict[str, Any], generation: dict[str, Any], ends: object, tmp_path: Path
) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), **({"vocab_size": 512} | config))
    (folder / "generation_config.json").write_text(json.dumps(generation))
    assert ChatTokenizer.from_folder(folder).eos_token_ids == ends


def test_a_family_has_an_end_where_no_file_names_one(tmp_path: Path) -> None:
    for family, expected in (("llama", (2,)), ("qwen2", ())):
        folder = tiny.write_folder(tmp_path / family, tiny.byte_level(), model_type=family, vocab_size=512)
        settings(folder, eos_token=None, tokenizer_class="PreTrainedTokenizerFast")
        found = read_folder(folder)
        if found.eos_token:  # Qwen2's class has one of its own
            expected = (found.backend.token_to_id(found.eos_token),)
            expected = tuple(one for one in expected if one < 512)
        assert found.eos_token_ids == expected


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("value", ["1", "</s>", -1, True, 1.0, [1, None], [[1]], ["1"], {"a": 1}], ids=repr)
def test_ends_that_are_no_ids_are_refused(file: str, value: object, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), vocab_size=512)
    path = folder / file
    before = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(before | {"eos_token_id": value}))
    with pytest.raises(InvalidArgument, match=rf"/{file}: eos_token_id has ") as refused:
        ChatTokenizer.from_folder(folder)
    assert "\n" not in refused.value.message


# ---- rows of the embedding


def folder_with(
    tmp_path: Path, *words: AddedToken, template: str = tiny.CHATML, rows: int | None = None
) -> Path:
    """A folder whose tokenizer has more words than its config.json has rows (those of the base, unless given)."""
    tokenizer = Tokenizer.from_str(tiny.byte_level())
    base = tokenizer.get_vocab_size()
    tokenizer.add_tokens(list(words))
    return tiny.write_folder(
        tmp_path, tokenizer.to_str(), template, eos="<|im_end|>", model_type="llama", vocab_size=rows or base
    )


def test_a_template_that_writes_a_word_without_a_row_is_refused(tmp_path: Path) -> None:
    word = AddedToken("<|turn|>", special=True, normalized=False)
    base = Tokenizer.from_str(tiny.byte_level()).get_vocab_size()
    said = rf"tokenizer\.json: .* template writes '<\|turn\|>', id {base}, but config\.json: vocab_size is {base}"
    templates = {
        "user": tiny.CHATML.replace("<|im_start|>", "<|turn|>"),
        "prompt": tiny.CHATML.replace("assistant\n", "<|turn|>assistant\n"),
        "system": "{% if messages[0]['role'] == 'system' %}<|turn|>{% endif %}" + tiny.CHATML,
    }
    for name, template in templates.items():
        with pytest.raises(InvalidArgument, match=said) as refused:
            ChatTokenizer.from_folder(folder_with(tmp_path / name, word, template=template))
        assert "\n" not in refused.value.message
    own = ChatTokenizer.from_folder(tmp_path / "user", chat_template=tiny.CHATML)
    assert own.vocab_size == base, "another template may do without the word"


def test_a_word_without_a_row_that_no_template_writes_is_served(tmp_path: Path) -> None:
    chat = ChatTokenizer.from_folder(
        folder_with(tmp_path, AddedToken("<extra>", special=True, normalized=False))
    )
    rendered = chat.render([], [TextMessage(Role.USER, "an <extra> word")], generation_prompt=True)
    assert int(max(ids.max() for ids in rendered.item_tokens)) < chat.vocab_size
    with pytest.raises(InvalidArgument, match=r"text: has token id .* for which the model has no embedding"):
        chat.render([], [RawMessage(Role.USER, "an <extra> word")], generation_prompt=True)


def test_a_beginning_without_a_row_is_refused(tmp_path: Path) -> None:
    folder = folder_with(tmp_path, AddedToken("<bos>", special=True, normalized=False))
    (folder / "tokenizer.json").write_text(tiny.with_bos((folder / "tokenizer.json").read_text(), "<bos>"))
    settings(folder, bos_token="<bos>")
    with pytest.raises(InvalidArgument, match="the tokenizer begins each text with '<bos>'"):
        ChatTokenizer.from_folder(folder)


def test_ordinary_tokens_without_rows_are_refused_and_rows_without_tokens_are_not(tmp_path: Path) -> None:
    with pytest.raises(
        InvalidArgument, match=r"tokenizer\.json: token .* has id 300, but config\.json: vocab_size is 300"
    ):
        ChatTokenizer.from_folder(folder_with(tmp_path / "short", rows=300))
    assert ChatTokenizer.from_folder(folder_with(tmp_path / "padded", rows=1024)).vocab_size == 1024


@pytest.mark.parametrize("value", [None, 0, -5, "512", True, 512.0], ids=repr)
def test_a_vocabulary_of_no_size_is_refused(value: object, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), vocab_size=value)
    with pytest.raises(InvalidArgument, match=r"config\.json: vocab_size is "):
        ChatTokenizer.from_folder(folder)


# ---- chat templates in several files


def arrange(folder: Path, files: dict[str, Any]) -> None:
    """Write files: a str as it is, another value as JSON; ``tokenizer_config.json`` is the chat template there."""
    for name, value in files.items():
        if name == "tokenizer_config.json":
            settings(folder, chat_template=value)
            continue
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(value if isinstance(value, str) else json.dumps(value))


def entries(**templates: str) -> list[dict[str, str]]:
    return [{"name": name, "template": template} for name, template in templates.items()]


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": NAMED},
        {"tokenizer_config.json": OTHER, "chat_template.jinja": NAMED},
        {"tokenizer_config.json": entries(default=NAMED, rag=OTHER)},
        {"tokenizer_config.json": entries(rag=OTHER), "chat_template.jinja": NAMED},
        {"chat_template.jinja": NAMED, "additional_chat_templates/rag.jinja": OTHER},
        {"tokenizer_config.json": OTHER, "additional_chat_templates/default.jinja": NAMED},
        {"tokenizer_config.json": NAMED, "chat_template.json": {"chat_template": OTHER}},
    ],
    ids=str,
)  # fmt: skip
def test_the_template_is_the_one_that_transformers_takes(files: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), model_type="llama", vocab_size=512)
    arrange(folder, files)
    oracle, chat = AutoTokenizer.from_pretrained(str(folder)), ChatTokenizer.from_folder(folder)
    rendered = chat.render([], [TextMessage(Role.USER, "hello")], generation_prompt=True)
    wanted = oracle.apply_chat_template([{"role": "user", "content": "hello"}], add_generation_prompt=True)[
        "input_ids"
    ]
    assert np.concatenate([*rendered.item_tokens, rendered.generation_prompt]).tolist() == wanted


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": entries(rag=NAMED, tool_use=OTHER)},
        {"tokenizer_config.json": NAMED, "additional_chat_templates/rag.jinja": OTHER},
        {"additional_chat_templates/rag.jinja": NAMED, "additional_chat_templates/tool_use.jinja": OTHER},
    ],
    ids=str,
)  # fmt: skip
def test_named_templates_without_a_default_are_refused(files: dict[str, Any], tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), model_type="llama", vocab_size=512)
    arrange(folder, files)
    with pytest.raises(ValueError, match="default"):
        AutoTokenizer.from_pretrained(str(folder)).apply_chat_template([{"role": "user", "content": "hello"}])
    with pytest.raises(
        InvalidArgument, match=r"chat_template has the templates rag.* none that is called default"
    ):
        ChatTokenizer.from_folder(folder)
    assert ChatTokenizer.from_folder(folder, chat_template=NAMED)


def test_a_folder_without_a_template_is_plain(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), vocab_size=512)
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": NAMED}))
    chat = ChatTokenizer.from_folder(folder)
    assert PLAIN_TEMPLATE.startswith("{{ bos_token }}")
    rendered = chat.render([], [TextMessage(Role.USER, "hello")], generation_prompt=True)
    assert chat.decode(rendered.item_tokens[0]) == "User: hello\n"


@pytest.mark.parametrize("value", [5, True, [5], [{"name": "default"}], {"default": 7}], ids=repr)
def test_templates_that_are_none_are_refused(value: object, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), vocab_size=512)
    settings(folder, chat_template=value)
    with pytest.raises(InvalidArgument, match=r"tokenizer_config\.json") as refused:
        ChatTokenizer.from_folder(folder)
    assert "\n" not in refused.value.message


def test_tools_with_a_template_of_their_own_are_refused(tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), vocab_size=512)
    arrange(folder, {"tokenizer_config.json": entries(default=NAMED, tool_use=OTHER)})
    with pytest.raises(InvalidArgument, match="tool_use"):
        ChatTokenizer.from_folder(folder).check_tools('[{"type": "function", "function": {"name": "f"}}]')


@pytest.mark.parametrize("text", ["{", "[]", '{"model": {"type": "BPE"}, "added_tokens": 5}', "null"])
def test_a_broken_tokenizer_is_refused(text: str, tmp_path: Path) -> None:
    folder = tiny.write_folder(tmp_path, tiny.byte_level(), vocab_size=512)
    (folder / "tokenizer.json").write_text(text)
    with pytest.raises(InvalidArgument, match=r"tokenizer\.json") as refused:
        ChatTokenizer.from_folder(folder)
    assert "\n" not in refused.value.message
