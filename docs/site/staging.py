"""What the site is made of: the pages of ``docs/``, whatever pages of the tree they lead to, and pictures."""

from __future__ import annotations

import posixpath
import re
import shutil
import sys
from pathlib import Path

import gfm

ROOT = Path(__file__).resolve().parents[2]
_LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^)\s]+)\)")
_PICTURES = {".png", ".svg", ".gif", ".webp"}
"""Copied, as is all below ``docs/``. Other sources are named, not linked: the site has no browser of sources."""

_WITHOUT_SIDES = "---\nhide: [navigation, toc]\n---\n"


def place(source: str) -> str:
    """Where a file of the tree lies on the site; both are paths with ``/``."""
    if source == "docs/README.md":
        return "contents.md"
    return source.removeprefix("docs/") if source.startswith("docs/") else f"tree/{source}"


def stage(target: Path) -> list[str]:
    """Lays out every page and file below ``target``; the pages that are in ``docs/`` itself, as places."""
    pages = [f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))]
    todo, done = list(pages), set(pages)
    while todo:
        source = todo.pop()
        text, files = turn_inwards(source, (ROOT / source).read_text(encoding="utf-8"))
        head = _WITHOUT_SIDES if source == "docs/index.md" else ""
        write(target / place(source), head + gfm.to_python_markdown(text))
        for file in sorted(files - done):
            done.add(file)
            if file.endswith(".md"):
                todo.append(file)
            else:
                (target / place(file)).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(ROOT / file, target / place(file))
    shutil.copyfile(ROOT / "docs/site/site.css", target / "site.css")
    return [place(page) for page in pages]


def turn_inwards(source: str, text: str) -> tuple[str, set[str]]:
    """A page with its links as the site has them, and the files of the tree that they lead to."""
    wanted: set[str] = set()
    here = posixpath.dirname(source)

    def change(link: re.Match[str]) -> str:
        picture, words, target = link.groups()
        if re.match(r"[a-z]+:|#", target):
            return link[0]
        file, _, anchor = target.partition("#")
        file = posixpath.normpath(posixpath.join(here, file))
        ours = file.startswith("docs/") and (ROOT / file).is_file()
        if ours or (ROOT / file).suffix in {".md", *_PICTURES}:
            if not (ROOT / file).is_file():
                sys.exit(f"docs: {source} leads to {file}, which is not there")
            wanted.add(file)
            inner = re.sub(_LINK, change, words)  # a picture that is a link
            back = posixpath.relpath(place(file), posixpath.dirname(place(source)) or ".")
            return f"{picture}[{inner}]({back}{'#' if anchor else ''}{anchor})"
        return words if file in words.replace("`", "") else f"{words} (`{file}`)"

    return gfm.outside_fences(text, lambda prose: _LINK.sub(change, prose)), wanted


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
