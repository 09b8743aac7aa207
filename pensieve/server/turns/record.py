"""A finished turn as the record that the store appends, and back from the record to what callers see."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import numpy as np

from pensieve.core import FinishReason, Role, TokenArray, Usage, pack_tokens, unpack_tokens
from pensieve.server.history.rendering import PreparedTurn
from pensieve.server.values import NewTurn, TurnStatus, TurnView
from pensieve.store import Key
from pensieve.store.records import History, Item, Record, RecordKind, TurnResult


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The part of the model's output that the history keeps."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_sequence: str
    usage: Usage


def build(
    spec: NewTurn,
    base: History,
    prepared: PreparedTurn,
    answer: KeptAnswer,
    *,
    keep_items: int | None,
    seed: int,
    attempt: str,
    time_ms: int,
) -> Record:
    """The record that follows ``base`` (as stored, before truncation): input items and one answer item.

    The answer's tokens are the generation prompt and the output, so that history stays token-exact.
    """
    output = np.asarray(answer.tokens, dtype=np.int32)
    item = Item(
        number=base.head_item + len(prepared.items) + 1,
        role=Role.ASSISTANT,
        text=answer.text,
        tokens=pack_tokens(np.concatenate([prepared.prompt, output])),
        request_id=spec.request_id,
        finish_reason=answer.finish_reason,
        create_ms=time_ms,
        prefix_tokens=len(prepared.prompt),
    )
    hidden = prepared.history.hidden_before
    return Record(
        revision=base.revision + 1,
        kind=RecordKind.TURN,
        time_ms=time_ms,
        request_id=spec.request_id,
        keep_items=keep_items,
        items=(*prepared.items, item),
        turn=TurnResult(
            base_revision=base.revision,
            finish_reason=answer.finish_reason,
            stop_sequence=answer.stop_sequence,
            seed=seed,
            usage=answer.usage,
            input_items=len(prepared.items),
            attempt=attempt,
        ),
        hidden_before=hidden if hidden != base.hidden_before else None,
    )


def committed_view(key: Key, record: Record) -> TurnView:
    """The turn that a TURN record holds, as callers see it."""
    assert record.turn is not None
    count = record.turn.input_items
    return TurnView(
        session_id=key.session_id,
        request_id=record.request_id,
        state=TurnStatus.COMMITTED,
        base_revision=record.turn.base_revision,
        revision=record.revision,
        input=record.items[:count],
        output=record.items[count],
        finish_reason=record.turn.finish_reason,
        stop_sequence=record.turn.stop_sequence,
        seed=record.turn.seed,
        usage=record.turn.usage,
    )


def output_tokens(item: Item) -> TokenArray:
    """The tokens of an answer that the model produced, int32 [n]."""
    return unpack_tokens(item.tokens)[item.prefix_tokens :]


def final_usage(
    usage: Usage | None, *, output_tokens: int, queue_s: float, prefill_s: float, decode_s: float
) -> Usage:
    """The receipt of a turn: the engine's counters, with the number of tokens that are kept.

    The times (seconds, by this process' clock) fill in for an engine that was told to stop before it reported its own.
    A turn that was never admitted has an empty receipt: nothing was computed for it.
    """
    if usage is None:
        return Usage(queue_s=queue_s)
    if usage.decode_s or usage.prefill_s:
        return msgspec.structs.replace(usage, output_tokens=output_tokens)
    return msgspec.structs.replace(
        usage,
        output_tokens=output_tokens,
        queue_s=usage.queue_s or queue_s,
        prefill_s=prefill_s,
        decode_s=decode_s,
    )
