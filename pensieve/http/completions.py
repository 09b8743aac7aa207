"""``POST /v1/completions``: raw text or token ids for the model, without the chat template."""

from __future__ import annotations

import asyncio
import codecs
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from typing import Any, ClassVar, Final, NamedTuple, cast

from starlette.requests import Request
from starlette.responses import Response

from pensieve.client import (
    AsyncTurnStream,
    Candidate,
    RawText,
    Role,
    TokenLogprob,
    TokenText,
    Turn,
    TurnOptions,
)
from pensieve.errors import PensieveError
from pensieve.http.common.answers import (
    DONE,
    EventStream,
    SentText,
    SentTokens,
    cancel_on_disconnect,
    candidates_of,
    clamp_logprob,
    completion_usage,
    finish_reason,
    sse_event,
)
from pensieve.http.common.callers import Caller
from pensieve.http.common.calls import Call, CallPlan, new_session_id
from pensieve.http.common.door import HttpDoor
from pensieve.http.common.failures import failure_from_error, invalid_field, unsupported_field
from pensieve.http.common.requests import (
    REFUSED_EVERYWHERE,
    CompletionFields,
    Positive,
    TokenId,
    WantedForm,
    add_form,
    named_form,
    one_form,
    seed_for,
)

MAX_PROMPTS: Final = 128
"""Per request: each prompt is a turn."""
MAX_TOKENS: Final = 16
MAX_TOP_LOGPROBS: Final = 5

Prompt = RawText | list[int]


class ValidatedCompletion(NamedTuple):
    body: CompletionRequest
    prompts: list[Prompt]
    options: TurnOptions


class CompletionRequest(CompletionFields, kw_only=True):
    """The request. ``return_token_ids`` is vLLM's."""

    WITHOUT_EFFECT: ClassVar[Mapping[str, str]] = {
        "cache_prompt": "cached state is always used",
        "metadata": "completions are not stored",
        "prompt_cache_key": "prefixes are shared without it",
        "safety_identifier": "users are not distinguished",
        "service_tier": "there is only one",
        "store": "completions are not stored",
        "user": "users are not distinguished",
    }
    REFUSED: ClassVar[Mapping[str, str]] = {
        **REFUSED_EVERYWHERE,
        "response_format": "belongs to chat completions: structured_outputs is honoured here",
        "max_completion_tokens": "is max_tokens in completions",
        "max_output_tokens": "is max_tokens in completions",
        "messages": "belong to chat completions",
    }
    prompt: str | list[str | TokenId | list[TokenId]] | None = None
    best_of: Positive | None = None
    logprobs: int | None = None
    echo: bool | None = False
    suffix: str | None = None
    return_token_ids: bool | None = False

    def validated(self) -> ValidatedCompletion:
        """Raises HttpFailure as ``check``, and for prompts that are invalid."""
        self.check()
        return ValidatedCompletion(self, self.prompts, self.turn_options)

    def check(self) -> None:
        if self.suffix:
            raise unsupported_field("suffix", "inserting text is not supported")
        if not 0 <= (self.logprobs or 0) <= MAX_TOP_LOGPROBS:
            raise invalid_field("logprobs", f"must be from 0 to {MAX_TOP_LOGPROBS}")
        if self.echo and self.logprobs is not None:
            raise unsupported_field(
                "echo", "cannot be combined with logprobs: those of a prompt are not computed"
            )
        if self.candidate_count < self.answer_count:
            raise invalid_field("best_of", "must not be less than n")
        if self.stream and self.candidate_count > self.answer_count:
            raise invalid_field(
                "best_of", "cannot be combined with stream: the best answers are known only at the end"
            )

    @property
    def form(self) -> WantedForm | None:
        """The form of the answer. Raises HttpFailure for more than one."""
        return one_form(self.vllm_forms)

    @property
    def answer_count(self) -> int:
        """Answers returned per prompt."""
        return self.n or 1

    @property
    def candidate_count(self) -> int:
        """Answers generated per prompt; the best ones are returned."""
        return self.best_of or self.answer_count

    @property
    def prompts(self) -> list[Prompt]:
        """Raises HttpFailure for a list of mixed types."""
        given = self.prompt
        if given is None or isinstance(given, str):
            return [RawText(given or "")]
        if not given:
            raise invalid_field("prompt", "must not be empty")
        kinds = set(map(type, given))
        if kinds == {int}:
            return [cast("list[int]", given)]
        if len(given) > MAX_PROMPTS:
            raise invalid_field("prompt", f"has more than {MAX_PROMPTS} prompts")
        if kinds == {str}:
            return [RawText(one) for one in given]
        if kinds == {list} and all(given):
            return [*cast("list[list[int]]", given)]
        raise invalid_field(
            "prompt", "must be a text, token ids, or a list of texts or of token ids, none of them empty"
        )

    @property
    def turn_options(self) -> TurnOptions:
        options = self.options()
        options["max_output_tokens"] = self.max_tokens or MAX_TOKENS
        add_form(options, self.form, None)
        if self.candidate_count > 1:
            options["candidates"] = self.candidate_count
        if self.candidate_count > self.answer_count:
            options["candidate_choice"] = "best_logprob"
        if self.logprobs is not None:
            options["top_logprobs"] = self.logprobs
        return options


