"""Translates a GGUF file's metadata to the fields of a Hugging Face config.json, for the same readers. No torch."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

from pensieve.core import Sampling
from pensieve.gguf import GgufError, GgufFile, read_gguf
from pensieve.model.arch import Arch, ModelError, with_divisors
from pensieve.model.families import READERS, generation_defaults

ARCHITECTURES: Final = ("llama", "qwen2", "qwen3")
"""Supported values of general.architecture; Mistral's models are written as llama."""
ROPE_FREQUENCIES: Final = "rope_freqs.weight"
"""The tensor that encodes Llama 3's RoPE scaling: the divisor of each frequency."""
_UNSUPPORTED: Final = (
    "attention.scale", "attention.clamp_kqv", "attention.max_alibi_bias", "attn_logit_softcapping",
    "final_logit_softcapping", "embedding_scale", "residual_scale", "logit_scale", "rope.scaling.attn_factor",
    "rope.scaling.yarn_log_multiplier",
)  # fmt: skip
"""Keys, after the architecture prefix, that change the computation in ways that the decoder does not support."""
_PIECE_BYTES: Final = 4096


def gguf_arch(path: Path) -> Arch:
    """Return the architecture of the model in a GGUF file. Raises ModelError."""
    try:
        return _arch(read_gguf(path))
    except GgufError as error:
        raise ModelError(str(error)) from error


def gguf_generation(path: Path) -> Sampling:
    """Return the sampling that the file recommends; see ``load_generation``. Raises ModelError."""
    try:
        return generation_defaults(_generation(read_gguf(path)))
    except GgufError as error:
        raise ModelError(str(error)) from error


