"""An answer whose engine is killed: steps and time until its stream goes on, with and without drafts.

    python bench/resuming.py --model smollm2
    python bench/resuming.py --model FOLDER --device cuda

The new engine computes the prompt again and repeats the answer from its seed. With drafts it is given the tokens that
the old one had chosen. The time from the kill has two parts: until the server tells that another attempt begins, and
from there to the first new token.
"""

from __future__ import annotations

import os
import signal
import time
from typing import Any

import click
from common.provenance import commit, table

from pensieve.client import Client
from pensieve.machine import usable_cores
from pensieve.spawn import ServerProcess

QUESTION = "Tell me the story of a lighthouse keeper, as long as you can."


def resume(server: ServerProcess, tokens: int, more: int) -> tuple[dict[str, Any], str]:
    """Kill the engine of an answer that has ``tokens`` tokens; return what its stream did then, and the answer."""
    seen, killed, begun, row = 0, 0.0, 0.0, dict[str, Any]()
    with Client(server.target, retry_for=300) as client:
        stream = client.create_session().stream(
            QUESTION, max_output_tokens=tokens + more, ignore_eos=True, seed=1
        )
        for piece in stream:
            now, end = time.perf_counter(), piece.token_offset + len(piece.token_ids)
            if piece.restarted:
                begun = now
            elif not killed and end >= tokens:
                engine = server.engine_pid
                assert engine is not None
                os.kill(engine, signal.SIGKILL)
                killed = now
            elif begun and not row and end > seen:
                steps = int(server.metric("pensieve_steps_total"))
                row = {
                    "known tokens": seen, "steps": steps, "s until it begins again": round(begun - killed, 2),
                    "s until it goes on": round(now - begun, 2),
                }  # fmt: skip
            if not begun:
                seen = max(seen, end)
        return row, stream.finish().text


@click.command(context_settings={"show_default": True})
@click.option("--model", default="smollm2", help="As for pensieve serve.")
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]))
@click.option("--tokens", default=400, help="Tokens that the answer has when its engine is killed.")
@click.option("--more", default=20, help="Tokens that follow.")
@click.option("--repeats", default=3, help="Kills of each kind, in turns.")
def main(model: str, device: str, tokens: int, more: int, repeats: int) -> None:
    """Measure how soon an answer goes on after its engine's death."""
    rows: list[dict[str, Any]] = []
    answers = set[str]()
    options = ("--model", model, "--device", device, "--store", "memory:", "--threads", str(usable_cores()))
    for speculation in ("--no-speculation", "--speculation") * repeats:
        with ServerProcess(*options, speculation) as server:
            row, answer = resume(server, tokens, more)
        answers.add(answer)
        rows.append({"option": speculation, **row})
        click.echo(rows[-1], err=True)
    assert len(answers) == 1, "the answers differ"
    click.echo("\n".join([f"Commit {commit()}, {usable_cores()} cores, {device}.", "", *table(rows)]))


if __name__ == "__main__":
    main()
