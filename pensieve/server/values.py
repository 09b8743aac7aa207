"""Plain frozen values of turns, which the service passes around instead of protobuf messages."""

from __future__ import annotations

import enum
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from pensieve.core import FinishReason, HintReceipt, Phase, Role, SamplingDefaults, TokenLogprob, Usage
from pensieve.speech import FunctionCall
from pensieve.store import Key
from pensieve.store.records import CandidateAnswer, Item


class InputEntry(msgspec.Struct, frozen=True):
    """One input item: text for the chat template, or token ids (packed uint32) taken verbatim."""

    role: Role
    text: str = ""
    tokens: bytes | None = None


class RawEntry(InputEntry, frozen=True):
    """Text that goes to the model without the template. A class of its own: what others hash to stays what it was."""

    raw: bool = True


class ToolEntry(InputEntry, frozen=True):
    """An item of a conversation with tools. A type of its own: the fingerprints of others stay as they were."""

    calls: tuple[FunctionCall, ...] = ()
    """Of an assistant's text: what it calls, behind the text."""
    call_id: str = ""
    """Of a tool's result."""


class OutputOptions(msgspec.Struct, frozen=True):
    """How a stream wants its deltas. It says how the answer is delivered, and is not part of what the turn is."""

    token_ids: bool = False
    top_logprobs: int | None = None
    max_chunk_tokens: int | None = None
    max_chunk_delay_s: float = 0.0
    pad_chunks: bool = False


class TurnHints(msgspec.Struct, frozen=True):
    """What a client says of the time after its turn; None and False: not said. As given, not clipped."""

    next_turn_s: float | None = None
    importance: float | None = None
    finished: bool = False


class CallBounds(msgspec.Struct, frozen=True):
    """How an answer calls functions."""

    begin_with: str | None = None
    """It begins as a call of this function, or of any (""); None: as the model likes."""
    one: bool = False
    """It ends with its first whole call."""


class TurnFrame(msgspec.Struct, frozen=True):
    """What the model sees before the history, for one turn; None: what the session has."""

    system_prompt: str | None = None
    tools: str | None = None


class NewTurn(msgspec.Struct, frozen=True):
    """What a client says of a turn it wants; the same again, with the same request id, is the same turn."""

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
    """The newest revision that the client has seen: a store that is behind it has lost something."""
    annotations: dict[str, str] = {}
    mark: str = ""
    calls: CallBounds = CallBounds()
    frame: TurnFrame = TurnFrame()

    def fingerprint(self) -> str:
        """Hash over the fields that say what the turn is.

        How it is delivered (output, priority), hints, what the client knows of the session, and what it writes on the
        turn for itself are not among them.
        """
        return fingerprint(
            "turn",
            self.input,
            self.expected_revision,
            self.replace_after_item,
            self.sampling,
            self.max_duration_s,
            # Others keep the fingerprints that they had: a retry of an older turn is still the same.
            *((self.calls,) if self.calls != CallBounds() else ()),
            *((self.frame,) if self.frame != TurnFrame() else ()),
        )


def fingerprint(*fields: object) -> str:
    """Hash over values: equal values give equal hashes, whatever the wire said. 128 bits, hex."""
    # Keys as texts first: the encoder sorts no others, and logit biases are keyed by token id.
    plain = msgspec.to_builtins(fields, builtin_types=(bytes,), str_keys=True)
    return hashlib.blake2b(_deterministic.encode(plain), digest_size=16).hexdigest()


_deterministic = msgspec.msgpack.Encoder(order="deterministic")


class OnDisconnect(enum.IntEnum):
    """The numbers are those of ``pensieve.v1.DisconnectPolicy``."""

    CANCEL = 1
    FINISH = 2


class TurnStatus(enum.IntEnum):
    """The numbers are those of ``pensieve.v1.Turn.State``."""

    RUNNING = 1
    COMMITTED = 2
    DISCARDED = 3


@dataclass(frozen=True, slots=True)
class TurnView:
    """A turn as a caller sees it: running, committed or discarded."""

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
    """The candidate that ``output`` is."""
    hints: HintReceipt | None = None
    annotations: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TurnEnd:
    """A turn that held its session, when it is over. Times in seconds of the event loop's clock."""

    key: Key
    outcome: str
    """Its finish reason or the reason of its error, in lower case."""
    committed: bool
    context_tokens: int
    """0: it was refused before it was rendered."""
    new_tokens: int
    """Length of its input, template glue included, however much of it had to be computed."""
    usage: Usage
    """Empty when it was never admitted."""
    arrived_at: float
    first_token_at: float | None
    ended_at: float
    request_id: str = ""
    submitted_at: float | None = None
    """When the engine was asked; None: it never was."""
    generated_at: float | None = None
    """When the generation was over, and the commit began."""


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
    """How far the turn has come."""

    phase: Phase = Phase.QUEUED
    queue_position: int = 0
    tokens_done: int = 0
    tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Delta:
    """Output tokens ``[offset, offset + len(tokens))`` of one candidate and the text that they complete."""

    offset: int
    tokens: tuple[int, ...]
    text: str
    logprobs: tuple[TokenLogprob, ...] = ()
    candidate: int = 0


StreamEvent = Accepted | ProgressView | Delta | TurnView
