"""A model's fingerprint changes with what it computes, and with nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from pensieve.model.arch import ModelError
from pensieve.model.folder import model_fingerprint


def write(folder: Path, *, value: float = 1.0, at: int = 0, size: int = 300_000, **config: object) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 8, **config}))
    tensor = torch.zeros(size)
    tensor[at:] = value
    save_file({"w": tensor}, folder / "model.safetensors")
    return folder


def test_the_same_model_elsewhere_is_the_same(tmp_path: Path) -> None:
    first = model_fingerprint(write(tmp_path / "a", transformers_version="4.1"))
    other = write(tmp_path / "b", transformers_version="5.0", _name_or_path="b")
    (other / "README.md").write_text("words")
    (other / "consolidated.safetensors").write_text("the same weights for another program")
    assert model_fingerprint(other) == first == model_fingerprint(other)


def test_configuration_weights_and_size_tell(tmp_path: Path) -> None:
    marks = [
        model_fingerprint(write(tmp_path / "a")),
        model_fingerprint(write(tmp_path / "b", hidden_size=16)),
        model_fingerprint(write(tmp_path / "c", value=2.0)),
        model_fingerprint(write(tmp_path / "d", value=2.0, at=299_000)),
        model_fingerprint(write(tmp_path / "e", size=300_001)),
        model_fingerprint(write(tmp_path / "f"), weights=False),
    ]
    assert len(set(marks)) == len(marks)


def test_a_large_file_is_sampled(tmp_path: Path) -> None:
    folder = write(tmp_path / "a")
    (folder / "model.safetensors").rename(folder / "model-1.safetensors")
    names = {"weight_map": {"w": "model-1.safetensors", "v": "model-2.safetensors"}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(names))
    with (folder / "model-2.safetensors").open("wb") as file:
        file.truncate(8 << 30)  # a hole: reading it whole would take many seconds
    sampled = model_fingerprint(folder)
    with (folder / "model-2.safetensors").open("r+b") as file:
        file.seek(-10, 2)
        file.write(b"1")
    assert model_fingerprint(folder) != sampled


def test_a_broken_configuration_is_told(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("[1]")
    with pytest.raises(ModelError, match="not a JSON object"):
        model_fingerprint(tmp_path)
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "model.safetensors.index.json").write_text("[]")
    with pytest.raises(ModelError, match="not a JSON object"):
        model_fingerprint(tmp_path)
