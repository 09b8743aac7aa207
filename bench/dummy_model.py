"""Makes a model folder without weights: a named shape as config.json, and a tokenizer that works without downloads.

    python bench/dummy_model.py llama-2-13b-gqa10 FOLDER

``llama-2-13b-gqaN`` and ``tiny-llama-gqaN`` take any number N of KV heads that divides the query heads (40 and 8).

For ``pensieve serve --model FOLDER --load-format dummy``. The tokenizer is the demo model's: it knows fewer ids than
the model has. Ids that it does not know are valid input and valid output; their text is empty.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import click

from pensieve import demo

_LLAMA = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "rms_norm_eps": 1e-5,
    "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": False, "torch_dtype": "bfloat16",
    "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
SHAPES: dict[str, dict[str, Any]] = {
    "llama-2-13b-gqa10": _LLAMA | {
        "hidden_size": 5120, "num_hidden_layers": 40, "num_attention_heads": 40, "num_key_value_heads": 10,
        "head_dim": 128, "intermediate_size": 13824, "vocab_size": 32000, "max_position_embeddings": 16384,
        "rope_theta": 10000.0,
    },
    "llama-3-8b": _LLAMA | {
        "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
        "head_dim": 128, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 16384,
        "rope_theta": 500000.0,
    },
    "opt-13b": {
        "architectures": ["OPTForCausalLM"], "model_type": "opt", "activation_function": "relu",
        "hidden_size": 5120, "word_embed_proj_dim": 5120, "num_hidden_layers": 40, "num_attention_heads": 40,
        "ffn_dim": 20480, "vocab_size": 50272, "max_position_embeddings": 2048, "do_layer_norm_before": True,
        "enable_bias": True, "layer_norm_elementwise_affine": True, "tie_word_embeddings": True,
        "torch_dtype": "float16", "bos_token_id": None, "eos_token_id": 1, "pad_token_id": 0,
    },
}  # fmt: skip
"""config.json by name. The first is Llama 2 13B with 10 KV heads and a longer context, as in the EuroSys paper §6."""
_GROUPED: dict[str, dict[str, Any]] = {
    "llama-2-13b": SHAPES["llama-2-13b-gqa10"],
    "tiny-llama": _LLAMA | {
        "hidden_size": 256, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 8,
        "head_dim": 32, "intermediate_size": 512, "vocab_size": 2048, "max_position_embeddings": 4096,
        "rope_theta": 10000.0,
    },
}  # fmt: skip
"""Shapes whose number of KV heads can be chosen; the tiny one is for a CPU."""
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")


def shape_config(name: str) -> dict[str, Any]:
    """config.json of a named shape. Raises ValueError on a name that stands for none."""
    if name in SHAPES:
        return dict(SHAPES[name])
    match = re.fullmatch(r"(?P<family>[a-z0-9-]+)-gqa(?P<heads>[1-9]\d*)", name)
    config = _GROUPED.get(match["family"]) if match else None
    if match is None or config is None:
        raise ValueError(f"{name!r} is no shape: {', '.join(SHAPES)}, {'-gqaN, '.join(_GROUPED)}-gqaN")
    queries, heads = config["num_attention_heads"], int(match["heads"])
    if queries % heads:
        raise ValueError(f"{name!r}: {heads} KV heads do not divide {queries} query heads")
    return config | {"num_key_value_heads": heads}


def make(name: str, folder: Path, context_limit: int = 0) -> Path:
    """Write the folder; ``context_limit`` replaces the shape's own. Raises ValueError on an unknown shape."""
    config = shape_config(name)
    if context_limit:
        config["max_position_embeddings"] = context_limit
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    for file in TOKENIZER_FILES:
        shutil.copyfile(Path(demo.__file__).parent / "model" / file, folder / file)
    return folder


@click.command()
@click.argument("shape")
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--context-limit", type=click.IntRange(min=0), default=0, metavar="N",
              help="Positions; default: the shape's own.")  # fmt: skip
def main(shape: str, folder: Path, context_limit: int) -> None:
    """Make FOLDER for the model SHAPE."""
    try:
        click.echo(make(shape, folder, context_limit))
    except ValueError as error:
        raise click.BadParameter(str(error), param_hint="SHAPE") from error


if __name__ == "__main__":
    main()
