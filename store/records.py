"""Contents of the history store: an append-only log of records per session, and one row of metadata.

A session's history is the fold of its records (``History.apply``): each record may supersede the tail after
some item and append items. Item numbers start at 1 and are never reused, so a superseded item stays readable
in the log. ``revision`` grows by one per record; the record that creates a session has revision 1.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec
import numpy as np

from pensieve.core import FinishReason, HintReceipt, Role, SamplingDefaults, TokenArray, Usage, unpack_tokens


class RecordKind(enum.StrEnum):
    CREATE = "create"
    TURN = "turn"
    REWIND = "rewind"
    UPDATE = "update"


class Overflow(enum.IntEnum):
    """Numbers as in ``pensieve.v1.OverflowPolicy``."""

    REJECT = 1
    DROP_OLDEST_TURNS = 2


class PrefixSharing(enum.IntEnum):
    """Numbers as in ``pensieve.v1.PrefixSharing``."""

    TENANT = 1
    NONE = 2


class ModelBinding(msgspec.Struct, frozen=True, omit_defaults=True):
    """The files that a session's token ids depend on: SHA-256 (hex) of each, "" if unknown."""

    name: str = ""
    """The model's name on the server, for people."""
    model: str = ""
    tokenizer: str = ""
    template: str = ""


class SessionConfig(msgspec.Struct, frozen=True, omit_defaults=True):
    """The settings of a session, as its records keep them."""

    model: str = ""
    system_prompt: str = ""
    sampling: SamplingDefaults = SamplingDefaults()
    ttl_s: float = 0.0
    """Idle lifetime in seconds, extended by each commit; 0: never expires."""
    overflow: Overflow = Overflow.REJECT
    prefix_sharing: PrefixSharing = PrefixSharing.TENANT
    tools: str = ""
    """JSON definitions of functions that the model may call; the chat template shows them at the beginning."""
    binding: ModelBinding | None = None
    """Set by the server, never by a client; None: the session is older than this field."""
    begun_ms: int = 0
    """The time for a chat template that writes a date. Set by the server; 0: the template writes none."""
    subject: str = ""
    """The person whom the session is about, in the caller's own words; at most 256 bytes of UTF-8."""
    summary: str = ""
    """Stands for the turns that a compaction removed; the model sees it behind the system prompt."""
    compact_at: int = 0
    """The session is compacted when it is idle and its context has at least this many tokens; 0: never."""
    keep_turns: int = 2
    """Turns that such a compaction leaves as they are."""

    @property
    def prompt(self) -> str:
        """Text of the item at the beginning of the context; "" for none."""
        return "\n\n".join(filter(None, (self.system_prompt, self.summary)))


class Item(msgspec.Struct, frozen=True, omit_defaults=True):
    """One immutable entry of history. ``tokens`` (packed uint32) starts with the template glue that introduces it."""

    number: int
    role: Role
    text: str
    tokens: bytes
    request_id: str = ""
    finish_reason: FinishReason | None = None
    create_ms: int = 0
    prefix_tokens: int = 0
    """Number of leading glue tokens in ``tokens``; an assistant item's output starts after them."""
    verbatim: bool = False
    """The client sent ``tokens``, so no glue is added around them."""
    call_id: str = ""
    """The call that a tool's result belongs to."""
    erased: bool = False
    """The number stays used; the item is in no history, of any revision."""


class CandidateAnswer(msgspec.Struct, frozen=True, omit_defaults=True):
    text: str
    tokens: bytes
    """Output tokens only, packed uint32; the generation prompt is in the answer's item."""
    finish_reason: FinishReason
    stop_sequence: str = ""
    seed: int = 0
    mean_logprob: float | None = None
    """Mean per output token, if the turn asked for the best candidate and there is a token."""


class TurnResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """The answer to GetTurn and to late retries of a committed turn, besides its items."""

    base_revision: int
    finish_reason: FinishReason
    stop_sequence: str = ""
    seed: int = 0
    usage: Usage = Usage()
    input_items: int = 0
    """The record's last item is the output."""
    attempt: str = ""
    """Token offsets of other attempts are not valid here."""
    hints: HintReceipt | None = None
    """The effect of the turn's hints; None: it gave none."""
    candidates: tuple[CandidateAnswer, ...] = ()
    """Empty if the turn drew only one."""
    chosen: int = 0
    """The candidate in the record's last item."""
    annotations: dict[str, str] = {}
    mark: str = ""
    """By it the client finds the turn; "": none."""
    numerics: str = ""
    """Name of the arithmetic that gave the answer (``EngineReady.numerics``)."""


class CandidateChange(msgspec.Struct, frozen=True, omit_defaults=True):
    """Another candidate became a turn's answer: the record's one item."""

    turn_revision: int
    candidate: int


class Erasure(msgspec.Struct, frozen=True):
    """The place of an erased record in the hash chain, which continues unchanged."""

    follows: str
    """Chain hash (hex) before the record."""
    chain: str
    """Chain hash after the record, over its bytes as first stored."""


class Record(msgspec.Struct, frozen=True, omit_defaults=True):
    """One committed change. Immutable, except that an erasing change removes its content."""

    revision: int
    kind: RecordKind
    time_ms: int
    request_id: str = ""
    keep_items: int | None = None
    """Supersede every live item with a larger number; None: keep all."""
    items: tuple[Item, ...] = ()
    turn: TurnResult | None = None
    config: SessionConfig | None = None
    """None: unchanged."""
    labels: dict[str, str] | None = None
    hidden_before: int | None = None
    """Overflow view: live non-system items with a smaller number are no longer in the context."""
    candidate: CandidateChange | None = None
    """Set in an UPDATE that makes another candidate the latest turn's answer. Older programs ignore it."""
    erases: tuple[int, ...] = ()
    """Set in a REWIND that erases: revisions of the erased records."""
    erased: Erasure | None = None


class State(enum.StrEnum):
    """DELETED rows are tombstones without content."""

    ACTIVE = "active"
    DAMAGED = "damaged"
    DELETED = "deleted"


class RunningTurn(msgspec.Struct, frozen=True):
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
    """Largest item number ever used."""
    head_hash: str = ""
    """Hex, of the newest record."""
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
    """The live items of a session at one revision."""

    revision: int = 0
    head_hash: str = ""
    items: tuple[Item, ...] = ()
    head_item: int = 0
    config: SessionConfig = SessionConfig()
    labels: tuple[tuple[str, str], ...] = ()
    hidden_before: int = 0
    was_generated: bool = False
    """Whether the model has ever answered in this session, or before its fork; superseded answers count."""

    def apply(self, record: Record, head_hash: str) -> History:
        """Return this history after one more record. Raises ValueError if the record is not the next one."""
        return self.after([(record, head_hash)])

    def after(self, records: Iterable[tuple[Record, str]]) -> History:
        """Like ``apply`` for many records, each with its chain hash, in time linear in their items."""
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
        return tuple(item for item in self.items if item.number <= keep)

    def visible(self) -> tuple[Item, ...]:
        """Return the items in the context: without those that the overflow policy has hidden."""
        return tuple(
            item for item in self.items if item.role is Role.SYSTEM or item.number >= self.hidden_before
        )

    def tokens(self) -> TokenArray:
        """Return the token ids of the visible items, concatenated; int32 [n]."""
        parts = [unpack_tokens(item.tokens) for item in self.visible()]
        return np.concatenate(parts) if parts else np.empty(0, dtype=np.int32)
