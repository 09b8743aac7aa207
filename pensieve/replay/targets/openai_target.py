"""Any server with the OpenAI protocol as a target.

Every turn sends the whole history, except with the Responses protocol, which names the previous response.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import msgspec
import numpy as np

from pensieve.core import TokenArray, Usage
from pensieve.replay.targets.base import Address, OnTokens, TargetInfo, TurnFailed, TurnRequest

_WORDS = (
    "the", "of", "and", "to", "in", "is", "you", "that", "it", "he", "was", "for", "on", "are", "as", "with",
)  # fmt: skip
_KEEP_ALIVE_S = 2.0
"""Idle time after which a connection is not reused. Uvicorn servers close theirs after 5 s, and a turn that
is sent at that moment would fail."""
RESPONSES_PATH = "/v1/responses"
"""At the end of a target's address: the server keeps the history."""
_PATHS = {"completions": "/v1/completions", "chat": "/v1/chat/completions", "responses": RESPONSES_PATH}
_CONNECTION_ERRORS = (aiohttp.ClientError, TimeoutError)


class _Delta(msgspec.Struct):
    content: str | None = None


class _Choice(msgspec.Struct):
    text: str = ""
    token_ids: list[int] | None = None
    delta: _Delta | None = None


class _Response(msgspec.Struct):
    id: str = ""
    usage: dict[str, Any] | None = None


class _Event(msgspec.Struct):
    """The fields that are read from a streamed event."""

    choices: list[_Choice] = []
    usage: dict[str, Any] | None = None
    error: Any = None
    # Only in the Responses protocol.
    type: str = ""
    delta: str | None = None
    response: _Response | None = None


_event_decoder = msgspec.json.Decoder(_Event)


