"""The shape of the repository: what may lie where, how long things may be, and that its documents tell the truth."""

from __future__ import annotations

import ast
import itertools
import os
import re
import subprocess
import sys
import tomllib
from collections import Counter
from pathlib import Path

import pytest

import pensieve
from pensieve.cli import main as cli
from pensieve.options.table import OPTIONS
from support import lengths, structure
from support.sources import LINKS, ROOT, files, nodes, python_files, tree

TOP_FOLDERS = {"proto", "pensieve", "kernels", "store", "tests", "bench", "deploy", "docs", "examples"}
TOP_FILES = {"pyproject.toml", "README.md", "Makefile", "LICENSE", "MANIFEST.in", "constraints.txt"}
SDIST_FILES = {"PKG-INFO", "setup.cfg"}
"""What setuptools adds to the tree of a source distribution, where these tests run as well."""
MAX_FUNCTION_LINES = 80
ENVIRONMENT_READERS = {
    "pensieve/cli/environment.py",  # which variables are set, to name the one at fault
    "pensieve/debug.py",  # debug switches
    "pensieve/machine.py",  # where a user's data goes (XDG_…_HOME), and who has started this process (NOTIFY_SOCKET)
}
SERVE_FLAGS = {option.name.removeprefix("no-") for option in OPTIONS} | {
    "config",
    "print-config",
    "help",
    "off",
}
FORBIDDEN = {
    "kernels/__init__.py": "a root package `kernels` shadows the PyPI package that transformers imports",
    "proto/__init__.py": "a root package `proto` shadows proto-plus",
    "tests/__init__.py": "it would put the root on sys.path",
    "conftest.py": "it would put the root on sys.path",
}
OLD_DOCUMENTS = ("CHANGELOG.md", "bench/results/")
"""They name files as they were called at the time."""
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def text_files() -> list[tuple[Path, str]]:
    found = []
    for path in files():
        if (ROOT / path).is_file() and not (ROOT / path).is_symlink():
            data = (ROOT / path).read_bytes()
            if b"\0" not in data[:8192]:
                found.append((path, data.decode("utf-8")))
    return found


def test_top_level_entries() -> None:
    for path in files():
        top = path.parts[0]
        if len(path.parts) > 1:
            assert top in TOP_FOLDERS or top.startswith("."), f"{top}/ is no folder of the layout"
        else:
            assert top in TOP_FILES | SDIST_FILES or top.endswith(".md") or top.startswith("."), (
                f"{top} does not belong here"
            )
    assert {path.parts[0] for path in files()} >= TOP_FOLDERS | TOP_FILES


@pytest.mark.parametrize(("forbidden", "why"), FORBIDDEN.items())
def test_files_that_must_not_exist(forbidden: str, why: str) -> None:
    assert not (ROOT / forbidden).exists(), why


def test_links() -> None:
    for link, folder in LINKS.items():
        assert (ROOT / link).is_symlink(), f"{link} must be a link: some downloads make it a text file"
        assert os.readlink(ROOT / link) == f"../{folder}"


def test_our_names_do_not_shadow_others() -> None:
    code = "import importlib.util as u; print([n for n in ('kernels', 'store', 'proto', 'tests') if u.find_spec(n)])"
    command = [sys.executable, "-P", "-c", f"import pensieve.store\n{code}"]
    assert (
        subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip() == "[]"
    )


TWICE = {
    "Item": "one message of a history as the client and as the store sees it: the same thing at two ends of the wire",
    **dict.fromkeys(
        ("FinishReason", "Phase", "Role"),
        "a number in the store and on the wire, a word for programs of people",
    ),
}
"""Class names that are defined more than once → why each of them may be."""


def test_a_class_name_stands_for_one_thing() -> None:
    found = structure.twice_defined()
    assert set(found) == set(TWICE), {name: found[name] for name in set(found) - set(TWICE)}
    assert len(TWICE) <= 8 and all(TWICE.values())


