"""Working copies of one revision of the repository, to change and to run tests in."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import coverage

RC = """[run]
source = {root}/pensieve, {root}/kernels, {root}/store
data_file = {data}
parallel = true
sigterm = true
core = ctrace
"""
SITECUSTOMIZE = """import os

if "COVERAGE_PROCESS_START" in os.environ:
    import coverage

    coverage.process_startup()
"""
PYTEST = ("-P", "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", "--no-header", "--tb=no")


@dataclass(frozen=True)
class Run:
    """``failed`` names the tests that failed; ``"(stuck)"`` stands for a run that did not end in time."""

    seconds: float
    failed: tuple[str, ...]


class Copy:
    """A detached git worktree. Python finds its package through a folder of its own on ``PYTHONPATH``."""

    def __init__(self, repository: Path, folder: Path, revision: str) -> None:
        self.root = folder
        if not folder.exists():
            command = ["git", "worktree", "add", "--quiet", "--detach", str(folder), revision]
            subprocess.run(command, cwd=repository, check=True)
        self._path = folder / "build" / "mutation"
        self._path.mkdir(parents=True, exist_ok=True)
        if not (self._path / "pensieve").is_symlink():
            (self._path / "pensieve").symlink_to(folder / "pensieve")
        (self._path / "sitecustomize.py").write_text(SITECUSTOMIZE)
        support = Path(__file__).parents[1]
        if not (folder / "tests/support/mutation").exists():  # an older revision
            (folder / "tests/support/mutation").symlink_to(support / "mutation")

    def remove(self, repository: Path) -> None:
        subprocess.run(["git", "worktree", "remove", "--force", str(self.root)], cwd=repository, check=True)

    def test_files(self, folders: Sequence[str]) -> list[str]:
        found = (path for folder in folders for path in (self.root / folder).rglob("test_*.py"))
        return sorted(path.relative_to(self.root).as_posix() for path in found)

    def run(self, tests: Sequence[str], limit_s: float, *more: str, data: Path | None = None) -> Run:
        """Run tests here. With ``data``, record the lines that they reach in files of that name."""
        environment = os.environ | {
            "PYTHONPATH": str(self._path),
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        if data is not None:
            rc = self._path / "coveragerc"
            rc.write_text(RC.format(root=self.root, data=data))
            environment["COVERAGE_PROCESS_START"] = str(rc)
            more = (*more, "-p", "support.mutation.contexts")
        command = [sys.executable, *PYTEST, "-rfE", *more, *tests]
        began = time.monotonic()
        with subprocess.Popen(
            command,
            cwd=self.root,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=limit_s)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.communicate()
                return Run(time.monotonic() - began, ("(stuck)",))
        failed = [
            line.split(" ", 1)[1].split(" - ")[0]
            for line in output.splitlines()
            if line.startswith(("FAILED ", "ERROR "))
        ]
        if process.returncode not in (0, 5) and not failed:
            failed = [f"(pytest ended with {process.returncode})"]
        return Run(time.monotonic() - began, tuple(failed))


@dataclass(frozen=True)
class Reach:
    """Which tests reach which lines. ``seconds`` and ``lines`` are by test file, ``tests`` by path and line."""

    seconds: dict[str, float]
    lines: dict[str, dict[str, list[int]]]
    tests: dict[str, dict[int, list[str]]]

    def of_lines(self, path: str, first: int, last: int) -> tuple[list[str], list[str]]:
        """Single tests, and then whole files (quickest first), that reach one of the lines."""
        wanted = range(first, last + 1)
        single = sorted({test for line in wanted for test in self.tests.get(path, {}).get(line, ())})
        files = [name for name, reached in self.lines.items() if set(wanted) & set(reached.get(path, ()))]
        return single, sorted(files, key=lambda name: self.seconds[name])

    def save(self, path: Path) -> None:
        path.write_text(json.dumps({"seconds": self.seconds, "lines": self.lines, "tests": self.tests}))

    @classmethod
    def load(cls, path: Path) -> Reach:
        read = json.loads(path.read_text())
        tests = {
            file: {int(line): names for line, names in rows.items()} for file, rows in read["tests"].items()
        }
        return cls(read["seconds"], read["lines"], tests)


def collect(copy: Copy, folder: Path, files: Sequence[str], seconds: dict[str, float]) -> Reach:
    """Put together what was recorded of each test file."""
    lines: dict[str, dict[str, list[int]]] = {}
    tests: dict[str, dict[int, list[str]]] = {}
    for name in files:
        reached: dict[str, set[int]] = {}
        for recorded in sorted(folder.glob(data_name(name) + ".*")):
            data = coverage.CoverageData(basename=str(recorded))
            data.read()
            for measured in data.measured_files():
                path = Path(*Path(measured).relative_to(copy.root.parent).parts[1:]).as_posix()  # in any copy
                reached.setdefault(path, set()).update(data.lines(measured) or ())
                for line, contexts in data.contexts_by_lineno(measured).items():
                    tests.setdefault(path, {}).setdefault(line, []).extend(filter(None, contexts))
        lines[name] = {path: sorted(found) for path, found in reached.items()}
    return Reach(seconds, lines, tests)


def data_name(test_file: str) -> str:
    return "reach." + test_file.removesuffix(".py").replace("/", "-")
