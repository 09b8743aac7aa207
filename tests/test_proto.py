"""The committed stubs are those of the .proto, and the .proto keeps its promises to released clients."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PROTO = ROOT / "proto"
BUF = Path(sys.prefix) / "bin" / "buf"


def buf(*arguments: str, module: Path = PROTO) -> subprocess.CompletedProcess[str]:
    assert BUF.exists(), "buf is missing: pip install buf-bin"
    return subprocess.run(
        [BUF, *arguments], cwd=module, capture_output=True, text=True, timeout=60, check=False
    )


@pytest.fixture
def module(tmp_path: Path) -> Path:
    """A copy of ``proto/`` that a test may damage."""
    return Path(shutil.copytree(PROTO, tmp_path / "proto"))


def edit(module: Path, old: str, new: str) -> None:
    path = module / "pensieve/v1/pensieve.proto"
    text = path.read_text()
    assert text.count(old) >= 1, old
    path.write_text(text.replace(old, new, 1))


def test_committed_stubs_are_what_the_generator_writes(tmp_path: Path) -> None:
    subprocess.run([sys.executable, PROTO / "generate.py", tmp_path], check=True, timeout=60)
    names = sorted(path.name for path in (tmp_path / "pensieve/v1").iterdir())
    assert names == ["pensieve_pb2.py", "pensieve_pb2.pyi", "pensieve_pb2_grpc.py"]
    for name in names:
        fresh, committed = tmp_path / "pensieve/v1" / name, ROOT / "pensieve/v1" / name
        assert fresh.read_bytes() == committed.read_bytes(), f"{name} is stale: run `make proto`"


def test_lint() -> None:
    result = buf("lint", ".")
    assert result.returncode == 0, result.stdout + result.stderr


def test_compatible_with_the_released_contract() -> None:
    result = buf("breaking", ".", "--against", "released.binpb")
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("uint64 revision = 3;", "uint64 revision = 77;"),
        ("uint32 item_count = 4;", "string item_count = 4;"),
        ("  STATE_DAMAGED = 2;", "  reserved 2;"),
        ("  rpc GetTurn(GetTurnRequest) returns (GetTurnResponse);", ""),
    ],
    ids=["renumbered", "retyped", "removed-value", "removed-method"],
)
def test_breaking_changes_are_caught(module: Path, old: str, new: str) -> None:
    edit(module, old, new)
    result = buf("breaking", ".", "--against", "released.binpb", module=module)
    assert result.returncode == 100, (
        result.stdout + result.stderr
    )  # buf's code for findings, not for a failed run


def test_added_fields_are_no_break(module: Path) -> None:
    edit(module, "uint64 revision = 3;", "uint64 revision = 3; string added_later = 900;")
    result = buf("breaking", ".", "--against", "released.binpb", module=module)
    assert result.returncode == 0, result.stdout + result.stderr


def test_lint_catches_a_bad_name(module: Path) -> None:
    edit(module, "uint32 item_count = 4;", "uint32 itemCount = 4;")
    assert buf("lint", ".", module=module).returncode == 100
