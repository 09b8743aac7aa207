"""How many streamed tokens per second one front-end process carries, with an engine that costs nothing.

    python bench/front_end.py --streams 100 --streams 250

Every stream gets a token per engine step and answers all the time. Reported per number of streams is the front end's
processor time per token, opening and closing the sessions included, which says what a core could carry, beside what
arrived at the clients, whose processes share this machine. One JSON line each.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import Any

import click
from common.servers import cpu_seconds, stand_in
from stand_ins.front_end_engine import STEP_VARIABLE

from pensieve.replay.load.schedule import Due, Script
from pensieve.replay.load.workload import Conversation, TurnLengths
from pensieve.replay.measure import summarise
from pensieve.replay.play import player_pool
from pensieve.replay.records import Outcome, RunOptions
from pensieve.replay.targets.grpc_target import PensieveTarget

ENGINE = "stand_ins/front_end_engine.py"
RAMP_S = 1.0


def streams_of(count: int, turn: TurnLengths, turns: int) -> list[Script]:
    """Conversations that are answered all the time, started evenly over the ramp."""
    talk = Conversation("", (turn,) * turns)
    return [Script(n, talk, (Due(RAMP_S * n / count, 0.0),) * turns) for n in range(count)]


async def play(address: str, scripts: Sequence[Script], processes: int) -> Outcome:
    """Replay the load against the server at ``address``."""
    target = PensieveTarget(address)
    try:
        info = await target.open()
        options = RunOptions(processes=processes)
        return await player_pool.replay(target, info, scripts, options)
    finally:
        await target.close()


def measure(
    streams: int, step_ms: float, turn: TurnLengths, seconds: float, processes: int, store: str
) -> dict[str, Any]:
    """One number of streams, on a server of its own."""
    turns = max(1, round(seconds / (turn.output_tokens * step_ms / 1e3)))
    load = streams_of(streams, turn, turns)
    environment = {STEP_VARIABLE: str(step_ms)}
    with stand_in(ENGINE, store=store, environment=environment, kill=False) as running:
        before = cpu_seconds(running.pid)
        outcome = asyncio.run(play(running.address, load, processes))
        used = cpu_seconds(running.pid) - before
    summary = summarise(outcome)
    if summary["turns"]["failed"]:
        raise click.ClickException(
            f"{summary['turns']['failed']} turns failed: {summary['error_examples'][0]}"
        )
    tokens = summary["tokens"]["output"]
    return {
        "streams": streams,
        "offered_tokens_per_s": streams / step_ms * 1e3,
        "tokens_per_s": summary["output_tokens_per_s"],
        "messages_per_s": sum(len(record.arrivals) for record in outcome.records) / outcome.duration_s,
        "front_end_us_per_token": used / tokens * 1e6,
        "tokens_per_s_per_core": tokens / used,
        "cpu_share": used / outcome.duration_s,
        "inter_token_p99_s": summary["inter_token_s"]["p99"],
    }


@click.command(context_settings={"show_default": True})
@click.option("--streams", type=click.IntRange(min=1), multiple=True, default=(100, 250, 400))
@click.option("--step-ms", type=float, default=20.0, help="Length of an engine step.")
@click.option("--input-tokens", type=click.IntRange(min=1), default=38, help="Of each turn.")
@click.option("--output-tokens", type=click.IntRange(min=1), default=200)
@click.option("--seconds", type=float, default=12.0, help="Of each number of streams, about.")
@click.option("--processes", type=click.IntRange(1, 64), default=2, help="Of the client.")
@click.option(
    "--store", default="", metavar="URL", help="History store. Default: SQLite in a temporary folder."
)
def main(
    streams: tuple[int, ...], step_ms: float, input_tokens: int, output_tokens: int, seconds: float, processes: int,
    store: str,
) -> None:  # fmt: skip
    """Measure the front end."""
    turn = TurnLengths(input_tokens, output_tokens)
    for count in streams:
        row = measure(count, step_ms, turn, seconds, min(processes, count), store)
        click.echo(json.dumps(row))


if __name__ == "__main__":
    main()
