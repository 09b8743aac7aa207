"""What the jobs of one experiment gave, as one report in the format of ``pensieve replay``, a page and a picture.

    python bench/evaluate_report.py FOLDER PART.json...

makes one result of several, of goes at the same experiment on the same machine; of a single one it makes the page anew.

``NAME.json`` is read by ``pensieve replay compare`` like any report; beyond that format it has ``experiment``,
``problems`` and ``jobs`` (one per server: ``target, device, model, server, replay, options, start_up_s, wall_s, error,
log_tail``).
"""

from __future__ import annotations

import json
import math
import shutil
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from evaluation.experiments import Experiment
from evaluation.jobs import JobResult, last_lines, without_folders

from pensieve.replay.measure import SCHEMA, environment, version_of
from pensieve.replay.presentation.curves import RULE, comparisons, entries, panels
from pensieve.replay.presentation.plots import write_plots
from pensieve.replay.presentation.table import SOURCE_NAMES, Column, format_number, ratio_texts

PACKAGES = ("vllm", "aiohttp", "matplotlib")
"""Versions that are told here beside those that every report has."""
DIGITS = 6
"""Significant ones of a measured number in the JSON."""
LISTS = ("targets", "intervals", "invalid_reasons", "unreached", "jobs")
"""Fields whose rows are of one job each."""
_COLUMNS = (
    Column("turns/s", "turns_per_s", ",.1f"),
    Column("tokens/s", "output_tokens_per_s", ",.0f"),
    Column("normalised latency mean ms", "normalised_latency_s.mean", ",.1f", 1e3),
    Column("p90 ms", "normalised_latency_s.p90", ",.1f", 1e3),
    Column("TTFT cold p50 ms", "ttft_s.cold.p50", ",.0f", 1e3),
    Column("p90 ms", "ttft_s.cold.p90", ",.0f", 1e3),
    Column("TTFT warm p50 ms", "ttft_s.warm.p50", ",.0f", 1e3),
    Column("p90 ms", "ttft_s.warm.p90", ",.0f", 1e3),
    Column("inter-token p99 ms", "inter_token_s.p99", ",.1f", 1e3),
    Column("in flight", "running_turns.mean", ",.0f"),
    Column("failed", "turns.failed"),
)


@dataclass(frozen=True, slots=True)
class Origin:
    command: str
    commit: str
    gpu: str
    created: str


def job_report(experiment: Experiment, result: JobResult, origin: Origin) -> dict[str, Any]:
    """What one job gave, under its label in this experiment; numbers rounded, without the folders of this machine."""
    label = dict(result.job.uses)[experiment.name]
    seen = result.report or {
        "runs": [], "targets": [], "intervals": [], "valid": True, "invalid_reasons": [], "unreached": [],
    }  # fmt: skip
    machine = environment()
    details = {"model": result.job.line.model, "started": result.command}
    run = next((row["run"] for row in seen["unreached"]), None)
    report = {
        "schema": SCHEMA,
        "created": origin.created,
        "command_line": origin.command,
        "commit": origin.commit,
        "experiment": {
            "name": experiment.name,
            "shows": experiment.shows,
            "lines": [line.label for line in experiment.lines],
        },
        "machine": machine["machine"] | {"gpu": origin.gpu},
        "versions": machine["versions"] | {name: version_of(name) for name in PACKAGES},
        **{key: seen.get(key) for key in ("dataset", "options", "workload")},
        "runs": seen["runs"],
        "targets": [row | {"target": label, "details": row["details"] | details} for row in seen["targets"]],
        "intervals": [row | {"target": label} for row in seen["intervals"]],
        "valid": seen["valid"],
        "invalid_reasons": [f"{label}: {reason}" for reason in seen["invalid_reasons"]],
        "unreached": [{"target": label, "error": result.error, "run": run}] if result.error else [],
        "jobs": [_job(label, result)],
    }
    return {key: _told(value) for key, value in report.items()}


