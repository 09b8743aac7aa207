"""Maintenance that is broken off, or done twice at once, leaves nothing behind that somebody would trip over."""

from __future__ import annotations

import fcntl
import os
import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from pensieve.store._raw import RawSession
from pensieve.store._rules import Meta
from pensieve.store.maintenance.archive import ArchiveWriter, read_sessions
from pensieve.store.records import SessionRow
from support.store.store_bench import key


@contextmanager
def full_disk() -> Iterator[None]:
    """No file of this process grows."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, before)


def write(path: Path, *, replace: bool = False) -> None:
    row = SessionRow(tenant=key().tenant, session_id=key().session_id)
    with ArchiveWriter(path, replace=replace) as writer:
        writer.begin("sqlite", "id", 1)
        writer.add(RawSession(key(), Meta(row, ""), (), {}))
        writer.finish()


@pytest.mark.parametrize("name", ["b.jsonl", "b.jsonl.gz"])
def test_a_backup_that_finds_no_room_leaves_nothing_and_names_its_file(tmp_path: Path, name: str) -> None:
    with pytest.raises(OSError) as caught, full_disk():
        write(tmp_path / name)
    assert caught.value.filename == str(tmp_path / name)
    assert not os.listdir(tmp_path)


def test_what_killed_backups_left_goes_with_the_next_one(tmp_path: Path) -> None:
    """Not what another one writes at this moment, nor other files."""
    for name in (".b.jsonl.0123abcd.part", ".other.jsonl.0123abcd.part", "b.jsonl.part"):
        (tmp_path / name).write_text("part")
    with ArchiveWriter(tmp_path / "b.jsonl") as running:
        running.begin("sqlite", "id", 1)
        write(tmp_path / "b.jsonl", replace=True)
        assert len(os.listdir(tmp_path)) == 4
        with pytest.raises(
            FileExistsError, match=r"b\.jsonl already exists: move it away, or choose another name"
        ):
            running.finish()
    assert set(os.listdir(tmp_path)) == {".other.jsonl.0123abcd.part", "b.jsonl.part", "b.jsonl"}
    assert [one.key for one in read_sessions(tmp_path / "b.jsonl")] == [key()]


def test_a_partial_file_that_another_backup_took_for_a_left_one_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It comes between the making of the file and its lock."""
    flock, taken = fcntl.flock, []

    def lock(file: int, how: int) -> None:
        if not taken:
            (one,) = tmp_path.iterdir()
            taken.append(one)
            one.unlink()
        flock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock)
    write(tmp_path / "b.jsonl")
    assert taken and os.listdir(tmp_path) == ["b.jsonl"]
