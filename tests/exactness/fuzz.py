"""``python -P tests/exactness/fuzz.py --seconds 3600``: random schedules of all families until the time is over.

Each schedule is new: seeds count from ``--first``, and the tests play those below 10,000. Every answer is compared with
transformers on the whole history. Prints counts. Ends with 1 at the first answer that differs, and names the family and
the seed that repeat it.
"""

from __future__ import annotations

import sys
import tempfile
import time
import traceback
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.engine.checkpoints import FAMILIES
from support.engine.exactness import Bench, run_schedule


@click.command()
@click.option("--seconds", type=float, default=60.0, show_default=True)
@click.option("--first", type=click.IntRange(0), default=10_000, show_default=True, help="The first seed.")
def main(seconds: float, first: int) -> None:
    """Compare random schedules with transformers."""
    counts = dict.fromkeys(("schedules", "turns", "cached", "swapped in", "recomputed", "suspended"), 0)
    until, told = time.monotonic() + seconds, time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        benches = {family: Bench(family, Path(folder)) for family in FAMILIES}
        seed = first
        while time.monotonic() < until:
            family = FAMILIES[seed % len(FAMILIES)]
            try:
                driver = run_schedule(benches[family], seed)
            except AssertionError:
                traceback.print_exc()
                sys.exit(f"{family}, seed {seed}: this answer differs")
            counts["schedules"] += 1
            counts["turns"] += len(driver.finished)
            for usage in (turn.usage for turn in driver.finished if turn.usage is not None):
                counts["cached"] += usage.gpu_cached_tokens
                counts["swapped in"] += usage.swapped_in_tokens
                counts["recomputed"] += usage.recomputed_tokens
            counts["suspended"] += driver.engine.stats().suspensions_total
            seed += 1
            if time.monotonic() - told > 30:
                told = time.monotonic()
                click.echo(", ".join(f"{number:,} {name}" for name, number in counts.items()), err=True)
        ties = sum(bench.oracle.near_ties for bench in benches.values())
        tokens = sum(bench.oracle.tokens for bench in benches.values())
    click.echo(", ".join(f"{number:,} {name}" for name, number in counts.items()))
    click.echo(f"{tokens:,} tokens equal to transformers', {ties} near ties; seeds {first} to {seed - 1}")
    sys.exit(0 if all(counts.values()) else "a path was never taken")


if __name__ == "__main__":
    main()
