"""What the history store holds: an append-only log of records per session, and one row of metadata.

A session's history is the fold of its records (``History.apply``): each record may supersede the tail after some item
and append items. Item numbers start at 1 and are never reused, so a superseded item stays readable in the log.
``revision`` grows by one per record; the record that creates a session has revision 1.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from pensieve.core import FinishReason, HintReceipt, Role, SamplingDefaults, TokenArray, Usage, unpack_tokens


class RecordKind(enum.StrEnum):
    """The kind of change that a record holds."""

    CREATE = "create"
    TURN = "turn"
    REWIND = "rewind"
    UPDATE = "update"


class Overflow(enum.IntEnum):
    """What a turn does that does not fit; the numbers are those of ``pensieve.v1.OverflowPolicy``."""

    REJECT = 1
    DROP_OLDEST_TURNS = 2


class PrefixSharing(enum.IntEnum):
    """With whom a session shares the KV of a common beginning; numbers as in ``pensieve.v1.PrefixSharing``."""

    TENANT = 1
    NONE = 2


class ModelBinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a session's token ids were made with: SHA-256 (hex) of each; "" where it is not known."""

    name: str = ""
    """What the server called the model; for people."""
    model: str = ""
    tokenizer: str = ""
    template: str = ""


class SessionConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a client may set of a session."""

    model: str = ""
    system_prompt: str = ""
    sampling: SamplingDefaults = SamplingDefaults()
    ttl_s: float = 0.0
    """Idle lifetime, extended by each commit; 0 = never expires."""
    overflow: Overflow = Overflow.REJECT
    prefix_sharing: PrefixSharing = PrefixSharing.TENANT
    tools: str = ""
    """Definitions of functions that the model may call, JSON; the chat template shows them at the beginning."""
    binding: ModelBinding | None = None
    """Set by the server, never by a client; None: made before it was kept."""
    begun_ms: int = 0
    """The time that a chat template which writes a date is given. Set by the server; 0: the template writes none."""


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One immutable entry of history. ``tokens`` (packed uint32) includes the template glue that introduces it."""

    number: int
    role: Role
    text: str
    tokens: bytes
    request_id: str = ""
    finish_reason: FinishReason | None = None
    create_ms: int = 0
    prefix_tokens: int = 0
    """Leading tokens of ``tokens`` that are glue (an assistant item's output starts after them)."""
    verbatim: bool = False
    """``tokens`` came from the client as they are, so no glue is added around them."""
    call_id: str = ""
    """Of a tool's result: the call that it belongs to."""
    erased: bool = False
    """Text and tokens were erased. The number stays used, and no history has the item, of no revision."""


class CandidateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    """One of the answers that a turn drew from its context; its number is its place among them."""

    text: str
    tokens: bytes
    """Output tokens alone, packed uint32; the generation prompt is in the answer's item."""
    finish_reason: FinishReason
    stop_sequence: str = ""
    seed: int = 0
    mean_logprob: float | None = None
    """Per output token, if the turn asked for the best one and there is a token."""


class TurnResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a committed turn answers to GetTurn and to late retries, beside its items."""

    base_revision: int
    finish_reason: FinishReason
    stop_sequence: str = ""
    seed: int = 0
    usage: Usage = Usage()
    input_items: int = 0
    """How many of the record's items are input; the last one is the output."""
    attempt: str = ""
    """Generation attempt that was committed: token offsets of another attempt mean nothing here."""
    hints: HintReceipt | None = None
    """What was made of the turn's hints; None: it gave none."""
    candidates: tuple[CandidateAnswer, ...] = ()
    """All of them, if the turn drew more than one."""
    chosen: int = 0
    """The candidate that the record's last item is."""
    annotations: dict[str, str] = {}
    """What the client wants to be told of the turn again."""
    mark: str = ""
    """By it, together with one of its answers, the turn is found; "": it is not."""


class CandidateChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another candidate became a turn's answer: the record's one item."""

    turn_revision: int
    """Revision of the turn's own record."""
    candidate: int


