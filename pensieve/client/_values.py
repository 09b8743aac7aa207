"""The values that the SDK returns: frozen, and independent of a connection.

Enumerations are open, as the wire contract demands: a value unknown to this SDK stays a plain ``int``.
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
    """An enumeration whose members have a word and the number of the wire contract.

    ``FinishReason("LENGTH")``, in any case, and ``FinishReason(4)`` are the same member; ValueError lists the
    words. A member is a string, ``FinishReason.LENGTH == "length"``, and prints and serializes as that. It also
    equals its number: ``FinishReason.LENGTH == 4``. Only in sets and as dict keys do word and number differ. A
    number without a word in this SDK stays an ``int``.
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
        for member in cls:
            if member == (value.lower() if isinstance(value, str) else value):
                return member
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
    """The speaker of an item."""

    SYSTEM = "system"
    USER = "user"
    ASSISTANT = "assistant"
    TOOL = "tool"


class Phase(WireEnum):
    """The stage that a turn has reached."""

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
    """Return the member with this number, or the number itself if this SDK does not know it."""
    return next((member for member in kind if member.number == number), number)


class SessionState(StrEnum):
    """State of a session. A DAMAGED session can be read but not written."""

    UNSPECIFIED = "unspecified"
    ACTIVE = "active"
    DAMAGED = "damaged"
    DELETED = "deleted"


class TurnState(StrEnum):
    """State of a turn. A DISCARDED turn left no trace in history; its request id may start again."""

    UNSPECIFIED = "unspecified"
    RUNNING = "running"
    COMMITTED = "committed"
    DISCARDED = "discarded"


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of an answer that is still being generated. Provisional until the turn is complete."""

    text: str = ""
    """Whole code points. Empty while a character is incomplete."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per token, if the turn set ``top_logprobs``."""
    token_offset: int = 0
    """Index of the first token of this piece in the answer."""
    token_count: int = 0
    restarted: bool = False
    """Drop the text so far, of all candidates: another attempt starts the answer again after this piece."""
    candidate: int = 0
    """The candidate that these tokens belong to. Offsets count within it."""


@dataclass(frozen=True, slots=True)
class Item:
    """One immutable entry of a session's history."""

    item: int
    """Position in the session; never reused."""
    role: Role | int
    text: str
    token_ids: tuple[int, ...] = ()
    """Filled on request. The ids of all live items, concatenated, are the model's context."""
    request_id: str = ""
    finish_reason: FinishReason | int | None = None
    """Set for assistant items only."""
    create_time: datetime | None = None
    call_id: str = ""
    """For a tool's result: the call that it answers."""


@dataclass(frozen=True, slots=True)
class ToolResult:
    """The result of a function: input of the turn after the one that called it."""

    text: str
    call_id: str = ""
    """The client's id of the call; some chat templates show it to the model."""


@dataclass(frozen=True, slots=True)
class CallingMessage:
    """An assistant's message that calls functions, for importing a transcript."""

    calls: tuple[FunctionCall, ...]
    text: str = ""


@dataclass(frozen=True, slots=True)
class Candidate:
    """One of several answers that a turn generated."""

    candidate: int
    text: str
    output_tokens: int
    finish_reason: FinishReason | int | None
    stop_sequence: str
    seed: int
    mean_logprob: float | None = None
    """Per output token; set with ``candidate_choice="best_logprob"``."""
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Turn:
    """A finished turn: the input and the model's answer. It is in history as a whole."""

    session: str
    request_id: str
    state: TurnState
    text: str
    """The answer as history has it."""
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
    """For a discarded turn: the ErrorInfo reason of the failure."""
    candidates: tuple[Candidate, ...] = ()
    """All answers, if the turn generated more than one."""
    chosen: int = 0
    """The number of the candidate in ``text`` and ``output``."""
    hints: HintReceipt | None = None
    """How the server used the turn's hints; None if the turn had none."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One entry per output token, if the turn set ``top_logprobs`` and this stream received all of them.
    History stores none, so a turn that was fetched or replayed has none."""
    annotations: Mapping[str, str] = field(default_factory=dict)
    """As given with the turn. While the turn runs on another server they are not known yet."""
    numerics: str = ""
    """Names what computed the answer, as ``numerics`` among the features of ``server_info``. Empty while the turn
    runs, and for turns of older servers."""

    @property
    def items(self) -> tuple[Item, ...]:
        """All items that this turn added to history, oldest first."""
        return self.input if self.output is None else (*self.input, self.output)

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Token ids of the answer's item, if the server sent them."""
        return self.output.token_ids if self.output is not None else ()


@dataclass(frozen=True, slots=True)
class FoundTurn:
    """Result of ``find_turn``."""

    turn: Turn
    candidate: int
    """The candidate that has the requested answer; ``turn.chosen`` is the one in history."""


@dataclass(frozen=True, slots=True)
class Progress:
    """Progress of a turn before and between its pieces."""

    phase: Phase | int
    queue_position: int = 0
    tokens_done: int = 0
    tokens_total: int = 0


