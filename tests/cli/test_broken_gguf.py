"""``pensieve serve`` with a GGUF file that is not whole: one line, and code 2."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from support.engine.checkpoints import tiny_checkpoint
from support.gguf_files import write_gguf
from support.terminal import PENSIEVE


@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", [0.0, 0.05, 0.9], ids=["empty", "in the header", "in the tensors"])
def test_a_file_that_is_cut_is_told_in_one_line(
    part: float, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    whole = write_gguf(tmp_path / "whole.gguf", tiny_checkpoint("llama", tmp_path_factory.getbasetemp()))
    content = whole.read_bytes()
    cut = tmp_path / "cut.gguf"
    cut.write_bytes(content[: int(len(content) * part)])
    result = subprocess.run(
        [*PENSIEVE, "serve", "--model", str(cut), "--store", "memory:", "--listen", "127.0.0.1:0"],
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert (result.returncode, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.stderr
    assert result.stderr.startswith("pensieve serve: ") and "cut.gguf" in result.stderr
