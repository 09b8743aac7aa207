"""A server under steady pressure for as long as you like: does it stay as it was?

    python bench/soak/soak.py --minutes 60 --threads 2
    python bench/soak/soak.py --minutes 10 --device cuda --device-cache 1GiB --host-cache 1GiB --clients 64

Conversations together hold ``--times`` as many tokens as both tiers of the cache; the next turn goes to any of them, so
most of what a turn needs was swapped out or dropped. Told in the end: throughput of the first tenth against the last
(per second, and per second of the server's processor time, which a shared machine does not disturb), memory of both
processes, the longest silence while turns were under way, and that every answer's receipt added up. With ``--check``
(PENSIEVE_DEBUG=1 in the server) the engine balances the books of its cache after each step, and ends when they do not.
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path
from random import Random

import click

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # beside the other benchmarks

from common.provenance import commit, gpu_name, portable
from common.servers import cpu_seconds, resident_bytes

from pensieve import AsyncClient, PensieveError
from pensieve.client import AsyncSession
from pensieve.core import Usage
from pensieve.spawn import ServerProcess

MIB = 1 << 20
SAMPLE_S = 5.0
INPUT_WORDS = ("red", "stone", "river", "seven", "glass", "north", "candle", "paper")


@dataclass
class Sample:
    seconds: float
    turns: int
    output_tokens: int
    front_end_mib: float
    engine_mib: float
    processor_s: float
    """Processor time of the server's processes: what else runs on the machine does not count in it."""
    context_tokens: int
    full: bool
    """Whether all conversations that are held at once have begun."""