def _defined(node: ast.stmt) -> list[str]:
    """Names that a statement of a module defines; an overload and its function are one definition."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return [] if any("overload" in ast.unparse(mark) for mark in node.decorator_list) else [node.name]
    targets = (
        node.targets
        if isinstance(node, ast.Assign)
        else [node.target]
        if isinstance(node, ast.AnnAssign)
        else []
    )
    return [name.id for target in targets for name in ast.walk(target) if isinstance(name, ast.Name)]


def test_a_module_defines_each_name_once() -> None:
    """Where modules are merged, the second of two constants of one name would replace the first for both."""
    twice = []
    for path in python_files():
        names = Counter(name for node in tree(path).body for name in _defined(node) if name != "_")
        twice += [f"{path}: {name}" for name, count in names.items() if count > 1]
    assert twice == []


def test_file_lengths() -> None:
    lengths = {str(path): len((ROOT / path).read_text().splitlines()) for path in python_files()}
    assert {path: count for path, count in lengths.items() if count > structure.MOST_LINES} == {}


def test_no_cancellation_can_be_forgotten() -> None:
    """``asyncio.wait_for`` of Python 3.11 swallows one that comes as its waiting ends; ``asyncio.timeout`` does not."""
    forgetful = [
        f"{path}:{node.lineno}"
        for path in python_files("pensieve", "store", "bench", "examples", "deploy")
        for node in nodes(path)
        if isinstance(node, ast.Attribute)
        and node.attr == "wait_for"
        and isinstance(node.value, ast.Name)
        and node.value.id == "asyncio"
    ]
    assert forgetful == []


def test_function_lengths() -> None:
    too_long = {}
    for path in python_files():
        for node in nodes(path):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    too_long[f"{path}:{node.lineno} {node.name}"] = length
    assert too_long == {}


def test_only_named_modules_read_the_environment() -> None:
    readers = set()
    for path in python_files("pensieve", "kernels", "store"):
        written = {
            node.value
            for node in nodes(path)
            if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load)
        }
        for node in nodes(path):
            if isinstance(node, ast.Attribute) and ast.unparse(node) in (
                "os.environ",
                "os.getenv",
                "os.environb",
            ):
                readers |= {str(path)} if node not in written else set()
            if isinstance(node, ast.ImportFrom) and node.module == "os":
                assert not {alias.name for alias in node.names} & {"environ", "getenv"}, path
    assert readers <= ENVIRONMENT_READERS


def test_no_swallowed_errors() -> None:
    for path in python_files():
        for node in nodes(path):
            if isinstance(node, ast.ExceptHandler):
                assert node.type is not None, f"{path}:{node.lineno}: bare except"
                broad = ast.unparse(node.type) in ("Exception", "BaseException")
                silent = all(isinstance(line, ast.Pass | ast.Continue) for line in node.body)
                assert not (broad and silent), f"{path}:{node.lineno}: any error is swallowed here"


def test_no_private_paths_and_no_leftovers() -> None:
    home = re.compile(r"(?<![\w.])/(?:home|Users|root|work)/\w")
    leftover = re.compile(r"\b(?:TODO|FIXME|XXX|HACK)\b")
    for path, text in text_files():
        if path == Path("tests/test_repo.py"):
            continue
        for pattern in (home, leftover):
            match = pattern.search(text)
            line = text.count("\n", 0, match.start()) + 1 if match else 0
            assert match is None, f"{path}:{line}: {match[0]!r}"


def test_no_link_leaves_the_tree() -> None:
    for path in files():
        if (ROOT / path).is_symlink():
            assert (ROOT / path).resolve().is_relative_to(ROOT), path


def test_large_files() -> None:
    sizes = {str(path): (ROOT / path).stat().st_size for path in files() if (ROOT / path).is_file()}
    assert sum(size for path, size in sizes.items() if path.startswith("pensieve/demo/model/")) <= 8 * 2**20
    others = {path: size for path, size in sizes.items() if not path.startswith("pensieve/demo/model/")}
    assert {path: size for path, size in others.items() if size > 2**20} == {}


def make_targets() -> set[str]:
    return set(re.findall(r"^([a-z][a-z-]*):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE))


def documents() -> list[Path]:
    return [path for path in files() if path.suffix == ".md"]


@pytest.mark.parametrize("document", documents(), ids=str)
def test_documents_name_what_exists(document: Path) -> None:
    text = (ROOT / document).read_text()
    code = "\n".join(re.findall(r"```.*?```|`[^`\n]+`", text, re.DOTALL))
    for target in re.findall(r"(?:^|[`$;&]\s*)make ([a-z][a-z-]*)", code, re.MULTILINE):
        assert target in make_targets(), f"{document}: no `make {target}`"
    for command in re.findall(r"(?:^|[`$;&]\s*)pensieve ([a-z]+)\b", code, re.MULTILINE):
        assert command in {"serve", *cli.SUBCOMMANDS}, f"{document}: no `pensieve {command}`"
    for arguments in re.findall(r"pensieve serve\b([^\n`|;#]*)", code):
        for flag in re.findall(r"--(?:no-)?([a-z][a-z-]+)", arguments):
            assert flag in SERVE_FLAGS, f"{document}: `pensieve serve` has no --{flag}"
    for link in re.findall(r"\]\((?!https?:|#|mailto:)([^)#\s]+)", text):
        assert (ROOT / document.parent / link).exists(), f"{document}: dead link {link}"
    if not str(document).startswith(OLD_DOCUMENTS):
        _check_source_names(document, text)


def _check_source_names(document: Path, text: str) -> None:
    """Sources by their paths, and in backticks by their names alone; those "of commit X" are gone on purpose."""
    named = re.findall(
        r"(?<![\w./-])(?:bench|kernels|pensieve|store|tests)/[\w./-]+\.py\b(?!` of commit)", text
    )
    for path in set(named) - FORBIDDEN.keys():
        assert (ROOT / path).exists(), f"{document}: no {path}"
    known = {path.name for path in python_files()}
    for name in re.findall(r"`(\w+\.py)`(?! of commit)", text):
        assert name in known, f"{document}: no source is called {name}"


def test_makefile_help_names_the_public_targets() -> None:
    # Under `make test` a plain make would say which folder it enters.
    command = ["make", "--no-print-directory", "help"]
    shown = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    named = {line.split()[0] for line in shown.splitlines()}
    assert {"setup", "demo", "test", "lint", "types", "proto", "bench-replay", "clean", "help"} <= named
    assert named <= make_targets()


def test_ci_runs_make_test() -> None:
    script = ROOT / ".ci/run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert script.read_text().rstrip().endswith("make test")


def test_the_slowest_test_files_exist_and_start_first() -> None:
    assert len(set(lengths.SLOWEST)) == len(lengths.SLOWEST)
    assert {name for name in lengths.SLOWEST if not (ROOT / name).is_file()} == set()
    assert "--no-loadscope-reorder" in (ROOT / "Makefile").read_text(), "pytest-xdist has an order of its own"


def test_versions_agree() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text()
    assert pensieve.__version__ == PROJECT["version"]
    assert f"## [{PROJECT['version']}]" in changelog


def test_every_dependency_is_pinned() -> None:
    lines = (ROOT / "constraints.txt").read_text().splitlines()
    pins = {normal(line.split("==")[0]) for line in lines if "==" in line and not line.startswith("#")}
    assert all("==" in line for line in lines if line and not line.startswith("#"))
    wanted = [*PROJECT["dependencies"], *itertools.chain(*PROJECT["optional-dependencies"].values())]
    missing = {
        name for name in (normal(re.split(r"[^\w.-]", line)[0]) for line in wanted) if name not in pins
    }
    assert missing <= {"pensieve"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def test_public_names() -> None:
    assert {"Client", "AsyncClient", "PensieveError", "__version__"} <= set(pensieve.__all__)
    for name in pensieve.__all__:
        assert getattr(pensieve, name) is not None
    errors = {name for name in dir(pensieve.errors) if isinstance(getattr(pensieve.errors, name), type)}
    ours = {name for name in errors if issubclass(getattr(pensieve.errors, name), pensieve.PensieveError)}
    assert ours <= set(pensieve.__all__)
