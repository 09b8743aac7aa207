"""What can still be said of a session whose row cannot be read: its log says nearly all of it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from pensieve.errors import FailedPrecondition
from pensieve.store._codec import StoredRecord, decode_record
from pensieve.store._rules import Meta
from pensieve.store.contract import Key
from pensieve.store.records import History, SessionRow, State


def salvaged(key: Key, stored: Sequence[StoredRecord], *, update_ms: int) -> Meta:
    """Metadata of a DAMAGED session, from its whole log (oldest first) as far as that can be read.

    It never expires: nobody knows when it would.
    """
    history = History()
    create_ms = 0
    for entry in stored:
        try:
            record = decode_record(entry.data)
            history = history.apply(record, entry.head_hash)
        except (msgspec.MsgspecError, ValueError, FailedPrecondition):
            break
        create_ms = create_ms or record.time_ms
    row = SessionRow(
        tenant=key.tenant,
        session_id=key.session_id,
        state=State.DAMAGED,
        revision=stored[-1].revision if stored else 0,
        head_item=history.head_item,
        head_hash=stored[-1].head_hash if stored else "",
        item_count=len(history.items),
        context_tokens=len(history.tokens()),
        config=history.config,
        labels=dict(history.labels),
        create_ms=create_ms,
        update_ms=update_ms,
    )
    return Meta(row, "")
