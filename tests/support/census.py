"""Size of the tree: lines, files, classes, long parameter lists, options of the first help screen, reach of an option.

python tests/support/census.py                     # this tree
python tests/support/census.py --before ../other   # beside another checkout
python tests/support/census.py --parameters        # the functions with seven or more parameters, by name

All lines of tracked ``.py`` files count; generated code does not. Keyword-only parameters count, ``self`` and ``cls``
do not.
"""

from __future__ import annotations

import argparse
import ast
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

ROOT = Path(__file__).parents[2]
PRODUCT = ("pensieve", "store", "kernels")
MANY_PARAMETERS = 7
SAMPLING_OPTION = "frequency_penalty"
"""A sampling option that changes logits and that every way in accepts: a new one reaches as many files."""
GENERATED = re.compile(r"_pb2(_grpc)?\.pyi?$|^pensieve/client/_sync\.py$")


@dataclass(frozen=True)
class Census:
    """Field metadata has no place here: the label of each row is the field's name, underscores apart."""

    product_lines: int
    product_files: int
    product_classes: int
    median_file_lines: int
    functions_with_7_parameters: int
    test_lines: int
    bench_lines: int
    options_on_first_help_screen: int
    files_of_a_sampling_option: int


def tracked(root: Path, *tops: str) -> list[Path]:
    """Tracked Python files below ``tops``, relative to ``root``; generated ones and links left out."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--", *tops], cwd=root, capture_output=True, text=True, check=True
    ).stdout.split("\0")
    return [
        Path(name)
        for name in listed
        if name.endswith(".py") and not GENERATED.search(name) and (root / name).is_file()
    ]


def _lines(root: Path, paths: list[Path]) -> int:
    return sum(len((root / path).read_text().splitlines()) for path in paths)


def long_lists(root: Path) -> Iterator[tuple[str, int]]:
    """(file:line name, parameters) of each product function that takes seven or more."""
    for path in tracked(root, *PRODUCT):
        for node in ast.walk(ast.parse((root / path).read_text())):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                arguments = node.args
                named = [*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs]
                count = sum(argument.arg not in ("self", "cls") for argument in named)
                if count >= MANY_PARAMETERS:
                    yield f"{path}:{node.lineno} {node.name}", count


def _help_options(root: Path) -> int:
    """Options that the first help screen of ``pensieve serve`` shows, ``--help`` among them."""
    text = subprocess.run(
        [sys.executable, "-P", "-c", "from pensieve.cli.main import main; main(['serve', '--help'])"],
        cwd=root,
        env={"PYTHONPATH": str(root / ".venv" / "source"), "COLUMNS": "120", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    ).stdout
    return len(re.findall(r"^\s{1,4}(?:-\w, )?--[a-z][\w-]*", text, re.MULTILINE))


def _reach(root: Path) -> int:
    """Files of the product and the protocol that name a sampling option: those that a new one must touch."""
    listed = subprocess.run(
        ["git", "grep", "-lw", SAMPLING_OPTION, "--", *PRODUCT, "proto"],
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return sum(1 for name in listed if name.endswith((".py", ".proto")) and not GENERATED.search(name))


def census(root: Path) -> Census:
    """Count the checkout at ``root``."""
    product = tracked(root, *PRODUCT)
    trees = [ast.parse((root / path).read_text()) for path in product]
    return Census(
        product_lines=_lines(root, product),
        product_files=len(product),
        product_classes=sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree)),
        median_file_lines=int(
            statistics.median(len((root / path).read_text().splitlines()) for path in product)
        ),
        functions_with_7_parameters=sum(1 for _ in long_lists(root)),
        test_lines=_lines(root, tracked(root, "tests")),
        bench_lines=_lines(root, tracked(root, "bench")),
        options_on_first_help_screen=_help_options(root),
        files_of_a_sampling_option=_reach(root),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--before", type=Path, help="another checkout, for a column beside this one")
    parser.add_argument(
        "--parameters", action="store_true", help="list the functions with seven or more parameters"
    )
    options = parser.parse_args()
    if options.parameters:
        for name, count in sorted(long_lists(ROOT), key=lambda found: (-found[1], found[0])):
            print(f"{count:3d} {name}")
        return
    columns = [census(root) for root in ([options.before] if options.before else []) + [ROOT]]
    print("| | " + " | ".join(["before", "after"] if options.before else ["now"]) + " |")
    print("|---" * (len(columns) + 1) + "|")
    for field in fields(Census):
        values = " | ".join(f"{getattr(column, field.name):,}" for column in columns)
        print(f"| {field.name.replace('_', ' ')} | {values} |")


if __name__ == "__main__":
    main()
