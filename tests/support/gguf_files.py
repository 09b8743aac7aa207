"""Writes GGUF files from model folders, as llama.cpp's converter does: the opposite way of what is tested."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from support import tokenizers_ as tiny

_NAMES = {
    "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output",
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}  # fmt: skip
Change = Callable[[dict[str, Any], dict[str, Any]], None]
"""Changes keys (None: without it) and tensors before they are written."""


def write_gguf(
    path: Path,
    folder: Path,
    *,
    tokenizer: str | None = None,
    template: str | None = tiny.CHATML,
    quant: str = "F32",
    change: Change | None = None,
    **keys: Any,
) -> Path:
    """A file with the tensors of a folder, its matrices as ``quant``. ``keys`` replace metadata, ``__`` for a dot.

    ``tokenizer``: JSON; without one the vocabulary is ``<0>``, ``<1>``, … as long as the embedding.
    """
    config = json.loads((folder / "config.json").read_text())
    family, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    metadata = _metadata(config, family, head_dim) | _vocabulary(tokenizer, config["vocab_size"])
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    metadata |= {name.replace("__", "."): value for name, value in keys.items()}
    tensors: dict[str, Any] = {}
    for name, values in sorted(load_file(folder / "model.safetensors").items()):
        ours = _name(name)
        if family == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            # Halves of a head become neighbours.
            values = (
                values.reshape(-1, 2, head_dim // 2, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)
            )
        tensors[ours] = np.ascontiguousarray(values)
    rope = config.get("rope_parameters") or {}
    if rope.get("rope_type") == "llama3":
        tensors["rope_freqs.weight"] = _divisors(rope, head_dim)
    if change is not None:
        change(metadata, tensors)
    _write(path, metadata, tensors, gguf.GGMLQuantizationType[quant])
    return path


def _write(
    path: Path, metadata: Mapping[str, Any], tensors: Mapping[str, Any], kind: gguf.GGMLQuantizationType
) -> None:
    writer = gguf.GGUFWriter(path, metadata["general.architecture"])
    for key, value in metadata.items():
        if value is None or key == "general.architecture":
            continue
        add = {
            bool: writer.add_bool,
            str: writer.add_string,
            float: writer.add_float32,
            list: writer.add_array,
        }
        add.get(type(value), writer.add_uint32)(key, value)  # type: ignore[operator]
    for name, values in tensors.items():
        if values.ndim == 1 or values.dtype != np.float32:
            writer.add_tensor(name, values)
        else:
            writer.add_tensor(name, gguf.quantize(values, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(config: dict[str, Any], family: str, head_dim: int) -> dict[str, Any]:
    theta = (config.get("rope_parameters") or {}).get("rope_theta", 10000.0)
    named = {
        "context_length": config["max_position_embeddings"],
        "embedding_length": config["hidden_size"],
        "block_count": config["num_hidden_layers"],
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count": config["num_attention_heads"],
        "attention.head_count_kv": config["num_key_value_heads"],
        "attention.key_length": head_dim,
        "attention.value_length": head_dim,
        "attention.layer_norm_rms_epsilon": float(config["rms_norm_eps"]),
        "rope.freq_base": float(theta),
    }
    return {"general.architecture": family} | {f"{family}.{key}": value for key, value in named.items()}


def _vocabulary(tokenizer: str | None, rows: int) -> dict[str, Any]:
    words: dict[str, Any] = {"bos_token_id": 1, "eos_token_id": 2}
    if tokenizer is None:
        merges: list[str] = []
        words |= {
            "model": "gpt2",
            "pre": "gpt-2",
            "tokens": [f"<{index}>" for index in range(rows)],
            "merges": merges,
        }
        words |= {"token_type": [3] * 3 + [4] * (rows - 3), "merges": ["a b"]}
        words["tokens"][-3:] = ["a", "b", "ab"]
        words["token_type"][-3:] = [1, 1, 1]
    else:
        spec = json.loads(tokenizer)
        added = {token["id"]: token for token in spec["added_tokens"]}
        by_id = sorted(
            Tokenizer.from_str(tokenizer).get_vocab(with_added_tokens=True).items(), key=lambda item: item[1]
        )
        is_bytes = not spec["model"].get("byte_fallback")
        words["model"] = "gpt2" if is_bytes else "llama"
        words["tokens"] = [token for token, _ in by_id]
        words["token_type"] = [
            (3 if added[number]["special"] else 4) if number in added else 6 if token.startswith("<0x") else 1
            for token, number in by_id
        ]
        if is_bytes:
            words |= {"pre": "gpt-2", "merges": [" ".join(pair) for pair in spec["model"]["merges"]]}
        else:
            # A token's score is the place of the merge that makes it.
            places = {
                "".join(pair): place for place, pair in reversed(list(enumerate(spec["model"]["merges"])))
            }
            words["scores"] = [-float(places.get(token, 1000)) for token in words["tokens"]]
            words["unknown_token_id"] = 0
    return {f"tokenizer.ggml.{key}": value for key, value in words.items()}


def _divisors(rope: dict[str, Any], head_dim: int) -> Any:
    """What llama.cpp's converter writes for Llama 3's scaling."""
    found = []
    for frequency in 1.0 / rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim):
        wavelength = 2 * np.pi / frequency
        original, low, high = (
            rope["original_max_position_embeddings"],
            rope["low_freq_factor"],
            rope["high_freq_factor"],
        )
        smooth = np.clip((original / wavelength - low) / (high - low), 0, 1)
        found.append(1 / ((1 - smooth) / rope["factor"] + smooth))
    return np.array(found, dtype=np.float32)


def _name(name: str) -> str:
    module, _, kind = name.rpartition(".")
    if module in _NAMES:
        return f"{_NAMES[module]}.{kind}"
    number, _, part = module.removeprefix("model.layers.").partition(".")
    return f"blk.{number}.{_NAMES[part]}.{kind}"
