"""Sends requests that nobody would send, for as long as you like: ``python tests/robustness/fuzz.py --seconds 600``.

A request that the server blames itself for is printed as a line of ``tests/robustness/corpus.txt``; put it there.
"""

from __future__ import annotations

import os
import sys
import time
from collections import Counter
from pathlib import Path
from random import SystemRandom

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("GRPC_VERBOSITY", "ERROR")

from support.robustness.fuzzed_server import FuzzedServer
from support.robustness.fuzzing import drawn


@click.command()
@click.option("--seconds", type=float, default=60.0, show_default=True)
@click.option("--seed", type=int, help="Default: another one each time.")
def main(seconds: float, seed: int | None) -> None:
    """Exit status 1 when something was found."""
    first = SystemRandom().getrandbits(40) if seed is None else seed
    answers: Counter[str] = Counter()
    found, end, count = 0, time.monotonic() + seconds, 0
    with FuzzedServer() as server:
        while time.monotonic() < end:
            method, data = drawn(first + count)
            count += 1
            try:
                answers[server.send(method, data)] += 1
            except AssertionError as error:
                found += 1
                print(f"{method} {data.hex() or '-'} {error}", flush=True)
    print(
        f"{count} requests, seeds {first} to {first + count - 1}, {found} that the server blames itself for"
    )
    for reason, times in answers.most_common():
        print(f"{times:8} {reason}")
    sys.exit(found > 0)


if __name__ == "__main__":
    main()
