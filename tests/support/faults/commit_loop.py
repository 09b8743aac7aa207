"""A process that commits turns to one session as fast as it can: ``python -m support.faults.commit_loop URL``.

Prints the revision after each acknowledged commit. Made to be killed.
"""

from __future__ import annotations

import asyncio
import sys

from pensieve.store import Began, open_store
from support.store.store_bench import counts, first_record, key, request, row, turn_record


async def run(url: str) -> None:
    store = open_store(url)
    await store.open()
    revision = (await store.create(row(key()), first_record(), "fp")).revision
    while True:
        name = f"r{revision}"
        began = await store.begin(key(), request(name, f"token-{name}"))
        assert isinstance(began, Began), began
        record = turn_record(revision, name, text="x" * 2000)
        row_after = await store.commit(key(), f"token-{name}", f"fp-{name}", record, counts(revision + 1))
        revision = row_after.revision
        print(revision, flush=True)


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1]))
