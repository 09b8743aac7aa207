"""The Llama decoder as training runs it: whole rows, no cache. Parameter names are those of ``LlamaForCausalLM``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch import Tensor, nn


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of the model."""

    vocab: int = 1536
    hidden: int = 256
    layers: int = 6
    heads: int = 4
    kv_heads: int = 2
    mlp: int = 384
    theta: float = 500_000.0
    eps: float = 1e-5
    context: int = 8192

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


def rotary(shape: Shape, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, head_dim], fp32, the two halves alike."""
    half = torch.arange(0, shape.head_dim, 2, device=device, dtype=torch.float32) / shape.head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), shape.theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class Norm(nn.Module):
    """RMS norm, computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        width = shape.kv_heads * shape.head_dim
        self.q_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)
        self.k_proj = nn.Linear(shape.hidden, width, bias=False)
        self.v_proj = nn.Linear(shape.hidden, width, bias=False)
        self.o_proj = nn.Linear(shape.hidden, shape.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, hidden] -> same
        batch, length, _ = x.shape
        dim = self.shape.head_dim
        query = self.q_proj(x).view(batch, length, self.shape.heads, dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, self.shape.kv_heads, dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, self.shape.kv_heads, dim).transpose(1, 2)
        repeat = self.shape.heads // self.shape.kv_heads
        key = _rotate(key, cos, sin).repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), key, value.repeat_interleave(repeat, dim=1), is_causal=True
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.up_proj = nn.Linear(shape.hidden, shape.mlp, bias=False)
        self.down_proj = nn.Linear(shape.mlp, shape.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.input_layernorm = Norm(shape.hidden, shape.eps)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, blocks, final norm; the output head is the embedding."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.embed_tokens = nn.Embedding(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.hidden, shape.eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = (
                    (2 * shape.layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=scale * (0.02 if "embed" in name else shape.hidden**-0.5))

    def forward(self, ids: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T] -> [B, T, hidden]
        x = self.embed_tokens(ids)
        for layer in self.layers:
            x = layer(x, cos, sin)
        normed: Tensor = self.norm(x)
        return normed

    def logits(self, hidden: Tensor) -> Tensor:
        """[..., hidden] -> [..., vocab]"""
        return F.linear(hidden, self.embed_tokens.weight)


def save(model: Decoder, folder: Path, end_id: int, pad_id: int) -> None:
    """Writes weights (bf16) and configuration as a ``LlamaForCausalLM`` folder."""
    shape = model.shape
    weights = {
        f"model.{name}": tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": shape.vocab,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.mlp,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rms_norm_eps": shape.eps,
        "rope_theta": shape.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": shape.theta},
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": None,
        "eos_token_id": end_id,
        "pad_token_id": pad_id,
        "torch_dtype": "bfloat16",
    }
    generation = {"do_sample": False, "eos_token_id": end_id, "pad_token_id": pad_id, "max_new_tokens": 64}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")


def load_weights(model: Decoder, folder: Path) -> None:
    """Reads what ``save`` wrote."""
    weights = load_file(folder / "model.safetensors")
    model.load_state_dict({name.removeprefix("model."): tensor.float() for name, tensor in weights.items()})
