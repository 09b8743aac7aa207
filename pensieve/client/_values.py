"""What the SDK hands out: frozen values, none of them tied to a connection.

Enumerations are open, as the contract says: a value that this SDK does not know yet stays a plain ``int``.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import TYPE_CHECKING, Self, TypeVar

from pensieve import core
from pensieve.core import HintReceipt, TokenLogprob, Usage
from pensieve.speech import CallForm, FunctionCall, SpeechForm


class WireEnum(enum.StrEnum):
    """A word for a number of the contract. Made from either, a word in any case; ValueError lists the words.

    ``FinishReason.LENGTH == "length"``; it prints and goes into JSON as that. Programs that compare with the contract's
    numbers go on working: ``FinishReason.LENGTH == 4``. Only as keys of a dict, or in a set, words and numbers are not
    the same. A number that this SDK has no word for stays an ``int``.
    """

    if TYPE_CHECKING:  # ``StrEnum`` takes words alone

        def __new__(cls, value: str | int) -> Self: ...

    @property
    def number(self) -> int:
        return _NUMBERS[type(self)][self.name].value

    def __eq__(self, other: object) -> bool:
        return self.number == other if isinstance(other, int) else str.__eq__(self, other)

    def __ne__(self, other: object) -> bool:
        return not self == other

    def __hash__(self) -> int:
        return str.__hash__(self)

    def __int__(self) -> int:
        return self.number

    @classmethod
    def _missing_(cls, value: object) -> Self:
        for one in cls:
            if one == (value.lower() if isinstance(value, str) else value):
                return one
        raise ValueError(f"{value!r} is not one of {', '.join(cls)}")


class FinishReason(WireEnum):
    """Why a turn ended."""

    EOS = "eos"
    STOP_SEQUENCE = "stop_sequence"
    STOP_TOKEN = "stop_token"
    LENGTH = "length"
    CONTEXT_FULL = "context_full"
    TIME_LIMIT = "time_limit"
    CANCELLED = "cancelled"


class Role(WireEnum):
    """Who an item speaks for."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Phase(WireEnum):
    """Where a turn is."""

    QUEUED = "queued"
    RESTORING = "restoring"
    PREFILL = "prefill"
    DECODE = "decode"
    COMMIT = "commit"


_NUMBERS: dict[type[WireEnum], type[core.FinishReason] | type[core.Role] | type[core.Phase]] = {
    FinishReason: core.FinishReason,
    Role: core.Role,
    Phase: core.Phase,
}

W = TypeVar("W", bound=WireEnum)


def enum_from_number(kind: type[W], number: int) -> W | int:
    """The word for this number, or the number itself when a newer server knows more."""
    return next((one for one in kind if one.number == number), number)


class SessionState(StrEnum):
    """State of a session. DAMAGED: readable, not writable."""

    UNSPECIFIED = "unspecified"
    ACTIVE = "active"
    DAMAGED = "damaged"
    DELETED = "deleted"


class TurnState(StrEnum):
    """State of a turn. DISCARDED: no trace in history; the same request id may start again."""

    UNSPECIFIED = "unspecified"
    RUNNING = "running"
    COMMITTED = "committed"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a running answer. Provisional until the turn is complete."""

    text: str = ""
    """Whole code points; may be empty while a character is still incomplete."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per token when ``top_logprobs`` was asked for."""
    token_offset: int = 0
    """Index of the first token of this piece in the answer."""
    token_count: int = 0
    restarted: bool = False
    """The attempt that produced the text so far is gone: drop that text, of all candidates; it starts again after this
    piece."""
    candidate: int = 0
    """Whose tokens these are; offsets count within the candidate."""


@dataclass(frozen=True, slots=True)
class Item:
    """One immutable entry of a session's history."""

    item: int
    """Position; never reused within a session."""
    role: Role | int
    text: str
    token_ids: tuple[int, ...] = ()
    """Filled when asked for; all live items' ids, concatenated, are the model's context."""
    request_id: str = ""
    finish_reason: FinishReason | int | None = None
    """Only assistant items have one."""
    create_time: datetime | None = None
    call_id: str = ""
    """Of a tool's result: the call that it belongs to."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """What a function gave back: input of the turn after the one that called it."""

    text: str
    call_id: str = ""
    """The call's id, as the client names it; some chat templates show it to the model."""