def gguf_fingerprint(path: Path, *, weights: bool = True) -> str:
    """Return the SHA-256 (hex) of the model in a GGUF file: its whole header, and the beginning, middle and end of
    each tensor. Tensors of up to three times 4 KiB are covered whole. The file's name does not count. ``weights``
    False: ignore weights, as with random ones. Raises ModelError, and OSError when the file cannot be read."""
    try:
        found = read_gguf(path)
    except GgufError as error:
        raise ModelError(str(error)) from error
    digest = hashlib.sha256(b"gguf" if weights else b"gguf, random weights")
    for part, length in found.headers:
        with part.open("rb") as file:
            digest.update(file.read(length))
            places = [place for place in found.tensors.values() if place.file == part] if weights else []
            for place in places:
                last = max(0, place.nbytes - _PIECE_BYTES)
                for start in (0, last // 2, last):
                    file.seek(place.start + start)
                    digest.update(file.read(min(_PIECE_BYTES, place.nbytes)))
    return digest.hexdigest()


def _arch(file: GgufFile) -> Arch:
    kind = file.text("general.type", "model")
    if kind != "model":
        raise GgufError(f"{file.path}: is of type {kind}, not a model")
    family = file.text("general.architecture")
    if family not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        raise GgufError(f"{file.path}: architecture {family} is not supported (supported in GGUF: {known})")
    config = _config(file, family)
    try:
        arch = READERS[family](config, _generation(file))
    except ModelError as error:
        raise GgufError(f"{file.path}: {error}") from error
    # A config.json has one flag for several biases; the file shows each.
    return replace(
        arch,
        layers=with_divisors(arch.layers, _rope_divisors(file, config["head_dim"])),
        # A window holds for layers that the file does not name: inside it all layers see everything.
        context_limit=min(arch.context_limit, _window(file, family)),
        qkv_bias="blk.0.attn_q.bias" in file.tensors,
        output_bias="blk.0.attn_output.bias" in file.tensors,
        mlp_bias="blk.0.ffn_down.bias" in file.tensors,
    )


def _config(file: GgufFile, family: str) -> dict[str, Any]:
    for key in _UNSUPPORTED:
        if f"{family}.{key}" in file.metadata:
            raise GgufError(f"{file.path}: {family}.{key} is not supported")
    if not file.flag(f"{family}.attention.causal", True):
        raise GgufError(
            f"{file.path}: attention in both directions ({family}.attention.causal) is not supported"
        )
    if file.integer(f"{family}.expert_count", 0):
        raise GgufError(f"{file.path}: a mixture of experts ({family}.expert_count) is not supported")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise GgufError(f"{file.path}: no tensor token_embd.weight among {len(file.tensors)}")
    hidden, heads = (
        file.integer(f"{family}.embedding_length"),
        _per_layer(file, f"{family}.attention.head_count"),
    )
    if not heads:
        raise GgufError(f"{file.path}: {family}.attention.head_count is 0")
    head_dim = file.integer(f"{family}.attention.key_length", hidden // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if (found := file.integer(f"{family}.{key}", head_dim)) != head_dim:
            raise GgufError(
                f"{file.path}: {family}.{key} is {found}, which is not supported: heads have {head_dim} values"
            )
    return {
        "model_type": family,
        # If the embedding lacks a row for a word of the vocabulary, the tokenizer reports it.
        "vocab_size": embedding.shape[0],
        "hidden_size": hidden,
        "intermediate_size": _per_layer(file, f"{family}.feed_forward_length"),
        "num_hidden_layers": file.integer(f"{family}.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": _per_layer(file, f"{family}.attention.head_count_kv", heads),
        "head_dim": head_dim,
        "max_position_embeddings": file.integer(f"{family}.context_length"),
        "rms_norm_eps": file.number(f"{family}.attention.layer_norm_rms_epsilon"),
        "rope_parameters": _rope(file, family),
        "sliding_window": None,
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "dtype": _dtype(file),
        "bos_token_id": file.metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": file.eos_token_ids(),
    }


def _window(file: GgufFile, family: str) -> int:
    """Return the sliding window, which the file names only if it is used; else the context length."""
    return file.integer(f"{family}.attention.sliding_window", 0) or file.integer(f"{family}.context_length")


def _per_layer(file: GgufFile, key: str, default: int | None = None) -> int:
    """Read a number that may be given per layer; all layers must have the same."""
    value = file.metadata.get(key)
    if isinstance(value, list) and value and all(item == value[0] for item in value):
        file.metadata[key] = value[0]
    elif isinstance(value, list):
        raise GgufError(f"{file.path}: {key} differs from layer to layer, which is not supported")
    return file.integer(key, default)


def _rope(file: GgufFile, family: str) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_theta": file.number(f"{family}.rope.freq_base", 10000.0)}
    # Old files have a factor without a type.
    kind = file.text(f"{family}.rope.scaling.type", "linear")
    factor = file.number(f"{family}.rope.scaling.factor", file.number(f"{family}.rope.scale_linear", 1.0))
    if kind not in ("none", "linear"):
        raise ModelError(f"{file.path}: RoPE scaling {kind!r} is not supported")
    return (
        rope | {"rope_type": "linear", "factor": factor}
        if kind == "linear" and factor not in (0.0, 1.0)
        else rope
    )


def _rope_divisors(file: GgufFile, head_dim: int) -> tuple[float, ...]:
    place = file.tensors.get(ROPE_FREQUENCIES)
    if place is None:
        return ()
    if place.type_name != "F32" or place.shape != (head_dim // 2,):
        raise GgufError(
            f"{file.path}: {ROPE_FREQUENCIES} is {place.type_name} {list(place.shape)}, not F32 [{head_dim // 2}]"
        )
    import numpy as np

    return tuple(np.fromfile(place.file, "<f4", head_dim // 2, offset=place.start).tolist())


def _dtype(file: GgufFile) -> str:
    """Return the dtype closest to the weights; their dtype before quantisation is unknown."""
    types = {place.type_name for place in file.tensors.values() if len(place.shape) > 1}
    if types <= {"F32"}:
        return "float32"
    return "float16" if types <= {"F32", "F16"} else "bfloat16"


def _generation(file: GgufFile) -> dict[str, Any]:
    """Return the entries of a generation_config.json; newer files have the authors' recommendation."""
    names = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
    found: dict[str, Any] = {
        name: file.number(f"general.sampling.{key}")
        for key, name in names.items()
        if f"general.sampling.{key}" in file.metadata
    }
    if found:
        found["do_sample"] = found.get("temperature", 1.0) > 0
    if "general.sampling.penalty_repeat" in file.metadata:
        found["repetition_penalty"] = file.number("general.sampling.penalty_repeat")
    return found
