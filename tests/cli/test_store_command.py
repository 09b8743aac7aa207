"""``pensieve store`` as an operator and a cron job meet it: exit codes, JSON, one line per mistake."""

from __future__ import annotations

import asyncio
import json
import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from pensieve.cli.main import cli
from pensieve.store import open_store
from support.store.population import Made, populate
from support.store.store_bench import SqliteBench, key

MADE = [
    Made(key("a"), ("turn", "turn")),
    Made(key("b", "other"), ("turn",)),
    Made(key("gone"), end="deleted"),
]


def run(*arguments: str) -> Result:
    return CliRunner().invoke(cli, ["store", *arguments])


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with three sessions."""

    async def fill() -> None:
        store = open_store(f"sqlite:///{tmp_path}/h.db")
        await store.open()
        await populate(store, MADE)
        await store.close()

    asyncio.run(fill())
    return tmp_path / "h.db"


def test_a_sound_store_is_code_0(path: Path) -> None:
    result = run("check", "--store", f"sqlite:///{path}")
    assert (result.exit_code, result.stdout) == (
        0,
        "2 sessions, 1 deleted, 5 records, 939 bytes: sound\n",
    ), result.output
    report = json.loads(run("check", "--store", f"sqlite:///{path}", "--json").stdout)
    assert report["sound"] is True and report["findings"] == []
    assert report["total"]["sessions"] == 2


def test_checking_changes_nothing(path: Path) -> None:
    before = path.read_bytes()
    assert run("check", "--store", f"sqlite:///{path}").exit_code == 0
    assert path.read_bytes() == before


def test_damage_is_code_1_and_named(path: Path) -> None:
    SqliteBench(path).damage(key("a"), 2)
    result = run("check", "--store", f"sqlite:///{path}")
    assert result.exit_code == 1
    assert "acme/a" in result.stdout and "record 2" in result.stdout
    report = json.loads(run("check", "--store", f"sqlite:///{path}", "--json", "--session", "acme/a").stdout)
    assert [(one["session"], one["problem"]) for one in report["findings"]] == [("a", "log")]
    assert run("check", "--store", f"sqlite:///{path}", "--session", "other/b").exit_code == 0


def test_repair_is_dry_until_it_is_told(path: Path, tmp_path: Path) -> None:
    SqliteBench(path).damage(key("a"), 3)
    url = f"sqlite:///{path}"
    cut = ("--truncate-damaged", str(tmp_path / "cut.jsonl"))
    result = run("repair", "--store", url, *cut)
    assert (result.exit_code, "with --apply" in result.stdout) == (0, True), result.output
    assert not (tmp_path / "cut.jsonl").exists()
    assert run("check", "--store", url).exit_code == 1
    result = run("repair", "--store", url, *cut, "--apply")
    assert (result.exit_code, "ends at revision 2, 1 unproven records cut" in result.stdout) == (0, True)
    assert (tmp_path / "cut.jsonl").exists()
    assert run("check", "--store", url).exit_code == 0


def test_backup_restore_and_usage(path: Path, tmp_path: Path) -> None:
    target = tmp_path / "b.jsonl.gz"
    result = run("backup", str(target), "--store", f"sqlite:///{path}")
    assert result.exit_code == 0, result.output
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    result = run("backup", str(target), "--store", f"sqlite:///{path}")
    assert result.exit_code == 1 and "already exists" in result.stderr
    assert run("backup", str(target), "--store", f"sqlite:///{path}", "--force").exit_code == 0
    new = f"sqlite:///{tmp_path}/new.db"
    result = run("restore", str(target), "--to", new, "--json")
    assert json.loads(result.stdout)["written"] == 3
    result = run("restore", str(target), "--to", new)
    assert result.exit_code == 1 and "holds 3 sessions" in result.stderr
    assert run("restore", str(target), "--to", new, "--merge").exit_code == 0
    tenants = json.loads(run("usage", "--store", new, "--json").stdout)["tenants"]
    assert [(one["tenant"], one["total"]["sessions"]) for one in tenants] == [("acme", 1), ("other", 1)]
    assert run("move", new, f"sqlite:///{tmp_path}/third.db").exit_code == 0
    assert run("check", "--store", f"sqlite:///{tmp_path}/third.db").exit_code == 0


def test_a_damaged_store_is_backed_up_all_the_same(path: Path, tmp_path: Path) -> None:
    SqliteBench(path).damage(key("a"), 2)
    result = run("backup", str(tmp_path / "b.jsonl"), "--store", f"sqlite:///{path}")
    assert result.exit_code == 1 and "1 damaged sessions" in result.stdout
    assert run("restore", str(tmp_path / "b.jsonl"), "--to", f"sqlite:///{tmp_path}/new.db").exit_code == 0


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["check", "--store", "memory:"], 2, "is not a store on a disk"),
        (["check", "--store", "mysql://x"], 2, "expected memory:"),
        (["check", "--store", "sqlite:////no/such.db"], 1, "there is no history file"),
        (["check", "--store", "sqlite:///{folder}/h.db", "--session", "nobody"], 2, "expected TENANT/ID"),
        (["check", "--store", "sqlite:///{folder}/h.db", "--session", "a/b"], 1, "no such session"),
        (["check", "--store", "sqlite:///{folder}/noise"], 1, "is not a history file"),
        (["check", "--store", "sqlite:///{folder}/empty"], 1, "empty is not a history file"),
        (["backup", "{folder}/b", "--store", "sqlite:///{folder}/empty"], 1, "empty is not a history file"),
        (["backup", "{folder}/b.zst", "--store", "sqlite:///{folder}/h.db"], 2, "plain JSON lines or .gz"),
        (
            ["backup", "{folder}/no/b.jsonl", "--store", "sqlite:///{folder}/h.db"],
            2,
            "in a folder that does not exist",
        ),
        (["restore", "{folder}/noise", "--to", "sqlite:///{folder}/new.db"], 1, "is not a backup"),
        (["restore", "{folder}/none", "--to", "sqlite:///{folder}/new.db"], 2, "does not exist"),
        (["restore", "{folder}/noise"], 2, "--to"),
        (["move", "sqlite:///{folder}/none.db", "sqlite:///{folder}/new.db"], 1, "there is no history file"),
        (["check", "--store", "redis://127.0.0.1:1/0"], 1, "history store: Redis at 127.0.0.1:1"),
    ],
)
def test_mistakes(path: Path, arguments: list[str], code: int, words: str) -> None:
    (path.parent / "noise").write_bytes(b"noise " * 1000)
    (path.parent / "empty").touch()
    result = run(*(one.replace("{folder}", str(path.parent)) for one in arguments))
    assert (result.exit_code, words in result.stderr) == (code, True), result.output
    assert result.stdout == ""


def test_a_served_file_is_read_and_not_written(path: Path, tmp_path: Path) -> None:
    async def served() -> None:
        store = open_store(f"sqlite:///{path}")
        await store.open()
        try:
            await asyncio.to_thread(reads)
        finally:
            await store.close()

    def reads() -> None:
        url = f"sqlite:///{path}"
        assert run("check", "--store", url).exit_code == 0
        assert run("backup", str(tmp_path / "b.jsonl"), "--store", url).exit_code == 0
        for writes in (["repair", "--apply", "--store", url], ["move", url, f"sqlite:///{tmp_path}/new.db"]):
            result = run(*writes)
            assert result.exit_code == 1 and "in use by another Pensieve server" in result.stderr
        assert run("restore", str(tmp_path / "b.jsonl"), "--to", url).exit_code == 1

    asyncio.run(served())


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_words_that_find_no_room_are_one_line_and_code_1(path: Path, options: list[str]) -> None:
    """As when stdout is a file on a full disk. What was to be done is done."""
    file = path.with_name("b.jsonl")
    command = [
        Path(sys.executable).with_name("pensieve"),
        "store",
        "backup",
        file,
        "--store",
        f"sqlite:///{path}",
    ]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [*command, *options], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60
        )
    assert (done.returncode, done.stderr) == (
        1,
        "pensieve store backup: cannot write the output: No space left on device\n",
    )
    assert file.exists()


def lead_nowhere(path: Path) -> None:
    """Nobody can open or make it, whoever that is."""
    path.unlink(missing_ok=True)
    path.symlink_to(path.parent / "nowhere" / "at all")


def test_a_file_on_a_medium_that_is_read_only_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is written beside it, as SQLite does where it can."""
    found = os.statvfs(path)
    flags = os.statvfs_result([*found[:8], found.f_flag | os.ST_RDONLY, *found[9:]])
    monkeypatch.setattr(os, "statvfs", lambda _: flags)
    lead_nowhere(path.with_name("h.db-shm"))
    for command in (["check"], ["usage"], ["backup", str(path.with_name("b.jsonl"))]):
        result = run(*command, "--store", f"sqlite:///{path}")
        assert result.exit_code == 0, result.output
    path.with_name("h.db-wal").write_bytes(b"what is newest")
    assert run("check", "--store", f"sqlite:///{path}").exit_code == 1, "what is newest is not passed over"


def test_where_nothing_can_be_written_beside_the_file_it_is_said_what_to_do(path: Path) -> None:
    lead_nowhere(path.with_name("h.db-shm"))
    for command in (["check"], ["backup", str(path.with_name("b.jsonl"))]):
        result = run(*command, "--store", f"sqlite:///{path}")
        assert result.exit_code == 1
        assert "h.db-shm beside it: run this as the user that the server runs as" in result.stderr
