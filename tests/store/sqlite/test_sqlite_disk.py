"""The SQLite store on a disk that fails: it never says "kept" of what it cannot prove to be on the disk."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest

from support.faults.failing_disk import STORIES
from support.faults.io_errors import IoErrors

ROOT = Path(__file__).parents[3]

SYNCS = """
import os, sys
for path in sys.argv[1:]:
    file = os.open(path, os.O_RDWR | os.O_CREAT)
    for call in (lambda: os.pwrite(file, b"x", 0), lambda: os.fsync(file), lambda: os.fdatasync(file)):
        try:
            call()
            print("ok", end=" ")
        except OSError as error:
            print(error.errno, end=" ")
"""


def test_the_preloaded_library_fails_what_it_is_told_to(tmp_path: Path) -> None:
    disk = IoErrors(tmp_path, tmp_path / "bad")

    def outcome() -> list[str]:
        command = [sys.executable, "-c", SYNCS, str(tmp_path / "bad"), str(tmp_path / "good")]
        environment = {**os.environ, **disk.environment}
        done = subprocess.run(
            command, env=environment, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout.split()

    assert outcome() == ["ok"] * 6
    disk.fail("sync")
    assert outcome() == ["ok", str(errno.EIO), str(errno.EIO)] + ["ok"] * 3
    disk.fail("sync", skip=1, times=1)
    assert outcome() == ["ok", "ok", str(errno.EIO)] + ["ok"] * 3
    disk.fail("write", "sync", error=errno.ENOSPC, times=1)
    assert outcome() == [str(errno.ENOSPC), str(errno.ENOSPC)] + ["ok"] * 4
    disk.heal()
    assert outcome() == ["ok"] * 6
    assert disk.met() == {"sync": 4, "write": 1}


@pytest.mark.fault(38, 39)
@pytest.mark.parametrize("story", STORIES, ids=lambda story: str(story[0]))
def test_a_failing_disk(tmp_path: Path, story: list[str]) -> None:
    disk = IoErrors(tmp_path, tmp_path / "h.db")
    path = f"{ROOT}{os.pathsep}{ROOT / 'tests'}"
    for scene in story:
        done = subprocess.run(
            [sys.executable, "-m", "support.faults.failing_disk", scene, str(tmp_path)],
            env={**os.environ, "PYTHONPATH": path, **disk.environment},
            capture_output=True,
            text=True,
            check=False,
            timeout=100,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout == "passed\n"
