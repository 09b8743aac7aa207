"""A finished turn as the record that the store appends, and back from the record to what callers see."""

from __future__ import annotations

from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pensieve.core import (
    FinishReason,
    HintReceipt,
    Role,
    TokenArray,
    Usage,
    pack_tokens,
    packed_length,
    unpack_tokens,
)
from pensieve.errors import NotFound
from pensieve.server.history.erased import check_not_erased
from pensieve.server.history.rendering import PreparedTurn
from pensieve.server.values import NewTurn, TurnStatus, TurnView
from pensieve.store import HistoryStore, Key
from pensieve.store.records import (
    CandidateAnswer,
    CandidateChange,
    History,
    Item,
    Record,
    RecordKind,
    SessionConfig,
    TurnResult,
)


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The part of the model's output that the history keeps, with the receipts of the turn."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_sequence: str
    usage: Usage
    candidates: tuple[CandidateAnswer, ...] = ()
    """All that the turn drew, if more than one."""
    chosen: int = 0
    """The candidate that this is."""
    hints: HintReceipt | None = None


@dataclass(frozen=True, slots=True)
class CommittedTurn:
    """A turn in the store, and what became of it."""

    record: Record
    change: Record | None
    """The last record that gave it another of its answers."""
    head: int
    """The session's revision when this was read."""
    latest: bool
    """Nothing was committed behind it but choices among its answers."""

    @property
    def answer(self) -> Item:
        """Its answer as it stands in history."""
        return (self.record if self.change is None else self.change).items[-1]


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
    config: SessionConfig | None = None,
) -> Record:
    """The record that follows ``base`` (as stored, before truncation): input items and one answer item.

    The answer's tokens are the generation prompt and the output, so that history stays token-exact.
    ``config``: the session's from here on; None: unchanged.
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
            candidates=answer.candidates,
            chosen=answer.chosen,
            hints=answer.hints,
            annotations=spec.annotations,
            mark=spec.mark,
        ),
        config=config,
        hidden_before=hidden if hidden != base.hidden_before else None,
    )


async def committed(store: HistoryStore, key: Key, revision: int) -> CommittedTurn | None:
    """The turn with this revision and its answer of today; None when it is not a turn's.

    Of the log it reads what the turn's age and the log's length do not matter for: the turn, and the last choice among
    its answers. Choices follow their turn at once and one another, so that the last one is searched by bisection.
    """
    piece = await store.read_slice(key, after_revision=revision - 1, limit=2)
    turn = next((one.record for one in piece.records if one.record.revision == revision), None)
    if turn is None or turn.turn is None:
        return None
    change = next((one.record for one in piece.records[1:] if _is_choice(one.record, revision)), None)
    head = piece.row.revision
    if change is not None:
        change = await _last_choice(store, key, change, head, revision)
    newest = revision if change is None else change.revision
    return CommittedTurn(turn, change, head, latest=newest == head)


async def _last_choice(store: HistoryStore, key: Key, first: Record, head: int, turn_revision: int) -> Record:
    """The last choice among the answers of a turn, in a log that ends at ``head``."""
    last, beyond, step = first, head + 1, 1  # from ``beyond`` on there is no choice
    while last.revision + 1 < beyond:
        at = min(last.revision + step, (last.revision + beyond) // 2)
        (logged,) = (await store.read_slice(key, after_revision=at - 1, limit=1)).records
        if _is_choice(logged.record, turn_revision):
            last, step = logged.record, 2 * step
        else:
            beyond = at
    return last


def _is_choice(record: Record, turn_revision: int) -> bool:
    return record.candidate is not None and record.candidate.turn_revision == turn_revision


def committed_view(key: Key, turn: CommittedTurn) -> TurnView:
    """A turn in the store as callers see it. Raises NotFound (CONTENT_ERASED)."""
    record, change = turn.record, turn.change
    check_not_erased([turn.answer, *record.items])
    assert record.turn is not None
    count = record.turn.input_items
    view = TurnView(
        session_id=key.session_id,
        request_id=record.request_id,
        state=TurnStatus.COMMITTED,
        base_revision=record.turn.base_revision,
        revision=record.revision,
        input=record.items[:count],
        output=turn.answer,
        finish_reason=record.turn.finish_reason,
        stop_sequence=record.turn.stop_sequence,
        seed=record.turn.seed,
        usage=record.turn.usage,
        hints=record.turn.hints,
        candidates=record.turn.candidates,
        chosen=record.turn.chosen,
        annotations=record.turn.annotations,
    )
    if change is None or change.candidate is None:
        return view
    number = change.candidate.candidate
    answer = view.candidates[number]
    usage = msgspec.structs.replace(record.turn.usage, output_tokens=packed_length(answer.tokens))
    return replace(
        view,
        revision=change.revision,
        finish_reason=answer.finish_reason,
        stop_sequence=answer.stop_sequence,
        usage=usage,
        chosen=number,
    )


def choose(base: History, turn: CommittedTurn, candidate: int, time_ms: int) -> Record:
    """The record that makes another candidate of ``turn``, the latest one, its answer.

    The new item has a number of its own, and the generation prompt of the old one, so that history stays token-exact.
    """
    current = turn.answer
    item = msgspec.structs.replace(
        answered(current, turn, candidate), number=base.head_item + 1, create_ms=time_ms
    )
    return Record(
        revision=base.revision + 1,
        kind=RecordKind.UPDATE,
        time_ms=time_ms,
        keep_items=current.number - 1,
        items=(item,),
        candidate=CandidateChange(turn_revision=turn.record.revision, candidate=candidate),
    )


def answered(item: Item, turn: CommittedTurn, candidate: int) -> Item:
    """``item``, which is the turn's answer, with another of its answers. Raises NotFound (CANDIDATE_NOT_FOUND)."""
    drawn = turn.record.turn.candidates if turn.record.turn is not None else ()
    if candidate >= len(drawn):
        raise no_candidate(candidate, len(drawn))
    answer = drawn[candidate]
    prompt = unpack_tokens(item.tokens)[: item.prefix_tokens]
    tokens = pack_tokens(prompt) + answer.tokens
    return msgspec.structs.replace(item, text=answer.text, tokens=tokens, finish_reason=answer.finish_reason)


def no_candidate(candidate: int, count: int) -> NotFound:
    """``count``: how many the turn has."""
    return NotFound(
        f"the turn has no candidate {candidate}",
        reason="CANDIDATE_NOT_FOUND",
        metadata={"candidates": str(max(1, count))},
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
