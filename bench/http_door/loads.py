"""Conversations of clients that resend their history, and what is measured of a server that answers them.

Models have random weights here, so what is said is decided by ``logit_bias``: answers are drawn evenly from a set of
tokens. Of whole words the text reads back as the same tokens. Of pieces of words it does not: the tokenizer cuts the
same letters in another way. That is what happens to real answers here and there; here it happens to every one.
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
from tokenizers import Tokenizer

from pensieve.replay.targets.openai_target import Completion

Row = dict[str, Any]
BIAS = 100.0
"""The protocol's largest: no other token is drawn."""
BIASED = 64
"""Tokens that an answer is drawn from; they travel with every request."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Tokens, numbers and seconds of a load."""

    conversations: int = 64
    turns: int = 5
    system: int = 1024
    user_turn: tuple[int, int] = (64, 256)
    answer: int = 128
    think_s: float = 0.8
    """Mean pause before the next turn; exponential."""
    ramp_s: float = 4.0
    """The conversations begin spread over this time."""


SMALL = Sizes(4, 3, 40, (8, 20), 8, 0.05, 0.1)
"""For a CPU: only shows that it runs."""


def warm_up_of(sizes: Sizes) -> Sizes:
    """Less, all at once: so that no kernel is compiled while it is measured."""
    return Sizes(min(48, sizes.conversations), 2, sizes.system, sizes.user_turn, sizes.answer // 2, 0.0, 0.0)


def spread(values: Sequence[float]) -> dict[str, float] | None:
    """Mean, median and 95th percentile (of what was measured, not between); None of nothing."""
    if not values:
        return None
    ordered = sorted(values)
    return {
        "mean": statistics.fmean(ordered), "p50": ordered[(len(ordered) - 1) // 2],
        "p95": ordered[min(len(ordered) - 1, -(-95 * len(ordered) // 100) - 1)],
    }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Words:
    """What is said: ``whole`` words read back as they are, ``pieces`` of words in other pieces."""

    tokenizer: Tokenizer
    whole: tuple[int, ...]
    pieces: tuple[int, ...]

    @classmethod
    def of(cls, model: Path) -> Words:
        """From the tokenizer of a model folder."""
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        texts = {token: tokenizer.decode([token]) for token in range(tokenizer.get_vocab_size())}
        whole = [
            token for token, text in texts.items()
            if text.startswith(" ") and text[1:].isalpha() and tokenizer.encode(text).ids == [token]
        ]  # fmt: skip
        pieces = [
            token for token, text in texts.items() if text.isalpha() and text.isascii() and len(text) <= 2
        ]
        return cls(tokenizer, tuple(whole), tuple(pieces))

    def text(self, dice: random.Random, tokens: int) -> str:
        return str(self.tokenizer.decode([dice.choice(self.whole) for _ in range(tokens)]))

    def count(self, text: str) -> int:
        return len(self.tokenizer.encode(text).ids)


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One answered turn. Seconds; ``number`` from 0."""

    number: int
    first_s: float
    whole_s: float
    prompt_tokens: int
    cached_tokens: int
    output_tokens: int
    text: str


@dataclass(slots=True)
class ChatTrial:
    """One load on one server, while it is played."""

    url: str
    """Where ``/v1/chat/completions`` is."""
    words: Words
    sizes: Sizes
    biased: Sequence[int]
    """Tokens that answers are drawn from."""
    dice: random.Random
    turns: list[ChatTurn] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: float = 0.0
    _model: str = ""

    async def play(self) -> None:
        """All conversations; one that fails ends, and the others go on."""
        talks = [self._talk(number) for number in range(self.sizes.conversations)]
        began = time.perf_counter()
        try:
            async with aiohttp.ClientSession(
                self.url, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
                timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
                json_serialize=lambda value: msgspec.json.encode(value).decode(),
            ) as http:  # fmt: skip
                async with http.get("/v1/models") as response:
                    self._model = str(msgspec.json.decode(await response.read())["data"][0]["id"])
                await asyncio.gather(*(talk.play(self, http) for talk in talks))
        finally:
            self.wall_s = time.perf_counter() - began

    def _talk(self, number: int) -> _Talk:
        sizes, dice = self.sizes, self.dice
        said = [self.words.text(dice, dice.randint(*sizes.user_turn)) for _ in range(sizes.turns)]
        pauses = [sizes.ramp_s * number / sizes.conversations]
        pauses += [dice.expovariate(1 / sizes.think_s) if sizes.think_s else 0.0 for _ in said[1:]]
        return _Talk(self.words.text(dice, sizes.system), said, pauses)

    async def ask(
        self, http: aiohttp.ClientSession, messages: Sequence[dict[str, str]]
    ) -> tuple[Completion, float]:
        """One answer, and when it was asked for. Raises ValueError for one of another length, and aiohttp's errors."""
        body = {
            "model": self._model, "messages": messages, "max_completion_tokens": self.sizes.answer, "stream": True,
            "stream_options": {"include_usage": True}, "temperature": 1.0, "ignore_eos": True,
            "logit_bias": {str(token): BIAS for token in self.biased},
        }  # fmt: skip
        answer, asked = Completion(), time.perf_counter()
        async with http.post("/v1/chat/completions", json=body) as response:
            if not response.ok:
                raise ValueError(f"HTTP {response.status}: {(await response.text())[:300]}")
            async for data in response.content.iter_any():
                answer.feed(data, time.perf_counter())
        if answer.usage.get("completion_tokens") != self.sizes.answer or not answer.pieces:
            raise ValueError(
                f"{answer.usage} and {len(answer.pieces)} pieces, not {self.sizes.answer} tokens"
            )
        return answer, asked

    def row(self) -> Row:
        """What came of it. The cached share and the tokens computed are of later turns."""
        later = [turn for turn in self.turns if turn.number]
        prompts, cached = sum(t.prompt_tokens for t in later), sum(t.cached_tokens for t in later)
        other = [turn for turn in self.turns if self.words.count(turn.text) != turn.output_tokens]
        return {
            "turns": len(self.turns), "failed": len(self.failures), "failures": self.failures[:5],
            "wall_s": self.wall_s, "turns_per_s": len(self.turns) / max(self.wall_s, 1e-9),
            "output_tokens": sum(turn.output_tokens for turn in self.turns),
            "later_turns": len(later),
            "first_token_s": spread([turn.first_s for turn in later]),
            "first_token_of_first_turns_s": spread([t.first_s for t in self.turns if not t.number]),
            "turn_s": spread([turn.whole_s for turn in later]),
            "prompt_tokens_mean": prompts / len(later) if later else None,
            "computed_tokens_mean": (prompts - cached) / len(later) if later else None,
            "cached_share": cached / prompts if prompts else None,
            "other_tokens_share": len(other) / len(self.turns) if self.turns else None,
        }  # fmt: skip


@dataclass(slots=True)
class _Talk:
    """One conversation: what its user says, and how long the user waits before it."""

    system: str
    said: Sequence[str]
    pauses: Sequence[float]

    async def play(self, trial: ChatTrial, http: aiohttp.ClientSession) -> None:
        messages = [{"role": "system", "content": self.system}]
        for number, (text, pause) in enumerate(zip(self.said, self.pauses, strict=True)):
            await asyncio.sleep(pause)
            messages.append({"role": "user", "content": text})
            try:
                answer, asked = await trial.ask(http, messages)
            except Exception as failure:
                trial.failures.append(f"{type(failure).__name__}: {str(failure)[:300]}")
                return
            ended, whole = time.perf_counter(), "".join(answer.texts)
            messages.append({"role": "assistant", "content": whole})
            trial.turns.append(_turn(number, answer, asked, ended, whole))


def _turn(number: int, answer: Completion, asked: float, ended: float, text: str) -> ChatTurn:
    usage: dict[str, Any] = answer.usage
    # vLLM leaves the details out where nothing was cached.
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    return ChatTurn(
        number, answer.pieces[0][1] - asked, ended - asked, int(usage["prompt_tokens"]), int(cached),
        int(usage["completion_tokens"]), text,
    )  # fmt: skip