@dataclass(slots=True)
class Completion:
    pieces: list[tuple[int, float]] = field(default_factory=list)
    """(tokens, time) of each piece. One without token ids counts as one token until the server reports a total."""
    ids: list[int] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)
    usage: dict[str, Any] = field(default_factory=dict)
    response_id: str = ""
    _rest: bytes = b""

    def feed(self, data: bytes, at: float) -> None:
        """Process data that arrived at time ``at``: any part of a stream of server-sent events."""
        *events, self._rest = (self._rest + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            for line in event.split(b"\n"):
                if line.startswith(b"data:") and (value := line[5:].strip()) != b"[DONE]":
                    self._take(_event_decoder.decode(value), at)

    def _take(self, event: _Event, at: float) -> None:
        if event.error:
            raise TurnFailed("SERVER_ERROR", str(event.error)[:300])
        self.usage = event.usage or self.usage
        for choice in event.choices:
            ids = choice.token_ids or ()
            text = choice.text or (choice.delta and choice.delta.content) or ""
            self.ids += ids
            if text:
                self.texts.append(text)
            if ids or text:
                self.pieces.append((len(ids) or 1, at))
        if event.type == "response.output_text.delta" and event.delta:
            self.texts.append(event.delta)
            self.pieces.append((1, at))
        if event.response is not None:
            self.response_id = event.response.id
            self.usage = _completions_usage(event.response.usage) or self.usage

    def settle(self) -> None:
        """Adjust the last pieces so that their tokens add up to the server's count."""
        total = self.usage.get("completion_tokens")
        # With ids every count is exact already; without a total there is nothing to adjust to.
        if self.ids or total is None or not self.pieces:
            return
        excess = sum(count for count, _ in self.pieces) - int(total)
        while excess > 0 and self.pieces:
            self.pieces.pop()
            excess -= 1
        if excess < 0:
            count, at = self.pieces[-1]
            self.pieces[-1] = count - excess, at


def _completions_usage(usage: dict[str, Any] | None) -> dict[str, Any]:
    """Convert counts of the Responses protocol to the names of the completions protocol."""
    if not usage:
        return {}
    return {
        "prompt_tokens": usage.get("input_tokens"),
        "completion_tokens": usage.get("output_tokens"),
        "prompt_tokens_details": usage.get("input_tokens_details"),
    }


@dataclass(frozen=True, slots=True)
class Dialect:
    """The kind of requests that a server accepts, found by a probe."""

    api: str
    """``completions`` with token ids as the prompt; ``chat`` with text; ``responses`` with only the new text."""
    forced: bool
    """The server accepts ``ignore_eos`` and ``min_tokens``."""
    returns_ids: bool = False
    """The server accepts ``return_token_ids``; answers then include ids."""

    @property
    def path(self) -> str:
        return _PATHS[self.api]


_DIALECTS = (
    Dialect("completions", True, True),
    Dialect("completions", True),
    Dialect("completions", False),
    Dialect("chat", True),
    Dialect("chat", False),
)
_RESPONSES_DIALECTS = (Dialect("responses", True), Dialect("responses", False))


@dataclass(slots=True)
class _Session:
    ids: list[int] = field(default_factory=list)
    messages: list[dict[str, str]] = field(default_factory=list)
    previous: str = ""
    context: int | None = 0
    """Tokens of the previous prompt and answer, as the server counts them; None if it does not."""


class OpenAITarget:
    """``http://HOST:PORT``, optionally with ``/v1/responses``. ``api_key`` is sent as a bearer token.

    It uses aiohttp, whose parser is written in C: a streamed piece costs a third of the processor time that
    it does with httpx2 (30 to 35 µs against 88 to 93, by ``bench/replay_client.py`` of commit d7826e2 with
    100 streams), and the client must not limit the measurement.
    """

    def __init__(self, base: str, *, name: str | None = None, api_key: str | None = None) -> None:
        self._address, self._name, self._api_key = base, name or base, api_key
        self._base = base.removesuffix(RESPONSES_PATH)
        self._http: aiohttp.ClientSession | None = None
        self._model = ""
        self._dialects = _RESPONSES_DIALECTS if base.endswith(RESPONSES_PATH) else _DIALECTS
        self._dialect = self._dialects[0]
        self._sessions: dict[str, _Session] = {}
        self._opened = 0

    @property
    def name(self) -> str:
        return self._name

    def address(self) -> Address:
        return Address(self._address, self._api_key)

    async def open(self) -> TargetInfo:
        self._http = aiohttp.ClientSession(
            self._base,
            headers={"authorization": f"Bearer {self._api_key}"} if self._api_key else {},
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
            json_serialize=_json,
        )
        listed = await self._models()
        listed["version"] = await self._version()
        self._model = str(listed["id"])
        refusals = []
        for dialect in self._dialects:
            self._dialect = dialect
            probe = _Session()
            try:
                answer = await self._ask(
                    probe, TurnRequest(np.arange(3, 7, dtype=np.int32), 2, dialect.forced)
                )
            except TurnFailed as refusal:
                refusals.append(f"{dialect.path}: {refusal}")
                continue
            if dialect.returns_ids and not answer.ids:
                self._dialect = dialect = Dialect(dialect.api, dialect.forced)
            return self._info(listed, dialect)
        raise TurnFailed(
            "UNSUPPORTED", f"{self._base} accepts no supported kind of request: {'; '.join(refusals)}"
        )

    async def start_session(self) -> str:
        self._opened += 1
        self._sessions[str(self._opened)] = _Session()
        return str(self._opened)

    async def turn(self, session: str, spec: TurnRequest, on_tokens: OnTokens) -> Usage | None:
        state = self._sessions[session]
        answer = await self._ask(state, spec)
        for count, at in answer.pieces:
            on_tokens(count, at)
        produced = sum(count for count, _ in answer.pieces)
        _append_turn(state, self._dialect, spec, answer, produced)
        return _receipt(state, answer.usage, produced)

    async def end_session(self, session: str) -> None:
        self._sessions.pop(session, None)

    async def evict(self) -> str:
        """Empty the prefix cache if the server can; return the request that did it."""
        for path in ("/reset_prefix_cache", "/flush_cache"):
            try:
                async with self._client.post(path) as response:
                    if response.ok:
                        return f"POST {path}"
            except _CONNECTION_ERRORS as error:
                raise _unavailable(error) from error
        return "other token ids"

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()
            self._http = None

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._http is not None, "not open"
        return self._http

    async def _models(self) -> dict[str, Any]:
        try:
            async with self._client.get("/v1/models", timeout=aiohttp.ClientTimeout(30.0)) as response:
                response.raise_for_status()
                return dict(msgspec.json.decode(await response.read())["data"][0])
        except _CONNECTION_ERRORS as error:
            raise _unavailable(error) from error
        except (ValueError, KeyError, IndexError, TypeError) as error:
            raise TurnFailed("BAD_RESPONSE", f"{self._base}/v1/models lists no model: {error!r}") from error

    async def _version(self) -> str:
        """The server's version if it reports one as vLLM does; otherwise empty."""
        try:
            async with self._client.get("/version", timeout=aiohttp.ClientTimeout(30.0)) as response:
                return str(msgspec.json.decode(await response.read())["version"]) if response.ok else ""
        except _CONNECTION_ERRORS as error:
            raise _unavailable(error) from error
        except (ValueError, KeyError, TypeError):
            return ""

    def _info(self, listed: dict[str, Any], dialect: Dialect) -> TargetInfo:
        meta = listed.get("meta") or {}
        tokens = dialect.api == "completions"
        details = {
            "model": self._model,
            "server": str(listed.get("owned_by", "")),
            "api": dialect.api,
            "prompt": "token ids" if tokens else "text",
            "answers": ("token ids" if dialect.returns_ids else "drawn") if tokens else "text",
            "lengths": "forced" if dialect.forced else "not forced",
        }
        details |= {"version": listed["version"]} if listed["version"] else {}
        limit = listed.get("max_model_len") or meta.get("n_ctx_train") or 0
        vocab = listed.get("vocab_size") or meta.get("n_vocab") or 0
        return TargetInfo(int(vocab), int(limit), details, dialect.forced)

    async def _ask(self, state: _Session, spec: TurnRequest) -> Completion:
        answer = Completion()
        body = _body(self._model, self._dialect, state, spec)
        try:
            async with self._client.post(self._dialect.path, json=body) as response:
                if not response.ok:
                    text = await response.text(errors="replace")
                    raise TurnFailed(f"HTTP_{response.status}", text[:300])
                async for data in response.content.iter_any():
                    answer.feed(data, time.perf_counter())
        except _CONNECTION_ERRORS as error:
            raise _unavailable(error) from error
        except (ValueError, TypeError) as error:
            raise TurnFailed("BAD_RESPONSE", repr(error)) from error
        answer.settle()
        return answer


def _json(value: Any) -> str:
    """Encode JSON fast: prompts are lists of thousands of numbers, slow in the standard library."""
    return msgspec.json.encode(value).decode()


def _body(model: str, dialect: Dialect, state: _Session, spec: TurnRequest) -> dict[str, Any]:
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": spec.output_tokens,
        "temperature": 0.0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    if dialect.api == "responses":
        del body["max_tokens"], body["stream_options"]
        body |= {"input": text_of(spec.input_ids), "max_output_tokens": spec.output_tokens}
        body |= {"previous_response_id": state.previous} if state.previous else {}
    elif dialect.api == "completions":
        body["prompt"] = state.ids + spec.input_ids.tolist()
    else:
        body["messages"] = [*state.messages, {"role": "user", "content": text_of(spec.input_ids)}]
    if spec.forced and dialect.forced:
        body |= {"ignore_eos": True, "min_tokens": spec.output_tokens}
    if dialect.returns_ids:
        body["return_token_ids"] = True
    return body


def _append_turn(
    state: _Session, dialect: Dialect, spec: TurnRequest, answer: Completion, produced: int
) -> None:
    if dialect.api == "responses":
        state.previous = answer.response_id
        return
    if dialect.api == "chat":
        question = {"role": "user", "content": text_of(spec.input_ids)}
        state.messages += [question, {"role": "assistant", "content": "".join(answer.texts)}]
        return
    # If the server returns no ids of its answer, other ids stand in: the lengths are right, but a prefix
    # cache cannot find the answer again; the report says "drawn".
    state.ids += spec.input_ids.tolist()
    state.ids += answer.ids or np.resize(spec.input_ids, produced).tolist()


def _receipt(state: _Session, usage: dict[str, Any], produced: int) -> Usage | None:
    """A receipt from the server's counts, or None if it does not report how many tokens its prefix cache held."""
    context = usage.get("prompt_tokens")
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    before, state.context = state.context, None if context is None else int(context) + produced
    if context is None or cached is None or before is None or context <= before:
        return None
    found = min(int(cached), before)
    return Usage(
        context_tokens=int(context),
        gpu_cached_tokens=found,
        recomputed_tokens=before - found,
        new_tokens=int(context) - before,
        output_tokens=produced,
    )


def text_of(ids: TokenArray) -> str:
    """English text of about as many tokens, different for different ids."""
    return " ".join(_WORDS[token % len(_WORDS)] for token in ids.tolist())


def _unavailable(error: Exception) -> TurnFailed:
    if isinstance(error, aiohttp.ClientResponseError):
        return TurnFailed(f"HTTP_{error.status}", error.message)
    return TurnFailed("UNAVAILABLE", f"{type(error).__name__}: {error}")
