"""The answers that a turn drew: what is kept of them, which one the history gets, and what replays show."""

from __future__ import annotations

import math
from collections.abc import Sequence

from pensieve.core import CandidateChoice, FinishReason, pack_tokens, unpack_tokens
from pensieve.server.turns import record as turn_record
from pensieve.server.turns.generation import TurnGeneration
from pensieve.server.turns.record import KeptAnswer
from pensieve.server.turns.text import OutputText, replayed_text
from pensieve.server.values import TurnView
from pensieve.store.records import CandidateAnswer
from pensieve.tokenizer import ChatTokenizer

SEEDS = 1 << 64
"""Candidate ``i`` samples with ``seed + i`` modulo this."""


def all_kept(
    outputs: Sequence[OutputText], generation: TurnGeneration, choice: CandidateChoice, seed: int
) -> KeptAnswer:
    """What is kept of a turn that ended by itself or because its time was over."""
    texts = [output.finish() for output in outputs]
    if len(outputs) == 1:
        return _kept(outputs[0], texts[0], generation.finish_reason(), generation)
    best = choice is CandidateChoice.BEST_LOGPROB
    means = mean_logprobs(outputs) if best else [None] * len(outputs)
    drawn = tuple(
        CandidateAnswer(
            text=text,
            tokens=pack_tokens(output.tokens),
            finish_reason=generation.finish_reason(number),
            stop_sequence=output.stop or "",
            seed=(seed + number) % SEEDS,
            mean_logprob=means[number],
        )
        for number, (output, text) in enumerate(zip(outputs, texts, strict=True))
    )
    chosen = best_of(drawn) if best else 0
    reason = drawn[chosen].finish_reason
    return _kept(outputs[chosen], texts[chosen], reason, generation, candidates=drawn, chosen=chosen)


def partly_kept(
    outputs: Sequence[OutputText], generation: TurnGeneration, keep_tokens: int | None
) -> KeptAnswer:
    """What is kept of a turn that was cancelled: candidate 0, or its first ``keep_tokens``, and no other."""
    text = outputs[0].finish(keep_tokens)
    return _kept(outputs[0], text, FinishReason.CANCELLED, generation)


def _kept(
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
    """The mean log-probability of each candidate.

    Those that drew the same tokens have the same one, that of the first of them: they differ by the noise of batched
    sums only, which depends on what else the engine computes, and must not choose among them.
    """
    means: dict[tuple[int, ...], float | None] = {}
    return [means.setdefault(tuple(output.tokens), mean_logprob(output)) for output in outputs]


def mean_logprob(output: OutputText) -> float | None:
    """Mean log-probability of the output's tokens; None without any."""
    if not output.logprobs:
        return None
    return math.fsum(one.logprob for one in output.logprobs) / len(output.logprobs)


def best_of(drawn: Sequence[CandidateAnswer]) -> int:
    """The candidate with the highest mean log-probability; the first of several, and of such without a token."""
    means = [-math.inf if one.mean_logprob is None else one.mean_logprob for one in drawn]
    return means.index(max(means))


def replayed(view: TurnView, tokenizer: ChatTokenizer) -> list[OutputText]:
    """The outputs of a committed turn, one per candidate."""
    assert view.output is not None
    answers = [(unpack_tokens(one.tokens), one.text) for one in view.candidates]
    if not answers:
        answers = [(turn_record.output_tokens(view.output), view.output.text)]
    outputs = [replayed_text(tokenizer, tokens.tolist(), text) for tokens, text in answers]
    outputs[0].cut_short = view.finish_reason is FinishReason.CANCELLED
    return outputs
