"""Pensieve and a server with the OpenAI protocol (vLLM) behind one face: contexts that go on, fork, and draw answers.

Both get token ids. What the client does for each is as little as measuring needs: the server's time is to be seen.
"""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import aiohttp
import grpc
import grpc.aio
import msgspec

from pensieve.replay.targets.openai_stream import Completion
from pensieve.spawn import read_metrics
from pensieve.v1 import pensieve_pb2 as pb
from pensieve.v1 import pensieve_pb2_grpc as rpc

CALLS = 100
"""Calls at once on one connection to Pensieve: a server takes 256 of them."""
_OPTIONS = (
    ("grpc.max_receive_message_length", 64 << 20),
    ("grpc.max_send_message_length", 64 << 20),
    ("grpc.use_local_subchannel_pool", 1),
)
_SPARE_TOKENS = 4
"""What a turn's events may lack until the server's own count is read at the end."""


class Refused(Exception):
    """A server did not answer as asked."""


@dataclass(frozen=True, slots=True)
class Draw:
    """How an answer is drawn: ``count`` answers of exactly ``tokens`` tokens. Greedy without a temperature."""

    tokens: int
    count: int = 1
    temperature: float = 0.0
    seed: int | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """Times on the clock of ``time.perf_counter``."""

    first: float
    """The first token of any answer."""
    all_first: float
    """The first token of the last answer to begin."""
    tokens: int
    """Of all answers."""
    cached: int | None
    """Tokens of the context that were not computed; None: the server does not say."""


@dataclass(slots=True)
class Context:
    """A context as its server knows it: a session's name, or the tokens themselves."""

    name: str = ""
    ids: list[int] = field(default_factory=list)


class Client(Protocol):
    """A server under test."""

    async def open(self) -> None:
        """Connect. Raises Refused."""
        ...

    async def begin(self, history: Sequence[int], *, shared: bool = True) -> Context:
        """A context that begins with these tokens, of which nothing need be computed yet."""
        ...

    async def fork(self, context: Context) -> Context: ...

    async def turn(
        self, context: Context, new: Sequence[int], draw: Draw, *, goes_on: bool = False
    ) -> Answer:
        """Answer ``new``. ``goes_on``: the context is continued or forked later. Raises Refused."""
        ...

    async def forget(self, contexts: Sequence[Context]) -> None:
        """Drop contexts and what is cached, as far as the server can be told to."""
        ...

    def used_tokens(self) -> float:
        """KV-tokens of the device in use now. Blocks; raises OSError."""
        ...

    async def close(self) -> None: ...


