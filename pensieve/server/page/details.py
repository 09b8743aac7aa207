"""One session in detail: its turns and their receipts, and its text only where the operator allows it."""

from __future__ import annotations

from typing import Final

import msgspec

from pensieve.core import FinishReason, Usage
from pensieve.feed import SessionLine
from pensieve.server.ids import session_key
from pensieve.store import HistoryStore, Key
from pensieve.store.records import Record, RecordKind, SessionRow

SCHEMA: Final = "pensieve.session/1"
MOST_TURNS: Final = 50
"""The latest ones are told."""
MOST_CHARS: Final = 2000
"""Of each text."""


class TextShown(msgspec.Struct, frozen=True, omit_defaults=True):
    """What one item says."""

    role: str
    text: str
    cut: bool = False


class TurnReceipt(msgspec.Struct, frozen=True, omit_defaults=True):
    """One change of a session. ``context_tokens`` = ``device`` + ``host`` + ``recomputed`` + ``new``. Seconds."""

    revision: int
    time_s: float
    """Unix time of the commit."""
    kind: str
    """``turn``, or what else changed the session."""
    request_id: str = ""
    finish_reason: str = ""
    candidates: int = 1
    context_tokens: int = 0
    device: int = 0
    host: int = 0
    recomputed: int = 0
    new: int = 0
    output_tokens: int = 0
    queue_s: float = 0.0
    restore_s: float = 0.0
    prefill_s: float = 0.0
    decode_s: float = 0.0
    said: tuple[TextShown, ...] = ()
    """Empty unless ``serve --page-text``."""


class SessionDocument(msgspec.Struct, frozen=True):
    """The answer to ``/sessions/{id}.json``."""

    schema: str
    session: str
    tenant: str
    id: str
    labels: dict[str, str]
    revision: int
    items: int
    context_tokens: int
    created_s: float
    forked_from: str
    running_request: str
    cached: SessionLine | None
    """None: nothing of it is cached, or the engine does not answer."""
    turns: tuple[TurnReceipt, ...]
    """Oldest first."""
    earlier: int
    """How many changes came before these."""


async def session_document(
    store: HistoryStore, key: Key, cached: SessionLine | None, *, text: bool
) -> SessionDocument:
    """Raises NotFound, and what the store raises."""
    row = await store.load(key)
    begin = max(row.revision - MOST_TURNS, 0)
    logged = await store.read(key, after_revision=begin)
    return _document(key, row, [one.record for one in logged], begin, cached, text=text)


def _document(
    key: Key, row: SessionRow, records: list[Record], begin: int, cached: SessionLine | None, *, text: bool
) -> SessionDocument:
    return SessionDocument(
        schema=SCHEMA,
        session=session_key(key),
        tenant=key.tenant,
        id=key.session_id,
        labels=row.labels,
        revision=row.revision,
        items=row.item_count,
        context_tokens=row.context_tokens,
        created_s=row.create_ms / 1e3,
        forked_from=row.forked_from,
        running_request=row.running.request_id if row.running is not None else "",
        cached=cached,
        turns=tuple(_receipt(record, text=text) for record in records),
        earlier=begin,
    )


def _receipt(record: Record, *, text: bool) -> TurnReceipt:
    turn = record.turn
    usage = turn.usage if turn is not None else Usage()
    return TurnReceipt(
        revision=record.revision,
        time_s=record.time_ms / 1e3,
        kind=RecordKind(record.kind).value,
        request_id=record.request_id,
        finish_reason=FinishReason(turn.finish_reason).name.lower() if turn is not None else "",
        candidates=max(len(turn.candidates), 1) if turn is not None else 1,
        context_tokens=usage.context_tokens,
        device=usage.gpu_cached_tokens,
        host=usage.swapped_in_tokens,
        recomputed=usage.recomputed_tokens,
        new=usage.new_tokens,
        output_tokens=usage.output_tokens,
        queue_s=usage.queue_s,
        restore_s=usage.restore_s,
        prefill_s=usage.prefill_s,
        decode_s=usage.decode_s,
        said=tuple(
            TextShown(item.role.name.lower(), item.text[:MOST_CHARS], len(item.text) > MOST_CHARS)
            for item in record.items
        )
        if text
        else (),
    )