def combine(reports: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Reports of one experiment as one: of its jobs, or of several goes at it.

    Raises ValueError when they are of several experiments, machines or versions.
    """
    for key in ("experiment", "machine", "versions"):
        if any(report[key] != reports[0][key] for report in reports):
            raise ValueError(f"the reports differ in `{key}`")
    order = reports[0]["experiment"]["lines"]
    runs: list[Any] = []
    rows: dict[str, list[Any]] = {key: [] for key in LISTS}
    for report in reports:
        runs += [run for run in report["runs"] if run not in runs]
        for key in LISTS:
            rows[key] += [_with_run(row, report["runs"], runs) for row in report[key]]
    for key in ("targets", "jobs"):
        rows[key].sort(key=lambda row: order.index(row["target"]))
    measured = next((report for report in reports if report["targets"]), reports[0])
    merged = {
        **measured,
        "created": max(report["created"] for report in reports),
        "command_line": "; ".join(dict.fromkeys(report["command_line"] for report in reports)),
        "commit": ", ".join(dict.fromkeys(report["commit"] for report in reports)),
        "runs": runs,
        **rows,
        "valid": all(report["valid"] for report in reports),
    }
    return merged | {"problems": list(_problems(merged))}


def _with_run(row: Any, before: Sequence[Any], runs: Sequence[Any]) -> Any:
    """A row that says of which run it is, by its index, with that index among all ``runs``."""
    if not isinstance(row, Mapping) or row.get("run") is None:
        return row
    return {**row, "run": runs.index(before[row["run"]])}


def write(report: Mapping[str, Any], folder: Path) -> Path:
    """``NAME.json``, which holds everything."""
    path = folder / f"{report['experiment']['name']}.json"
    path.write_text(compact(report), encoding="utf-8")
    return path


def write_page(report: Mapping[str, Any], folder: Path) -> None:
    """``NAME.md`` and, where there is something to draw, ``NAME.png``."""
    page = folder / f"{report['experiment']['name']}.md"
    picture = page.with_suffix(".png")
    has_picture = bool(report["targets"]) and _draw(report, picture)
    page.write_text(markdown(report, picture.name if has_picture else ""), encoding="utf-8")


def compact(report: Mapping[str, Any]) -> str:
    """JSON with a line for each field and each target: a sweep of six systems has a hundred thousand numbers."""
    fields = []
    for key, value in report.items():
        if isinstance(value, list) and value:
            rows = ",\n".join(f"  {json.dumps(row, ensure_ascii=False)}" for row in value)
            fields.append(f" {json.dumps(key)}: [\n{rows}\n ]")
        else:
            fields.append(f" {json.dumps(key)}: {json.dumps(value, ensure_ascii=False)}")
    return "{\n" + ",\n".join(fields) + "\n}\n"


def markdown(report: Mapping[str, Any], picture: str = "") -> str:
    """The text of an experiment's page."""
    return "\n".join(_page(report, picture)) + "\n"


def _page(report: Mapping[str, Any], picture: str) -> Iterator[str]:
    machine = report["machine"]
    known = {name: value for name, value in report["versions"].items() if value != "absent"}
    yield f"# {report['experiment']['name']}"
    yield f"\nWhat it shows: {report['experiment']['shows']}.\n\n`{report['command_line']}`\n"
    yield (
        f"{machine['gpu'] or machine['cpu']}, {machine['cores']} cores, {machine['system']}; "
        + ", ".join(f"{name} {value}" for name, value in known.items())
        + f"; commit {report['commit'] or 'unknown'}; {report['created']}."
    )
    if picture:
        yield f"\n![latency against throughput]({picture})"
    found = entries([report])
    if found:
        yield "\n| system | offered turns/s | " + " | ".join(column.title for column in _COLUMNS) + " |"
        yield "|---" + "|---:" * (len(_COLUMNS) + 1) + "|"
        for entry in found:
            cells = (
                entry.system,
                format_number(entry.rate, "g"),
                *(column.text(entry.summary) for column in _COLUMNS),
            )
            yield "| " + " | ".join(cells) + " |"
        yield from _sources(report)
        yield from _ratios(report)
    yield from _what_went_wrong(report)
    yield from _servers(report)


def _sources(report: Mapping[str, Any]) -> Iterator[str]:
    """A table that tells from where each context came, in per cent; for systems that say so.

    With the OpenAI protocol a server tells how much it found, not in which tier.
    """
    rows = []
    for entry in entries([report]):
        tokens = entry.summary["tokens"]
        if tokens["context"]:
            shares = [f"{tokens[key] / tokens['context']:.1%}" for key in SOURCE_NAMES]
            if "api" in entry.summary["details"]:
                shares[1] = "in device"
            swap = entry.summary.get("swap") or {}
            bytes_ = (format_number(swap.get(f"{way}_bytes"), ",.1f", 2**-30) for way in ("in", "out"))
            rows.append(" | ".join((entry.system, format_number(entry.rate, "g"), *shares, *bytes_)))
    if rows:
        names = " | ".join(SOURCE_NAMES.values())
        yield f"\nContext tokens by source\n\n| system | offered | {names} | GiB in | GiB out |"
        yield "|---" + "|---:" * (len(SOURCE_NAMES) + 3) + "|"
        yield from (f"| {row} |" for row in rows)


def _ratios(report: Mapping[str, Any]) -> Iterator[str]:
    for panel in panels([report]):
        pairs = comparisons(panel.points)
        if not pairs:
            continue
        yield f"\nThroughput ratio at equal normalised latency. {RULE}\n"
        yield "| pair | at mean ms/token | ratio | at p90 ms/token | ratio |\n|---|---:|---:|---:|---:|"
        for pair in pairs:
            cells = (*ratio_texts(pair.mean), *ratio_texts(pair.p90))
            yield f"| {pair.ours} ∕ {pair.other} | " + " | ".join(cells) + " |"


def _what_went_wrong(report: Mapping[str, Any]) -> Iterator[str]:
    lines = [*report["problems"], *report["invalid_reasons"]]
    if lines or report["unreached"]:
        yield "\n## What went wrong\n"
    yield from (f"* {line}" for line in lines)
    for missing in report["unreached"]:
        yield f"* {missing['target']}:\n\n" + _indented(missing["error"])


def _servers(report: Mapping[str, Any]) -> Iterator[str]:
    yield "\n## Servers\n"
    versions = {row["target"]: row["details"].get("version", "") for row in report["targets"]}
    for job in report["jobs"]:
        up = "never up" if job["start_up_s"] is None else f"up after {job['start_up_s']:.1f} s"
        version = f"version {says}, " if (says := versions.get(job["target"])) else ""
        about = f"{version}device {job['device']}, {up}, {job['wall_s']:.0f} s in all"
        yield f"* {job['target']} ({about}), {job['model']}:"
        yield f"  `{job['server']}`; `{job['replay']}`"


def _indented(text: str) -> str:
    return "\n".join(f"      {line}" for line in text.split("\n"))


def _problems(report: Mapping[str, Any]) -> Iterator[str]:
    """What makes the systems not comparable, or a number of one not worth its name."""
    work: dict[Any, tuple[str, Any]] = {}
    loads = {job["target"]: _load(job["options"]) for job in report["jobs"] if job["options"]}
    unsteady: dict[str, list[str]] = {}
    for summary in report["targets"]:
        label, rate = summary["target"], format_number(summary["rate"], "g")
        run = report["runs"][summary["run"]]
        other, seen = work.setdefault((loads[label], rate), (label, run))
        if seen != run:
            yield f"{label} and {other} did not get the same work at {rate} turns/s"
        where = f"{label}, {rate} turns/s"
        if summary["turns"]["failed"]:
            yield f"{where}: {summary['turns']['failed']} turns failed, {summary['errors']}"
        if summary["receipts"]["violations"]:
            yield f"{where}: {summary['receipts']['violations']} receipts do not add up"
        if summary["window"]["steady"] is False:
            unsteady.setdefault(label, []).append(rate)
    for label, rates in unsteady.items():
        yield f"{label}: the load rose or fell in the measured window at {', '.join(rates)} turns/s"


def _load(options: Mapping[str, Any]) -> str:
    """What was asked for but the rate, as text that compares."""
    return json.dumps(options["arrivals"] | {"rate": None}, sort_keys=True)


def _job(label: str, result: JobResult) -> dict[str, Any]:
    seen = result.report or {"targets": []}
    failed = result.error or any(summary["turns"]["failed"] for summary in seen["targets"])
    return {
        "target": label,
        "device": result.device,
        "model": result.job.line.model,
        "server": result.command,
        "replay": result.replay,
        "options": seen.get("options"),
        "start_up_s": result.start_up_s,
        "wall_s": result.wall_s,
        "error": result.error,
        "log_tail": last_lines(result.logs["server.log"]) if failed else "",
    }


def _draw(report: Mapping[str, Any], path: Path) -> bool:
    """Latency against throughput; False where there is no point to draw."""
    with tempfile.TemporaryDirectory() as folder:
        drawn = [file for file in write_plots([report], Path(folder)) if file.name == "latency.png"]
        for file in drawn:
            shutil.copyfile(file, path)
    return bool(drawn)


def _told(value: Any) -> Any:
    """``value`` as it goes into a result: rounded, and without the folders of this machine."""
    if isinstance(value, Mapping):
        return {key: _told(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_told(inner) for inner in value]
    if isinstance(value, str):
        return without_folders(value)
    if isinstance(value, float) and math.isfinite(value):
        return float(f"{value:.{DIGITS}g}")
    return value


def main(folder: Path, parts: Sequence[Path]) -> None:
    """Combine and write. Raises ValueError, OSError."""
    report = combine([json.loads(part.read_text(encoding="utf-8")) for part in parts])
    write(report, folder)
    write_page(report, folder)


if __name__ == "__main__":
    main(Path(sys.argv[1]), [Path(part) for part in sys.argv[2:]])