class Erasure(msgspec.Struct, frozen=True):
    """The place in the hash chain of a record that lost content: the chain goes on as it was."""

    follows: str
    """Chain hash (hex) before the record."""
    chain: str
    """Chain hash after the record, over its bytes as they were first stored."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One committed change. Immutable, but that an erasing change takes content out of it."""

    revision: int
    kind: RecordKind
    time_ms: int
    request_id: str = ""
    keep_items: int | None = None
    """Supersede every live item with a larger number; None: keep all."""
    items: tuple[Item, ...] = ()
    turn: TurnResult | None = None
    config: SessionConfig | None = None
    """The configuration from this record on; None: unchanged."""
    labels: dict[str, str] | None = None
    hidden_before: int | None = None
    """Overflow view: live non-system items with a smaller number are no longer part of the context."""
    candidate: CandidateChange | None = None
    """Set in an UPDATE that gives the latest turn another of its answers. Programs that do not know this field yet
    fold such a record like any other."""
    erases: tuple[int, ...] = ()
    """Set in a REWIND that erases: revisions of the records that lost content by it."""
    erased: Erasure | None = None
    """Set in a record of which content was erased."""


class State(enum.StrEnum):
    """State of a session; DELETED rows are tombstones without content."""

    ACTIVE = "active"
    DAMAGED = "damaged"
    DELETED = "deleted"


class RunningTurn(msgspec.Struct, frozen=True):
    """The turn that holds a session's lease."""

    request_id: str
    owner: str
    attempt: str
    lease_ms_left: int
    start_ms: int


class SessionRow(msgspec.Struct, frozen=True, kw_only=True):
    """Metadata of one session; cheap to read, enough for GetSession."""

    tenant: str
    session_id: str
    state: State = State.ACTIVE
    revision: int = 0
    head_item: int = 0
    """Largest item number that was ever used."""
    head_hash: str = ""
    """Chain hash (hex) of the newest record."""
    item_count: int = 0
    context_tokens: int = 0
    config: SessionConfig = SessionConfig()
    labels: dict[str, str] = {}
    create_ms: int = 0
    update_ms: int = 0
    expire_ms: int = 0
    """0: never."""
    forked_from: str = ""
    forked_from_item: int = 0
    running: RunningTurn | None = None


@dataclass(frozen=True, slots=True)
class History:
    """The live items of a session at one revision: what a model run would be given."""

    revision: int = 0
    head_hash: str = ""
    items: tuple[Item, ...] = ()
    head_item: int = 0
    config: SessionConfig = SessionConfig()
    labels: tuple[tuple[str, str], ...] = ()
    hidden_before: int = 0
    was_generated: bool = False
    """Whether the model has ever answered in it, here or before it was forked; also if the answer is superseded."""

    def apply(self, record: Record, head_hash: str) -> History:
        """This history after one more record. Pure. Raises ValueError when the record is not the next one."""
        return self.after([(record, head_hash)])

    def after(self, records: Iterable[tuple[Record, str]]) -> History:
        """This history after more records, each with its chain hash, in time linear in their items.

        Pure. Raises ValueError when a record is not the next one.
        """
        items = list(self.items)
        revision, head_hash, head_item = self.revision, self.head_hash, self.head_item
        config, labels, hidden = self.config, self.labels, self.hidden_before
        was_generated = self.was_generated
        for record, chain in records:
            if record.revision != revision + 1:
                raise ValueError(f"record {record.revision} cannot follow revision {revision}")
            revision, head_hash = record.revision, chain
            if record.keep_items is not None:
                while items and items[-1].number > record.keep_items:  # numbers only grow
                    items.pop()
            items += [item for item in record.items if not item.erased]
            head_item = max([head_item, *(item.number for item in record.items)])
            config = record.config if record.config is not None else config
            labels = tuple(sorted(record.labels.items())) if record.labels is not None else labels
            hidden = record.hidden_before if record.hidden_before is not None else hidden
            was_generated = was_generated or any(item.finish_reason is not None for item in record.items)
        return History(revision, head_hash, tuple(items), head_item, config, labels, hidden, was_generated)

    def truncated(self, keep: int) -> tuple[Item, ...]:
        """Live items with a number of at most ``keep``."""
        return tuple(item for item in self.items if item.number <= keep)

    def visible(self) -> tuple[Item, ...]:
        """Live items inside the context: all but what the overflow policy took out of view."""
        return tuple(
            item for item in self.items if item.role is Role.SYSTEM or item.number >= self.hidden_before
        )

    def tokens(self) -> TokenArray:
        """The model's context: token ids of the visible items, concatenated; int32 [n]."""
        parts = [unpack_tokens(item.tokens) for item in self.visible()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
