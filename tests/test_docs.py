"""The pages of ``docs/`` name what is there: files, classes, functions, fields, options and sections of other pages."""

from __future__ import annotations

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from pensieve.cli.chat.command import chat
from pensieve.cli.gateway import gateway
from pensieve.cli.sessions import sessions
from pensieve.cli.store import store
from pensieve.cli.top.command import top
from pensieve.demo.run import demo
from pensieve.options.table import OPTIONS
from pensieve.v1 import pensieve_pb2
from support import structure
from support.sources import LINKS, ROOT, files, nodes, python_files

PAGES = [path for path in files() if path.parts[0] == "docs" and path.suffix == ".md"]
WALKS = [path for path in PAGES if path.name.startswith("life-of-")]
WORDS_OF_OTHERS = {"completed", "begin", "__init__"}
"""In backticks, and no name of ours: an event of the contract, an operation of the store, a file."""


def spans(page: Path) -> list[str]:
    """What stands in backticks, code blocks left out."""
    text = re.sub(r"```.*?```", "", (ROOT / page).read_text(), flags=re.DOTALL)
    return re.findall(r"`([^`\n]+)`", text)


@cache
def definitions() -> tuple[set[str], dict[str, set[str]]]:
    """Every name that a module defines, and of each class what it and its bases in the tree define."""
    names: set[str] = set()
    members: dict[str, set[str]] = {}
    bases: dict[str, set[str]] = {}
    for path in python_files("pensieve", *LINKS.values()):
        for node in nodes(path):
            if isinstance(node, ast.ClassDef):
                inside = members.setdefault(node.name, set())
                bases.setdefault(node.name, set()).update(
                    ast.unparse(base).split("[")[0] for base in node.bases
                )
                for part in ast.walk(node):
                    if isinstance(part, ast.FunctionDef | ast.AsyncFunctionDef):
                        inside.add(part.name)
                    elif isinstance(part, ast.AnnAssign | ast.Assign):
                        targets = part.targets if isinstance(part, ast.Assign) else [part.target]
                        inside |= {one.id for one in targets if isinstance(one, ast.Name)}
                        inside |= {one.attr for one in targets if isinstance(one, ast.Attribute)}
                names.add(node.name)
            elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Assign | ast.AnnAssign):
                targets = node.targets if isinstance(node, ast.Assign) else [node.target]
                names |= {one.id for one in targets if isinstance(one, ast.Name)}
    for name in members:
        todo = list(bases[name])
        while todo:
            base = todo.pop()
            if base in members and base != name:
                members[name] |= members[base]
                todo += bases[base] - {name}
    return names, members


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_paths_exist(page: Path) -> None:
    for span in spans(page):
        if re.fullmatch(r"(pensieve|kernels|store|bench|tests|proto|deploy|docs)/[\w./-]*", span):
            assert (ROOT / span).exists(), f"{page}: no {span}"


@pytest.mark.parametrize("page", WALKS, ids=str)
def test_walks_name_what_is_defined(page: Path) -> None:
    names, members = definitions()
    found = 0
    for span in spans(page):
        if re.fullmatch(r"[A-Z]\w*\.\w+", span):
            owner, member = span.split(".")
            assert owner in members, f"{page}: no class {owner}"
            assert member in members[owner], f"{page}: {owner} has no {member}"
        elif re.fullmatch(r"[A-Za-z_]\w*", span) and span not in WORDS_OF_OTHERS:
            reason = span.isupper() and any(
                f'"{span}"' in (ROOT / path).read_text() for path in python_files("pensieve", "store")
            )
            assert span in names or reason or any(span in inside for inside in members.values()), (
                f"{page}: nothing is called {span}"
            )
        else:
            continue
        found += 1
    assert found > 10


