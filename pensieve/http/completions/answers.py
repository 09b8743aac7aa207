"""Completions, as one document or as a stream of chunks."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from pensieve.client import Candidate, TokenLogprob, Turn
from pensieve.errors import PensieveError
from pensieve.http.common.answers import SentText, SentTokens, finish_reason, usage_of
from pensieve.http.common.failures import failure_of
from pensieve.http.common.streams import DONE, event
from pensieve.http.completions.begin import BegunPrompt
from pensieve.http.completions.logprobs import ScoreLists
from pensieve.http.completions.requests import CompletionRequest

Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """What all parts of one answer say. Prompt p's answer a is choice ``p * n + a``."""

    id: str
    model: str
    asked: CompletionRequest
    begun: Sequence[BegunPrompt]
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> Document:
        """The answers as one document. Raises PensieveError."""
        turns = await asyncio.gather(*(one.stream.finish() for one in self.begun))
        choices = [
            choice
            for number, (prompt, turn) in enumerate(zip(self.begun, turns, strict=True))
            for choice in self._choices(number, prompt, turn)
        ]
        return {**self._frame(choices), "usage": usage_of(*turns)}

    async def chunks(self) -> AsyncIterator[bytes]:
        """The answers as they come; an error is the last event."""
        try:
            async for choice in merged([self._said(number) for number in range(len(self.begun))]):
                yield event(self._frame([choice]))
        except PensieveError as error:
            yield event(failure_of(error).body)
            return
        options = self.asked.stream_options
        if options is not None and options.include_usage:
            turns = [one.stream.turn for one in self.begun]
            yield event({**self._frame([]), "usage": usage_of(*turns)})
        yield DONE

    def _choices(self, number: int, prompt: BegunPrompt, turn: Turn) -> list[Document]:
        """The best answers to one prompt."""
        return [
            {
                "index": number * self.asked.answers + rank,
                "text": self._echo(prompt) + one.text,
                "logprobs": ScoreLists().of(one.logprobs) if one.logprobs else None,
                "finish_reason": finish_reason(one.finish_reason),
                **self._ids(one.token_ids, prompt.token_ids),
            }
            for rank, one in enumerate(_best(turn)[: self.asked.answers])
        ]

    async def _said(self, number: int) -> AsyncIterator[Document]:
        """The choices of one prompt's chunks."""
        prompt, first = self.begun[number], number * self.asked.answers
        scored = self.asked.logprobs is not None
        sent, tokens = SentText(), SentTokens(scored or bool(self.asked.return_token_ids))
        lists = [ScoreLists() for _ in range(self.asked.answers)]
        begun: set[int] = set()

        def said(
            at: int, text: str, ids: tuple[int, ...] = (), scores: tuple[TokenLogprob, ...] = ()
        ) -> Document:
            beginning = at not in begun
            begun.add(at)
            return {
                "index": first + at,
                "text": (self._echo(prompt) if beginning else "") + text,
                "logprobs": lists[at].of(scores) if scores else None,
                "finish_reason": None,
                **self._ids(ids, prompt.token_ids if beginning else None),
            }

        async for piece in prompt.stream:
            text, (ids, scores) = sent.new_text(piece), tokens.new_tokens(piece)
            if text or ids:
                yield said(piece.candidate, text or "", ids, scores)
        for at, one in enumerate(_best(prompt.stream.turn, ranked=False)):
            yield {**said(at, ""), "finish_reason": finish_reason(one.finish_reason)}

    def _echo(self, prompt: BegunPrompt) -> str:
        return prompt.text if self.asked.echo else ""

    def _ids(self, token_ids: tuple[int, ...], prompt: tuple[int, ...] | None) -> Document:
        """What vLLM adds when it is asked for token ids."""
        if not self.asked.return_token_ids:
            return {}
        return {"token_ids": token_ids, "prompt_token_ids": prompt}

    def _frame(self, choices: list[Document]) -> Document:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
            "usage": None,
        }


def _best(turn: Turn, *, ranked: bool = True) -> list[Candidate]:
    """A turn's answers, the likeliest first if they were compared."""
    if not turn.candidates:
        return [
            Candidate(
                candidate=0,
                text=turn.text,
                output_tokens=turn.usage.output_tokens,
                finish_reason=turn.finish_reason,
                stop_sequence=turn.stop_sequence,
                seed=turn.seed,
                token_ids=turn.token_ids,
                logprobs=turn.logprobs,
            )
        ]
    if not ranked or any(one.mean_logprob is None for one in turn.candidates):
        return list(turn.candidates)
    return sorted(turn.candidates, key=lambda one: -(one.mean_logprob or 0.0))


async def merged(sources: Sequence[AsyncIterator[Document]]) -> AsyncIterator[Document]:
    """What all sources give, as it comes. Raises what the first failing one does; leaving ends all of them."""
    if len(sources) == 1:
        async for one in sources[0]:
            yield one
        return
    found: asyncio.Queue[Document | Exception | None] = asyncio.Queue(len(sources))

    async def drain(source: AsyncIterator[Document]) -> None:
        try:
            async for one in source:
                await found.put(one)
        except Exception as error:  # told to whoever reads
            await found.put(error)
        else:
            await found.put(None)

    tasks = [asyncio.create_task(drain(source)) for source in sources]
    running = len(tasks)
    try:
        while running:
            next_one = await found.get()
            if isinstance(next_one, Exception):
                raise next_one
            if next_one is None:
                running -= 1
            else:
                yield next_one
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
