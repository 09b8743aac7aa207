"""Answers under grammars and penalties without a model: logits are a function of the context, as of a hash.

``ChoosingWorker`` chooses tokens as a real worker does, late ones in ``PendingStep.choose``. ``expected`` gives
the same tokens from a context alone, with a matcher of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from pensieve.core import FinishReason, Grammar, RequestKey, Sampling, TokenArray
from pensieve.engine.plan import PendingStep, Plan, Sampled, SampleSpec, StepResult, TokenMask
from pensieve.engine.sampling.sampler import sample
from support.engine.hash_worker import HashWorker, last_kv

EOS = 0
STOP = 1
PIECES = [
    b"<|end|>",
    b"<|stop|>",
    *(bytes([code]) for code in range(32, 127)),
    b'":',
    b'","',
    b"}}",
    b"true",
    b"12",
]
VOCAB = len(PIECES) + 3
"""The last ids have no token, as in models whose embedding has more rows than the tokenizer has tokens."""
WORDS = -(-VOCAB // 32)


class _Vocabulary:
    eos_token_id = EOS
    bos_token_id = None
    special_token_ids = (EOS, STOP)

    def __init__(self, vocab: int) -> None:
        self.tokens = [*PIECES, *[b""] * (vocab - len(PIECES))]

    def __call__(self, text: str | bytes) -> list[int]:
        data = text if isinstance(text, bytes) else text.encode()
        return [PIECES.index(bytes([byte])) for byte in data]


def make_tokenizer(vocab: int = VOCAB) -> LLTokenizer:
    return LLTokenizer(TokenizerWrapper(_Vocabulary(vocab)), n_vocab=vocab, eos_token=[EOS])


def grammar(lark: str, **values: Any) -> Grammar:
    return Grammar(LLMatcher.grammar_from_lark(lark), **values)


def text_of(tokens: Sequence[int]) -> str:
    """The text of an answer, without its end token."""
    *text, last = tokens
    return b"".join(PIECES[token] for token in ([*text, last] if last != EOS else text)).decode()


def logits_of(kv: int) -> torch.Tensor:
    """Logits after a KV, float32 [VOCAB], spread so that neither greedy answers nor draws are all alike."""
    rng = np.random.Generator(np.random.Philox(key=kv))
    return torch.from_numpy(rng.standard_normal(VOCAB).astype(np.float32) * 3)


@dataclass(slots=True)
class _Step:
    worker: ChoosingWorker
    rows: list[tuple[RequestKey, int]]
    sampled: tuple[Sampled, ...] | None = None

    def choose(self, specs: Sequence[SampleSpec | None]) -> None:
        assert self.sampled is None, "chosen twice"
        chosen = []
        for (request, kv), spec in zip(self.rows, specs, strict=True):
            if spec is not None:
                assert (spec.mask is not None) == (spec.sampling.grammar is not None)
                ((token, logprob),) = sample(logits_of(kv)[None], [spec])
                chosen.append(Sampled(request, token, logprob))
        self.sampled = tuple(chosen)
        self.worker.choose(chosen)

    def result(self) -> StepResult:
        assert self.sampled is not None, "no token was chosen"
        return StepResult(self.sampled)


class ChoosingWorker(HashWorker):
    """A ``HashWorker`` whose tokens are sampled from ``logits_of`` as the specs say."""

    def launch(self, plan: Plan) -> PendingStep:
        plan = self.decided(plan)
        rows = [(span.request, kv) for span, kv in self.compute(plan) if span.sample is not None]
        step = _Step(self, rows)
        if not plan.chooses_late:
            step.choose(plan.specs)
        return step


def expected(
    tokenizer: LLTokenizer, context: Sequence[int], sampling: Sampling, limit: int, candidate: int = 0
) -> tuple[list[int], FinishReason]:
    """The answer of a stateless run over ``context``, at most ``limit`` tokens with it, and why it ends."""
    sampling = msgspec.structs.replace(sampling, seed=(sampling.seed + candidate) % (1 << 64))
    matcher = None
    if sampling.grammar is not None:
        limits = LLParserLimits(step_max_items=sampling.grammar.step_items)
        matcher = LLMatcher(tokenizer, sampling.grammar.text, limits=limits)
        assert not matcher.is_error(), matcher.get_error()
    output: list[int] = []
    while True:
        token = _next(context, output, sampling, matcher)
        output.append(token)
        if matcher is not None and token == EOS:
            return output, FinishReason.EOS
        if len(output) > sampling.min_output_tokens and token in sampling.stop_token_ids:
            return output, FinishReason.STOP_TOKEN
        if len(output) > sampling.min_output_tokens and token == EOS:
            return output, FinishReason.EOS
        if sampling.max_output_tokens is not None and len(output) >= sampling.max_output_tokens:
            return output, FinishReason.LENGTH
        if len(context) + len(output) >= limit:
            return output, FinishReason.CONTEXT_FULL
        if matcher is not None:
            assert matcher.consume_token(token), matcher.get_error()


def _next(
    context: Sequence[int], output: Sequence[int], sampling: Sampling, matcher: LLMatcher | None
) -> int:
    mask: TokenMask | None = None
    if matcher is not None:
        mask = np.zeros(WORDS, np.int32)
        matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
    prompt, so_far = (_array(context), _array(output)) if sampling.needs_context else (None, None)
    spec = SampleSpec(sampling, len(output), (EOS,), prompt, so_far, mask)
    ((token, _),) = sample(logits_of(last_kv([*context, *output]))[None], [spec])
    return token


def _array(tokens: Sequence[int]) -> TokenArray:
    return np.array(tokens, dtype=np.int32)
