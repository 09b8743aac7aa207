"""How many streamed pieces per second one process of the replay client carries, from servers that cost nothing.

    python bench/replay_client.py openai pensieve --streams 100 --streams 400

Every stream gets a piece of one token per step. Reported per number of streams is the client's processor time per
piece, which says what a core could carry also where other programs take their share of it, beside what really came and
how late the client's timers were. One JSON line each.
"""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from stand_ins.replay_pump import CONTEXT_LIMIT, VOCABULARY

from pensieve.debug import child_environment
from pensieve.replay.load.schedule import Due, Script
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.replay.measure.report import statistics
from pensieve.replay.play.runner import replay
from pensieve.replay.records import Outcome, RunOptions
from pensieve.replay.targets.options import parse_target

RAMP_S = 1.0
PROTOCOLS = ("openai", "pensieve")


@contextmanager
def pump(protocol: str, step_ms: float) -> Iterator[str]:
    """A server of its own process; its URL."""
    program = [
        sys.executable,
        str(Path(__file__).parent / "stand_ins" / "replay_pump.py"),
        protocol,
        str(step_ms),
    ]
    environment = child_environment(failpoints=False)
    with subprocess.Popen(program, stdout=subprocess.PIPE, text=True, env=environment) as process:
        try:
            assert process.stdout is not None
            yield process.stdout.readline().split()[1]
        finally:
            process.terminate()


def streams_of(count: int, turn: TurnLengths, turns: int) -> list[Script]:
    """Conversations that are answered all the time, started evenly over the ramp."""
    talk = Conversation("", (turn,) * turns)
    return [Script(n, talk, (Due(RAMP_S * n / count, 0.0),) * turns) for n in range(count)]


async def play(url: str, scripts: Sequence[Script]) -> tuple[Outcome, float]:
    """What came of it, and processor seconds of this process."""
    target = parse_target(url)
    try:
        info = replace(await target.open(), vocab_size=VOCABULARY, context_limit=CONTEXT_LIMIT)
        before = time.process_time()
        outcome = await replay(target, info, scripts, RunOptions())
        return outcome, time.process_time() - before
    finally:
        await target.close()


def measure(protocol: str, streams: int, step_ms: float, turn: TurnLengths, seconds: float) -> dict[str, Any]:
    turns = max(1, round(seconds / (turn.output_tokens * step_ms / 1e3)))
    with pump(protocol, step_ms) as url:
        outcome, used = asyncio.run(play(url, streams_of(streams, turn, turns)))
    failed = [record.message for record in outcome.records if record.error]
    if failed:
        raise click.ClickException(f"{len(failed)} turns failed: {failed[0]}")
    pieces = sum(len(record.arrivals) for record in outcome.records)
    (lags,) = outcome.loop_lag_s
    return {
        "protocol": protocol,
        "streams": streams,
        "offered_pieces_per_s": streams / step_ms * 1e3,
        "pieces_per_s": pieces / outcome.duration_s,
        "client_us_per_piece": used / pieces * 1e6,
        "pieces_per_s_per_core": pieces / used,
        "cpu_share": used / outcome.duration_s,
        "loop_lag_p99_s": statistics(lags)["p99"],
    }


@click.command()
@click.argument("protocols", nargs=-1, type=click.Choice(PROTOCOLS))
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(100, 400), show_default=True)
@click.option(
    "--step-ms", type=float, default=20.0, show_default=True, help="Between two tokens of a stream."
)
@click.option(
    "--input-tokens", type=click.IntRange(min=1), default=38, show_default=True, help="Of each turn."
)
@click.option("--output-tokens", type=click.IntRange(min=1), default=200, show_default=True)
@click.option(
    "--seconds", type=float, default=8.0, show_default=True, help="Of each number of streams, about."
)
def main(
    protocols: tuple[str, ...], streams: tuple[int, ...], step_ms: float, input_tokens: int, output_tokens: int,
    seconds: float,
) -> None:  # fmt: skip
    """Measure the client on these PROTOCOLS; default: all."""
    for protocol in protocols or PROTOCOLS:
        for count in streams:
            click.echo(
                json.dumps(
                    measure(protocol, count, step_ms, TurnLengths(input_tokens, output_tokens), seconds)
                )
            )


if __name__ == "__main__":
    main()
