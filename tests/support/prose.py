"""``python -P tests/support/prose.py [--before DIR]``: counts of the prose of the product, and of the docs.

`docs/style.md` states the rules. A program can see only some of them: first words of docstrings, a few words, sentences
that are too long. `tests/test_prose.py` holds these counts to a budget.
"""

from __future__ import annotations

import argparse
import ast
import re
import shutil
import subprocess
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

FIRST_WORDS = ("Of", "Whose", "So many", "That", "Those", "Such", "Whoever", "Nobody", "What")
WORDS = ("whoever", "nobody", "so many", "what is")
LONGEST_SENTENCE = 40
PRODUCT = ("pensieve", "store", "kernels")


def sources(root: Path, folders: tuple[str, ...], suffix: str) -> list[Path]:
    """The files of a checkout below ``folders`` (all: none given), links and generated stubs left out."""
    if shutil.which("git") is None or not (root / ".git").exists():
        found = [path.relative_to(root) for path in root.rglob(f"*{suffix}")]
    else:
        command = ["git", "ls-files", f"*{suffix}"]
        listed = subprocess.run(command, cwd=root, capture_output=True, text=True, check=True).stdout
        found = [Path(line) for line in listed.split()]
    left_out = {"node_modules", ".venv", ".site", "build"} | ({"v1"} if suffix == ".py" else set())
    return [
        root / path
        for path in sorted(found)
        if (not folders or path.parts[0] in folders)
        and not left_out & set(path.parts)
        and (root / path).is_file()
    ]


def docstrings(source: str) -> Iterator[tuple[int, str]]:
    """Line and text of each docstring of a module: of the module, its classes, functions and attributes."""
    for node in ast.walk(ast.parse(source)):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            value = statement.value if isinstance(statement, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield statement.lineno, value.value


def sentences(text: str) -> Iterator[str]:
    """Sentences of running text: code, tables, lists of fields and headings end one, too."""
    text = re.sub(r"```.*?```|::\n\n(?: +.*\n|\n)+", "\n\n", text, flags=re.DOTALL)
    text = re.sub(r"^.*\S {2,}\S.*$", "", text, flags=re.MULTILINE)  # a row of a table
    for paragraph in re.split(r"\n\s*\n|\n\s*[|*#=-]+ ?", text):
        yield from re.split(r"(?<=[.!?:;])\s+", " ".join(paragraph.split()))


def is_long(sentence: str) -> bool:
    """Whether a sentence has more than ``LONGEST_SENTENCE`` words."""
    return len(re.findall(r"[A-Za-z][\w'-]*", sentence)) > LONGEST_SENTENCE and "|" not in sentence


def _line_of(sentence: str, lines: list[str]) -> int:
    """The first line that holds the first words of a sentence, or 1."""
    start = " ".join(sentence.split()[:3])
    return next((number for number, line in enumerate(lines, 1) if start in line), 1)


def count(root: Path) -> tuple[Counter[str], list[str]]:
    """The counts by name, and where each is: ``path:line: name``."""
    counts: Counter[str] = Counter()
    places: list[str] = []

    def found(name: str, path: Path, line: int, times: int = 1) -> None:
        counts[name] += times
        places.append(f"{path.relative_to(root)}:{line}: {name}")

    for path in sources(root, PRODUCT, ".py"):
        source = path.read_text()
        for line, text in docstrings(source):
            for word in FIRST_WORDS:
                if re.match(rf"{word}\b", text.strip()):
                    found(f"first word {word}", path, line)
            for sentence in filter(is_long, sentences(text)):
                found("long sentence", path, line + text[: text.find(sentence[:20])].count("\n"))
    for path in (
        sources(root, PRODUCT, ".py") + sources(root, (), ".md") + sources(root, ("proto",), ".proto")
    ):
        name = str(path.relative_to(root))
        if name.startswith(("bench/results", "docs/style.md", "tests/")):
            continue
        lines = path.read_text().splitlines()
        for number, text in enumerate(lines, 1):
            for word in WORDS:
                if times := len(re.findall(rf"\b{word}\b", text.lower())):
                    found(f"word {word}" if name.endswith(".py") else f"docs {word}", path, number, times)
        if name.endswith(".md"):
            for sentence in filter(is_long, sentences("\n".join(lines))):
                found("docs long sentence", path, _line_of(sentence, lines))
    return counts, places


def lengths(root: Path) -> tuple[float, float]:
    """The mean length of a docstring's sentence in words, and lines of docstrings for each line of code."""
    words = number = lines = code = 0
    for path in sources(root, PRODUCT, ".py"):
        source = path.read_text()
        inside = 0
        for _, text in docstrings(source):
            inside += text.count("\n") + 1
            for sentence in sentences(text):
                size = len(re.findall(r"[A-Za-z][\w'-]*", sentence))
                words, number = words + size, number + bool(size)
        lines += inside
        code += sum(bool(line.strip()) for line in source.splitlines()) - inside
    return words / number, lines / code


def main() -> None:
    """Print a Markdown table, and with ``--places`` where each count comes from."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--before", type=Path, help="another checkout to compare with")
    parser.add_argument("--places", action="store_true", help="print each place")
    asked = parser.parse_args()
    roots = [asked.before] if asked.before else []
    roots.append(Path(__file__).resolve().parents[2])
    columns = [(count(root), lengths(root)) for root in roots]
    names = sorted(set().union(*(counts for (counts, _), _ in columns)))
    print("| | " + " | ".join(["before", "now"][-len(columns) :]) + " |\n|---|" + "---|" * len(columns))
    for name in names:
        print(f"| {name} | " + " | ".join(str(counts[name]) for (counts, _), _ in columns) + " |")
    print("| words a sentence | " + " | ".join(f"{mean:.1f}" for _, (mean, _) in columns) + " |")
    print(
        "| docstring lines a line of code | " + " | ".join(f"{share:.3f}" for _, (_, share) in columns) + " |"
    )
    if asked.places:
        print("\n".join(columns[-1][0][1]))


if __name__ == "__main__":
    main()
