"""How long one tenant's reads of a long log hold up another tenant's look at a session.

    python bench/service/long_log.py --revisions 700 --megabytes 25

A SQLite history with one long session is made first. Then a server runs on it. Eight callers of the long session's
tenant ask, one call after the other, for its first turn (``turn``), for pages with tokens of an old revision
(``page``), or for nothing (``idle``). Meanwhile a process of its own calls GetSession of another tenant. The last line
is one JSON document: milliseconds of those calls, and how many calls the eight callers made.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import multiprocessing
import statistics
import tempfile
import time
import uuid
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any, Final

import click
import grpc
from grpc import aio

from pensieve.core import FinishReason, Role, pack_tokens
from pensieve.spawn import ServerProcess
from pensieve.store import BeginRequest, Counts, Key, open_store
from pensieve.store.records import Item, Record, RecordKind, SessionConfig, SessionRow, TurnResult
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc

CALLERS: Final = 8
PAUSE_S: Final = 0.01
"""Between two calls of the tenant that is measured."""
LOADS: Final = ("idle", "turn", "page")
KEYS: Final = {"long": "s-long", "other": "s-other"}


def key_file() -> str:
    """One key for each of the two tenants."""
    entry = '[[key]]\nid = "{0}"\nsha256 = "{1}"\ntenant = "{0}"\n'
    return "".join(
        entry.format(tenant, hashlib.sha256(secret.encode()).hexdigest()) for tenant, secret in KEYS.items()
    )


def credentials(tenant: str) -> list[tuple[str, str]]:
    return [("authorization", f"Bearer ck_{tenant}_{KEYS[tenant]}")]


async def make(url: str, revisions: int, size: int) -> None:
    """The long session, of turns that take ``size`` bytes each, and a short one of the other tenant."""
    store = open_store(url)
    await store.open()
    try:
        for tenant in KEYS:
            row = SessionRow(tenant=tenant, session_id="talk", config=SessionConfig())
            await store.create(
                row,
                Record(revision=1, kind=RecordKind.CREATE, time_ms=1, config=SessionConfig(), labels={}),
                "",
            )
        key = Key("long", "talk")
        for base in range(1, revisions):
            begin = BeginRequest(request_id(base), "f", f"{base:032x}", "bench", "a", 60_000, 1)
            await store.begin(key, begin)
            record = turn(base, size)
            await store.commit(key, begin.token, "f", record, Counts(2 * base, 2 * base, 0))
    finally:
        await store.close()


def request_id(base: int) -> str:
    """The request id of the turn on this revision."""
    return str(uuid.UUID(int=base, version=4))


def turn(base: int, size: int) -> Record:
    text, tokens = "x" * (size // 5), pack_tokens([7] * (size // 5))
    asked = Item(2 * base - 1, Role.USER, "hi", pack_tokens([1, 2]), request_id=request_id(base))
    answer = Item(
        2 * base, Role.ASSISTANT, text, tokens, request_id=request_id(base), finish_reason=FinishReason.EOS
    )
    result = TurnResult(base_revision=base, finish_reason=FinishReason.EOS, input_items=1, attempt="a")
    return Record(base + 1, RecordKind.TURN, 1, request_id(base), items=(asked, answer), turn=result)


def watch(address: str, seconds: float) -> list[float]:
    """Milliseconds of each GetSession of the other tenant; in a process of its own."""
    took = []
    with grpc.insecure_channel(address) as channel:
        stub = pensieve_pb2_grpc.ConversationServiceStub(channel)
        until = time.monotonic() + seconds
        while (begun := time.monotonic()) < until:
            try:
                stub.GetSession(
                    pb.GetSessionRequest(name="sessions/talk"), metadata=credentials("other"), timeout=120
                )
            except grpc.RpcError as error:
                raise RuntimeError(
                    str(error)
                ) from None  # a call's own error does not travel between processes
            took.append(1e3 * (time.monotonic() - begun))
            time.sleep(PAUSE_S)
    return took


async def press(address: str, load: str, seconds: float, processes: ProcessPoolExecutor) -> dict[str, Any]:
    """What another tenant's GetSession takes under ``load``."""
    loop = asyncio.get_running_loop()
    async with aio.insecure_channel(address) as channel:
        stub: Any = pensieve_pb2_grpc.ConversationServiceStub(channel)
        tokens = await old_pages(stub) if load == "page" else []
        watching = loop.run_in_executor(processes, watch, address, seconds)
        calls = [0] * CALLERS

        async def call(number: int) -> None:
            while not watching.done():
                if load == "turn":
                    await stub.GetTurn(
                        pb.GetTurnRequest(session="sessions/talk", request_id=request_id(1)),
                        metadata=credentials("long"),
                    )
                else:
                    page = pb.ListItemsRequest(name="sessions/talk", page_size=2, page_token=tokens[number])
                    await stub.ListItems(page, metadata=credentials("long"))
                calls[number] += 1

        callers = [asyncio.create_task(call(number)) for number in range(CALLERS if load != "idle" else 0)]
        took = sorted(await watching)
        await asyncio.gather(*callers)
    return {
        "load": load,
        "p50_ms": round(statistics.median(took), 1),
        "p99_ms": round(took[int(0.99 * (len(took) - 1))], 1),
        "looks": len(took),
        "calls": sum(calls),
    }


async def old_pages(stub: Any) -> list[str]:
    """Page tokens of as many revisions as there are callers, none of them the newest."""
    found = []
    for number in range(CALLERS):
        first = pb.ListItemsRequest(name="sessions/talk", page_size=2)
        found.append((await stub.ListItems(first, metadata=credentials("long"))).next_page_token)
        change = pb.UpdateSessionRequest(name="sessions/talk", session=pb.Session(labels={"n": str(number)}))
        change.update_mask.paths.append("labels")
        await stub.UpdateSession(change, metadata=credentials("long"))
    return found


async def measure(revisions: int, megabytes: float, seconds: float, loads: tuple[str, ...]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        url = f"sqlite:///{folder}/history.sqlite3"
        await make(url, revisions, int(1e6 * megabytes / revisions))
        keys = Path(folder, "keys.toml")
        keys.write_text(key_file(), encoding="utf-8")
        found = []
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as processes:
            for load in loads:  # a server of its own each: nothing is cached
                with ServerProcess("--model", "demo", "--store", url, "--api-keys", str(keys)) as server:
                    found.append(await press(server.target, load, seconds, processes))
                click.echo(json.dumps(found[-1]), err=True)
    return {"revisions": revisions, "megabytes": megabytes, "other_tenant": found}


@click.command()
@click.option("--revisions", default=700, show_default=True)
@click.option("--megabytes", default=25.0, show_default=True, help="Size of the log.")
@click.option("--seconds", default=10.0, show_default=True, help="Length of each load.")
@click.option("--load", "loads", multiple=True, type=click.Choice(LOADS), default=LOADS)
def main(revisions: int, megabytes: float, seconds: float, loads: tuple[str, ...]) -> None:
    """See the module docstring."""
    click.echo(json.dumps(asyncio.run(measure(revisions, megabytes, seconds, loads))))


if __name__ == "__main__":
    main()