@dataclass(frozen=True, slots=True)
class Residency:
    """Where a session's KV-tokens are. Best effort."""

    replica: str
    as_of_revision: int
    gpu_tokens: int
    host_tokens: int
    dropped_tokens: int


@dataclass(frozen=True, slots=True)
class Warming:
    """Result of ``warm``."""

    accepted: bool
    refused: str
    """Reason of a refusal: ``no_room``, ``running``, ``nothing_to_do``, ``busy``, or a newer server's word."""
    residency: Residency
    """The state at the time of the response; copies may still be in progress."""


@dataclass(frozen=True, slots=True)
class SessionInfo:
    """Metadata of one session."""

    name: str
    state: SessionState
    revision: int
    item_count: int
    context_tokens: int
    """Length of the context before the next turn's input."""
    context_limit: int
    model: str
    system_prompt: str
    default_sampling: dict[str, object]
    """Only the parameters that the session sets, named as in ``SamplingOptions``."""
    ttl_s: float
    """Idle lifetime in seconds; 0: never expires."""
    overflow: str
    """``reject`` or ``drop_oldest_turns``."""
    share_prefixes: bool = True
    """Whether cached state of common prefixes may be shared with the tenant's other sessions."""
    labels: dict[str, str] = field(default_factory=dict)
    create_time: datetime | None = None
    update_time: datetime | None = None
    expire_time: datetime | None = None
    forked_from: str = ""
    forked_from_item: int = 0
    tools: str = ""
    """Definitions of the functions that the model may call, as a JSON array."""
    subject: str = ""
    """The person whom the session is about, or ""."""
    summary: str = ""
    """Stands behind the system prompt in place of the turns that ``compact`` removed; "": none."""
    compact_at: int = 0
    """Tokens of context from which on the server compacts the session while it is idle; 0: never."""
    keep_turns: int = 2
    """Turns that such a compaction leaves as they are."""
    active_request_id: str = ""
    """Request id of the running turn, or ""."""
    residency: Residency | None = None

    @property
    def id(self) -> str:
        """The name without ``sessions/``."""
        return self.name.removeprefix("sessions/")


@dataclass(frozen=True, slots=True)
class Compaction:
    """Result of ``compact``."""

    session: SessionInfo
    summary: str
    """Stands for the turns that the session no longer has in its context."""
    branch: str
    """Name of a session with the whole history; its last turn is the summary's."""
    usage: Usage | None
    """Receipt of the turn that made the summary; None if the request had been carried out before."""


@dataclass(frozen=True, slots=True)
class ErasedSession:
    """A session that is erased, and what it had held."""

    name: str
    forked_from: str
    revision: int
    turns: int
    items: int
    """Superseded items included."""
    tokens: int
    """Stored token ids, those of all candidates included."""
    device_tokens: int
    """KV-tokens on the server's device before."""
    host_tokens: int
    dropped_tokens: int
    """KV-tokens that the server dropped; it keeps those that other sessions share."""
    damaged: bool
    """The session could not be read whole: the counts are of the part that could."""


@dataclass(frozen=True, slots=True)
class ErasureReceipt:
    """Receipt of ``erase_subject``: no session about the subject is left."""

    sessions: tuple[ErasedSession, ...]
    """The sessions that this call erased."""
    replica: str
    """The server whose cache was cleared."""
    undecided: tuple[str, ...]
    """Names of damaged sessions that were left, because their subject cannot be read."""
    remnants: str
    """Where files of the store may still hold erased content, and what removes it; "" if they hold none."""


@dataclass(frozen=True, slots=True)
class TokenCount:
    """Result of ``count_tokens``."""

    input_tokens: int
    context_tokens: int
    """History plus this input."""
    context_limit: int

    @property
    def fits(self) -> bool:
        """Whether a turn with this input would be accepted: there must be room for at least one output token."""
        return self.context_tokens < self.context_limit


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits that a server announces; 0 if it announces none."""

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
    """Version, model, limits and features of a server."""

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
    """Hash of configuration and weights. Sessions are bound to it, the tokenizer and the template."""

    @property
    def speech(self) -> SpeechForm:
        """Format of calls and thoughts: ``pensieve.speech.read(turn.text, info.speech)`` extracts them."""
        found = dict(feature.partition("=")[::2] for feature in self.features)
        form = found.get("calls", "")
        thinks = found.get("thinks", "")
        return SpeechForm(
            CallForm(form) if form in set(CallForm) else None, thinks in ("tags", "open"), thinks == "open"
        )


@dataclass(frozen=True, slots=True)
class TenantTotals:
    """Usage of the caller's tenant: counts of one server since its start, its cache now, and the history store."""

    tenant: str
    replica: str
    """The server that counted. All servers share the history store."""
    turns: int
    """Turns that ended, however they ended."""
    refused_turns: int
    """Turns refused before they began."""
    computed_tokens: int
    """Context tokens that were computed, new or again."""
    cached_tokens: int
    """Context tokens that were found on the device or the host."""
    output_tokens: int
    device_tokens: int
    """Capacity in tokens of the device pages that the tenant's chunks occupy now."""
    host_tokens: int
    sessions: int | None
    """In the history store; None if the store does not answer."""
    stored_bytes: int | None
