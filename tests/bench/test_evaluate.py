"""An experiment as a user runs it, in small: the whole program, on a real server."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from support.lengths import LONG
from support.replay.benches import BENCH

EVALUATE = (sys.executable, str(BENCH / "evaluate.py"))


@pytest.mark.skipif(not LONG, reason="half a minute: PENSIEVE_LONG_TESTS=1")
def test_an_experiment_in_small(tmp_path: Path) -> None:
    folders = ("--results", str(tmp_path / "results"), "--models", str(tmp_path / "models"))
    command = [*EVALUATE, "ablate-unified", "--small", "--rates", "6", *folders]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert [path.name for path in (tmp_path / "models").iterdir()] == ["tiny-llama-gqa2"]
    tmp_path /= "results"
    report = json.loads((tmp_path / "ablate-unified.json").read_text(encoding="utf-8"))
    assert [summary["target"] for summary in report["targets"]] == ["unified", "separate"]
    for summary in report["targets"]:
        assert summary["turns"]["completed"] and summary["receipts"]["checked"] and summary["rate"] == 6
        assert summary["receipts"]["violations"] == 0
    assert report["command_line"].startswith("python bench/evaluate.py ablate-unified --small")
    assert all(job["start_up_s"] > 0 and "pensieve serve" in job["server"] for job in report["jobs"])
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "ablate-unified.json", "ablate-unified.md", "ablate-unified.png", "evaluate.log"
    ]  # fmt: skip
    page = (tmp_path / "ablate-unified.md").read_text(encoding="utf-8")
    assert "| unified | 6 |" in page and "| unified ∕ separate |" in page
    assert "expected: " in done.stdout and "ablate-unified: separate: done in" in done.stdout


def test_a_signal_leaves_what_was_measured(tmp_path: Path) -> None:
    """The first system fails at once and is written; the second is under way when SIGTERM comes."""
    environment = os.environ | {"PATH": "/usr/bin:/bin"}  # without vLLM
    command = [*EVALUATE, "systems-13b-sharegpt", "--small", "--only", "vLLM", "--only", "Pensieve"]
    process = subprocess.Popen(
        [*command, "--results", str(tmp_path)], stdout=subprocess.PIPE, text=True, env=environment
    )
    assert process.stdout is not None
    for line in process.stdout:
        if ": systems-13b-sharegpt: Pensieve: rates" in line:
            break
    time.sleep(2)
    process.send_signal(signal.SIGTERM)
    rest = process.stdout.read()
    process.stdout.close()
    assert process.wait(60) == 1 and "Pensieve: failed: stopped after" in rest
    report = json.loads((tmp_path / "systems-13b-sharegpt.json").read_text(encoding="utf-8"))
    errors = {missing["target"]: missing["error"] for missing in report["unreached"]}
    assert sorted(errors) == ["Pensieve", "vLLM"]
    assert "vllm" in errors["vLLM"] and errors["Pensieve"].endswith("no time was left")
    assert "=== systems-13b-sharegpt: Pensieve on device cpu" in (tmp_path / "evaluate.log").read_text(
        encoding="utf-8"
    )
