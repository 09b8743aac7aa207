"""The walk through the life of a turn stays as short as it says."""

from __future__ import annotations

import ast
import re

from support.sources import ROOT, python_files, tree

WALK = (ROOT / "docs/life-of-a-turn.md").read_text()
MOST_FILES, MOST_CLASSES = 25, 15


def named(text: str) -> tuple[set[str], set[str]]:
    """Files, and classes of ours, that a text names in code marks."""
    words = set(re.findall(r"`([^`\n]+)`", text))
    classes = {
        node.name
        for path in python_files("pensieve", "kernels", "store")
        for node in tree(path).body
        if isinstance(node, ast.ClassDef)
    }
    return {word for word in words if word.endswith(".py")}, classes & {
        word.partition(".")[0] for word in words
    }


def test_the_walk_needs_few_files_and_classes() -> None:
    files, classes = named(WALK)
    assert len(files) <= MOST_FILES and len(classes) <= MOST_CLASSES
    assert f"**{len(files)} files and {len(classes)} classes**" in WALK


def test_the_list_at_its_end_is_the_walk() -> None:
    text, _, table = WALK.partition("\n## The files and classes\n")
    assert named(text) == named(table)
