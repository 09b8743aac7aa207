"""A model folder whose files disagree, served by the real engine: what the tokenizer alone says counts as well."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from openai import OpenAI
from tokenizers import Tokenizer

from pensieve.engine.process.host import DEFAULT_BUILDER
from support.engine.checkpoints import tiny_checkpoint
from support.engine.greedy import PROMPT, transformers_tokens
from support.service.server_process import launched
from support.tokenizers_ import byte_level, write_folder


@pytest.mark.timeout(180)
def test_a_turn_ends_at_the_end_that_only_the_tokenizer_names(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_checkpoint("llama", tmp_path, vocab_size=368, num_hidden_layers=1), folder)
    expected = transformers_tokens(folder, 8)
    end = next(n for n, token in enumerate(expected) if n >= 2 and token not in expected[:n])
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": None}
    (folder / "generation_config.json").unlink()
    eos = Tokenizer.from_str(byte_level()).id_to_token(expected[end])
    write_folder(folder, byte_level(), eos=eos, **config)
    options = {
        "model": str(folder),
        "builder": DEFAULT_BUILDER,
        "device_cache": "256tokens",
        "host_cache": "0",
    }
    with (
        launched(tmp_path / "server", http="127.0.0.1:0", threads=1, chunk_tokens=16, **options) as server,
        OpenAI(base_url=f"http://{server.http}/v1", api_key="none", max_retries=0) as client,
    ):
        said = client.completions.create(
            model="model",
            prompt=list(PROMPT),
            max_tokens=8,
            temperature=0,
            extra_body={"return_token_ids": True},
        )
        choice = said.choices[0]
        assert (choice.finish_reason, choice.token_ids) == ("stop", expected[: end + 1])  # type: ignore[attr-defined]
