"""Reads a load from a server's store: arrival times, lengths and receipts of the committed turns.

The rules are those of ``serve --record`` (``pensieve.server.operations.recording.TraceRow``): a turn that
does not continue the turn before (after a fork, rewind, regeneration, overflow or appended items) begins a
new session with its whole context as input. Uncommitted turns and deleted or expired sessions are missing.

The gap is the share of history that the server recomputed, by its receipts, minus the share that the
``clairvoyant`` policy recomputes when the same turns are simulated.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from pensieve.core import Usage, packed_length
from pensieve.replay.load.workload import (
    RECEIPT_FIELDS,
    Conversation,
    Dataset,
    DatasetError,
    parse_length_trace,
)
from pensieve.store import maintenance
from pensieve.store.contract import Key
from pensieve.store.maintenance import Mode, RawStore
from pensieve.store.records import Record, RecordKind

_SHARES = ("device", "host", "recomputed")


def from_store(url: str) -> Dataset:
    """Read the turns of a store, which is not changed; servers may be using it.

    Raises DatasetError if it has no turn, ValueError on a bad URL, and the store's errors.
    """
    store = maintenance.open_raw(url)
    rows = asyncio.run(_rows(store))
    if not rows:
        raise DatasetError("the store has no committed turn")
    start = min(row["timestamp_s"] for row in rows)
    for row in rows:
        row["timestamp_s"] = round(row["timestamp_s"] - start, 6)
    text = "\n".join(map(json.dumps, rows))
    name = f"{store.kind} store"
    conversations = parse_length_trace(Path(name), text)
    if not conversations:
        raise DatasetError("the store has no answered turn")
    return Dataset(name, tuple(conversations), hashlib.sha256(text.encode()).hexdigest())


async def _rows(store: RawStore) -> list[dict[str, Any]]:
    try:
        await store.open(Mode.READ)
        return [row async for key, log in maintenance.iter_logs(store) for row in trace_rows(key, log)]
    finally:
        await store.close()


def trace_rows(key: Key, log: Sequence[Record]) -> Iterator[dict[str, Any]]:
    """Yield the turns of one session as rows of a trace. ``timestamp_s`` is the arrival in Unix time.

    The store records the commit time; the arrival is that minus the time that the receipt accounts for.
    """
    session_number, turn, tokens = 0, 0, -1
    for record in log:
        if record.kind is not RecordKind.TURN or record.turn is None or record.erased is not None:
            continue
        usage = record.turn.usage
        *inputs, answer = record.items
        new = sum(packed_length(item.tokens) for item in inputs) + answer.prefix_tokens
        if usage.context_tokens - new != tokens or not new:
            session_number, turn = session_number + 1, 0
        yield {
            "session_id": f"{key.tenant}/{key.session_id}#{session_number}",
            "turn": turn,
            "input_tokens": new if turn else usage.context_tokens,
            "output_tokens": usage.output_tokens,
            "timestamp_s": record.time_ms / 1e3 - _duration_s(usage),
            "context_tokens": usage.context_tokens,
            **{name: getattr(usage, name) for name in RECEIPT_FIELDS},
            "committed": True,
        }
        turn += 1
        tokens = usage.context_tokens + usage.output_tokens


def _duration_s(usage: Usage) -> float:
    return usage.queue_s + usage.restore_s + usage.prefill_s + usage.decode_s


def gap(
    conversations: Iterable[Conversation],
    window: tuple[float, float] | None,
    targets: Sequence[dict[str, Any]],
) -> dict[str, Any] | None:
    """Where later turns found their history, and how much less a clairvoyant policy would have recomputed.

    Only turns that arrived in ``window`` count. ``targets`` are the simulated policies, as in a report. None
    if a later turn has no receipt.
    """
    listed = list(conversations)
    start = min((talk.turns[0].timestamp_s or 0.0 for talk in listed), default=0.0)
    low, high = window or (0.0, float("inf"))
    later = [
        turn for talk in listed for turn in talk.turns[1:] if low <= (turn.timestamp_s or 0.0) - start < high
    ]
    receipts = [turn.receipt for turn in later if turn.receipt is not None]
    if not later or len(receipts) < len(later):
        return None
    measured = _shares([sum(column) for column in zip(*receipts, strict=True)])
    simulated = next((row["tokens"] for row in targets if row["target"] == "clairvoyant"), None)
    best = (
        None
        if simulated is None
        else _shares([simulated[name] for name in ("gpu_cached", "swapped_in", "recomputed")])
    )
    return {
        "turns": len(later),
        "history_tokens": sum(map(sum, receipts)),
        "measured": measured,
        "clairvoyant": best,
        "recomputed_in_vain": None if best is None else max(measured["recomputed"] - best["recomputed"], 0.0),
    }


def _shares(tokens: Sequence[int]) -> dict[str, float]:
    """Shares of the history tokens. An empty history counts as present on the device."""
    total = sum(tokens)
    return dict(zip(_SHARES, (count / total for count in tokens) if total else (1.0, 0.0, 0.0), strict=True))
