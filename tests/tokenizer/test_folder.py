"""What is read of a model folder."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.core import Role
from pensieve.errors import InvalidArgument
from pensieve.tokenizer import ChatTokenizer, TextMessage
from support import tokenizers_ as tiny


def test_ids_of_all_three_places(tmp_path: Path) -> None:
    tiny.write_folder(
        tmp_path, tiny.byte_level(), tiny.CHATML, eos="<|im_end|>", vocab_size=512, eos_token_id=2
    )
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": [8, 2]}))
    chat = ChatTokenizer.from_folder(tmp_path)
    assert chat.eos_token_ids == (8, 2, 4)
    assert chat.vocab_size == 512
    assert chat.bos_token_id == 1


def test_vocabulary_without_a_config(tmp_path: Path) -> None:
    chat = ChatTokenizer.from_folder(tiny.write_folder(tmp_path, tiny.byte_level()))
    assert chat.vocab_size == len(json.loads(tiny.byte_level())["model"]["vocab"]) + 1  # and <think>


@pytest.mark.fault(54)
def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    one = ChatTokenizer.from_folder(tiny.write_folder(tmp_path, tiny.byte_level()))
    same = ChatTokenizer.from_folder(tiny.write_folder(tmp_path, tiny.byte_level()))
    other = ChatTokenizer.from_folder(tiny.write_folder(tmp_path, tiny.metaspace(True)))
    assert one.sha256 == same.sha256 != other.sha256
    assert len(one.sha256) == len(one.template_sha256) == 64


def test_template_in_its_own_file(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, tiny.byte_level(), eos="<|im_end|>")
    (tmp_path / "chat_template.jinja").write_text(tiny.CHATML)
    chat = ChatTokenizer.from_folder(tmp_path)
    assert chat.render([], [TextMessage(Role.USER, "hi")], generation_prompt=False).item_tokens[0][0] == 3


def test_vocab_and_merges_as_opt_is_published(tmp_path: Path) -> None:
    spec = json.loads(tiny.byte_level())["model"]
    (tmp_path / "vocab.json").write_text(json.dumps(spec["vocab"]))
    merges = [" ".join(pair) for pair in spec["merges"]]
    (tmp_path / "merges.txt").write_text("\n".join(["#version: 0.2", *merges]))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps(
            {
                "bos_token": "</s>",
                "eos_token": {"__type": "AddedToken", "content": "</s>"},
                "add_bos_token": True,
            }
        )
    )
    chat = ChatTokenizer.from_folder(tmp_path)
    rendered = chat.render([], [TextMessage(Role.USER, "hello </s>")], generation_prompt=True)
    ids = rendered.item_tokens[0].tolist()
    assert ids[0] == 2 and ids.count(2) == 1, "BOS first, and none of the user's making"
    assert chat.decode(ids) == "User: hello </s>\n"
    assert chat.decode(rendered.generation_prompt) == "Assistant:"


def test_no_tokenizer_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgument, match="save_pretrained"):
        ChatTokenizer.from_folder(tmp_path)


@pytest.mark.fault(19)
def test_too_many_characters_can_be_refused_untokenised(tmp_path: Path) -> None:
    chat = ChatTokenizer.from_folder(tiny.write_folder(tmp_path, tiny.byte_level()))
    text = "hello world " * 50
    tokens = chat.render([], [TextMessage(Role.USER, text)], generation_prompt=False).num_tokens
    assert len(text) <= chat.max_chars(tokens)


def test_works_without_torch(tmp_path: Path) -> None:
    tiny.write_folder(tmp_path, tiny.byte_level(), tiny.CHATML, eos="<|im_end|>")
    program = (
        "import sys; sys.modules['torch'] = None\n"
        "from pathlib import Path\nfrom pensieve.tokenizer import ChatTokenizer\n"
        f"print(ChatTokenizer.from_folder(Path({str(tmp_path)!r})).decode([3, 50, 51]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
