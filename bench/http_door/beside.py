"""The HTTP door of two checkouts beside each other: a turn here, the same turn there, through gRPC and the door.

    python bench/http_door/beside.py --before ../old

Each checkout runs its own server and door, on an engine without a model. A figure is the median over all turns: the
time to the first token, and the processor time that the server and the door spent on a turn of four tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.provenance import table
from http_door.cost import WAYS, Rig
from http_door.streams import Conversation, Way, conversations

ROOT = Path(__file__).resolve().parents[2]
OUTPUT, WARM_UPS, LENGTH = 4, 5, 60
"""Tokens of an answer; turns that are not counted; turns of a conversation."""
SETTLE_S = 0.004
"""Time for what a server does after an answer."""
FIGURES = ("first token ms", "server CPU ms", "door CPU ms")
_HOLD = """
import json, sys
sys.path.append("bench")
from http_door.cost import rig
with rig(1.0) as both:
    print(json.dumps([both.address, both.url, both.server, both.door]), flush=True)
    sys.stdin.read()
"""


@contextmanager
def held(checkout: Path) -> Iterator[Rig]:
    """Server and door of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout)}
    with subprocess.Popen(
        [sys.executable, "-c", _HOLD], cwd=checkout, env=environment,
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        line = process.stdout.readline()
        if not line:
            raise click.ClickException(f"{checkout}: its server did not start")
        yield Rig(*json.loads(line))


def cpu_ms(pid: int) -> float:
    """Processor time of a process's threads so far, to the nanosecond."""
    threads = Path(f"/proc/{pid}/task").glob("*/schedstat")
    return sum(int(one.read_text().split()[0]) for one in threads) / 1e6


Rows = dict[tuple[Way, str], list[tuple[float, float, float]]]


async def by_turns(rigs: Mapping[str, Rig], turns: int) -> Rows:
    rows: Rows = defaultdict(list)
    async with AsyncExitStack() as stack:
        talks: dict[tuple[Way, str], Conversation] = {}
        for number in range(turns + WARM_UPS):
            for way in WAYS:
                for name in random.sample(sorted(rigs), len(rigs)):
                    one = rigs[name]
                    if number % LENGTH == 0:
                        load = one.load(way, 1, turns, OUTPUT)
                        talks[way, name] = (await stack.enter_async_context(conversations(load)))[0]
                    server, door = cpu_ms(one.server), cpu_ms(one.door)
                    first, _ = await talks[way, name].turn(OUTPUT)
                    await asyncio.sleep(SETTLE_S)
                    if number % LENGTH >= WARM_UPS:
                        spent = cpu_ms(one.server) - server, cpu_ms(one.door) - door
                        rows[way, name].append((1e3 * first, *spent))
    return rows


@click.command(context_settings={"show_default": True})
@click.option("--before", required=True, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--after", default=ROOT, type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--turns", default=300, help="Of each way in each checkout.")
def main(before: Path, after: Path, turns: int) -> None:
    """Compare the doors of two checkouts."""
    with held(before.resolve()) as one, held(after.resolve()) as other:
        rows = asyncio.run(by_turns({"before": one, "after": other}, turns))
    lines = []
    for way in WAYS:
        for index, figure in enumerate(FIGURES[: 2 if way == "grpc" else 3]):
            found = {name: [row[index] for row in rows[way, name]] for name in ("before", "after")}
            medians = {name: statistics.median(values) for name, values in found.items()}
            ratio = medians["after"] / medians["before"]
            line = {"way": way, "figure": figure, **{name: f"{value:.2f}" for name, value in medians.items()}}
            lines.append(line | {"after ÷ before": f"{ratio:.3f}"})
    click.echo("\n".join(table(lines)))


if __name__ == "__main__":
    main()