@dataclass(frozen=True, slots=True)
class CallingMessage:
    """An assistant's message that calls functions, of a transcript that is imported."""

    calls: tuple[FunctionCall, ...]
    text: str = ""
    """What it says before."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of the answers that a turn drew."""

    candidate: int
    text: str
    output_tokens: int
    finish_reason: FinishReason | int | None
    stop_sequence: str
    seed: int
    mean_logprob: float | None = None
    """Per output token; with ``candidate_choice="best_logprob"``."""
    token_ids: tuple[int, ...] = ()
    """Output tokens, if the server sent them."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """As ``Turn.logprobs``."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One finished turn: the input and the model's answer, in history as a whole."""

    session: str
    request_id: str
    state: TurnState
    text: str
    """The answer as it stands in history."""
    finish_reason: FinishReason | int | None
    usage: Usage
    revision: int
    """Revision of the session after this turn."""
    base_revision: int
    seed: int
    stop_sequence: str
    input: tuple[Item, ...]
    output: Item | None
    discard_reason: str = ""
    """ErrorInfo reason of the failure, for a discarded turn."""
    candidates: tuple[Candidate, ...] = ()
    """All answers, if the turn drew more than one."""
    chosen: int = 0
    """The candidate that ``text`` and ``output`` are."""
    hints: HintReceipt | None = None
    """What the server made of the turn's hints; None: it gave none."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per output token when ``top_logprobs`` was asked for and this stream has seen them all. History keeps
    none: a turn that is fetched or replayed is without them."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """As they were given with the turn; of one that runs at another server, not before it is committed."""

    @property
    def items(self) -> tuple[Item, ...]:
        """Everything this turn put into history, oldest first."""
        return self.input if self.output is None else (*self.input, self.output)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Ids of the answer's item, if the server sent them."""
        return self.output.token_ids if self.output is not None else ()


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """Answer of ``find_turn``."""

    turn: Turn
    candidate: int
    """The turn's candidate that the answer is; ``turn.chosen`` is the one in history."""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a turn does before and between its pieces."""

    phase: Phase | int
    queue_position: int = 0
    tokens_done: int = 0
    tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a session's KV-tokens lie; best effort."""

    replica: str
    as_of_revision: int
    gpu_tokens: int
    host_tokens: int
    dropped_tokens: int


@dataclass(frozen=True, slots=True)
class Warming:
    """Answer of ``warm``."""

    accepted: bool
    refused: str
    """Why not: ``no_room``, ``running``, ``nothing_to_do``, ``busy``, or what a newer server says."""
    residency: Residency
    """As it is now: what is to be brought may still be on its way."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Metadata of one session."""

    name: str
    state: SessionState
    revision: int
    """Grows by one with each committed change."""
    item_count: int
    context_tokens: int
    """What the next turn starts from."""
    context_limit: int
    model: str
    system_prompt: str
    default_sampling: dict[str, object]
    """Only the parameters the session sets; names as in ``SamplingOptions``."""
    ttl_s: float
    """Idle lifetime; 0: never expires."""
    overflow: str
    """``reject`` or ``drop_oldest_turns``."""
    share_prefixes: bool = True
    """Whether cached state of common beginnings may be shared with other sessions of the tenant."""
    labels: dict[str, str] = field(default_factory=dict)
    create_time: datetime | None = None
    update_time: datetime | None = None
    expire_time: datetime | None = None
    forked_from: str = ""
    forked_from_item: int = 0
    tools: str = ""
    """Definitions of the functions that the model may call, as JSON."""
    active_request_id: str = ""
    """Request id of the turn that runs right now, if any."""
    residency: Residency | None = None

    @property
    def id(self) -> str:
        """The name without ``sessions/``."""
        return self.name.removeprefix("sessions/")


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Answer of ``count_tokens``."""

    input_tokens: int
    context_tokens: int
    """History plus this input."""
    context_limit: int

    @property
    def fits(self) -> bool:
        """Whether a turn with this input is taken: at least one token of an answer has to fit behind it."""
        return self.context_tokens < self.context_limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a server announces; 0: it does not."""

    max_request_bytes: int
    max_input_chars: int
    max_stop_sequences: int
    max_top_logprobs: int
    max_ttl_s: float
    request_id_retention_s: float
    disconnect_grace_s: float
    max_candidates: int
    max_beam_width: int
    max_annotations: int = 0
    max_annotation_bytes: int = 0


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What a server says of itself."""

    version: str
    replica: str
    model: str
    tokenizer_sha256: str
    chat_template_sha256: str
    vocab_size: int
    context_limit: int
    limits: Limits
    features: tuple[str, ...]
    model_sha256: str = ""
    """Of the model's configuration and weights. Sessions are bound to it, to the tokenizer and to the template."""

    @property
    def speech(self) -> SpeechForm:
        """How the model writes calls and thoughts: ``pensieve.speech.read(turn.text, info.speech)`` finds them."""
        found = dict(feature.partition("=")[::2] for feature in self.features)
        form = found.get("calls", "")
        thinks = found.get("thinks", "")
        return SpeechForm(
            CallForm(form) if form in set(CallForm) else None, thinks in ("tags", "open"), thinks == "open"
        )


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """What the caller's tenant uses: counts of one server since it was started, what it holds now, what is stored."""

    tenant: str
    replica: str
    """The server that counted; the history store is everybody's."""
    turns: int
    """That ended, whatever they came to."""
    refused_turns: int
    """Before they began."""
    computed_tokens: int
    """Of contexts: new, or computed once more."""
    cached_tokens: int
    """Of contexts: found on the device or the host."""
    output_tokens: int
    device_tokens: int
    """Room for so many tokens do the tenant's pages take on the device now."""
    host_tokens: int
    sessions: int | None
    """In the history store; None when that does not answer."""
    stored_bytes: int | None