class PensieveClient:
    def __init__(self, address: str, admin: str) -> None:
        self.address, self._admin = address, admin
        self._channels: list[tuple[grpc.aio.Channel, Any]] = []
        self._next = 0

    async def open(self) -> None:
        for _ in range(4):
            channel = grpc.aio.insecure_channel(self.address, options=_OPTIONS)
            self._channels.append((channel, rpc.ConversationServiceStub(channel)))
        await self._stub().GetServerInfo(pb.GetServerInfoRequest(), timeout=30)

    def _stub(self) -> Any:
        self._next += 1
        return self._channels[self._next % len(self._channels)][1]

    async def begin(self, history: Sequence[int], *, shared: bool = True) -> Context:
        sharing = pb.PREFIX_SHARING_UNSPECIFIED if shared else pb.PREFIX_SHARING_NONE
        items = [pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=history))] if history else []
        request = pb.CreateSessionRequest(
            request_id=str(uuid.uuid4()), initial_items=items, config=pb.SessionConfig(prefix_sharing=sharing)
        )
        created = await _grpc(self._stub().CreateSession(request, timeout=120))
        return Context(created.session.name)

    async def fork(self, context: Context) -> Context:
        request = pb.ForkSessionRequest(name=context.name, request_id=str(uuid.uuid4()))
        forked = await _grpc(self._stub().ForkSession(request, timeout=120))
        return Context(forked.session.name)

    async def turn(
        self, context: Context, new: Sequence[int], draw: Draw, *, goes_on: bool = False
    ) -> Answer:
        sampling = pb.SamplingParams(
            temperature=draw.temperature, max_output_tokens=draw.tokens, min_output_tokens=draw.tokens,
            ignore_eos=True,
        )  # fmt: skip
        if draw.count > 1:
            sampling.candidates = draw.count
        if draw.seed is not None:
            sampling.seed = draw.seed
        content = pb.InputItem(role=pb.ROLE_USER, tokens=pb.TokenIds(ids=new))
        spec = pb.TurnSpec(request_id=str(uuid.uuid4()), input=[content], sampling=sampling)
        first: dict[int, float] = {}
        told: dict[int, int] = {}
        completed = None
        try:
            async for event in self._stub().StreamTurn(pb.StreamTurnRequest(session=context.name, turn=spec)):
                kind = event.WhichOneof("event")
                if kind == "delta" and event.delta.token_count:
                    which = event.delta.candidate
                    if which not in first:
                        first[which] = time.perf_counter()
                    told[which] = told.get(which, 0) + event.delta.token_count
                elif kind == "completed":
                    completed = event.completed
        except grpc.aio.AioRpcError as error:
            raise Refused(f"{error.code().name}: {error.details()}") from error
        if completed is None or completed.state != pb.Turn.STATE_COMMITTED:
            raise Refused(f"the turn was not committed: {completed and completed.discard_reason}")
        answers = [one.output_tokens for one in completed.candidates] or [completed.usage.output_tokens]
        _check(answers, told, draw)
        receipt = completed.usage
        cached = receipt.context_tokens - receipt.recomputed_tokens - receipt.new_tokens
        return Answer(min(first.values()), max(first.values()), sum(answers), cached)

    async def forget(self, contexts: Sequence[Context]) -> None:
        for start in range(0, len(contexts), CALLS):
            await asyncio.gather(
                *(
                    _grpc(
                        self._stub().DeleteSession(pb.DeleteSessionRequest(name=one.name, allow_missing=True))
                    )
                    for one in contexts[start : start + CALLS]
                )
            )
        async with grpc.aio.insecure_channel(self._admin) as channel:
            await _grpc(rpc.AdminServiceStub(channel).EvictCache(pb.EvictCacheRequest(), timeout=60))

    def used_tokens(self) -> float:
        return sum(
            sample.value
            for sample in read_metrics(self._admin)
            if sample.name == "pensieve_cache_tokens"
            and (sample.labels["tier"], sample.labels["state"]) == ("device", "used")
        )

    async def close(self) -> None:
        for channel, _ in self._channels:
            await channel.close()


async def _grpc(call: Any) -> Any:
    try:
        return await call
    except grpc.aio.AioRpcError as error:
        raise Refused(f"{error.code().name}: {error.details()}") from error


