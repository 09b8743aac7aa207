"""Tiny random checkpoints of the families with recurrent layers, and steps of such a model over pages."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from pensieve.kernels import reference
from pensieve.kernels.arguments import HeadPrep
from pensieve.kernels.recurrence import NO_PAGE, Recurrence
from pensieve.kernels.recurrent import recurrent
from pensieve.kernels.spans import make_spans
from pensieve.model.arch import Arch
from pensieve.model.transformer import Transformer
from support.kernels.recurrence_cases import make_chains
from support.model.newest_models import as_newest
from support.model.torch_only import MODELS

Family = Literal["mamba2", "bamba", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_next_experts"]
FAMILIES: tuple[Family, ...] = (
    "mamba2", "bamba", "falcon_h1", "qwen3_next", "qwen3_5_text", "qwen3_next_experts",
)  # fmt: skip
"""``qwen3_next_experts``: a Qwen3-Next with mixtures of experts in all layers but one."""

_COMMON: dict[str, Any] = {"vocab_size": 120, "hidden_size": 32, "bos_token_id": 1, "eos_token_id": 2}
_ATTENTION = _COMMON | {
    "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512,
}  # fmt: skip
_MAMBA = _ATTENTION | {
    "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_n_groups": 2, "mamba_d_state": 12, "mamba_chunk_size": 16,
}  # fmt: skip
_DELTA = _ATTENTION | {
    "num_hidden_layers": 4, "full_attention_interval": 2, "head_dim": 16, "linear_num_key_heads": 2,
    "linear_num_value_heads": 4, "linear_key_head_dim": 8, "linear_value_head_dim": 12,
}  # fmt: skip
_MULTIPLIERS: dict[str, Any] = {
    "ssm_multipliers": [0.7, 1.3, 0.9, 1.2, 0.6], "mlp_multipliers": [1.4, 0.8], "key_multiplier": 0.6,
    "attention_in_multiplier": 1.1, "attention_out_multiplier": 0.9, "ssm_in_multiplier": 1.2,
    "ssm_out_multiplier": 0.7, "embedding_multiplier": 1.5, "lm_head_multiplier": 0.4,
}  # fmt: skip
_CONFIGS: dict[Family, tuple[type[PreTrainedConfig], dict[str, Any]]] = {
    "mamba2": (
        MODELS["mamba2"].Mamba2Config,
        _COMMON | {"num_heads": 8, "head_dim": 8, "state_size": 12, "n_groups": 2, "num_hidden_layers": 3,
                   "chunk_size": 16, "time_step_limit": (0.02, float("inf"))},
    ),
    "bamba": (MODELS["bamba"].BambaConfig, _MAMBA | {"num_hidden_layers": 3, "attn_layer_indices": [1]}),
    "falcon_h1": (
        MODELS["falcon_h1"].FalconH1Config,
        _MAMBA | _MULTIPLIERS | {"num_hidden_layers": 2, "mamba_d_ssm": 64, "mamba_rms_norm": True},
    ),
    "qwen3_next": (MODELS["qwen3_next"].Qwen3NextConfig, _DELTA | {"mlp_only_layers": [0, 1, 2, 3], "num_experts": 4}),
    "qwen3_5_text": (MODELS["qwen3_5"].Qwen3_5TextConfig, _DELTA),
    "qwen3_next_experts": (
        MODELS["qwen3_next"].Qwen3NextConfig,
        _DELTA | {"mlp_only_layers": [2], "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
                  "shared_expert_intermediate_size": 20},
    ),
}  # fmt: skip


def make_model(family: Family, folder: Path, seed: int = 0, **overrides: Any) -> torch.nn.Module:
    """Return transformers' random model of a family in float32, saved in ``folder``; ``overrides`` replace values of
    its config."""
    config_class, values = _CONFIGS[family]
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(
            config_class(**(values | overrides)), dtype=torch.float32, attn_implementation="eager"
        )
        spread(model)
    model.save_pretrained(folder)
    made: torch.nn.Module = as_newest(model.eval())
    return made


@torch.no_grad()
def spread(model: torch.nn.Module) -> None:
    """Draw weights with which every part matters and states remember tens of tokens; nothing is at its default."""
    for name, parameter in model.named_parameters():
        drawn = torch.randn_like(parameter)
        if name.endswith(("norm.weight", "norm_f.weight")) or "layernorm" in name:
            parameter.copy_(0.8 + 0.2 * drawn)
        elif name.endswith("A_log"):
            parameter.copy_(drawn - 2.0)
        elif parameter.dim() == 1:
            parameter.copy_(0.3 * drawn)
        elif "embed" in name:
            parameter.copy_(drawn)
        else:
            parameter.copy_(drawn * 1.5 / parameter.shape[-1] ** 0.5)


PAGE = 8
"""Tokens of a page of keys and values."""


class Pages:
    """Keys, values and states of a model's layers, and one step's work: ``attend`` and ``recur``. All pages are NaN
    until they are written."""

    def __init__(self, arch: Arch, kv_pages: int, state_pages: int, device: str = "cpu") -> None:
        self.arch, self.device = arch, torch.device(device)
        kv = (kv_pages, 2, arch.num_kv_heads, PAGE, arch.head_dim)
        self.kv = {index: torch.full(kv, torch.nan, device=device) for index in arch.attention_layers}
        self.states = {
            index: (
                torch.full(
                    (state_pages, state.conv_channels, state.conv_width - 1), torch.nan, device=device
                ),
                torch.full(
                    (state_pages, state.heads, state.key_dim, state.value_dim), torch.nan, device=device
                ),
            )
            for index, state in ((index, layer.state) for index, layer in enumerate(arch.layers))
            if state is not None
        }
        self.state_pages = state_pages

    def run(
        self, model: Transformer, pieces: list[tuple[torch.Tensor, int, list[int]]], chains: list[list[int]]
    ) -> torch.Tensor:
        """Return the logits after every token of a step. ``pieces``: tokens, first position and pages of keys and
        values of each context's piece."""
        tokens = torch.cat([piece for piece, _, _ in pieces])
        positions = torch.cat([start + torch.arange(len(piece)) for piece, start, _ in pieces])
        tables = torch.tensor([pages for _, _, pages in pieces], dtype=torch.int32)
        spans = make_spans(
            [len(piece) for piece, _, _ in pieces], [start for _, start, _ in pieces], range(len(pieces))
        )
        slots = torch.cat([
            torch.tensor(pages)[(start + torch.arange(len(piece))) // PAGE] * PAGE
            + (start + torch.arange(len(piece))) % PAGE
            for piece, start, pages in pieces
        ])  # fmt: skip
        made = make_chains(chains, len(tokens), self.state_pages)
        tokens, positions, slots = (each.to(self.device) for each in (tokens, positions, slots))

        def attend(layer: int, qkv: torch.Tensor, prep: HeadPrep) -> torch.Tensor:
            q = reference.kv_write(self.kv[layer], qkv, slots, prep)
            return reference.ragged_paged_attention(
                q, self.kv[layer], spans, tables, scale=self.arch.attention_scale
            )

        def recur(
            layer: int, inputs: torch.Tensor, gates: torch.Tensor, constants: Recurrence
        ) -> torch.Tensor:
            if self.device.type == "cpu":
                return recurrent(inputs, gates, self.states[layer], constants, made)
            from pensieve.kernels import state_chunks  # needs Triton

            plan = state_chunks.make_recurrent_plan(made, len(inputs), inputs.dtype, self.device)
            return state_chunks.recurrent(inputs, gates, self.states[layer], constants, plan)

        with torch.inference_mode():
            rows = torch.arange(len(tokens), device=self.device)
            return model.forward(tokens, positions, attend, rows, recur)


@dataclass
class Context:
    """One context that is computed in pieces."""

    tokens: torch.Tensor
    kv_pages: list[int]
    at: int = 0
    """Tokens that are computed."""
    page: int = NO_PAGE
    """State page after them."""
    boundary: tuple[int, int] | None = None
    """State page of an earlier position, and that position."""
    logits: dict[int, torch.Tensor] = field(default_factory=dict)
    """After each position."""

    @property
    def complete(self) -> bool:
        return self.at == len(self.tokens)


def run_in_pieces(
    model: Transformer, texts: list[torch.Tensor], rng: random.Random, device: str = "cpu"
) -> list[torch.Tensor]:
    """Return the logits after every token of each text, computed in random pieces, several contexts a step. Now and
    then a context falls back to its boundary page and goes on from there."""
    most = -(-max(len(text) for text in texts) // PAGE)
    contexts = [Context(text, list(range(i * most, (i + 1) * most))) for i, text in enumerate(texts)]
    pages = Pages(model.arch, most * len(texts), 4 * len(texts), device)
    free = list(range(pages.state_pages))
    while not all(context.complete for context in contexts):
        pieces, chains, row = [], [], 0
        freed: list[int] = []
        chosen = [context for context in contexts if not context.complete and rng.random() < 0.7]
        for context in chosen:
            if context.boundary is not None and rng.random() < 0.3:
                freed.append(context.page)
                (context.page, context.at), context.boundary = context.boundary, None
            rows = min(len(context.tokens) - context.at, rng.choice((1, 1, 3, rng.randrange(1, 50))))
            chain = [row, rows, context.page, NO_PAGE, 0, context.page]
            if context.page == NO_PAGE or rng.random() < 0.5:
                freed += [context.page] * (context.page != NO_PAGE)
                chain[5] = free.pop(rng.randrange(len(free)))
            if rng.random() < 0.5:
                freed += [context.boundary[0]] if context.boundary else []
                chain[3:5] = free.pop(rng.randrange(len(free))), rng.randrange(1, rows + 1)
                context.boundary = chain[3], context.at + chain[4]
            pieces.append((context.tokens[context.at : context.at + rows], context.at, context.kv_pages))
            chains.append(chain)
            context.page, row = chain[5], row + rows
        if not pieces:
            continue
        logits = pages.run(model, pieces, chains)
        for context, (piece, start, _), (first, *_) in zip(chosen, pieces, chains, strict=True):
            context.at = start + len(piece)
            context.logits |= {start + index: logits[first + index] for index in range(len(piece))}
        for page in freed:
            for parts in pages.states.values():
                parts[0][page], parts[1][page] = torch.nan, torch.nan
        free += freed
    return [torch.stack([context.logits[at] for at in range(len(context.tokens))]) for context in contexts]
