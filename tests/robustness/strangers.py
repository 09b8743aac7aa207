"""Attacks the HTTP door without a key, and measures what a tenant's calls take meanwhile.

``python tests/robustness/strangers.py [--rounds 3] [--seconds 5] [--json FILE]``

Senders in a process of their own write one-byte chunks, large bodies and calls with invented keys as fast as they are
taken: by turns to the door and to a port that only discards what it gets, so that the load on the machine is the same.
That port ends a connection after the head of a call without a body: who waits there for an answer comes back as soon as
at the door.
The tenant's calls go to the door all the time, each on a connection of its own. For each attack the script prints the
p50 and p99 of these calls, the ratio of both p99, and the files that server and door have open. It ends with status 1
where the door was started again, a call of the tenant failed, or half of the files were exceeded.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import hashlib
import http.client
import json
import multiprocessing
import os
import platform
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from pensieve.spawn import ServerProcess, read_metric

BODY_BYTES: Final = (4 << 20) - 1
ANSWER_S: Final = 5.0
"""How long a sender waits for an answer."""
END: Final = b"\r\n\r\n"
HEAD: Final = b"POST /v1/responses HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKS: Final = b"1\r\nx\r\n" * 2000


async def chunks(port: int, number: int) -> None:
    """One-byte chunks without a key."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(CHUNKS)
            await writer.drain()


async def body(port: int, number: int) -> None:
    """A large body, less its last byte, with a key that nobody has."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(HEAD + b"Authorization: Bearer nobody\r\nContent-Length: %d\r\n\r\n" % (BODY_BYTES + 1))
        for _ in range(BODY_BYTES >> 16):
            writer.write(b" " * (1 << 16))
            await writer.drain()
        await asyncio.wait_for(reader.read(), 60)


async def key(port: int, number: int) -> None:
    """A call with a key that was never used before."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(_invented(number))
        await asyncio.wait_for(reader.read(1), ANSWER_S)


async def key_and_away(port: int, number: int) -> None:
    """The same, without waiting for the answer."""
    _, writer = await asyncio.open_connection("127.0.0.1", port)
    with contextlib.closing(writer):
        writer.write(_invented(number))


def _invented(number: int) -> bytes:
    bearer = f"ck_k{os.urandom(6).hex()}_{number}".encode()
    return b"GET /v1/models HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer " + bearer + END


Sender = Callable[[int, int], Coroutine[Any, Any, None]]
ATTACKS: Final[dict[str, tuple[Sender, int]]] = {
    "one-byte chunks, 1 connection": (chunks, 1),
    "one-byte chunks, 8 connections": (chunks, 8),
    "one-byte chunks, 40 connections": (chunks, 40),
    "64 bodies of 4 MiB without a key": (body, 64),
    "1,000 invented keys at a time": (key, 1000),
    "1,000 invented keys, no answer awaited": (key_and_away, 1000),
}


def send(name: str, port: int, seconds: float) -> None:
    """Run an attack for so long: a sender whose connection ends comes again at once."""
    sender, count = ATTACKS[name]
    until = time.monotonic() + seconds

    async def again(number: int) -> None:
        while time.monotonic() < until:
            with contextlib.suppress(OSError, TimeoutError):
                await sender(port, number)
            await asyncio.sleep(0)

    async def all_of_them() -> None:
        senders = [asyncio.create_task(again(number)) for number in range(count)]
        await asyncio.wait(senders, timeout=seconds)
        for one in senders:
            one.cancel()
        await asyncio.wait(senders)

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most) if most > 0 else 8192, most))
    asyncio.run(all_of_them())


def discard(port: Any) -> None:
    """Take all connections, and drop what comes."""

    async def drop(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(OSError):
            while (read := await reader.read(1 << 16)) and not (
                read.startswith(b"GET ") and read.endswith(END)
            ):
                pass
        writer.close()

    async def serve() -> None:
        server = await asyncio.start_server(drop, "127.0.0.1", 0, backlog=2048)
        port.send(server.sockets[0].getsockname()[1])
        await server.serve_forever()

    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(ValueError, OSError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, most) if most > 0 else 8192, most))
    asyncio.run(serve())


@dataclass
class Seen:
    """What a tenant saw under one attack."""

    took_s: list[float] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)

    def percentile(self, percent: int) -> float:
        return statistics.quantiles(self.took_s, n=100)[percent - 1] if len(self.took_s) > 1 else float("nan")


