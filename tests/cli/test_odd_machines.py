"""Commands where something is missing that every desktop has: a home, a folder that can be written."""

from __future__ import annotations

import os
import pwd
import subprocess
import sys
from pathlib import Path

import pytest

from pensieve.machine import user_directory
from pensieve.model.arch import ModelError
from pensieve.model.resolve import resolve_model
from pensieve.options.serve import ServeOptions
from pensieve.options.values import existing_file, file_to_write

PENSIEVE = Path(sys.executable).parent / "pensieve"


def serve(folder: Path, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """A start that fails, in a folder."""
    command = [PENSIEVE, "serve", "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0", *arguments]
    environment = {**os.environ, **variables}
    return subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def unknown_user(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a container that runs as a number: no entry, and nobody has set HOME."""

    def nobody(uid: int) -> None:
        raise KeyError(f"getpwuid(): uid not found: {uid}")

    monkeypatch.setattr(pwd, "getpwuid", nobody)
    for name in ("HOME", "XDG_STATE_HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.usefixtures("unknown_user")
def test_a_user_without_a_home_has_the_root_folder() -> None:
    assert user_directory("XDG_CACHE_HOME", ".cache") == Path("/.cache/pensieve")
    assert ServeOptions().store == "sqlite:////.local/state/pensieve/pensieve.sqlite3"


def test_the_home_of_an_unknown_user_is_a_path_like_others() -> None:
    with pytest.raises(ValueError, match="cannot read ~nobody-here/keys: No such file"):
        existing_file("~nobody-here/keys")
    with pytest.raises(ValueError, match="there is no folder ~nobody-here"):
        file_to_write("~nobody-here/trace.jsonl")
    with pytest.raises(ModelError, match="~nobody-here/model: no such folder"):
        resolve_model("~nobody-here/model")
    with pytest.raises(ValueError, match=r"cannot read a+: File name too long"):
        existing_file("a" * 300)
    with pytest.raises(ValueError, match=r"cannot write a+: File name too long"):
        file_to_write("a" * 300)


def test_a_state_folder_that_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    result = serve(tmp_path, XDG_STATE_HOME=str(tmp_path / "file"))
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr == (
        f"pensieve serve: --store: cannot create the folder {tmp_path}/file/pensieve: Not a directory; "
        "pass --store URL, or set XDG_STATE_HOME\n"
    )
