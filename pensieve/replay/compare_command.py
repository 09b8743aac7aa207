"""``pensieve replay compare``: reports of several runs in one set of pictures and tables."""

from __future__ import annotations

import json
from pathlib import Path

import click

from pensieve.replay.parameters import FILE, OUTPUT, OUTPUT_FOLDER, wide_console, writing
from pensieve.replay.presentation.compare import NotAReport, comparison, names_of, read_report
from pensieve.replay.presentation.html import write_html
from pensieve.replay.presentation.plots import write_plots
from pensieve.replay.presentation.table import show_curves


@click.command()
@click.argument("files", metavar="A.json [B.json ...]", type=FILE, nargs=-1, required=True)
@click.option("--at-latency", "latency_ms", type=click.FloatRange(0, min_open=True), metavar="MS",
              help="Ratios of throughput at this normalised latency, in milliseconds per token. Default, for each pair "
              "of systems: the geometric middle of the latencies that both reached.")  # fmt: skip
@click.option("--json", "json_file", type=OUTPUT, metavar="FILE", help="Write the curves and the ratios.")
@click.option("--html", "html_file", type=OUTPUT, metavar="FILE",
              help="Write one page with plots, tables and configurations.")  # fmt: skip
@click.option("--plots", "plots_folder", type=OUTPUT_FOLDER, metavar="FOLDER",
              help="Write the plots as PNG and SVG.")  # fmt: skip
def compare(
    files: tuple[Path, ...], latency_ms: float | None, json_file: Path | None, html_file: Path | None,
    plots_folder: Path | None,
) -> None:  # fmt: skip
    """Several reports of `pensieve replay --json` together.

    Reports of the same workload and model are drawn in one panel, others in panels beside it. In a panel, targets of
    the same name are one curve when the reports differ in nothing but the load and the place where a server listens;
    else each report has its own.
    """
    reports, names = [read_report(path) for path in files], names_of(files)
    if not any(report["targets"] for report in reports):
        raise NotAReport("no target was measured in any of these")
    latency_s = None if latency_ms is None else latency_ms / 1000
    show_curves(reports, names, wide_console(), latency_s)
    if json_file is not None:
        text = json.dumps(comparison(reports, names, latency_s), indent=1, allow_nan=False)
        with writing(json_file):
            json_file.write_text(text + "\n", encoding="utf-8")
    if html_file is not None:
        with writing(html_file):
            write_html(reports, html_file, names, latency_s)
    if plots_folder is not None:
        with writing(plots_folder):
            write_plots(reports, plots_folder, names, latency_s)