def call(address: str, seen: Seen) -> None:
    """One turn of the tenant, on a connection of its own."""
    began = time.monotonic()
    connection = http.client.HTTPConnection(address, timeout=60)
    try:
        asked = json.dumps({"input": "hi", "max_output_tokens": 4, "store": False})
        headers = {"Authorization": "Bearer ck_acme_secret", "Content-Type": "application/json"}
        connection.request("POST", "/v1/responses", asked, headers)
        answer = connection.getresponse()
        said = answer.read()
        if answer.status != 200:
            seen.failed.append(f"{answer.status} {said[:200]!r}")
    except OSError as error:
        seen.failed.append(repr(error))
    finally:
        connection.close()
    seen.took_s.append(time.monotonic() - began)


def files(pid: int) -> int:
    with contextlib.suppress(OSError):
        return len(os.listdir(f"/proc/{pid}/fd"))
    return 0


def door_of(server: int) -> int:
    """Process id of the door of a server."""
    for task in Path(f"/proc/{server}/task").iterdir():
        for pid in (task / "children").read_text().split():
            with contextlib.suppress(OSError):
                if b"pensieve.http.child" in Path(f"/proc/{pid}/cmdline").read_bytes():
                    return int(pid)
    return 0


@contextmanager
def served(folder: Path) -> Iterator[ServerProcess]:
    digest = hashlib.sha256(b"secret").hexdigest()
    keys = folder / "keys.toml"
    keys.write_text(f'[[key]]\nid = "acme"\nsha256 = "{digest}"\ntenant = "acme"\n')
    options = ("--model", "demo", "--store", "memory:", "--threads", "1", "--http", "127.0.0.1:0")
    with ServerProcess(*options, "--api-keys", str(keys), listen="127.0.0.1:0") as server:
        yield server


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=5.0)
    parser.add_argument("--attack", action="append", choices=list(ATTACKS))
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    spawned = multiprocessing.get_context("spawn")
    ours, theirs = spawned.Pipe()
    sink = spawned.Process(target=discard, args=(theirs,), daemon=True)
    sink.start()
    discarding = ours.recv()
    most, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, served(Path(folder)) as server:
        pid = server.pid
        warm = Seen()
        for _ in range(20):
            call(server.http, warm)
        for name in asked.attack or ATTACKS:
            seen = {"door": Seen(), "discarding": Seen()}
            opened = {"server": 0, "door": 0}
            for _ in range(asked.rounds):
                for target, port in (
                    ("discarding", discarding),
                    ("door", int(server.http.rpartition(":")[2])),
                ):
                    sending = spawned.Process(target=send, args=(name, port, asked.seconds), daemon=True)
                    sending.start()
                    time.sleep(1.0)  # the process starts
                    until = time.monotonic() + asked.seconds - 1.0
                    while time.monotonic() < until:
                        call(server.http, seen[target])
                        opened["server"] = max(opened["server"], files(pid))
                        opened["door"] = max(opened["door"], files(door_of(pid)))
                    sending.join()
            rows.append(row(name, seen, opened))
            print(json.dumps(rows[-1]), flush=True)
        restarts = int(read_metric(server.admin, "pensieve_http_restarts_total"))
    sink.kill()
    told = {
        "machine": f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {platform.python_version()}",
        "files": most,
        "restarts": restarts,
        "rows": rows,
    }
    print(json.dumps({name: told[name] for name in ("machine", "files", "restarts")}))
    if asked.json:
        asked.json.write_text(json.dumps(told, indent=1) + "\n")
    failed = any(one["failed"] for one in rows) or restarts
    return int(bool(failed or any(max(one["files"].values()) >= most / 2 for one in rows)))


def row(name: str, seen: dict[str, Seen], opened: dict[str, int]) -> dict[str, Any]:
    """What is told of one attack; times in milliseconds."""
    door, beside = seen["door"], seen["discarding"]
    return {
        "attack": name,
        "calls": [len(beside.took_s), len(door.took_s)],
        "p50_ms": [round(1000 * one.percentile(50), 1) for one in (beside, door)],
        "p99_ms": [round(1000 * one.percentile(99), 1) for one in (beside, door)],
        "ratio_p99": round(door.percentile(99) / beside.percentile(99), 2),
        "failed": [*door.failed, *beside.failed][:3],
        "files": opened,
    }


if __name__ == "__main__":
    sys.exit(main())
