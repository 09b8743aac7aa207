"""Converts a finished turn to the store's record, and a record to what callers see."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from pensieve.core import (
    CandidateChoice,
    FinishReason,
    Role,
    TokenArray,
    Usage,
    pack_tokens,
    packed_length,
    unpack_tokens,
)
from pensieve.errors import NotFound
from pensieve.server.clock import now_ms
from pensieve.server.history.cuts import check_not_erased
from pensieve.server.history.rendering import PreparedTurn
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.run import TurnRun
from pensieve.server.turns.text import OutputText, replayed_text
from pensieve.server.values import TurnStatus, TurnView
from pensieve.store import HistoryStore, Key
from pensieve.store.records import (
    CandidateAnswer,
    CandidateChange,
    History,
    Item,
    Record,
    RecordKind,
    TurnResult,
)
from pensieve.tokenizer import ChatTokenizer

SEED_MODULUS = 1 << 64
"""Candidate ``i`` samples with ``seed + i`` modulo this."""


@dataclass(frozen=True, slots=True)
class KeptAnswer:
    """The part of the model's output that the history keeps, with the receipts of the turn."""

    tokens: tuple[int, ...]
    text: str
    finish_reason: FinishReason
    stop_sequence: str
    usage: Usage
    candidates: tuple[CandidateAnswer, ...] = ()
    """All candidates, if the turn drew more than one."""
    chosen: int = 0


@dataclass(frozen=True, slots=True)
class CommittedTurn:
    """A turn in the store, with the last choice among its candidates."""

    record: Record
    choice: Record | None
    """The last record that chose another candidate."""
    head_revision: int
    """The session's revision at the time of reading."""
    latest: bool
    """Nothing but choices among its candidates was committed after it."""

    @property
    def answer(self) -> Item:
        return (self.record if self.choice is None else self.choice).items[-1]


def build(
    run: TurnRun,
    base: History,
    prepared: PreparedTurn,
    answer: KeptAnswer,
    *,
    keep_items: int | None,
    numerics: str = "",
) -> Record:
    """The record that follows ``base`` (as stored, before truncation): input items and one answer item, whose
    tokens begin with the generation prompt. It leaves the session's config as it is. ``numerics``: of the engine."""
    spec, time_ms = run.spec, now_ms()
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
            seed=run.seed,
            usage=answer.usage,
            input_items=len(prepared.items),
            attempt=run.attempt,
            candidates=answer.candidates,
            chosen=answer.chosen,
            hints=run.hints,
            annotations=spec.annotations,
            mark=spec.mark,
            numerics=numerics,
        ),
        hidden_before=hidden if hidden != base.hidden_before else None,
    )


async def load_committed(store: HistoryStore, key: Key, revision: int) -> CommittedTurn | None:
    """The turn committed at ``revision``, with its present answer; None when that revision is not a turn.
    Choices directly follow their turn, so bisection finds the last one."""
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
    """The last choice among the candidates of a turn, in a log that ends at ``head``."""
    last, beyond, step = first, head + 1, 1  # no choice at or after ``beyond``
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
    """A committed turn as callers see it. Raises NotFound (CONTENT_ERASED)."""
    record, change = turn.record, turn.choice
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
        numerics=record.turn.numerics,
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


def choice_record(base: History, turn: CommittedTurn, candidate: int, time_ms: int) -> Record:
    """The record that makes another candidate the answer of ``turn``, which must be the latest turn."""
    current = turn.answer
    item = msgspec.structs.replace(
        with_candidate(current, turn, candidate), number=base.head_item + 1, create_ms=time_ms
    )
    return Record(
        revision=base.revision + 1,
        kind=RecordKind.UPDATE,
        time_ms=time_ms,
        keep_items=current.number - 1,
        items=(item,),
        candidate=CandidateChange(turn_revision=turn.record.revision, candidate=candidate),
    )


def with_candidate(item: Item, turn: CommittedTurn, candidate: int) -> Item:
    """``item``, the turn's answer, with the content of another candidate. Raises NotFound (CANDIDATE_NOT_FOUND)."""
    drawn = turn.record.turn.candidates if turn.record.turn is not None else ()
    if candidate >= len(drawn):
        raise candidate_not_found(candidate, len(drawn))
    answer = drawn[candidate]
    prompt = unpack_tokens(item.tokens)[: item.prefix_tokens]
    tokens = pack_tokens(prompt) + answer.tokens
    return msgspec.structs.replace(item, text=answer.text, tokens=tokens, finish_reason=answer.finish_reason)


