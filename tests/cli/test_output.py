"""What the commands print is whole where it is piped into a program or written to a file."""

from __future__ import annotations

import io
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pensieve.cli import main as cli
from pensieve.cli import output
from pensieve.cli.store import show_survey, show_usage
from pensieve.client import Client
from pensieve.store.maintenance import Finding, Problem, Remedy, Survey, TenantTotal, Totals
from support.page.feeds import FeedStub, row, state
from support.service.fake_server import FakeServerThread

LONG = "a" * 60


@pytest.fixture(autouse=True)
def no_width(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)


@pytest.fixture
def server() -> Iterator[FakeServerThread]:
    with FakeServerThread() as running:
        yield running


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[str]:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 0
    return capsys.readouterr().out.splitlines()


def test_a_pipe_has_no_width_unless_columns_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    monkeypatch.setenv("FORCE_COLOR", "1")  # colours in a pipe make no terminal of it
    assert output.stdout().width == output.UNBOUNDED_WIDTH
    monkeypatch.setenv("COLUMNS", "70")
    assert output.stdout().width == 70


def test_sessions_are_whole_lines(capsys: pytest.CaptureFixture[str], server: FakeServerThread) -> None:
    labels = {"title": "t" * 120}
    with Client(server.target) as client:
        client.create_session(session_id=LONG, labels=labels).send("what is the secret")
    heads, line = said(capsys, "sessions", "--target", server.target)
    assert heads.split() == ["SESSION", "AGE", "USED", "ITEMS", "TOKENS", "STATE", "CONTEXT", "LABELS"]
    fields = line.split()
    assert (fields[0], fields[3], fields[5]) == (LONG, "2", "active")
    assert line.endswith(f"title={'t' * 120}")
    shown = said(capsys, "sessions", "show", LONG, "--target", server.target)
    assert any(one.split() == ["labels", f"title={'t' * 120}"] for one in shown)
    assert shown[-2].split()[-2:] == ["FIRST", "END"]


def test_findings_and_tenants_of_a_store_are_a_line_each(capsys: pytest.CaptureFixture[str]) -> None:
    total = Totals(sessions=1, records=2, bytes=3)
    detail = "a record is damaged " * 10
    show_usage([TenantTotal(LONG * 2, total)])
    assert capsys.readouterr().out.splitlines()[1].split() == [LONG * 2, "1", "0", "2", "3"]
    show_survey(Survey(total, [Finding(LONG, LONG, Problem.LOG, detail, Remedy.MARK)]))
    _, line, verdict = capsys.readouterr().out.splitlines()
    assert f"{LONG}/{LONG}" in line and detail.strip() in line and "1 finding" in verdict


def test_top_has_whole_ids_and_labels(capsys: pytest.CaptureFixture[str]) -> None:
    document = state(1)
    document["sessions"]["rows"] = [row(0, session=f"default/{LONG}", labels={"title": "t" * 120})]
    with FeedStub() as stub:
        stub.state = document
        lines = said(capsys, "top", "--admin", stub.address)
    (line,) = [line for line in lines if line.startswith(f"{LONG}  running ")]
    assert line.endswith(f"title={'t' * 120}")
    assert max(len(one) for one in lines if one is not line) <= 200


def test_a_finding_of_doctor_is_a_line(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "many words in the name of a folder that is not there" / "and another"
    with pytest.raises(SystemExit):
        cli.main(("doctor", "--model", str(folder), "--listen", "127.0.0.1:0", "--admin", "127.0.0.1:0"))
    assert any(str(folder) in line for line in capsys.readouterr().out.splitlines())
