"""Turns per second of servers of chat completions while none, some or all of the answers follow a JSON schema.

    python bench/dummy_model.py llama-3-8b FOLDER --fill-vocabulary
    python bench/structured_load.py --tokenizer FOLDER \
        --start 'Pensieve=http://127.0.0.1:8001 pensieve serve --model FOLDER --load-format dummy --store memory: \
            --listen 127.0.0.1:0 --admin 127.0.0.1:0 --http 127.0.0.1:8001 --max-running 512 --max-wait 0' \
        --start 'vLLM=http://127.0.0.1:8002 vllm serve FOLDER --load-format dummy --port 8002 --max-num-seqs 512'

Clients in a closed loop hold conversations of several turns and resend their history. A structured turn wants an
object of ten bounded fields. Random weights do not end an answer by themselves, so a plain answer gets as many tokens
as a structured one had on average in the server's warm-up. Random weights also like white space between values, where
servers allow more or less of it: ``--tokenizer FOLDER`` keeps it out of all answers with ``logit_bias``. The shares
alternate, and each is played ``--repeats`` times. What a server loses is against its own turns without schemas.
"""

from __future__ import annotations

import asyncio
import json
import statistics
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import click
import jsonschema
import numpy as np
from common.provenance import commit, gpu_name, portable, table, write_report
from returns import started
from tokenizers import Tokenizer

from pensieve.replay.targets.base import TurnFailed
from pensieve.replay.targets.openai_target import Completion, text_of
from pensieve.replay.targets.started_target import StartedTarget

SCHEMAS = 8
"""Schemas that requests take in turn; a server compiles each once."""
MOST_TOKENS = 1000
"""Token limit of a structured answer. One that reaches it counts as cut."""
WARM_UP_TOKENS = 128
"""Tokens of plain answers in the warm-up."""
SEED_TOKENS = 1 << 20
Row = dict[str, Any]


def schema(number: int) -> dict[str, Any]:
    """Return a schema of ten fields whose values are short. Another number gives other names."""
    kinds: list[dict[str, Any]] = [
        {"type": "string", "minLength": 8, "maxLength": 12}, {"type": "integer", "minimum": 1000, "maximum": 9999},
        {"enum": ["low", "medium", "high"]}, {"type": "boolean"},
        {"type": "array", "items": {"enum": ["red", "blue"]}, "minItems": 2, "maxItems": 2},
    ]  # fmt: skip
    fields = {f"field_{number}_{at}": kinds[at % len(kinds)] for at in range(10)}
    return {
        "type": "object",
        "properties": fields,
        "required": list(fields),
        "additionalProperties": False,
    }


@dataclass(frozen=True, slots=True)
class LoadSizes:
    clients: int
    turns: int
    """Turns of a conversation."""
    system: int
    message: int
    """Words, about as many tokens."""
    seconds: float
    """Length of the window that is measured."""
    settle_s: float
    """Time before it."""


@dataclass(frozen=True, slots=True)
class Answered:
    """One turn. Times are seconds of ``time.perf_counter``."""

    structured: bool
    asked: float
    first: float
    ended: float
    tokens: int
    problem: str = ""


