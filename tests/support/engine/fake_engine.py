"""A scripted engine without a model: each request gives its tokens one per step. Runs in a thread or a host process.

The script comes as JSON in ``EngineOptions.model`` (a fake has no model), so that it reaches another process too.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from pensieve.config import EngineOptions, device_range, parse_cache_size
from pensieve.core import FinishReason, Phase, RequestKey, Usage, packed_length, unpack_tokens
from pensieve.debug import failpoint
from pensieve.engine.messages import (
    Cancel,
    CandidateFinished,
    Choose,
    Command,
    EngineReady,
    Event,
    Evict,
    Evicted,
    Failed,
    Finished,
    GetResidency,
    Memory,
    Output,
    RequestProgress,
    ResidentTokens,
    SetMemory,
    Started,
    Stats,
    Submit,
    Warm,
    Warmed,
)
from pensieve.engine.process.loop import StepAnnouncer
from pensieve.errors import InvalidArgument

SCRIPT_FILE = "fake_engine.json"
"""In a model folder: the script of the fake engine that serves it."""
BUILDER = "support.engine.fake_engine:build"


class Script(msgspec.Struct, frozen=True, kw_only=True):
    """What the fake does. Steps are counted from 1 in each life of an engine."""

    fail_to_start: str = ""
    raise_to_start: str = ""
    exit_to_start: bool = False
    step_s: float = 0.002
    raise_at_step: int = 0
    hang_at_step: int = 0
    exit_at_step: int = 0
    only_in_life: str = ""
    """Path of a marker file: the faults above strike only in the first life, which makes the file."""
    never_steps: bool = False
    """Has work and makes no step: heartbeats only."""
    tokens_per_step: int = 1
    token_s: float = 0.0
    """What each input token of a step costs, seconds."""
    poison: int = -1
    """A request whose context holds this token id ends the engine, once it has made ``poison_at`` tokens."""
    poison_at: int = 0
    poison_does: str = "raise"
    sleep_to_start_s: float = 0.0
    chatter: str = ""
    """Written to stderr at start."""
    elastic_refusal: str = ""
    """Why the tier has one size in spite of a range."""


def options(script: Script) -> EngineOptions:
    return EngineOptions(model=msgspec.json.encode(script).decode())


@dataclass
class _Request:
    submit: Submit
    made: int = 0
    started: bool = False
    unwanted: set[int] = field(default_factory=set)
    """Candidates that were cancelled by themselves."""


@dataclass
class FakeEngine:
    script: Script
    requests: dict[int, _Request] = field(default_factory=dict)
    steps: int = 0
    outputs: int = 0
    announcer: StepAnnouncer = field(default_factory=StepAnnouncer)
    last_tokens: int = 0
    last_s: float = 0.0
    closed: bool = False
    chosen: list[Choose] = field(default_factory=list)
    floor: int = 4 << 20
    ceiling: int = 4 << 20
    """Bytes of the device tier; two sizes make it elastic."""
    wanted: int = 0
    held: int = 0

    def __post_init__(self) -> None:
        self.wanted = self.held = self.ceiling

    def ready(self) -> EngineReady:
        return EngineReady(
            context_limit=4096,
            vocab_size=512,
            device="fake",
            dtype="float32",
            device_capacity_tokens=4096,
            host_capacity_tokens=2048,
            chunk_tokens=32,
            device_floor=self.floor,
            device_ceiling=self.ceiling,
            elastic_refusal=self.script.elastic_refusal,
        )

    @property
    def has_work(self) -> bool:
        return bool(self.requests)

    def handle(self, command: Command) -> list[Event]:
        if isinstance(command, Submit):
            if packed_length(command.tokens) > 4096:
                return [Failed(command.request, "CONTEXT_LIMIT_EXCEEDED", "4096 tokens at most")]
            self.requests[command.request] = _Request(command)
        elif isinstance(command, Cancel) and command.candidate is not None:
            if command.request in self.requests:
                self.requests[command.request].unwanted.add(command.candidate)
        elif isinstance(command, Cancel):
            self.requests.pop(command.request, None)
        elif isinstance(command, Choose):
            self.chosen.append(command)
        elif isinstance(command, Evict):
            return [Evicted(call=command.call, tokens=len(command.session) or 77)]
        elif isinstance(command, GetResidency):
            return [ResidentTokens(call=command.call, device_tokens=1, host_tokens=2)]
        elif isinstance(command, SetMemory):
            return [self._set_memory(command)]
        elif isinstance(command, Warm):
            return [Warmed(command.call, command.scope, packed_length(command.tokens), len(command.session))]
        return []

    def _set_memory(self, command: SetMemory) -> Memory:
        """Answer with what is held now; that follows at once, behind the answer."""
        refused = ""
        if command.wanted is not None:
            if self.floor <= command.wanted <= self.ceiling:
                self.wanted = command.wanted
            else:
                refused = f"{command.wanted} bytes are out of range"
        answer = Memory(command.call, self.held, self.wanted, self.floor, self.ceiling, refused)
        self.held = self.wanted
        return answer

    def step(self) -> list[Event]:
        if self.script.never_steps:
            return []
        began = time.monotonic()
        new = [one for one in self.requests.values() if not one.started]
        tokens = len(self.requests) + sum(packed_length(one.submit.tokens) for one in new)
        self.announcer.announce(tokens, frozenset(map(RequestKey, self.requests)))
        failpoint("engine_mid_step")
        time.sleep(self.script.token_s * tokens)
        self._strike()
        if self.steps + 1 == self.script.raise_at_step:
            raise RuntimeError("device-side assert triggered")
        if self.steps + 1 == self.script.exit_at_step:
            os._exit(3)
        if self.steps + 1 == self.script.hang_at_step:
            time.sleep(1000)
        time.sleep(self.script.step_s)
        self.steps += 1
        self.last_tokens, self.last_s = tokens, time.monotonic() - began
        events: list[Event] = []
        for request in list(self.requests.values()):
            events += self._advance(request)
        return events

    def _strike(self) -> None:
        """End as the script says if a request holds its poison."""
        for request in self.requests.values():
            if self.script.poison in unpack_tokens(request.submit.tokens) and (
                request.made >= self.script.poison_at
            ):
                match self.script.poison_does:
                    case "hang":
                        time.sleep(1000)
                    case "exhaust memory":
                        bytearray(1 << 62)
                raise RuntimeError("poisoned")

    def _advance(self, request: _Request) -> list[Event]:
        number = request.submit.request
        context = packed_length(request.submit.tokens)
        usage = Usage(
            context_tokens=context,
            new_tokens=request.submit.num_new,
            gpu_cached_tokens=context - request.submit.num_new,
        )
        events: list[Event] = []
        if not request.started:
            request.started = True
            events += [Started(number, usage), RequestProgress(number, Phase.DECODE)]
        limit = request.submit.sampling.max_output_tokens or 4
        count = min(self.script.tokens_per_step, limit - request.made)
        made = tuple(range(request.made, request.made + count))
        wanted = [c for c in range(request.submit.sampling.candidates) if c not in request.unwanted]
        events += [Output(number, made, candidate=candidate) for candidate in wanted]
        request.made += count
        self.outputs += count
        if request.made == limit:
            del self.requests[number]
            if request.submit.sampling.candidates > 1:
                events += [CandidateFinished(number, one, FinishReason.LENGTH) for one in wanted]
            finished = msgspec.structs.replace(usage, output_tokens=limit)
            events.append(Finished(number, FinishReason.LENGTH, finished))
        return events

    def stats(self) -> Stats:
        return Stats(
            steps_total=self.steps,
            running=len(self.requests),
            output_total=self.outputs,
            last_batch_tokens=self.last_tokens,
            last_step_seconds=self.last_s,
            device_held=self.held,
            device_wanted=self.wanted,
            device_floor=self.floor,
            device_ceiling=self.ceiling,
        )

    def close(self) -> None:
        self.closed = True


def build(engine_options: EngineOptions) -> FakeEngine:
    folder = Path(engine_options.model)
    if not engine_options.model.startswith("{"):
        described = folder / SCRIPT_FILE
        text = described.read_text() if described.exists() else "{}"
    else:
        text = engine_options.model
    script = msgspec.json.decode(text, type=Script)
    tier = {}
    if not script.elastic_refusal and (sides := device_range(engine_options.device_cache)):
        tier = {
            name: parse_cache_size(side, 1) for name, side in zip(("floor", "ceiling"), sides, strict=True)
        }
    if script.only_in_life:
        try:
            os.close(os.open(script.only_in_life, os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            return FakeEngine(Script(step_s=script.step_s), **tier)
    if script.chatter:
        os.write(2, script.chatter.encode())
    time.sleep(script.sleep_to_start_s)
    if script.fail_to_start:
        raise InvalidArgument(script.fail_to_start)
    if script.raise_to_start:
        raise RuntimeError(script.raise_to_start)
    if script.exit_to_start:
        os._exit(5)
    return FakeEngine(script, **tier)