@dataclass
class Soak:
    """The conversations, and what came of them."""

    client: AsyncClient
    random: Random
    open_sessions: int
    longest: int
    """Tokens of context after which a conversation ends and another begins."""
    outputs: int
    idle: list[AsyncSession] = field(default_factory=list)
    begun: int = 0
    turns: int = 0
    output_tokens: int = 0
    context_tokens: int = 0
    sources: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    wrong_receipts: int = 0
    last_piece: float = 0.0
    longest_silence_s: float = 0.0
    latencies_s: list[float] = field(default_factory=list)
    samples: list[Sample] = field(default_factory=list)

    async def talk(self, until: float) -> None:
        """One client: a turn of any conversation that no other client has in hand, again and again."""
        while time.monotonic() < until:
            fewer = len(self.idle) < self.open_sessions and self.random.random() < 0.5
            try:
                if fewer or not self.idle:
                    session = await self.begin(self._system_prompt())
                else:
                    session = self.idle.pop(self.random.randrange(len(self.idle)))
                started = time.monotonic()
                length = await self._turn(session)
                self.latencies_s.append(time.monotonic() - started)
                if length < self.longest:
                    self.idle.append(session)
                else:
                    await self.end(session)
            except PensieveError as error:
                self.errors[error.reason] += 1

    async def begin(self, system_prompt: str) -> AsyncSession:
        return await self.client.create_session(system_prompt=system_prompt)

    async def end(self, session: AsyncSession) -> None:
        await session.delete()

    def _system_prompt(self) -> str:
        """The first conversations begin anywhere between their beginning and their end, as they are later on."""
        self.begun += 1
        words = self.random.randrange(self.longest // 2) if self.begun <= self.open_sessions else 0
        return " ".join(("You are a helpful assistant.", *self.random.choices(INPUT_WORDS, k=words)))

    def _words(self) -> str:
        return " ".join(self.random.choices(INPUT_WORDS, k=self.random.randint(4, 16)))

    async def _turn(self, session: AsyncSession) -> int:
        """The conversation's length behind it."""
        stream = session.stream(
            self._words(), max_output_tokens=self.outputs, ignore_eos=True, temperature=0.0
        )
        async for _ in stream:
            now = time.monotonic()
            self.longest_silence_s = max(self.longest_silence_s, now - self.last_piece)
            self.last_piece = now
        return self._account(stream.turn.usage)

    def _account(self, usage: Usage) -> int:
        """Add up a receipt; the conversation's length after its turn."""
        self.turns += 1
        self.output_tokens += usage.output_tokens
        self.context_tokens += usage.context_tokens
        self.wrong_receipts += not usage.reconciles
        self.sources["device"] += usage.gpu_cached_tokens
        self.sources["host"] += usage.swapped_in_tokens
        self.sources["recomputed"] += usage.recomputed_tokens
        self.sources["new"] += usage.new_tokens
        return usage.context_tokens + usage.output_tokens

    async def sample(self, server: ServerProcess, began: float) -> None:
        while True:
            await asyncio.sleep(SAMPLE_S)
            engine = server.engine_pid
            processes = [server.pid] if engine is None else [server.pid, engine]
            resident = [resident_bytes(process) / MIB for process in processes]
            self.samples.append(Sample(
                time.monotonic() - began, self.turns, self.output_tokens, resident[0], sum(resident[1:]),
                sum(map(cpu_seconds, processes)), self.context_tokens, self.begun >= self.open_sessions,
            ))  # fmt: skip
            if len(self.samples) % 12 == 0:
                print(f"{self.samples[-1]} {dict(self.errors)}", file=sys.stderr, flush=True)


def tenth(samples: list[Sample], last: bool) -> dict[str, float]:
    """Output tokens per second and memory over the first or the last tenth, from the time on that the cache is full."""
    kept = [one for one in samples if one.full]
    if len(kept) < 4:
        raise click.ClickException("too short: not all conversations had begun, or just now")
    count = max(2, len(kept) // 10)
    part = kept[-count:] if last else kept[:count]
    span = part[-1].seconds - part[0].seconds
    tokens = part[-1].output_tokens - part[0].output_tokens
    return {
        "output_tokens_per_s": round(tokens / span, 2),
        "output_tokens_per_processor_s": round(tokens / (part[-1].processor_s - part[0].processor_s), 2),
        "context_tokens_per_turn": round(
            (part[-1].context_tokens - part[0].context_tokens) / max(1, part[-1].turns - part[0].turns)
        ),
        "front_end_mib": round(sum(one.front_end_mib for one in part) / len(part), 1),
        "engine_mib": round(sum(one.engine_mib for one in part) / len(part), 1),
    }


async def soaked(server: ServerProcess, soak: Soak, clients: int, minutes: float) -> None:
    began = soak.last_piece = time.monotonic()
    sampling = asyncio.create_task(soak.sample(server, began))
    try:
        await asyncio.gather(*(soak.talk(began + minutes * 60) for _ in range(clients)))
    finally:
        sampling.cancel()


@click.command(context_settings={"show_default": True})
@click.option("--minutes", type=float, default=60.0)
@click.option("--device", default="cpu")
@click.option("--device-cache", default="4096tokens")
@click.option("--host-cache", default="4096tokens")
@click.option("--times", type=float, default=4.0, help="Tokens held, as a multiple of both tiers.")
@click.option("--longest", type=int, default=600, help="Context at which a conversation ends.")
@click.option("--outputs", type=int, default=24)
@click.option("--clients", type=int, default=6, help="Turns under way at once.")
@click.option("--threads", type=int, default=1)
@click.option("--seed", type=int, default=1)
@click.option("--check/--no-check", default=True)
@click.option("--store", default="memory:")
@click.option("--json", "out", type=click.Path(path_type=Path))
def main(
    minutes: float, device: str, device_cache: str, host_cache: str, times: float, longest: int, outputs: int,
    clients: int, threads: int, seed: int, check: bool, store: str, out: Path | None,
) -> None:  # fmt: skip
    """One server with the demo model, and clients that never let it rest."""
    options = [
        *("--model", "demo", "--device", device, "--store", store, "--threads", str(threads)),
        *("--device-cache", device_cache, "--host-cache", host_cache),
    ]
    with ServerProcess(*options, environment={"PENSIEVE_DEBUG": "1" if check else "0"}) as server:
        capacity = int(server.metric("pensieve_cache_tokens"))  # of both tiers: all of it is free now
        sessions = round(times * capacity / (longest / 2))  # on average half way to their end

        async def run() -> Soak:
            async with AsyncClient(server.target) as client:
                soak = Soak(client, Random(seed), sessions, longest, outputs)
                await soaked(server, soak, clients, minutes)
                return soak

        soak = asyncio.run(run())
        restarts = server.metric("pensieve_engine_restarts_total")
        dropped = server.metric("pensieve_dropped_tokens_total")
        first, last = tenth(soak.samples, False), tenth(soak.samples, True)
    result = {
        "command": portable(["python", *sys.argv]), "commit": commit(), "gpu": gpu_name() if device != "cpu" else "",
        "minutes": minutes, "tier_tokens": capacity, "sessions": sessions, "turns": soak.turns,
        "output_tokens": soak.output_tokens, "context_tokens_by_source": dict(soak.sources),
        "dropped_tokens": dropped, "first_tenth": first, "last_tenth": last,
        "longest_silence_s": round(soak.longest_silence_s, 2), "engine_restarts": restarts,
        "errors": dict(soak.errors), "wrong_receipts": soak.wrong_receipts, "checked_each_step": check,
    }  # fmt: skip
    print(json.dumps(result, indent=1))
    if out is not None:
        out.write_text(
            json.dumps({**result, "samples": [asdict(one) for one in soak.samples]}, indent=1) + "\n"
        )
    sys.exit(bool(restarts or soak.errors or soak.wrong_receipts))


if __name__ == "__main__":
    main()