@dataclass(slots=True)
class ClosedLoop:
    """One load on one server."""

    url: str
    sizes: LoadSizes
    share: float
    """Structured turns among all."""
    plain_tokens: int
    seed: str
    bias: Mapping[str, float]
    """``logit_bias`` of every turn."""
    turns: list[Answered] = field(default_factory=list)
    sent: int = 0
    until: float = 0.0
    _model: str = ""

    async def play(self) -> None:
        """Raises an ExceptionGroup of aiohttp's errors and of refusals."""
        self.until = time.perf_counter() + self.sizes.settle_s + self.sizes.seconds
        async with aiohttp.ClientSession(
            self.url, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, connect=30.0),
        ) as http:  # fmt: skip
            async with http.get("/v1/models") as response:
                response.raise_for_status()
                self._model = (await response.json())["data"][0]["id"]
            async with asyncio.TaskGroup() as clients:
                for number in range(self.sizes.clients):
                    clients.create_task(self._converse(http, number))

    async def _converse(self, http: aiohttp.ClientSession, client: int) -> None:
        rng = np.random.default_rng(list(f"{self.seed} {client}".encode()))
        await asyncio.sleep(self.sizes.settle_s / 2 * client / self.sizes.clients)
        while True:
            messages = [{"role": "system", "content": _words(rng, self.sizes.system)}]
            for _ in range(self.sizes.turns):
                if time.perf_counter() > self.until:
                    return
                messages.append({"role": "user", "content": _words(rng, self.sizes.message)})
                text = await self._turn(http, messages)
                messages.append({"role": "assistant", "content": text})

    async def _turn(self, http: aiohttp.ClientSession, messages: list[dict[str, str]]) -> str:
        number, self.sent = self.sent, self.sent + 1
        structured = int((number + 1) * self.share) > int(number * self.share)
        body: dict[str, Any] = {
            "model": self._model, "messages": messages, "temperature": 1.0, "stream": True,
            "stream_options": {"include_usage": True}, "logit_bias": self.bias,
        }  # fmt: skip
        wanted = schema(number % SCHEMAS)
        if structured:
            form = {"name": "answer", "schema": wanted, "strict": True}
            body |= {
                "max_tokens": MOST_TOKENS,
                "response_format": {"type": "json_schema", "json_schema": form},
            }
        else:
            body |= {"max_tokens": self.plain_tokens, "ignore_eos": True}
        answer, asked = Completion(), time.perf_counter()
        async with http.post("/v1/chat/completions", json=body) as response:
            if not response.ok:
                raise click.ClickException(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for data in response.content.iter_any():
                answer.feed(data, time.perf_counter())
        ended, text = time.perf_counter(), "".join(answer.texts)
        tokens = int(answer.usage["completion_tokens"])
        problem = _problem(text, tokens, wanted) if structured else ""
        first = answer.pieces[0][1] if answer.pieces else ended
        self.turns.append(Answered(structured, asked, first, ended, tokens, problem))
        return text

    def row(self) -> Row:
        """Figures of the turns that ended in the window."""
        begin = self.until - self.sizes.seconds
        turns = [turn for turn in self.turns if begin <= turn.ended <= self.until]
        if not turns:
            raise click.ClickException(
                f"no turn ended within {self.sizes.seconds:g} s: give more --seconds or fewer --clients"
            )
        ms = [1e3 * (turn.first - turn.asked) for turn in turns]
        return {
            "turns/s": len(turns) / self.sizes.seconds,
            "tokens/s": sum(turn.tokens for turn in turns) / self.sizes.seconds,
            "tokens/turn": statistics.fmean(turn.tokens for turn in turns),
            "TTFT p50 ms": statistics.median(ms),
            "TTFT p99 ms": float(np.quantile(ms, 0.99)),
            "structured": sum(turn.structured for turn in turns),
            "cut": sum(turn.problem == "cut" for turn in turns),
            "invalid": sum(turn.problem not in ("", "cut") for turn in turns),
        }


def _problem(text: str, tokens: int, wanted: dict[str, Any]) -> str:
    """Return "cut" for an answer that reached the token limit, or why it is invalid."""
    if tokens >= MOST_TOKENS:
        return "cut"
    try:
        jsonschema.validate(json.loads(text), wanted)
    except (ValueError, jsonschema.ValidationError) as error:
        return f"{str(error)[:200]}: {text[:200]!r}"
    return ""


def blanks(folder: Path) -> dict[str, float]:
    """Return a ``logit_bias`` against the tokens of a model folder that are white space alone."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
    return {str(token): -100.0 for token, text in texts.items() if text.isspace()}


def _words(rng: np.random.Generator, count: int) -> str:
    return text_of(rng.integers(0, SEED_TOKENS, count, dtype=np.int32))


async def measure(
    target: StartedTarget, url: str, shares: tuple[float, ...], sizes: LoadSizes, bias: Mapping[str, float],
    repeats: int, rows: list[Row],
) -> None:  # fmt: skip
    """Start the server, warm it up and play every share; append a row for each load. Raises TurnFailed if it ends, and
    what ``ClosedLoop.play`` raises."""
    info = await target.open()
    try:
        warm_up = ClosedLoop(url, sizes, 0.5, WARM_UP_TOKENS, "warm up", bias)
        await target.while_up(warm_up.play())
        whole = [turn.tokens for turn in warm_up.turns if turn.structured and turn.problem != "cut"]
        if not whole:
            raise click.ClickException(f"{target.name}: no structured answer of the warm-up came to its end")
        plain_tokens = round(statistics.fmean(whole))
        for repeat in range(repeats):
            for share in shares if repeat % 2 == 0 else shares[::-1]:
                load = ClosedLoop(url, sizes, share, plain_tokens, f"{share} {repeat}", bias)
                await target.while_up(load.play())
                row = {"server": target.name, "share": share, "repeat": repeat, "plain tokens": plain_tokens}
                rows.append(row | load.row() | {"version": info.details.get("version", "")})
                click.echo(json.dumps(rows[-1]), err=True)
    finally:
        await target.close()


def summary(rows: list[Row]) -> list[Row]:
    """Return the median of each server and share, and the loss against the smallest share."""
    found = []
    for name in dict.fromkeys(row["server"] for row in rows):
        own = [row for row in rows if row["server"] == name]
        base: Row = {}
        for share in sorted({row["share"] for row in own}):
            alike = [row for row in own if row["share"] == share]
            middle = {key: statistics.median(row[key] for row in alike) for key in _MEDIANS}
            base = base or middle
            lost = {f"{key} lost": f"{100 * (1 - middle[key] / base[key]):.1f} %" for key in _MEDIANS[:2]}
            found.append(
                {"server": name, "structured": f"{share:.0%}"}
                | {key: f"{value:.1f}" for key, value in middle.items()}
                | lost
                | {key: sum(row[key] for row in alike) for key in ("cut", "invalid")}
            )
    return found


_MEDIANS = ("turns/s", "tokens/s", "tokens/turn", "TTFT p50 ms", "TTFT p99 ms")


@click.command(context_settings={"show_default": True})
@click.option("--start", "servers", multiple=True, required=True, metavar="NAME=URL COMMAND")
@click.option("--share", "shares", multiple=True, type=click.FloatRange(0, 1), default=(0.0, 0.2, 1.0))
@click.option("--clients", default=128, help="Conversations at a time.")
@click.option("--turns", default=4, help="Turns of a conversation.")
@click.option("--system", default=256, help="Words of the system message.")
@click.option("--message", default=48, help="Words of each message.")
@click.option("--seconds", default=20.0, help="Length of each measurement.")
@click.option("--settle", default=6.0, help="Seconds before it.")
@click.option("--repeats", default=2)
@click.option("--tokenizer", type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="FOLDER",
              help="Keeps white space out of all answers.")  # fmt: skip
@click.option("--out", type=click.Path(path_type=Path), default=Path("build/structured_load"),
              help="FILE.json and FILE.md")  # fmt: skip
def main(
    servers: tuple[str, ...], shares: tuple[float, ...], clients: int, turns: int, system: int, message: int,
    seconds: float, settle: float, repeats: int, tokenizer: Path | None, out: Path,
) -> None:  # fmt: skip
    """Measure the turns that structured answers cost."""
    sizes = LoadSizes(clients, turns, system, message, seconds, settle)
    bias = {} if tokenizer is None else blanks(tokenizer)
    report: Row = {
        "schema": "pensieve.structured_load/1", "command": portable(["python", *sys.argv]), "commit": commit(),
        "device": gpu_name(), "servers": servers, "rows": [], "errors": {},
    }  # fmt: skip
    for words in servers:
        target, url = started(words), words.partition("=")[2].split()[0]
        if not url.startswith("http"):
            raise click.UsageError(f"--start {words!r}: NAME=URL COMMAND")
        try:
            asyncio.run(measure(target, url, shares, sizes, bias, repeats, report["rows"]))
        except* (TurnFailed, aiohttp.ClientError, click.ClickException) as failures:
            report["errors"][target.name] = str(failures.exceptions[0])
        lines = [
            f"`{report['command']}`", "", f"{report['device'] or 'no GPU'}, commit {report['commit']}.", "",
            *table(summary(report["rows"])), *(f"* {name}: {text}" for name, text in report["errors"].items()),
        ]  # fmt: skip
        write_report(out.parent, out.name, report, lines)
    click.echo("\n".join(lines))
    if report["errors"] or any(row["invalid"] for row in report["rows"]):
        raise click.ClickException("a server failed, or answers were invalid")


if __name__ == "__main__":
    main()
