"""Shared by the commands of ``replay`` and ``simulate``: parameter types, output options, the console."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from pensieve.replay.load.generators import NAMES

POSITIVE = click.IntRange(min=1)
FILE = click.Path(exists=True, dir_okay=False, path_type=Path)
FOLDER = click.Path(exists=True, file_okay=False, path_type=Path)
OUTPUT = click.Path(dir_okay=False, path_type=Path)
OUTPUT_FOLDER = click.Path(file_okay=False, path_type=Path)


class DatasetName(click.ParamType):  # type: ignore[type-arg]  # generic only in newer versions
    """A built-in workload by name, otherwise a file (``./NAME`` is always a file)."""

    name = "dataset"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Path | str:
        return str(value) if value in NAMES else Path(FILE.convert(value, param, ctx))


def number_list(
    kind: Callable[[str], Any],
) -> Callable[[click.Context, click.Parameter, str | None], tuple[Any, ...]]:
    """Return a callback that parses comma-separated numbers, each at least 0."""

    def convert(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[Any, ...]:
        if value is None:
            return ()
        try:
            found = tuple(kind(part) for part in value.split(","))
        except ValueError as error:
            raise click.BadParameter(f"{value!r} is not a list of numbers like 1,2,3") from error
        if min(found) < 0 or len(set(found)) < len(found):
            raise click.BadParameter("numbers must be at least 0 and distinct")
        return found

    return convert


@contextmanager
def writing(path: Path) -> Iterator[None]:
    """Context in which ``path`` is written; turns OSError into a ClickException that names the file."""
    try:
        yield
    except OSError as error:
        raise click.ClickException(f"cannot write {error.filename or path}: {error.strerror}") from error


@dataclass(frozen=True, slots=True)
class Outputs:
    json_file: Path | None
    html_file: Path | None
    plots_folder: Path | None

    def require(self) -> None:
        """Raise PlotsMissing if plots are wanted but cannot be drawn. Call it before an hour of measurement."""
        if self._draws:
            from pensieve.replay.presentation import plots

            plots.require()

    def write(self, report: Mapping[str, Any], *, draw: bool = True) -> None:
        """Write the requested files; without ``draw`` only the numbers. Raises ClickException."""
        if self.json_file is not None:
            with writing(self.json_file):
                self.json_file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        if not (draw and self._draws):
            return
        from pensieve.replay.presentation import html, plots  # matplotlib takes a second to import

        if self.html_file is not None:
            with writing(self.html_file):
                html.write_html([report], self.html_file)
        if self.plots_folder is not None:
            with writing(self.plots_folder):
                plots.write_plots([report], self.plots_folder)

    def write_partial(self, report: Mapping[str, Any]) -> bool:
        """Write the numbers so far, to be overwritten later; return whether there is a regular file for them.

        A pipe or a terminal gets only the final report. Raises ClickException.
        """
        if self.json_file is None or (self.json_file.exists() and not self.json_file.is_file()):
            return False
        self.write(report, draw=False)
        return True

    @property
    def _draws(self) -> bool:
        return self.html_file is not None or self.plots_folder is not None


def output_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add ``--json``, ``--html`` and ``--plots``; the command gets them as ``outputs``."""

    @click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write all numbers.")
    @click.option(
        "--html", "html_file", type=OUTPUT, metavar="FILE", help="Write one page of plots and tables."
    )
    @click.option("--plots", "plots_folder", type=OUTPUT_FOLDER, metavar="FOLDER",
                  help="Write the plots as PNG and SVG.")  # fmt: skip
    @wraps(command)
    def wrapped(
        json_file: Path | None, html_file: Path | None, plots_folder: Path | None, **others: Any
    ) -> Any:
        return command(outputs=Outputs(json_file, html_file, plots_folder), **others)

    return wrapped


def wide_console() -> Console:
    """Return a console on stdout, wide enough for the tables if stdout is not a terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=140)
