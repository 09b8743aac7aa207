"""What ``--model`` takes. The hub is offline in tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from pensieve.model import resolve
from pensieve.model.arch import ModelError
from pensieve.model.resolve import display_name, resolve_model


def test_local_folder(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="not a model folder"):
        resolve_model(str(tmp_path))
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model(str(tmp_path)) == tmp_path


def test_demo_is_inside_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve.DEMO_FOLDER.parts[-3:] == ("pensieve", "demo", "model")
    monkeypatch.setattr(resolve, "DEMO_FOLDER", tmp_path)
    with pytest.raises(ModelError, match="demo model is not part of this installation"):
        resolve_model("demo")
    (tmp_path / "config.json").write_text("{}")
    assert resolve_model("demo") == tmp_path


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("./nowhere", "no such folder"),
        ("/nowhere/at/all", "no such folder"),
        ("", "no model named"),
        ("two words", "neither a folder here nor a hub id"),
        ("nobody/nothing", "the hub cannot be reached"),
    ],
)
def test_what_is_no_model(name: str, message: str) -> None:
    with pytest.raises(ModelError, match=message):
        resolve_model(name)


def test_a_folder_is_shown_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "mine"
    model.mkdir()
    monkeypatch.chdir(model)
    assert [display_name(name) for name in (str(model), f"{model}/", ".")] == ["mine"] * 3
    assert [display_name(name) for name in ("demo", "org/model")] == ["demo", "org/model"]
