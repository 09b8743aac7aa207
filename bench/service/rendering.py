"""Time to render histories. (``rendering_served.py``: how long another tenant waits meanwhile.)

    python bench/service/rendering.py FOLDER...

For each model folder (tokenizer.json and tokenizer_config.json are enough): milliseconds of the import of 250 to 2,000
messages, as a dialogue and with roles in any order where the template takes that; and of the text work of the last of
1,000 short turns.
``bench/results/rendering.md`` has results.
"""

from __future__ import annotations

import asyncio
import json
import random
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import click

from pensieve.core import Role, pack_tokens
from pensieve.server.history.rendering import ContextRoom, ItemStamp, Renderer
from pensieve.server.values import InputEntry
from pensieve.store.records import History, Item, Overflow
from pensieve.tokenizer import ChatTokenizer, TemplateError

COUNTS: Final = (250, 500, 1000, 2000)
ROOM: Final = ContextRoom(1 << 22, Overflow.REJECT, None)
WORDS: Final = "Well, the fox was in the garden at 7, and no one knows whose dog that is. "


def entries(roles: Sequence[Role], chars: int) -> list[InputEntry]:
    """Messages of about ``chars`` characters."""
    return [InputEntry(role, (WORDS * (chars // len(WORDS) + 1))[:chars]) for role in roles]


async def import_ms(renderer: Renderer, said: Sequence[InputEntry]) -> float:
    """Milliseconds until a history is rendered, one that was not seen before."""
    begin = time.perf_counter()
    await renderer.items(History(), said, ItemStamp(1, "r", 0))
    return (time.perf_counter() - begin) * 1e3


async def turns_ms(renderer: Renderer, turns: int) -> dict[int, float]:
    """Median milliseconds of the text work of ten turns, by how many came before."""
    taken: list[float] = []
    history = History()
    for number in range(turns):
        begin = time.perf_counter()
        prepared = await renderer.prepare(
            history, [InputEntry(Role.USER, "hi")], ItemStamp(2 * number + 1, "r", 0), ROOM
        )
        taken.append((time.perf_counter() - begin) * 1e3)
        answer = Item(2 * number + 2, Role.ASSISTANT, "yes", pack_tokens(prepared.context[-2:]))
        items = (*history.items, *prepared.items, answer)
        history = History(items=items, head_item=answer.number)
    return {n: statistics.median(taken[max(0, n - 10) : n]) for n in (10, turns // 4, turns // 2, turns)}


async def measure(folder: Path) -> dict[str, Any]:
    tokenizer = ChatTokenizer.from_folder(folder, allow_rewriting=True)
    draw = random.Random(3)
    shapes = {"dialogue": [Role.USER, Role.ASSISTANT] * 1000}
    shapes["any order"] = draw.choices((Role.USER, Role.ASSISTANT, Role.SYSTEM), k=2000)
    found: dict[str, Any] = {}
    for name, roles in shapes.items():
        for chars in (1, 200):
            try:
                # A renderer of its own: nothing is remembered of the shorter history.
                found[f"{name}, {chars} characters"] = {
                    count: await import_ms(Renderer(tokenizer), entries(roles[:count], chars))
                    for count in COUNTS
                }
            except TemplateError as error:
                found[name] = error.message
    found["turns"] = await turns_ms(Renderer(tokenizer), 1000)
    return found


@click.command()
@click.argument("folders", nargs=-1, required=True, type=click.Path(exists=True, path_type=Path))
def main(folders: tuple[Path, ...]) -> None:
    """Print one JSON document: milliseconds by model folder."""

    async def all_of_them() -> dict[str, Any]:
        return {folder.name: await measure(folder) for folder in folders}

    click.echo(json.dumps(asyncio.run(all_of_them()), indent=1))


if __name__ == "__main__":
    main()
