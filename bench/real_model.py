"""SmolLM2 on this machine: the first token of a short turn at about 4,000 tokens, kept beside stateless.

It holds the conversation of ``pensieve demo --model smollm2`` and writes the time of each turn as a page. Beside it,
``tests/e2e/test_smollm2.py`` compares the answers of servers on little memory with those of transformers.
"""

from __future__ import annotations

import argparse
import os
import platform
import time
from pathlib import Path

import torch
from rich.console import Console

from pensieve import __version__
from pensieve.demo.acts import long_talk, real_model
from pensieve.model.resolve import resolve_model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", default="smollm2", metavar="NAME", help="As for `pensieve serve`.")
    parser.add_argument("--context", type=int, default=real_model.CONTEXT_TOKENS, metavar="TOKENS")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE", help="The page, in Markdown.")
    asked = parser.parse_args()
    resolve_model(asked.model)
    before = os.getloadavg()[0]
    keeps, forgets = long_talk.serve_and_hold(
        real_model.script(asked.context, 1), Console(stderr=True), real_model.servers(asked.model)
    )
    asked.out.write_text(page(keeps, forgets, (before, os.getloadavg()[0])), encoding="utf-8")
    if problems := long_talk.problems(keeps, forgets):
        raise SystemExit("\n".join(problems))


def page(keeps: long_talk.ServerRun, forgets: long_talk.ServerRun, load: tuple[float, float]) -> str:
    """The times of each turn, the closing ratio, and what they were measured on."""
    kept, forgot = long_talk.medians(keeps, forgets, real_model.LAST_TURNS)
    same = sum(
        one.turn.text == other.turn.text
        for one, other in zip(keeps.exchanges, forgets.exchanges, strict=True)
    )
    rows = [
        f"| {number} | {one.turn.usage.context_tokens:,} | {one.turn.usage.new_tokens:,}"
        f" | {one.first_token_s * 1e3:,.0f} ms | {other.first_token_s * 1e3:,.0f} ms |"
        for number, (one, other) in enumerate(zip(keeps.exchanges, forgets.exchanges, strict=True), 1)
    ]
    return "\n".join(
        [
            "| turn | context | new tokens | kept | stateless |",
            "|---|---|---|---|---|",
            *rows,
            "",
            f"Medians of the last {real_model.LAST_TURNS} turns: {kept * 1e3:,.0f} ms kept, {forgot * 1e3:,.0f} ms"
            f" stateless, {forgot / kept:.0f} times. {same} of {len(rows)} answers are the same on both.",
            "",
            f"Pensieve {__version__}, torch {torch.__version__}, Python {platform.python_version()};"
            f" {os.cpu_count()} cores of {cpu_model()}, no GPU used;"
            f" load average {load[0]:.1f} before and {load[1]:.1f} after;"
            f" {time.strftime('%Y-%m-%d')}.",
            "",
        ]
    )


def cpu_model() -> str:
    """As the kernel names it."""
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.partition(":")[2].strip()
    return platform.machine()


if __name__ == "__main__":
    main()
