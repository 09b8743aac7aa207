"""Fail-overs and restarts under load, in figures: ``python tests/replicas/failover.py --rounds 5``.

Two servers behind HAProxy, a Redis primary with two replicas and three Sentinels: all real, on loopback. Clients of
the SDK talk without a pause. Ends with 1 if a turn failed, and with an error if history is not what clients were told.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from support.replicas.failover import Measured, Stage, stage


async def _play(folder: Path, rounds: int, clients: int) -> tuple[list[Measured], Stage]:
    found: list[Measured] = []
    async with stage(folder, clients=clients) as playing:
        async with playing.measuring("nothing") as measured:
            await playing.crowd.more(40 * clients)
        found.append(measured)
        async with playing.measuring("SIGTERM to one server after the other") as measured:
            for _ in range(rounds):
                await playing.roll(measured)
        found.append(measured)
        for hung, what in ((False, "SIGKILL to the primary"), (True, "SIGSTOP to the primary, then SIGCONT")):
            async with playing.measuring(what) as measured:
                for _ in range(rounds):
                    await playing.fail_over(measured, hung=hung)
            found.append(measured)
    return found, playing


def _row(one: Measured) -> str:
    named = f"{max(one.unavailable):.1f}" if one.unavailable else ""
    pauses = " | ".join(f"{one.pause(part):.2f}" for part in (0.5, 0.99, 1.0))
    return f"| {one.what} | {one.times or ''} | {named} | {one.turns} | {one.failed} | {one.resumes} | {pauses} |"


@click.command()
@click.option("--rounds", type=int, default=5, show_default=True, help="Of each kind of fault.")
@click.option("--clients", type=int, default=4, show_default=True)
def main(rounds: int, clients: int) -> None:
    """Prints a table: what was done, and what clients saw of it."""
    with tempfile.TemporaryDirectory(prefix="pensieve-failover-") as folder:
        found, playing = asyncio.run(_play(Path(folder), rounds, clients))
    print("| what happens | times | another primary after at most s | turns | failed | sent again", end=" ")
    print("| longest silence of a turn, p50 s | p99 s | worst s |")
    print("|---|---:|---:|---:|---:|---:|---:|---:|---:|")
    for one in found:
        print(_row(one))
    told = sum(len(talker.told) for talker in playing.crowd.talkers)
    print(
        f"\n{told} turns acknowledged in {len(playing.crowd.talkers)} sessions, all in history as they were told;"
    )
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}")
    for error in playing.crowd.errors:
        print(error)
    sys.exit(1 if playing.crowd.errors else 0)


if __name__ == "__main__":
    main()
