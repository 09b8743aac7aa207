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
class DecoderSizes:
    """Sizes of the decoder's parts, and how many of them there are."""

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


def rotary(sizes: DecoderSizes, length: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Cosines and sines, each [length, head_dim], fp32, the two halves alike."""
    half = torch.arange(0, sizes.head_dim, 2, device=device, dtype=torch.float32) / sizes.head_dim
    angles = torch.outer(torch.arange(length, device=device, dtype=torch.float32), sizes.theta**-half)
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return (x * cos + torch.cat((-second, first), dim=-1) * sin).to(x.dtype)


class RmsNorm(nn.Module):
    """RMS norm; the square mean is computed in fp32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps))


class Attention(nn.Module):
    """Causal attention over whole rows, with rotary positions."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        width = sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, width, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, width, bias=False)
        self.o_proj = nn.Linear(sizes.hidden, sizes.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:  # [B, T, hidden] -> same
        batch, length, _ = x.shape
        dim = self.sizes.head_dim
        query = self.q_proj(x).view(batch, length, self.sizes.heads, dim).transpose(1, 2)
        key = self.k_proj(x).view(batch, length, self.sizes.kv_heads, dim).transpose(1, 2)
        value = self.v_proj(x).view(batch, length, self.sizes.kv_heads, dim).transpose(1, 2)
        repeat = self.sizes.heads // self.sizes.kv_heads
        key = _rotate(key, cos, sin).repeat_interleave(repeat, dim=1)
        out = F.scaled_dot_product_attention(
            _rotate(query, cos, sin), key, value.repeat_interleave(repeat, dim=1), is_causal=True
        )
        mixed: Tensor = self.o_proj(out.transpose(1, 2).reshape(batch, length, -1))
        return mixed


class Mlp(nn.Module):
    """The gated feed-forward part of a layer."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.mlp, bias=False)
        self.down_proj = nn.Linear(sizes.mlp, sizes.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class DecoderLayer(nn.Module):
    """Attention and feed-forward, each on a normed input and added to it."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.self_attn = Attention(sizes)
        self.mlp = Mlp(sizes)
        self.input_layernorm = RmsNorm(sizes.hidden, sizes.eps)
        self.post_attention_layernorm = RmsNorm(sizes.hidden, sizes.eps)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), cos, sin)
        out: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return out


class Decoder(nn.Module):
    """Embedding, layers, final norm; the output head is the embedding."""

    def __init__(self, sizes: DecoderSizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed_tokens = nn.Embedding(sizes.vocab, sizes.hidden)
        self.layers = nn.ModuleList(DecoderLayer(sizes) for _ in range(sizes.layers))
        self.norm = RmsNorm(sizes.hidden, sizes.eps)
        for name, weight in self.named_parameters():
            if weight.dim() == 2:
                scale = (
                    (2 * sizes.layers) ** -0.5
                    if name.endswith(("o_proj.weight", "down_proj.weight"))
                    else 1.0
                )
                nn.init.normal_(weight, std=scale * (0.02 if "embed" in name else sizes.hidden**-0.5))

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
    sizes = model.sizes
    weights = {
        f"model.{name}": tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": sizes.vocab,
        "hidden_size": sizes.hidden,
        "intermediate_size": sizes.mlp,
        "num_hidden_layers": sizes.layers,
        "num_attention_heads": sizes.heads,
        "num_key_value_heads": sizes.kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": sizes.context,
        "rms_norm_eps": sizes.eps,
        "rope_theta": sizes.theta,
        "rope_parameters": {"rope_type": "default", "rope_theta": sizes.theta},
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
