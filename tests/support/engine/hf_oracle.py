"""What Hugging Face transformers gives on the whole history: the oracle of exactness."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from support.engine.coded_cache import CodedCache
from support.model.newest_models import as_newest

NEAR_TIE = 1e-4
"""Logits closer than this are equal to within float32 rounding of two different summation orders."""


class HfOracle:
    """Greedy continuations by a transformers model in float32.

    ``verify`` runs the model once over context and output together and demands that each output token is the argmax
    after what precedes it: by induction exactly the sequence that ``generate`` gives. Every ``every``-th call runs
    ``generate`` itself. A token that differs only where the two best logits are a near tie is counted, not refused.
    """

    def __init__(
        self,
        folder: Path,
        *,
        every: int = 25,
        weights: torch.dtype = torch.float32,
        near_tie: float = NEAR_TIE,
        code: torch.dtype | None = None,
        change: Callable[[Any], Any] = lambda model: model,
    ) -> None:
        """The model computes in float32, with the checkpoint's values rounded to ``weights``; or in float64, with keys
        and values that went through the codec ``code``. ``change`` makes it compute otherwise."""
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=weights, attn_implementation="eager")
        if code is not None:
            # Some versions of torch have no grouped products in float64.
            loaded.set_experts_implementation("eager")
        self._model = change(as_newest(loaded).to(torch.float32 if code is None else torch.float64).eval())
        self._code = code
        self._every = every
        self._near_tie = near_tie
        self.alone: Callable[[Sequence[int], int], list[int]] | None = None
        """Returns the next tokens after a context, as many as asked for, from an engine that does nothing else. If they
        equal the output, a token that differs from transformers' counts as a near tie: transformers rounds norms and
        angles to float32, and a value at the edge between two codes falls on the other side."""
        self.calls = self.tokens = self.near_ties = 0
        self.largest_gap = 0.0
        """By how much the logit of a token was below the largest, at most."""

    @torch.inference_mode()
    def verify(self, context: Sequence[int], output: Sequence[int], seed: int = 0) -> None:
        """Raise AssertionError unless ``output`` is the greedy continuation of ``context``, whatever the seed."""
        if not output:
            return
        self.calls += 1
        self.tokens += len(output)
        ids = torch.tensor([[*context, *output]])
        logits = self._model(ids[:, :-1], **self._cache()).logits[0, len(context) - 1 :]
        expected = logits.argmax(-1)
        tied = False
        for index in (expected != ids[0, len(context) :]).nonzero().flatten().tolist():
            gap = (logits[index].max() - logits[index, output[index]]).item()
            self.largest_gap = max(self.largest_gap, gap)
            self.near_ties += 1
            tied = True
            if gap >= self._near_tie:
                assert self.alone is not None and self.alone(context, len(output)) == list(output), (
                    f"token {index} of the output is {output[index]}, not {expected[index].item()} (logit gap"
                    f" {gap:.4g})"
                )
                break  # the other code stays in the context
        if self.calls % self._every == 0 and not tied:
            assert list(output) == self.generate(context, len(output))

    @torch.inference_mode()
    def logprobs(self, context: Sequence[int]) -> torch.Tensor:
        """Log-probabilities after each token of ``context``, float32 [n, vocab]."""
        return torch.log_softmax(
            self._model(torch.tensor([list(context)]), **self._cache()).logits[0], dim=-1
        )

    @torch.inference_mode()
    def generate(self, context: Sequence[int], count: int) -> list[int]:
        """``count`` greedy tokens by ``generate``, end of sequence ignored."""
        ids = torch.tensor([list(context)])
        result = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            **self._cache(),
        )
        return [int(token) for token in result[0, len(context) :]]

    def _cache(self) -> dict[str, CodedCache]:
        """The argument of a call that gives it a cache with the codec, if there is one."""
        return {} if self._code is None else {"past_key_values": CodedCache(self._code, self._model.config)}
