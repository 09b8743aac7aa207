"""Readers that turn the config.json of a family into an ``Arch``. A family is one ``model_type``.

transformers' own config class parses the file first (``parsing``), so defaults, nulls, types and both spellings of
rotary positions are interpreted as transformers does. The readers map the result and reject unsupported values.

May import: core, model.arch.
"""

from __future__ import annotations

from collections.abc import Callable

from pensieve.model.arch import Arch
from pensieve.model.families import layer_norm, llama, recurrent
from pensieve.model.families.parsing import CONFIG_CLASSES, Config, generation_defaults

READERS: dict[str, Callable[[Config, Config], Arch]] = {
    "opt": layer_norm.read_opt,
    **{family: llama.reader_of(family) for family in llama.FIELDS},
    "mistral3": llama.read_mistral3,
    "gemma": llama.read_gemma,
    "gemma2": llama.read_gemma2,
    "gemma3": llama.read_gemma3,
    "gemma3_text": llama.read_gemma3_text,
    "cohere": layer_norm.read_cohere,
    "cohere2": layer_norm.read_cohere2,
    "mamba2": recurrent.read_mamba2,
    "bamba": recurrent.read_bamba,
    "falcon_h1": recurrent.read_falcon_h1,
    "qwen3_next": recurrent.read_qwen3_next,
    "qwen3_5": recurrent.read_qwen3_5,
    "qwen3_5_text": recurrent.read_qwen3_5,
    "stablelm": layer_norm.read_stablelm,
    "starcoder2": layer_norm.read_starcoder2,
}
"""The reader of each ``model_type`` in config.json."""

__all__ = ["CONFIG_CLASSES", "READERS", "generation_defaults"]
