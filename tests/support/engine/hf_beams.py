"""Beam search of Hugging Face transformers, and ours driven with the same logits: the two sides of its exactness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import (
    AutoModelForCausalLM,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.modeling_outputs import CausalLMOutput

from pensieve.engine.beams import BeamSearch, Hypothesis, Row


@dataclass(frozen=True)
class BeamCase:
    """What a beam search is asked for."""

    prompt: tuple[int, ...]
    width: int
    max_output_tokens: int
    end_tokens: tuple[int, ...] = ()
    length_penalty: float = 1.0
    early_stopping: bool = False

    def search(self) -> BeamSearch:
        return BeamSearch(
            self.width,
            max_output_tokens=self.max_output_tokens,
            end_tokens=self.end_tokens,
            length_penalty=self.length_penalty,
            early_stopping=self.early_stopping,
        )


class HfBeams:
    """One transformers model in float32, asked for its own beam search and for log-probabilities."""

    def __init__(self, model: Any) -> None:
        self.model = model.eval()

    @classmethod
    def load(cls, folder: Path) -> HfBeams:
        return cls(
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
        )

    @torch.inference_mode()
    def generate(self, case: BeamCase, *, use_cache: bool = False) -> tuple[tuple[int, ...], float]:
        """Output tokens and score of ``generate`` itself. Without a cache its model sees what ``rows`` shows it."""
        ids = torch.tensor([case.prompt])
        result = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            num_beams=case.width,
            do_sample=False,
            max_new_tokens=case.max_output_tokens,
            eos_token_id=list(case.end_tokens) or None,
            pad_token_id=0,
            length_penalty=case.length_penalty,
            early_stopping=case.early_stopping,
            use_cache=use_cache,
            return_dict_in_generate=True,
            output_scores=True,
        )
        tokens = tuple(int(token) for token in result.sequences[0, len(case.prompt) :])
        return tokens, float(result.sequences_scores[0])

    @torch.inference_mode()
    def rows(self, contexts: Sequence[tuple[int, ...]], count: int) -> list[Row]:
        """The ``count`` most likely tokens after each context, by a full forward pass."""
        logits = self.model(torch.tensor(contexts), use_cache=False, logits_to_keep=1).logits[:, -1, :]
        best = torch.log_softmax(logits, dim=-1).topk(min(count, logits.shape[-1]), dim=-1)
        pairs = zip(best.indices.tolist(), best.values.tolist(), strict=True)
        return [tuple(zip(ids, values, strict=True)) for ids, values in pairs]

    def search(self, case: BeamCase, *, more: int = 0) -> Hypothesis:
        """The answer of ``BeamSearch``, given ``more`` tokens of each row than it needs."""
        search = case.search()
        # transformers begins with the prompt in each beam: the same batch, or a product might round differently.
        rows = self.rows([case.prompt] * case.width, search.candidates + more)[:1]
        contexts = [case.prompt]
        while (step := search.step(rows)).finished is None:
            assert len(step.parents) == len(step.tokens) == case.width
            contexts = [
                (*contexts[parent], token) for parent, token in zip(step.parents, step.tokens, strict=True)
            ]
            start = len(case.prompt)
            assert [search.output(beam) for beam in range(case.width)] == [ids[start:] for ids in contexts]
            rows = self.rows(contexts, search.candidates + more)
        assert step.parents == step.tokens == ()
        return step.finished


class TableConfig(PreTrainedConfig):
    """Configuration of ``TableModel``."""

    model_type = "table"

    def __init__(self, vocab_size: int = 12, rows: int = 97, spread: float = 1.0, seed: int = 0, **rest: Any):
        self.vocab_size, self.rows, self.spread, self.seed = vocab_size, rows, spread, seed
        super().__init__(**rest)


class TableModel(PreTrainedModel, GenerationMixin):
    """Logits from a random table, whose row a hash of the context names: a model that costs nothing."""

    config_class = TableConfig

    def __init__(self, config: TableConfig) -> None:
        super().__init__(config)
        generator = torch.Generator().manual_seed(config.seed)
        table = torch.randn(config.rows, config.vocab_size, generator=generator) * config.spread
        self.table = torch.nn.Parameter(table)
        self.generation_config = GenerationConfig(pad_token_id=0)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        """The table is random as it is."""

    def forward(self, input_ids: torch.Tensor, **_: Any) -> CausalLMOutput:
        """Logits [n, 1, vocab] after each of the contexts [n, length]."""
        state = torch.zeros(len(input_ids), dtype=torch.int64)
        for column in input_ids.T:
            state = (state * 31 + column + 7) % 1_000_003
        return CausalLMOutput(logits=self.table[state % len(self.table)][:, None])