class ScoreLists:
    """Makes the log-probability lists of one answer, which may come in parts."""

    def __init__(self, offset: int = 0) -> None:
        """``offset``: where the answer begins in the text, in characters."""
        self._offset = offset
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def take(self, scores: Iterable[TokenLogprob]) -> dict[str, Any]:
        """Return the lists of the next tokens. A token's offset is that of the character that it begins or
        continues."""
        offsets, tokens, values, tops = [], [], [], []
        for one in scores:
            offsets.append(self._offset)
            self._offset += len(self._utf8.decode(one.token.piece))
            tokens.append(_name(one.token))
            values.append(clamp_logprob(one.logprob))
            tops.append(_top(one))
        return {"text_offset": offsets, "token_logprobs": values, "tokens": tokens, "top_logprobs": tops}


def _top(one: TokenLogprob) -> dict[str, float]:
    """Return the likeliest tokens and the sampled one by their texts; of two with the same text, the likelier."""
    found: dict[str, float] = {}
    for text, (_, logprob) in zip(one.top_tokens, one.top, strict=True):
        found.setdefault(_name(text), clamp_logprob(logprob))
    found.setdefault(_name(one.token), clamp_logprob(one.logprob))
    return found


def _name(token: TokenText) -> str:
    """Return a token as OpenAI writes it: ``bytes:…`` if it is not whole characters."""
    try:
        return token.name or token.piece.decode()
    except UnicodeDecodeError:
        return f"bytes:{token.text}"


@dataclass(frozen=True, slots=True)
class StartedPrompt:
    stream: AsyncTurnStream
    text: str
    """The prompt; "" for token ids, unless it is to be echoed."""
    token_ids: tuple[int, ...]


class _PromptTurn(NamedTuple):
    prompt: Prompt
    session: str
    id: uuid.UUID


async def begin_all(
    caller: Caller,
    asked: ValidatedCompletion,
    call: Call,
    ttl_s: float,
    held: AsyncExitStack,
) -> list[StartedPrompt]:
    """Begin one turn for each prompt; ``held`` closes their streams. If one is refused, raise its error and
    leave no session behind.

    Each prompt gets its own session, which expires after ``ttl_s``. Until then the same prompt finds its state
    cached, and a retried call its answer.
    """
    plan = await call.claim_plan(caller.client, CallPlan(new_session_id("text-")))
    turns = {
        _session(plan, number): uuid.uuid5(call.id, f"prompt {number}")
        for number in range(len(asked.prompts))
    }
    async with call.undo_on_refusal(caller.client, plan, turns):
        begun = [
            _begin(caller, asked, _PromptTurn(prompt, name, turn_id), ttl_s, held)
            for prompt, (name, turn_id) in zip(asked.prompts, turns.items(), strict=True)
        ]
        # Wait for all before raising: a turn that begins later would not be closed.
        outcomes = await asyncio.gather(*begun, return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException):
                await _cancel_all(outcomes)
                raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, StartedPrompt)]


async def _cancel_all(outcomes: Sequence[StartedPrompt | BaseException]) -> None:
    """Cancel the turns that began beside a refused one."""
    for one in outcomes:
        if isinstance(one, StartedPrompt):
            with contextlib.suppress(PensieveError):
                await one.stream.cancel(keep="nothing")


def _session(plan: CallPlan, number: int) -> str:
    first = uuid.UUID(plan.own.removeprefix("text-"))
    return f"text-{uuid.uuid5(first, str(number)).hex}" if number else plan.own


async def _begin(
    caller: Caller,
    asked: ValidatedCompletion,
    turn: _PromptTurn,
    ttl_s: float,
    held: AsyncExitStack,
) -> StartedPrompt:
    session = await caller.client.create_session(
        session_id=turn.session,
        initial_items=[(Role.USER, turn.prompt)],
        ttl=ttl_s,
        request_id=str(uuid.uuid5(turn.id, "session")),
    )
    text, ids = (turn.prompt, ()) if isinstance(turn.prompt, RawText) else ("", tuple(turn.prompt))
    if (asked.body.echo and not text) or (asked.body.return_token_ids and not ids):
        item = (await session.items(include_tokens=True))[0]
        text, ids = item.text, item.token_ids
    # The session already holds the prompt; the turn answers it.
    options: TurnOptions = {
        "seed": seed_for(turn.id),
        **asked.options,
        "replace_after_item": 1,
        "request_id": str(turn.id),
    }
    stream = session.stream(**options)
    held.callback(stream.close)
    await stream.accepted()
    return StartedPrompt(stream, text, ids)


