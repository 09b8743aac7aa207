"""Frozen values of turns, which the service uses instead of protobuf messages."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pensieve.core import FinishReason, HintReceipt, Phase, Role, SamplingDefaults, TokenLogprob, Usage
from pensieve.speech import AnswerFormat, FunctionCall
from pensieve.store import Key
from pensieve.store.records import CandidateAnswer, Item


class InputEntry(msgspec.Struct, frozen=True):
    """One input item: text for the chat template, or token ids (packed uint32) used verbatim."""

    role: Role
    text: str = ""
    tokens: bytes | None = None


class RawEntry(InputEntry, frozen=True):
    """Text passed to the model without the template. A subclass, so that fingerprints of other items stay the same."""

    raw: bool = True


class ToolEntry(InputEntry, frozen=True):
    """An item of a conversation with tools. A subclass, so that fingerprints of other items stay the same."""

    calls: tuple[FunctionCall, ...] = ()
    """Calls that follow the text, in an item of the assistant."""
    call_id: str = ""


class OutputOptions(msgspec.Struct, frozen=True):
    """How a stream delivers its deltas. Not part of the turn's identity."""

    token_ids: bool = False
    top_logprobs: int | None = None
    max_chunk_tokens: int | None = None
    max_chunk_delay_s: float = 0.0
    pad_chunks: bool = False


class TurnHints(msgspec.Struct, frozen=True):
    """Hints about the time after a turn; None and False: not given. Values are not clipped."""

    next_turn_s: float | None = None
    importance: float | None = None
    finished: bool = False


class CallBounds(msgspec.Struct, frozen=True):
    begin_with: str | None = None
    """The answer begins with a call of this function, or of any (""); None: unconstrained."""
    one: bool = False
    """The answer ends after its first complete call."""


class CallRules(msgspec.Struct, frozen=True):
    """More rules for calls. Not fields of ``CallBounds``, so that fingerprints of older turns stay the same."""

    allowed: tuple[str, ...] = ()
    """Functions that may be called; (): all."""
    strict: tuple[str, ...] = ()
    """Functions whose arguments follow their parameters."""
    none: bool = False
    """No function is called."""


class TurnFrame(msgspec.Struct, frozen=True):
    """Replaces the session's system prompt and tools for one turn; None: keep the session's."""

    system_prompt: str | None = None
    tools: str | None = None


class NewTurn(msgspec.Struct, frozen=True):
    """A requested turn. Another request with the same values and request id is the same turn."""

    request_id: str
    input: tuple[InputEntry, ...] = ()
    expected_revision: int | None = None
    replace_after_item: int | None = None
    sampling: SamplingDefaults = SamplingDefaults()
    output: OutputOptions = OutputOptions()
    max_duration_s: float | None = None
    priority: int = 0
    hints: TurnHints = TurnHints()
    known_revision: int | None = None
    """Newest revision that the client has seen; a store that is behind it has lost data."""
    annotations: dict[str, str] = {}
    mark: str = ""
    calls: CallBounds = CallBounds()
    frame: TurnFrame = TurnFrame()
    rules: CallRules = CallRules()
    format: AnswerFormat | None = None
    prediction: str = ""
    """A guess at the answer; it changes the speed only."""

    def fingerprint(self) -> str:
        """Hash the fields that make up the turn's identity. Excluded are delivery (output, priority), hints,
        the prediction, ``known_revision``, annotations and the mark."""
        return fingerprint(
            "turn",
            self.input,
            self.expected_revision,
            self.replace_after_item,
            self.sampling,
            self.max_duration_s,
            # Added only if set, so that older turns keep their fingerprints and can be retried.
            *((self.calls,) if self.calls != CallBounds() else ()),
            *((self.frame,) if self.frame != TurnFrame() else ()),
            *((self.rules,) if self.rules != CallRules() else ()),
            *((self.format,) if self.format is not None else ()),
        )


def fingerprint(*fields: object) -> str:
    """Hash values; equal values give equal hashes, however they were encoded on the wire. 128 bits, hex."""
    # Keys become strings: the encoder sorts no others, and logit biases are keyed by token id.
    plain = msgspec.to_builtins(fields, builtin_types=(bytes,), str_keys=True)
    return hashlib.blake2b(_deterministic.encode(plain), digest_size=16).hexdigest()


_deterministic = msgspec.msgpack.Encoder(order="deterministic")


class OnDisconnect(enum.IntEnum):
    """Numbered like ``pensieve.v1.DisconnectPolicy``."""

    CANCEL = 1
    FINISH = 2


class TurnStatus(enum.IntEnum):
    """Numbered like ``pensieve.v1.Turn.State``."""

    RUNNING = 1
    COMMITTED = 2
    DISCARDED = 3


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as its caller sees it: running, committed or discarded."""

    session_id: str
    request_id: str
    state: TurnStatus
    base_revision: int = 0
    revision: int = 0
    input: tuple[Item, ...] = ()
    output: Item | None = None
    finish_reason: FinishReason | None = None
    stop_sequence: str = ""
    seed: int = 0
    usage: Usage | None = None
    discard_reason: str = ""
    candidates: tuple[CandidateAnswer, ...] = ()
    chosen: int = 0
    hints: HintReceipt | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)
    numerics: str = ""


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """An ended turn that held its session. Times in seconds of the event loop's clock."""

    key: Key
    outcome: str
    """Finish reason or error reason, in lower case."""
    committed: bool
    context_tokens: int
    """0: refused before it was rendered."""
    new_tokens: int
    """Length of the input with template glue, whether or not it had to be computed."""
    usage: Usage
    """Empty if the turn was never admitted."""
    arrived_at: float
    first_token_at: float | None
    ended_at: float
    request_id: str = ""
    submitted_at: float | None = None
    """When it was submitted to the engine; None: never."""
    generated_at: float | None = None
    """When generation ended and the commit began."""
    compact_at: int = 0
    """The session's, in tokens of context; 0: never."""
    generated_tokens: int = 0
    """Tokens of all candidates or beams, also of those that were not kept, which ``usage`` leaves out."""


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of a stream: the turn holds its session and its context fits."""

    request_id: str
    base_revision: int
    context_tokens: int
    seed: int
    attempt: str
    replayed: bool


@dataclass(frozen=True, slots=True)
class ProgressView:
    phase: Phase = Phase.QUEUED
    queue_position: int = 0
    tokens_done: int = 0
    tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens ``[offset, offset + len(tokens))`` of one candidate, and the text that they complete."""

    offset: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    candidate: int = 0


StreamEvent = Accepted | ProgressView | Delta | TurnView