def candidate_not_found(candidate: int, count: int) -> NotFound:
    return NotFound(
        f"the turn has no candidate {candidate}",
        reason="CANDIDATE_NOT_FOUND",
        metadata={"candidates": str(max(1, count))},
    )


def output_tokens(item: Item) -> TokenArray:
    """The tokens of an answer that the model produced, int32 [n]."""
    return unpack_tokens(item.tokens)[item.prefix_tokens :]


def completed_answer(
    outputs: Sequence[OutputText], generation: TurnGeneration, choice: CandidateChoice, seed: int
) -> KeptAnswer:
    """The answer to keep of a turn that ended by itself or at its time limit."""
    texts = [output.finish() for output in outputs]
    if len(outputs) == 1:
        return _kept_answer(outputs[0], texts[0], generation.finish_reason(), generation)
    best = choice is CandidateChoice.BEST_LOGPROB
    means = mean_logprobs(outputs) if best else [None] * len(outputs)
    drawn = tuple(
        CandidateAnswer(
            text=text,
            tokens=pack_tokens(output.tokens),
            finish_reason=generation.finish_reason(number),
            stop_sequence=output.stop or "",
            seed=(seed + number) % SEED_MODULUS,
            mean_logprob=means[number],
        )
        for number, (output, text) in enumerate(zip(outputs, texts, strict=True))
    )
    chosen = best_candidate(drawn) if best else 0
    reason = drawn[chosen].finish_reason
    return _kept_answer(outputs[chosen], texts[chosen], reason, generation, candidates=drawn, chosen=chosen)


def cancelled_answer(
    outputs: Sequence[OutputText], generation: TurnGeneration, keep_tokens: int | None
) -> KeptAnswer:
    """The answer to keep of a cancelled turn: candidate 0, or its first ``keep_tokens``, and no other candidate."""
    text = outputs[0].finish(keep_tokens)
    return _kept_answer(outputs[0], text, FinishReason.CANCELLED, generation)


def _kept_answer(
    output: OutputText,
    text: str,
    reason: FinishReason,
    generation: TurnGeneration,
    *,
    candidates: tuple[CandidateAnswer, ...] = (),
    chosen: int = 0,
) -> KeptAnswer:
    return KeptAnswer(
        tokens=tuple(output.tokens),
        text=text,
        finish_reason=reason,
        stop_sequence=output.stop or "",
        usage=generation.usage(len(output.tokens)),
        candidates=candidates,
        chosen=chosen,
    )


def mean_logprobs(outputs: Sequence[OutputText]) -> list[float | None]:
    """The mean log-probability of each candidate. Candidates with equal tokens share one mean: theirs differ
    only by the numerical noise of batching."""
    means: dict[tuple[int, ...], float | None] = {}
    return [means.setdefault(tuple(output.tokens), mean_logprob(output)) for output in outputs]


def mean_logprob(output: OutputText) -> float | None:
    """Mean log-probability of the output's tokens; None without any."""
    if not output.logprobs:
        return None
    return math.fsum(one.logprob for one in output.logprobs) / len(output.logprobs)


def best_candidate(drawn: Sequence[CandidateAnswer]) -> int:
    """The candidate with the highest mean log-probability, the first one of equals. A missing mean ranks last."""
    means = [-math.inf if one.mean_logprob is None else one.mean_logprob for one in drawn]
    return means.index(max(means))


def replayed_outputs(view: TurnView, tokenizer: ChatTokenizer) -> list[OutputText]:
    """The outputs of a committed turn, one per candidate."""
    assert view.output is not None
    answers = [(unpack_tokens(one.tokens), one.text) for one in view.candidates]
    if not answers:
        answers = [(output_tokens(view.output), view.output.text)]
    outputs = [replayed_text(tokenizer, tokens.tolist(), text) for tokens, text in answers]
    outputs[0].cut_short = view.finish_reason is FinishReason.CANCELLED
    return outputs