@pytest.mark.parametrize("page", PAGES, ids=str)
def test_options_exist(page: Path) -> None:
    flags = {option.name for option in OPTIONS} | {"config", "print-config", "help", "off"}
    flags |= {flag.lstrip("-") for parameter in gateway.params for flag in parameter.opts}
    groups = {"stores.md": [store], "top.md": [sessions], "personal-data.md": [sessions, store]}
    for group in groups.get(page.name, []):
        options = (param.opts for command in group.commands.values() for param in command.params)
        flags |= {name.removeprefix("--") for names in options for name in names}
    if page.name == "top.md":
        flags |= {flag.lstrip("-") for parameter in top.params for flag in parameter.opts}
    if page.name == "demo.md":
        flags |= {flag.lstrip("-") for parameter in demo.params for flag in parameter.opts}
    if page.name == "chat.md":
        flags |= {flag.lstrip("-") for parameter in chat.params for flag in parameter.opts}
    for span in spans(page):
        for flag in re.findall(r"(?<!\S)--(no-)?([a-z][a-z-]+)", span) if span.startswith("--") else []:
            assert flag[1] in flags or f"no-{flag[1]}" in flags, (
                f"{page}: `pensieve serve` and `pensieve gateway` have no --{flag[1]}"
            )


def anchors(page: Path) -> set[str]:
    """The anchors of a page's headings, as GitHub makes them."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    titles = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", [*PAGES, Path("README.md"), Path("CONTRIBUTING.md")], ids=str)
def test_links_to_sections_lead_somewhere(page: Path) -> None:
    for link, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", (ROOT / page).read_text()):
        target = (ROOT / page.parent / link) if link else ROOT / page
        assert anchor in anchors(target), f"{page}: {target.name} has no section #{anchor}"


@pytest.mark.parametrize("page", [path for path in files() if path.suffix == ".md"], ids=str)
def test_tables_are_whole(page: Path) -> None:
    """An empty line ends a table: rows behind it are shown as text, since they have no head of their own."""
    text = re.sub(r"^ *```.*?^ *```", "", (ROOT / page).read_text(), flags=re.DOTALL | re.MULTILINE)
    for block in re.split(r"\n\s*\n", text):
        rows = [line.strip() for line in block.splitlines() if line.lstrip().startswith("|")]
        if rows:
            assert len(rows) > 1 and re.fullmatch(r"[|:\- ]+", rows[1]), (
                f"{page}: no head above {rows[0][:60]}"
            )


def test_every_page_can_be_found() -> None:
    index = (ROOT / "docs/README.md").read_text()
    for page in PAGES:
        assert page.name == "README.md" or f"]({page.name})" in index, (
            f"docs/README.md does not name {page.name}"
        )


def modules_named(path: Path) -> set[str]:
    """What a source file has in double backticks as a module of ours, or as a word of one."""
    folders = {one.parent.name for one in (ROOT / "pensieve").glob("*/__init__.py")}
    packages = "|".join(folders - {"options"})  # a common name of a value, too
    return set(re.findall(rf"``((?:{packages}|kernels|store)(?:\.[a-z_]+)+)``", (ROOT / path).read_text()))


def is_there(name: str) -> bool:
    """Whether that is a module, a package, or a word that one has."""
    *folders, last = name.split(".")
    parent = ROOT.joinpath("pensieve", *folders)
    if parent.is_dir():
        source = parent / "__init__.py"
        inside = any((parent / f"{last}{end}").exists() for end in ("", ".py"))
        return inside or (source.exists() and last in source.read_text())
    module = parent.with_suffix(".py")
    return module.exists() and last in module.read_text()


def test_docstrings_name_modules_that_are_there() -> None:
    named = {
        (path, name) for path in python_files("pensieve", *LINKS.values()) for name in modules_named(path)
    }
    assert len(named) > 10
    assert [f"{path}: {name}" for path, name in sorted(named) if not is_there(name)] == []


def test_the_readme_counts_the_calls() -> None:
    calls = pensieve_pb2.DESCRIPTOR.services_by_name["ConversationService"].methods
    assert f"{len(calls)} RPCs" in (ROOT / "README.md").read_text()


def test_the_table_of_packages_is_made_of_their_docstrings() -> None:
    page = (ROOT / "docs/packages.md").read_text()
    assert structure.table() in page, "run: python tests/support/structure.py --markdown"