class OpenAIClient:
    """A server without sessions: every turn sends the whole context."""

    def __init__(self, url: str) -> None:
        self.url, self._model = url, ""
        self._http: aiohttp.ClientSession | None = None

    async def open(self) -> None:
        self._http = aiohttp.ClientSession(
            self.url, connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=2.0),
            timeout=aiohttp.ClientTimeout(total=None, connect=10.0),
            json_serialize=lambda value: msgspec.json.encode(value).decode(),
        )  # fmt: skip
        async with self._http.get("/v1/models") as response:
            self._model = str(msgspec.json.decode(await response.read())["data"][0]["id"])

    async def begin(self, history: Sequence[int], *, shared: bool = True) -> Context:
        return Context(ids=list(history))

    async def fork(self, context: Context) -> Context:
        return Context(ids=list(context.ids))

    async def turn(
        self, context: Context, new: Sequence[int], draw: Draw, *, goes_on: bool = False
    ) -> Answer:
        prompt = [*context.ids, *new]
        body: dict[str, Any] = {
            "model": self._model, "prompt": prompt, "max_tokens": draw.tokens, "min_tokens": draw.tokens,
            "ignore_eos": True, "temperature": draw.temperature, "stream": True,
            "stream_options": {"include_usage": True},
        }  # fmt: skip
        if draw.count > 1:
            body["n"] = draw.count
        if draw.seed is not None:
            body["seed"] = draw.seed
        if goes_on:  # not else: with the answer's ids come the prompt's, which cost time
            body["return_token_ids"] = True
        seen = Stream(draw.count, whole=goes_on)
        assert self._http is not None, "not open"
        try:
            async with self._http.post("/v1/completions", json=body) as response:
                if not response.ok:
                    raise Refused(f"HTTP {response.status}: {(await response.text())[:300]}")
                async for data in response.content.iter_any():
                    seen.feed(data, time.perf_counter())
        except aiohttp.ClientError as error:
            raise Refused(repr(error)) from error
        usage = seen.usage()
        tokens = int(usage.get("completion_tokens") or 0)
        if tokens != draw.count * draw.tokens or len(seen.first) != draw.count:
            raise Refused(
                f"{tokens} tokens in {len(seen.first)} answers, not {draw.count} times {draw.tokens}"
            )
        if goes_on:
            context.ids = [*prompt, *seen.ids()]
        details = usage.get("prompt_tokens_details") or {}
        return Answer(
            min(seen.first.values()), max(seen.first.values()), tokens, details.get("cached_tokens")
        )

    async def forget(self, contexts: Sequence[Context]) -> None:
        assert self._http is not None, "not open"
        async with self._http.post("/reset_prefix_cache") as response:
            if not response.ok:
                raise Refused(f"the prefix cache was not emptied: HTTP {response.status}")

    def used_tokens(self) -> float:
        samples = read_metrics(self.url.removeprefix("http://"))
        share = max((one.value for one in samples if one.name == "vllm:kv_cache_usage_perc"), default=0.0)
        blocks = next((one.labels for one in samples if one.name == "vllm:cache_config_info"), None)
        if blocks is None:
            raise OSError("the server does not tell the size of its cache")
        return share * int(blocks["num_gpu_blocks"]) * int(blocks["block_size"])

    async def close(self) -> None:
        if self._http is not None:
            await self._http.close()


class Stream:
    """The events of one completion. They are parsed until every answer has begun, and then only kept."""

    def __init__(self, answers: int, *, whole: bool) -> None:
        self.first: dict[int, float] = {}
        self._answers, self._whole = answers, whole
        self._completion = Completion()
        self._head, self._tail = b"", b""

    def feed(self, data: bytes, at: float) -> None:
        """Take in what came at a time."""
        if self._whole:
            self._completion.feed(data, at)
        self._tail = (self._tail + data)[-4096:]
        if len(self.first) == self._answers:
            return
        *events, self._head = (self._head + data).replace(b"\r\n", b"\n").split(b"\n\n")
        for event in events:
            value = event.removeprefix(b"data:").strip()
            if value == b"[DONE]" or not value:
                continue
            told = msgspec.json.decode(value)
            if told.get("error"):
                raise Refused(str(told["error"])[:300])
            for choice in told.get("choices") or ():
                # There is an event for every step of an answer, also where its token has no text.
                self.first.setdefault(int(choice.get("index", 0)), at)

    def usage(self) -> dict[str, Any]:
        """The server's own count, in the last event that has one."""
        for event in reversed(self._tail.replace(b"\r\n", b"\n").split(b"\n\n")):
            value = event.removeprefix(b"data:").strip()
            if b'"usage":{' in value.replace(b" ", b"") and value.startswith(b"{"):
                return dict(msgspec.json.decode(value)["usage"])
        return {}

    def ids(self) -> list[int]:
        return self._completion.ids


def _check(answers: Sequence[int], told: dict[int, int], draw: Draw) -> None:
    """Raises Refused when there are other answers than asked for, or not all of them were streamed."""
    if list(answers) != [draw.tokens] * draw.count:
        raise Refused(f"answers of {answers} tokens, not {draw.count} times {draw.tokens}")
    if len(told) != draw.count or min(told.values()) < draw.tokens - _SPARE_TOKENS:
        raise Refused(f"streamed {told} tokens of {draw.count} times {draw.tokens}")
