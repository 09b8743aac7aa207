"""Turns beside one session whose every turn ends the engine, and whose client never gives up.

    python bench/service/poison.py                # 50 s
    python bench/service/poison.py --fresh        # the client begins a new session for each try, with the same words

The engine is ``priced_engine`` with a poisonous token. The poisonous client sends another turn as soon as it is told
anything. The others take one turn after another, each within 8 s. The last line is one JSON
document.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from pathlib import Path

import click

sys.path.append(str(Path(__file__).parents[1]))  # bench/, which is no package

from common.servers import stand_in
from service.priced_engine import ENGINE, POISON_VARIABLE, STEP_VARIABLE, TOKEN_VARIABLE

from pensieve.client import AsyncClient
from pensieve.errors import PensieveError
from pensieve.model.resolve import DEMO_FOLDER
from pensieve.spawn import read_metric
from pensieve.tokenizer import ChatTokenizer

WITHIN_S = 8.0
POISON = "Z"
OTHERS = 6


async def poisonous(client: AsyncClient, until: float, told: Counter[str], *, fresh: bool) -> None:
    """Try again and again; what it was told."""
    session = await client.create_session()
    while time.monotonic() < until:
        try:
            session = await client.create_session() if fresh else session
            words = POISON if fresh else f"{told.total()} {POISON}"
            await session.send(words, max_output_tokens=10, timeout=WITHIN_S)
            told["served"] += 1
        except PensieveError as error:
            told[error.reason] += 1
            await asyncio.sleep(0.2)


async def other(client: AsyncClient, until: float, told: Counter[str]) -> None:
    """One turn after another, each in time or not."""
    session = await client.create_session()
    while time.monotonic() < until:
        try:
            turn = await session.send("hello", max_output_tokens=20, ignore_eos=True, timeout=WITHIN_S)
            told["served"] += 1
            if turn.revision > 40:
                session = await client.create_session()
        except PensieveError as error:
            told[error.reason] += 1
        await asyncio.sleep(0.3)


async def measure(address: str, seconds: float, *, fresh: bool) -> tuple[Counter[str], Counter[str]]:
    """What the others were told, and the poisonous client."""
    until = time.monotonic() + seconds
    others, poisoned = Counter[str](), Counter[str]()
    async with AsyncClient(address) as client, AsyncClient(address) as bad:
        tasks = [other(client, until, others) for _ in range(OTHERS)]
        await asyncio.gather(*tasks, poisonous(bad, until, poisoned, fresh=fresh))
    return others, poisoned


@click.command(context_settings={"show_default": True})
@click.option("--seconds", type=float, default=50.0)
@click.option("--fresh", is_flag=True, help="The poisonous client begins a new session for each try.")
def main(seconds: float, fresh: bool) -> None:
    """Measure what one poisonous session does to the others' turns."""
    tokenizer = ChatTokenizer.from_folder(DEMO_FOLDER)
    token = next(one for one in range(tokenizer.vocab_size) if tokenizer.decode([one]) == POISON)
    environment = {STEP_VARIABLE: "20", TOKEN_VARIABLE: "20", POISON_VARIABLE: str(token)}
    with stand_in(ENGINE, "--log-level", "error", environment=environment) as server:
        others, poisoned = asyncio.run(measure(server.address, seconds, fresh=fresh))
        deaths = read_metric(server.admin, "pensieve_engine_restarts_total")
    share = others["served"] / max(others.total(), 1)
    click.echo(
        f"others: {share:.1%} of {others.total()} turns within {WITHIN_S:g} s; engine deaths: {deaths:g}"
    )
    click.echo(json.dumps({"others": dict(others), "poisonous": dict(poisoned), "deaths": deaths}))


if __name__ == "__main__":
    main()
