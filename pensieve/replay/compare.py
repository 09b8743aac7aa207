"""``pensieve replay compare``: reports of several runs in one set of pictures and tables."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pensieve.replay.html import write_html
from pensieve.replay.plots import write_plots
from pensieve.replay.table import show_curves

_REPORT = click.Path(exists=True, dir_okay=False, path_type=Path)


class NotAReport(click.ClickException):
    """The file holds something else."""


def read_report(path: Path) -> dict[str, Any]:
    """A report of any version of this program; newer ones only have more fields. Raises NotAReport, OSError."""
    try:
        report: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise NotAReport(f"{path}: {error}") from error
    schema = report.get("schema") if isinstance(report, dict) else None
    if not str(schema).startswith("pensieve."):
        raise NotAReport(f"{path}: no report of `pensieve replay --json`: its schema is {schema!r}")
    targets = report.get("targets")
    if not isinstance(targets, list) or not all(isinstance(t, dict) and "target" in t for t in targets):
        raise NotAReport(f"{path}: `targets` must be a list of named entries")
    if not targets:
        raise NotAReport(f"{path}: it holds no measured target")
    return report


def names_of(files: tuple[Path, ...]) -> list[str]:
    """What tells the reports apart: file names, as much of the paths as that takes."""
    stems = [path.stem for path in files]
    return stems if len(set(stems)) == len(stems) else [str(path) for path in files]


@click.command()
@click.argument("files", metavar="A.json [B.json ...]", type=_REPORT, nargs=-1, required=True)
@click.option("--html", "html_file", type=click.Path(dir_okay=False, path_type=Path), metavar="FILE",
              help="Write one page with plots, tables and configurations.")  # fmt: skip
@click.option("--plots", "plots_folder", type=click.Path(file_okay=False, path_type=Path), metavar="FOLDER",
              help="Write the plots as PNG and SVG.")  # fmt: skip
def compare(files: tuple[Path, ...], html_file: Path | None, plots_folder: Path | None) -> None:
    """Several reports of `pensieve replay --json` together.

    Targets of the same name are one curve when the reports differ in nothing but the load, the seed and the time; else
    each report has its own.
    """
    reports, names = [read_report(path) for path in files], names_of(files)
    console = Console()
    show_curves(reports, names, console if console.is_terminal else Console(width=140))
    if html_file is not None:
        write_html(reports, html_file, names)
    if plots_folder is not None:
        write_plots(reports, plots_folder, names)