Document = dict[str, Any]


@dataclass(frozen=True, slots=True)
class TextCompletion:
    """Fields common to all parts of one answer. Answer a of prompt p is choice ``p * n + a``."""

    id: str
    model: str
    asked: CompletionRequest
    begun: Sequence[StartedPrompt]
    created: int = field(default_factory=lambda: int(time.time()))

    async def whole(self) -> Document:
        turns = await asyncio.gather(*(one.stream.finish() for one in self.begun))
        choices = [
            choice
            for number, (prompt, turn) in enumerate(zip(self.begun, turns, strict=True))
            for choice in self._choices(number, prompt, turn)
        ]
        return {**self._frame(choices), "usage": completion_usage(*turns)}

    async def chunks(self) -> AsyncIterator[bytes]:
        """Stream the answers; an error is the last event."""
        try:
            async for choice in merge_streams(
                [self._prompt_choices(number) for number in range(len(self.begun))]
            ):
                yield sse_event(self._frame([choice]))
        except PensieveError as error:
            yield sse_event(failure_from_error(error).body)
            return
        options = self.asked.stream_options
        if options is not None and options.include_usage:
            turns = [one.stream.turn for one in self.begun]
            yield sse_event({**self._frame([]), "usage": completion_usage(*turns)})
        yield DONE

    def _choices(self, number: int, prompt: StartedPrompt, turn: Turn) -> list[Document]:
        return [
            {
                "index": number * self.asked.answer_count + rank,
                "text": self._echo(prompt) + one.text,
                "logprobs": ScoreLists().take(one.logprobs) if one.logprobs else None,
                "finish_reason": finish_reason(one.finish_reason),
                **self._ids(one.token_ids, prompt.token_ids),
            }
            for rank, one in enumerate(_best(turn)[: self.asked.answer_count])
        ]

    async def _prompt_choices(self, number: int) -> AsyncIterator[Document]:
        prompt, first = self.begun[number], number * self.asked.answer_count
        scored = self.asked.logprobs is not None
        sent, tokens = SentText(), SentTokens(scored or bool(self.asked.return_token_ids))
        lists = [ScoreLists() for _ in range(self.asked.answer_count)]
        begun: set[int] = set()

        def said(
            at: int, text: str, ids: tuple[int, ...] = (), scores: tuple[TokenLogprob, ...] = ()
        ) -> Document:
            beginning = at not in begun
            begun.add(at)
            return {
                "index": first + at,
                "text": (self._echo(prompt) if beginning else "") + text,
                "logprobs": lists[at].take(scores) if scores else None,
                "finish_reason": None,
                **self._ids(ids, prompt.token_ids if beginning else None),
            }

        async for piece in prompt.stream:
            text, (ids, scores) = sent.new_text(piece), tokens.new_tokens(piece)
            if text or ids:
                yield said(piece.candidate, text or "", ids, scores)
        for at, one in enumerate(_best(prompt.stream.turn, ranked=False)):
            yield {**said(at, ""), "finish_reason": finish_reason(one.finish_reason)}

    def _echo(self, prompt: StartedPrompt) -> str:
        return prompt.text if self.asked.echo else ""

    def _ids(self, token_ids: tuple[int, ...], prompt: tuple[int, ...] | None) -> Document:
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
    """Return a turn's answers, the likeliest first if ``ranked`` and they were compared."""
    found = candidates_of(turn)
    if not ranked or any(one.mean_logprob is None for one in found):
        return found
    return sorted(found, key=lambda one: -(one.mean_logprob or 0.0))


async def merge_streams(sources: Sequence[AsyncIterator[Document]]) -> AsyncIterator[Document]:
    """Yield from all sources as items arrive. Raises the first source's error; leaving the loop cancels all of
    them."""
    if len(sources) == 1:
        async for one in sources[0]:
            yield one
        return
    found: asyncio.Queue[Document | Exception | None] = asyncio.Queue(len(sources))

    async def drain(source: AsyncIterator[Document]) -> None:
        try:
            async for one in source:
                await found.put(one)
        except Exception as error:  # re-raised by the reader
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


async def create(request: Request) -> Response:
    door = HttpDoor.from_request(request)
    asked = await door.bodies.read(request, CompletionRequest, CompletionRequest.validated)
    body = asked.body
    call = await door.bodies.offload(request, Call.from_request, request, body)
    async with AsyncExitStack() as held:
        caller = await held.enter_async_context(door.callers.for_request(request))
        model = await door.require_model(caller, body.model)
        held.enter_context(named_form(body.form))
        begun = await begin_all(caller, asked, call, door.settings.completion_ttl_s, held)
        completion = TextCompletion(f"cmpl-{call.id.hex}", model, body, begun)
        if body.stream:
            return EventStream(completion.chunks(), held.pop_all(), door.headers(request))
        return door.answer(await cancel_on_disconnect(request, completion.whole()), request)
